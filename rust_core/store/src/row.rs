//! [`Layout`]: how a table keeps its rows, and a row's weights in and out of it.
//!
//! A row is `[weights | optimizer state]` in words of 32 bits. A weight of f32 fills a word; of 16 bits two share
//! one, and of an odd number the last half is not used. State is always f32.

use persia_kernels::copy;
use persia_kernels::half::{Bf16, F16, narrow, round_stochastic, widen};
use persia_types::{Dtype, Table};

use crate::random::RowDraws;
use crate::simd::{Lanes, Portable};

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Weights.
    pub(crate) dim: usize,
    /// What a weight is stored as.
    pub(crate) dtype: Dtype,
    /// Floats of optimizer state behind the weights.
    pub(crate) state_len: usize,
    /// Steps that a row lives without being looked up in training.
    pub(crate) ttl: Option<u32>,
}

impl Layout {
    /// Of a table before a run says what state its rows have.
    pub(crate) fn stateless(table: &Table) -> Self {
        Self { dim: table.dim, dtype: table.settings.dtype, state_len: 0, ttl: table.settings.ttl }
    }

    /// Words from one row to the next.
    #[inline(always)]
    pub(crate) fn stride(self) -> usize {
        self.weight_words() + self.state_len
    }

    /// Words of the weights.
    #[inline(always)]
    pub(crate) fn weight_words(self) -> usize {
        match self.dtype {
            Dtype::F32 => self.dim,
            Dtype::F16 | Dtype::Bf16 => self.dim.div_ceil(2),
        }
    }

    /// Bytes of weights and state, without what an odd number of halves leaves over.
    pub(crate) fn payload_bytes(self) -> usize {
        let weight = if self.dtype == Dtype::F32 { 4 } else { 2 };
        self.dim * weight + self.state_len * 4
    }

    /// Rows last used before this step are gone at `step`; 0 where they live for ever.
    #[inline(always)]
    pub(crate) fn oldest_alive(self, step: u32) -> u32 {
        self.ttl.map_or(0, |ttl| step.saturating_sub(ttl))
    }

    /// Copy the weights of a row to `to`, which is `dim` long.
    #[inline(always)]
    pub(crate) fn read<L: Lanes>(self, row: &[f32], to: &mut [f32]) {
        match self.dtype {
            Dtype::F32 => copy(&row[..self.dim], to),
            Dtype::F16 => widen::<L, F16>(self.halves(row), to),
            Dtype::Bf16 => widen::<L, Bf16>(self.halves(row), to),
        }
    }

    /// Set the weights of a row, rounded to the nearest or, with `draws`, as those say. `from` is `dim` long.
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

    /// Change weights to what a row can hold. `room` is as long.
    pub(crate) fn round(self, weights: &mut [f32], room: &mut [f32]) {
        if self.dtype != Dtype::F32 {
            self.write::<Portable>(room, weights, None);
            self.read::<Portable>(room, weights);
        }
    }

    #[inline(always)]
    fn halves(self, row: &[f32]) -> &[u16] {
        &bytemuck::cast_slice::<f32, u16>(&row[..self.weight_words()])[..self.dim]
    }
}
