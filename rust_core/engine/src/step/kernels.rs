//! The two loops over floats: pooling rows into samples, and summing gradients per unique id.
//!
//! Both add in batch order, element by element, so their results depend on nothing but their input. They are the
//! oracle for every other device.

use crate::step::simd::prefetch;
pub use crate::step::simd::{pool, scale, segment_sum};
use persia_types::schema::{Pooling, Slot};

/// Floats that are fetched ahead of their use: enough rows to hide memory, few enough to stay in the nearest cache.
const AHEAD_FLOATS: usize = 4096;

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

/// Gradients of one feature's samples, and which samples each unique id occurs in.
#[derive(Debug, Clone, Copy)]
pub struct SegmentSum<'a> {
    /// `[samples, dim]`.
    pub gradients: &'a [f32],
    /// Floats in a row.
    pub dim: usize,
    /// Per unique id where its samples start (`unique + 1`).
    pub starts: &'a [u32],
    /// Samples, unique id after unique id, each in batch order.
    pub samples: &'a [u32],
    /// Per sample what its gradient is multiplied by; `None` is 1.
    pub factors: Option<&'a [f32]>,
    /// Per unique id the output row it is *added* to; `None` writes row after row instead.
    pub map: Option<&'a [u32]>,
}

/// What each sample's sum is divided by: its number of ids for a mean, the root of its number of rows (ids × rounds of
/// a hash stack) for sqrt scaling; either at least 1. `None` where that is 1 for all.
///
/// `offsets` are those of the feature as it is looked up.
pub fn divisors(slot: &Slot, offsets: Option<&[u32]>) -> Option<Vec<f32>> {
    if slot.pooling == Pooling::Sum && !slot.sqrt_scaling {
        return None;
    }
    let rounds = slot.hash_stack.map_or(1, |stack| stack.rounds);
    let divisor = |bounds: &[u32]| {
        let rows = bounds[1] - bounds[0];
        let mean = if slot.pooling == Pooling::Mean { (rows / rounds).max(1) as f32 } else { 1.0 };
        let root = if slot.sqrt_scaling { (rows.max(1) as f32).sqrt() } else { 1.0 };
        mean * root
    };
    offsets.map(|offsets| offsets.windows(2).map(divisor).collect())
}

#[inline(always)]
pub(crate) fn scale_body(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[inline(always)]
pub(crate) fn pool_body(input: &Pool<'_>, out: &mut [f32]) {
    let Pool { rows, dim, places, offsets, divisors } = *input;
    let Some(offsets) = offsets else {
        for (occurrence, (&place, out)) in places.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
            fetch_ahead(rows, dim, places, occurrence);
            copy_row(&rows[place as usize * dim..][..dim], out);
        }
        return;
    };
    for (sample, (bounds, out)) in offsets.windows(2).zip(out.chunks_exact_mut(dim)).enumerate() {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        for occurrence in start..end {
            fetch_ahead(rows, dim, places, occurrence);
        }
        let row = |place: u32| place as usize * dim;
        sum_rows(rows, dim, places[start..end].iter().map(|place| (row(*place), 1.0)), false, out);
        if let Some(divisors) = divisors {
            let divisor = divisors[sample];
            out.iter_mut().for_each(|value| *value /= divisor);
        }
    }
}

#[inline(always)]
pub(crate) fn segment_sum_body(input: &SegmentSum<'_>, out: &mut [f32]) {
    let SegmentSum { gradients, dim, starts, samples, factors, map } = *input;
    for (unique, bounds) in starts.windows(2).enumerate() {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        for occurrence in start..end {
            fetch_ahead(gradients, dim, samples, occurrence);
        }
        let row = map.map_or(unique, |map| map[unique] as usize);
        let out = &mut out[row * dim..][..dim];
        let samples = &samples[start..end];
        let row = |sample: u32| sample as usize * dim;
        match factors {
            None => sum_rows(gradients, dim, samples.iter().map(|s| (row(*s), 1.0)), map.is_some(), out),
            Some(factors) => {
                let scaled = samples.iter().map(|s| (row(*s), factors[*s as usize]));
                sum_rows(gradients, dim, scaled, map.is_some(), out);
            }
        }
    }
}

/// A copy without a call: rows are as short as a cache line.
#[inline(always)]
fn copy_row(row: &[f32], out: &mut [f32]) {
    let (blocks, rest) = row.as_chunks::<16>();
    let (out_blocks, out_rest) = out.as_chunks_mut::<16>();
    for (block, out) in blocks.iter().zip(out_blocks) {
        *out = *block;
    }
    for (value, out) in rest.iter().zip(out_rest) {
        *out = *value;
    }
}

#[inline(always)]
fn fetch_ahead(rows: &[f32], dim: usize, places: &[u32], occurrence: usize) {
    if let Some(&place) = places.get(occurrence + (AHEAD_FLOATS / dim).clamp(8, 64)) {
        prefetch(rows, place as usize * dim, dim);
    }
}

/// `out = (onto ? out : 0) + sum of factor * row`, block of columns after block, so that sums stay in registers.
#[inline(always)]
fn sum_rows(
    rows: &[f32],
    dim: usize,
    places: impl Iterator<Item = (usize, f32)> + Clone,
    onto: bool,
    out: &mut [f32],
) {
    let mut column = 0;
    while dim - column >= 128 {
        sum_block::<128>(rows, column, places.clone(), onto, out);
        column += 128;
    }
    while dim - column >= 64 {
        sum_block::<64>(rows, column, places.clone(), onto, out);
        column += 64;
    }
    while dim - column >= 16 {
        sum_block::<16>(rows, column, places.clone(), onto, out);
        column += 16;
    }
    while dim - column >= 4 {
        sum_block::<4>(rows, column, places.clone(), onto, out);
        column += 4;
    }
    while column < dim {
        sum_block::<1>(rows, column, places.clone(), onto, out);
        column += 1;
    }
}

#[inline(always)]
fn sum_block<const W: usize>(
    rows: &[f32],
    column: usize,
    places: impl Iterator<Item = (usize, f32)>,
    onto: bool,
    out: &mut [f32],
) {
    let out = &mut out[column..column + W];
    let mut sum = [0.0f32; W];
    if onto {
        sum.copy_from_slice(out);
    }
    for (place, factor) in places {
        let row = &rows[place + column..][..W];
        for lane in 0..W {
            sum[lane] += row[lane] * factor;
        }
    }
    out.copy_from_slice(&sum);
}
