//! Pools the rows of unique ids into vectors of samples.

use crate::bags::Bags;
use crate::simd::{InstructionSet, LANES, Lanes, SimdLoop, prefetch_row};

/// The number of floats by which a prefetch is ahead, before [`rows_ahead`] limits the number of rows: enough
/// to hide memory latency, but few enough for the first-level cache.
const AHEAD_FLOATS: usize = 4096;

/// The number of rows of `dim` floats by which a prefetch is ahead.
#[inline(always)]
pub(crate) fn rows_ahead(dim: usize) -> usize {
    (AHEAD_FLOATS / dim.max(1)).clamp(8, 64)
}

/// The rows of one table, and the bags of one feature.
#[derive(Debug, Clone, Copy)]
pub struct Pool<'a> {
    /// The rows, with the shape `[unique, dim]`.
    pub rows: &'a [f32],
    /// The number of floats in a row.
    pub dim: usize,
    /// The rows that are added for each sample.
    pub bags: Bags<'a>,
}

/// Pool rows into `out`, which has the shape `[samples, dim]`. Rows are added in batch order, and then the
/// sum is divided by the sample's divisor. The vector of an empty sample is zero.
pub fn pool(input: &Pool<'_>, out: &mut [f32]) {
    InstructionSet::detect().run(PoolWork { input, out });
}

/// Multiply every float by `factor`.
pub fn scale(values: &mut [f32], factor: f32) {
    InstructionSet::detect().run(ScaleWork { values, factor });
}

struct PoolWork<'a> {
    input: &'a Pool<'a>,
    out: &'a mut [f32],
}

impl SimdLoop for PoolWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Pool { rows, dim, bags: Bags { indices, offsets, per_sample_weights, divisors } } = *self.input;
        let outs = self.out.chunks_exact_mut(dim);
        if let (None, None) = (offsets, per_sample_weights) {
            for (at, (&index, out)) in indices.iter().zip(outs).enumerate() {
                fetch_ahead(rows, dim, indices, at);
                copy(&rows[index as usize * dim..][..dim], out);
            }
            return;
        }
        let sum = Sum { rows, dim, onto: false, scale: 1.0 };
        for (sample, out) in outs.enumerate() {
            let range = match offsets {
                None => sample..sample + 1,
                Some(offsets) => offsets[sample] as usize..offsets[sample + 1] as usize,
            };
            for at in range.clone() {
                fetch_ahead(rows, dim, indices, at);
            }
            let own = indices[range.clone()].iter().map(|index| *index as usize * dim);
            match per_sample_weights {
                None => sum.write(own.map(|row| (row, 1.0)), out),
                Some(weights) => sum.write(own.zip(weights[range].iter().copied()), out),
            }
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

impl SimdLoop for ScaleWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.values.iter_mut().for_each(|value| *value *= self.factor);
    }
}

/// Copy a row of any length in blocks that become single moves, because a call to `memcpy` costs more than
/// copying a short row. If a remainder is left, the last block overlaps the one before, because a loop over
/// the remainder would cost as much as the call.
#[inline(always)]
pub fn copy(from: &[f32], to: &mut [f32]) {
    let to = &mut to[..from.len()];
    if from.len() >= LANES {
        for (out, block) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(from.as_chunks::<LANES>().0) {
            *out = *block;
        }
    }
    if !from.len().is_multiple_of(LANES) {
        let _done = copy_ends::<LANES>(from, to)
            || copy_ends::<8>(from, to)
            || copy_ends::<4>(from, to)
            || copy_few(from, to);
    }
}

/// Copy the first and the last `W` floats. Returns false if there are fewer than `W`.
#[inline(always)]
fn copy_ends<const W: usize>(from: &[f32], to: &mut [f32]) -> bool {
    let (Some(first), Some(last)) = (from.first_chunk::<W>(), from.last_chunk::<W>()) else { return false };
    if let Some(out) = to.first_chunk_mut::<W>() {
        *out = *first;
    }
    if let Some(out) = to.last_chunk_mut::<W>() {
        *out = *last;
    }
    true
}

/// Copy one to three floats. Always returns true, like [`copy_ends`] on success.
#[inline(always)]
fn copy_few(from: &[f32], to: &mut [f32]) -> bool {
    for at in [0, from.len() / 2, from.len() - 1] {
        to[at] = from[at];
    }
    true
}

#[inline(always)]
pub(crate) fn fetch_ahead(rows: &[f32], dim: usize, indices: &[u32], at: usize) {
    if let Some(&index) = indices.get(at + rows_ahead(dim)) {
        prefetch_row(rows.as_ptr().wrapping_add(index as usize * dim), dim);
    }
}

/// Computes `out = ((onto ? out : 0) + sum of factor * row) * scale`.
#[derive(Clone, Copy)]
pub(crate) struct Sum<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) dim: usize,
    pub(crate) onto: bool,
    pub(crate) scale: f32,
}

impl Sum<'_> {
    /// Add the rows, given as (position of the first float, factor), one block of columns after another, so
    /// that sums stay in registers.
    #[inline(always)]
    pub(crate) fn write(self, starts: impl Iterator<Item = (usize, f32)> + Clone, out: &mut [f32]) {
        let (dim, mut column) = (self.dim, 0);
        while dim - column >= 128 {
            self.block::<128>(column, starts.clone(), out);
            column += 128;
        }
        while dim - column >= 64 {
            self.block::<64>(column, starts.clone(), out);
            column += 64;
        }
        while dim - column >= 16 {
            self.block::<16>(column, starts.clone(), out);
            column += 16;
        }
        while dim - column >= 4 {
            self.block::<4>(column, starts.clone(), out);
            column += 4;
        }
        while column < dim {
            self.block::<1>(column, starts.clone(), out);
            column += 1;
        }
    }

    #[inline(always)]
    fn block<const W: usize>(
        self,
        column: usize,
        starts: impl Iterator<Item = (usize, f32)>,
        out: &mut [f32],
    ) {
        let out = &mut out[column..column + W];
        let mut sum = [0.0f32; W];
        if self.onto {
            sum.copy_from_slice(out);
        }
        for (start, factor) in starts {
            let row = &self.rows[start + column..][..W];
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
    use super::*;
    use crate::segment_sum::{Csr, SegmentSum, SegmentSumWork, segment_sum};

    fn number(i: usize) -> f32 {
        ((i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f32 / 1e5 - 80.0
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let indices: Vec<u32> = (0..500u32).map(|i| i * 7 % 50).collect();
        let offsets: Vec<u32> = (0..=100).map(|i| i * 5).collect();
        let divisors: Vec<f32> = (0..100).map(|i| number(i).abs() + 1.0).collect();
        let weights: Vec<f32> = (700..1200).map(number).collect();
        for dim in [1, 4, 16, 19, 64, 128, 211] {
            let rows: Vec<f32> = (0..100 * dim).map(number).collect();
            let divisors = Some(&divisors[..]);
            let offsets = &offsets[..];
            for weights in [None, Some(&weights[..])] {
                let bags =
                    Bags { indices: &indices, offsets: Some(offsets), per_sample_weights: weights, divisors };
                let pooled = &Pool { rows: &rows, dim, bags };
                let csr = Csr { offsets, indices: &indices };
                let summed = &SegmentSum {
                    gradients: &rows,
                    dim,
                    csr,
                    factors: divisors,
                    per_sample_weights: weights,
                    scale: 0.3,
                };
                let at = |level: InstructionSet| {
                    let mut outs = [(); 2].map(|()| vec![0.0; 100 * dim]);
                    level.run(PoolWork { input: pooled, out: &mut outs[0] });
                    level.run(SegmentSumWork { input: summed, first: 0, out: &mut outs[1] });
                    outs.map(|out| bits(&out))
                };
                for level in InstructionSet::supported() {
                    assert_eq!(at(level), at(InstructionSet::PORTABLE), "{level:?}, dim {dim}");
                }
            }
        }
    }

    #[test]
    fn rows_of_any_length_are_copied_whole() {
        for length in 0..200 {
            let row: Vec<f32> = (0..length).map(number).collect();
            let mut out = vec![f32::NAN; length];
            copy(&row, &mut out);
            assert_eq!(bits(&out), bits(&row));
        }
    }

    #[test]
    fn weights_multiply_rows_and_gradients() {
        let (indices, offsets) = ([3, 0, 0, 2, 5, 5, 1, 4, 2], [0, 2, 2, 7, 9]);
        let (divisors, weights) = ([2.0, 1.0, 5.0, 3.0], (0..9).map(number).collect::<Vec<f32>>());
        let factors: Vec<f32> = (20..26).map(number).collect();
        for dim in [1, 3, 16, 19, 64, 131] {
            let rows: Vec<f32> = (0..6 * dim).map(number).collect();
            let [mut out, mut sums] = [(); 2].map(|()| vec![f32::NAN; 4 * dim]);
            let bags = Bags {
                indices: &indices,
                offsets: Some(&offsets),
                per_sample_weights: Some(&weights),
                divisors: Some(&divisors),
            };
            pool(&Pool { rows: &rows, dim, bags }, &mut out);
            let csr = Csr { offsets: &offsets, indices: &indices };
            let summed = SegmentSum {
                gradients: &rows,
                dim,
                csr,
                factors: Some(&factors),
                per_sample_weights: Some(&weights),
                scale: 2.0,
            };
            segment_sum(&summed, 0, &mut sums);
            for row in 0..4 {
                for column in 0..dim {
                    let (mut pooled, mut summed) = (0.0f32, 0.0f32);
                    for (index, weight) in csr.of(row).iter().zip(&weights[csr.range(row)]) {
                        let index = *index as usize;
                        pooled += rows[index * dim + column] * weight;
                        summed += rows[index * dim + column] * (factors[index] * weight);
                    }
                    assert_eq!(out[row * dim + column], pooled / divisors[row]);
                    assert_eq!(sums[row * dim + column], summed * 2.0);
                }
            }
            let mut out = vec![f32::NAN; 9 * dim];
            let bags = Bags { offsets: None, divisors: None, ..bags };
            pool(&Pool { rows: &rows, dim, bags }, &mut out);
            assert_eq!(out[8 * dim], rows[2 * dim] * weights[8]);
        }
    }

    #[test]
    fn weights_of_one_change_no_bit() {
        let (dim, indices, offsets) = (19, [3, 0, 0, 2, 5, 5], [0, 2, 2, 6]);
        let rows: Vec<f32> = (0..6 * dim).map(number).collect();
        let factors: Vec<f32> = (30..36).map(number).collect();
        let [without, with] = [None, Some(&[1.0; 6][..])].map(|weights| {
            let mut outs = [(); 2].map(|()| vec![0.0; 3 * dim]);
            let offsets = &offsets[..];
            let bags = Bags {
                indices: &indices,
                offsets: Some(offsets),
                per_sample_weights: weights,
                divisors: None,
            };
            pool(&Pool { rows: &rows, dim, bags }, &mut outs[0]);
            let csr = Csr { offsets, indices: &indices };
            let factors = Some(&factors[..]);
            let sum =
                SegmentSum { gradients: &rows, dim, csr, factors, per_sample_weights: weights, scale: 1.0 };
            segment_sum(&sum, 0, &mut outs[1]);
            outs.map(|out| bits(&out))
        });
        assert_eq!(without, with);
    }
}
