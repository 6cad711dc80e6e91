//! [`Layout`]: how a table's rows are stored, and how their weights are read and written.
//!
//! A row is `[weights | optimizer state]` in words of 32 bits. An f32 weight occupies one word. Two 16-bit weights
//! share a word. If the number of weights is odd, half of the last word is unused. The state is always f32.

use persia_kernels::copy;
use persia_kernels::half::{Bf16, F16, narrow, round_stochastic, widen};
use persia_types::{Dtype, Table};

use crate::math::random::RowDraws;
use crate::simd::{Lanes, Portable};

/// The recency that marks a row index without a row. Steps are counted from 1, so 0 is available. No id could be the
/// mark, because every id is valid.
pub(crate) const FREE: u32 = 0;

/// The layout of a table's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The number of weights per row.
    pub(crate) dim: usize,
    /// The type in which weights are stored.
    pub(crate) dtype: Dtype,
    /// The number of floats of optimizer state per row.
    pub(crate) state_len: usize,
    /// The time to live in steps; None means that rows never expire.
    pub(crate) ttl: Option<u32>,
}

impl Layout {
    /// The layout of a table before a run has set its optimizer.
    pub(crate) fn stateless(table: &Table) -> Self {
        Self { dim: table.dim, dtype: table.settings.dtype, state_len: 0, ttl: table.settings.ttl }
    }

    /// The distance from one row to the next, in words.
    #[inline(always)]
    pub(crate) fn stride(self) -> usize {
        self.weight_words() + self.state_len
    }

    /// The number of words that the weights occupy.
    #[inline(always)]
    pub(crate) fn weight_words(self) -> usize {
        match self.dtype {
            Dtype::F32 => self.dim,
            Dtype::F16 | Dtype::Bf16 => self.dim.div_ceil(2),
        }
    }

    /// The size of weights and state in bytes, without padding.
    pub(crate) fn payload_bytes(self) -> usize {
        let weight = if self.dtype == Dtype::F32 { 4 } else { 2 };
        self.dim * weight + self.state_len * 4
    }

    /// The earliest last use of a row that is not expired at `step`; 0 if no row can be expired.
    #[inline(always)]
    pub(crate) fn oldest_alive(self, step: u32) -> u32 {
        self.ttl.map_or(0, |ttl| step.saturating_sub(ttl))
    }

    /// Read the weights of a row into `to`, which has `dim` floats.
    #[inline(always)]
    pub(crate) fn read<L: Lanes>(self, row: &[f32], to: &mut [f32]) {
        match self.dtype {
            Dtype::F32 => copy(&row[..self.dim], to),
            Dtype::F16 => widen::<L, F16>(self.halves(row), to),
            Dtype::Bf16 => widen::<L, Bf16>(self.halves(row), to),
        }
    }

    /// Write the `dim` floats of `from` as the weights of a row, rounded to nearest or, with `draws`, stochastically.
    #[inline(always)]
    pub(crate) fn write<L: Lanes>(self, row: &mut [f32], from: &[f32], draws: Option<RowDraws>) {
        let halves = match self.dtype {
            Dtype::F32 => return copy(from, &mut row[..self.dim]),
            Dtype::F16 | Dtype::Bf16 => {
                &mut bytemuck::cast_slice_mut::<f32, u16>(&mut row[..self.weight_words()])[..self.dim]
            }
        };
        match (self.dtype, draws) {
            (Dtype::F16, None) => narrow::<L, F16>(from, halves),
            (Dtype::F16, Some(draws)) => round_stochastic::<F16>(from, halves, |i| draws.draw(i)),
            (_, None) => narrow::<L, Bf16>(from, halves),
            (_, Some(draws)) => round_stochastic::<Bf16>(from, halves, |i| draws.draw(i)),
        }
    }

    /// Round weights to the dtype of a row. `scratch` has the same length.
    pub(crate) fn round(self, weights: &mut [f32], scratch: &mut [f32]) {
        if self.dtype != Dtype::F32 {
            self.write::<Portable>(scratch, weights, None);
            self.read::<Portable>(scratch, weights);
        }
    }

    #[inline(always)]
    fn halves(self, row: &[f32]) -> &[u16] {
        &bytemuck::cast_slice::<f32, u16>(&row[..self.weight_words()])[..self.dim]
    }
}
