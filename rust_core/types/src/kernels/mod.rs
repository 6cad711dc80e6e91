//! The loops over floats that more than one part runs: rows pooled into samples, gradients summed per unique id.
//!
//! Both add in batch order, element by element, so their results depend on nothing but their input. They are the
//! oracle for every other device.

mod segment;

use crate::schema::{Pooling, Slot};
use crate::simd::{LANES, Lanes, Level, Work, prefetch};
pub use segment::{Gradients, SegmentSum, Uses, segment_sum, segment_sum_onto};

/// Floats that are fetched ahead of their use: enough rows to hide memory, few enough to stay in the nearest cache.
const AHEAD_FLOATS: usize = 4096;

/// Rows of `dim` floats that are fetched ahead of their use.
#[inline(always)]
pub fn rows_ahead(dim: usize) -> usize {
    (AHEAD_FLOATS / dim.max(1)).clamp(8, 64)
}

/// Rows of one table, and which of them each sample of one feature uses.
#[derive(Debug, Clone, Copy)]
pub struct Pool<'a> {
    /// `[unique, dim]`.
    pub rows: &'a [f32],
    /// Floats in a row.
    pub dim: usize,
    /// Per occurrence the row it uses, in batch order.
    pub places: &'a [u32],
    /// Where each sample's occurrences start (`samples + 1`); `None` is one per sample.
    pub offsets: Option<&'a [u32]>,
    /// Per sample what its sum is divided by; `None` is 1.
    pub divisors: Option<&'a [f32]>,
}

/// What each sample's sum is divided by: `n` for a mean, `sqrt(n)` for sqrt scaling, with n at least 1.
/// `None` where that is 1 for all.
pub fn divisors(slot: &Slot, offsets: Option<&[u32]>) -> Option<Vec<f32>> {
    if slot.pooling == Pooling::Sum && !slot.sqrt_scaling {
        return None;
    }
    let divisor = |bounds: &[u32]| {
        let ids = (bounds[1] - bounds[0]).max(1) as f32;
        let mean = if slot.pooling == Pooling::Mean { ids } else { 1.0 };
        let root = if slot.sqrt_scaling { ids.sqrt() } else { 1.0 };
        mean * root
    };
    offsets.map(|offsets| offsets.windows(2).map(divisor).collect())
}

/// Pool rows into `out`, `[samples, dim]`: sums in order of occurrence, then divided. An empty sample is zeros.
pub fn pool(input: &Pool<'_>, out: &mut [f32]) {
    Level::detect().run(PoolWork { input, out });
}

/// Multiply every float by `factor`.
pub fn scale(values: &mut [f32], factor: f32) {
    Level::detect().run(ScaleWork { values, factor });
}

struct PoolWork<'a> {
    input: &'a Pool<'a>,
    out: &'a mut [f32],
}

impl Work for PoolWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Pool { rows, dim, places, offsets, divisors } = *self.input;
        let outs = self.out.chunks_exact_mut(dim);
        let Some(offsets) = offsets else {
            for (occurrence, (&place, out)) in places.iter().zip(outs).enumerate() {
                fetch_ahead(rows, dim, places, occurrence);
                copy(&rows[place as usize * dim..][..dim], out);
            }
            return;
        };
        let sum = Sum { rows, dim, onto: false, scale: 1.0 };
        for (sample, (bounds, out)) in offsets.windows(2).zip(outs).enumerate() {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            for occurrence in start..end {
                fetch_ahead(rows, dim, places, occurrence);
            }
            sum.write(places[start..end].iter().map(|place| (*place as usize * dim, 1.0)), out);
            if let Some(divisors) = divisors {
                let divisor = divisors[sample];
                out.iter_mut().for_each(|value| *value /= divisor);
            }
        }
    }
}

struct ScaleWork<'a> {
    values: &'a mut [f32],
    factor: f32,
}

impl Work for ScaleWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.values.iter_mut().for_each(|value| *value *= self.factor);
    }
}

/// Copy a row of any length in blocks that become single moves; a call to `memcpy` costs more than a short row.
#[inline(always)]
pub fn copy(from: &[f32], to: &mut [f32]) {
    let (blocks, rest) = from.as_chunks::<LANES>();
    let (out_blocks, out_rest) = to.as_chunks_mut::<LANES>();
    for (out, block) in out_blocks.iter_mut().zip(blocks) {
        *out = *block;
    }
    for (out, value) in out_rest.iter_mut().zip(rest) {
        *out = *value;
    }
}

#[inline(always)]
fn fetch_ahead(rows: &[f32], dim: usize, places: &[u32], occurrence: usize) {
    if let Some(&place) = places.get(occurrence + rows_ahead(dim)) {
        prefetch(rows, place as usize * dim, dim);
    }
}

/// `out = ((onto ? out : 0) + sum of factor * row) * scale`.
#[derive(Clone, Copy)]
struct Sum<'a> {
    rows: &'a [f32],
    dim: usize,
    onto: bool,
    scale: f32,
}

impl Sum<'_> {
    /// Add the rows that start at these floats, block of columns after block, so that sums stay in registers.
    #[inline(always)]
    fn write(self, places: impl Iterator<Item = (usize, f32)> + Clone, out: &mut [f32]) {
        let (dim, mut column) = (self.dim, 0);
        while dim - column >= 128 {
            self.block::<128>(column, places.clone(), out);
            column += 128;
        }
        while dim - column >= 64 {
            self.block::<64>(column, places.clone(), out);
            column += 64;
        }
        while dim - column >= 16 {
            self.block::<16>(column, places.clone(), out);
            column += 16;
        }
        while dim - column >= 4 {
            self.block::<4>(column, places.clone(), out);
            column += 4;
        }
        while column < dim {
            self.block::<1>(column, places.clone(), out);
            column += 1;
        }
    }

    #[inline(always)]
    fn block<const W: usize>(
        self,
        column: usize,
        places: impl Iterator<Item = (usize, f32)>,
        out: &mut [f32],
    ) {
        let out = &mut out[column..column + W];
        let mut sum = [0.0f32; W];
        if self.onto {
            sum.copy_from_slice(out);
        }
        for (place, factor) in places {
            let row = &self.rows[place + column..][..W];
            for lane in 0..W {
                sum[lane] += row[lane] * factor;
            }
        }
        for lane in 0..W {
            out[lane] = sum[lane] * self.scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::segment::SegmentSumWork;
    use super::*;

    fn number(i: usize) -> f32 {
        (crate::id::hash_id(i as u64) >> 40) as f32 / 1e5 - 80.0
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let places: Vec<u32> = (0..500u32).map(|i| i * 7 % 50).collect();
        let offsets: Vec<u32> = (0..=100).map(|i| i * 5).collect();
        let divisors: Vec<f32> = (0..100).map(|i| number(i).abs() + 1.0).collect();
        for dim in [1, 4, 16, 19, 64, 128, 211] {
            let rows: Vec<f32> = (0..100 * dim).map(number).collect();
            let divisors = Some(&divisors[..]);
            let pooled = &Pool { rows: &rows, dim, places: &places, offsets: Some(&offsets), divisors };
            let uses = Uses { starts: &offsets, samples: &places };
            let summed = &SegmentSum { gradients: &rows, dim, uses, factors: divisors, scale: 0.3 };
            let at = |level: Level| {
                let mut outs = [(); 2].map(|()| vec![0.0; 100 * dim]);
                level.run(PoolWork { input: pooled, out: &mut outs[0] });
                level.run(SegmentSumWork { input: summed, first: 0, out: &mut outs[1] });
                outs.map(|out| bits(&out))
            };
            for level in Level::supported() {
                assert_eq!(at(level), at(Level::PORTABLE), "{level:?}, dim {dim}");
            }
        }
    }
}
