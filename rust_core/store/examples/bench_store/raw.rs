//! The memory limit: the same memory traffic, with row positions known in advance.
//!
//! The limit must be as fast as possible: rows start at a cache line if their length allows it, all their cache
//! lines are prefetched, the loops use the widest registers, and the best of several prefetch distances is used.

use crate::machine::{cpu_ns, on_huge_pages, prefetch, widest};

/// The prefetch distances to try, in rows.
const AHEAD: [usize; 7] = [4, 8, 12, 16, 32, 64, 128];

/// The rows, in one array.
pub(crate) struct RawRows {
    values: Vec<f32>,
    /// The start of the first row, which is aligned to a cache line.
    first: usize,
    stride: usize,
    gather_ahead: usize,
    update_ahead: usize,
}

impl RawRows {
    /// Create the rows. `slots` lists the rows with which prefetch distances are tried.
    pub(crate) fn new(rows: usize, stride: usize, dim: usize, slots: &[Vec<u32>]) -> Self {
        let values = on_huge_pages(rows * stride + 16);
        let first = values.as_ptr().align_offset(64);
        let mut raw = Self { values, first, stride, gather_ahead: 0, update_ahead: 0 };
        let mut buffer = vec![0.0; slots[0].len() * dim];
        raw.gather_ahead = fastest(slots, |slots, ahead| {
            raw.gather_ahead = ahead;
            raw.gather(slots, &mut buffer, dim);
        });
        raw.update_ahead = fastest(slots, |slots, ahead| {
            raw.update_ahead = ahead;
            raw.update(slots, &buffer, dim);
        });
        raw
    }

    /// Copy the first `dim` floats of the row of every slot.
    pub(crate) fn gather(&self, slots: &[u32], out: &mut [f32], dim: usize) {
        let (rows, stride, ahead) = (&self.values[self.first..], self.stride, self.gather_ahead);
        widest(
            #[inline(always)]
            || gather(rows, stride, ahead, slots, out, dim),
        );
    }

    /// Add a gradient to the weights and to each part of the state.
    pub(crate) fn update(&mut self, slots: &[u32], gradients: &[f32], dim: usize) {
        let (rows, stride, ahead) = (&mut self.values[self.first..], self.stride, self.update_ahead);
        widest(
            #[inline(always)]
            || update(rows, stride, ahead, slots, gradients, dim),
        );
    }
}

/// The prefetch distance with which `work` takes the least time over all `slots`.
fn fastest(slots: &[Vec<u32>], mut work: impl FnMut(&[u32], usize)) -> usize {
    let mut best = (f64::INFINITY, 0);
    for ahead in AHEAD {
        let mut times = crate::figures::Samples::default();
        for slots in slots {
            let start = cpu_ns();
            work(slots, ahead);
            times.add(cpu_ns() - start);
        }
        if times.median() < best.0 {
            best = (times.median(), ahead);
        }
    }
    best.1
}

#[inline(always)]
fn gather(rows: &[f32], stride: usize, ahead: usize, slots: &[u32], out: &mut [f32], dim: usize) {
    slots.iter().take(ahead).for_each(|slot| prefetch(rows, *slot as usize * stride, dim));
    for (at, (slot, out)) in slots.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
        if let Some(next) = slots.get(at + ahead) {
            prefetch(rows, *next as usize * stride, dim);
        }
        let row = &rows[*slot as usize * stride..][..dim];
        for (out, block) in out.as_chunks_mut::<16>().0.iter_mut().zip(row.as_chunks::<16>().0) {
            *out = *block;
        }
    }
}

#[inline(always)]
fn update(rows: &mut [f32], stride: usize, ahead: usize, slots: &[u32], gradients: &[f32], dim: usize) {
    slots.iter().take(ahead).for_each(|slot| prefetch(rows, *slot as usize * stride, stride));
    for (at, (slot, gradient)) in slots.iter().zip(gradients.chunks_exact(dim)).enumerate() {
        if let Some(next) = slots.get(at + ahead) {
            prefetch(rows, *next as usize * stride, stride);
        }
        let row = &mut rows[*slot as usize * stride..][..stride];
        let mut parts = row.chunks_exact_mut(dim);
        for part in &mut parts {
            let mut at = 0;
            while at < dim {
                add_block(part, gradient, at);
                at += 16;
            }
        }
        // The state may be shorter than the weights: a row-wise optimizer has one float per row.
        parts.into_remainder().iter_mut().for_each(|value| *value += gradient[0]);
    }
}

/// Add sixteen floats through a copy, which the compiler turns into one vector addition.
#[inline(always)]
fn add_block(values: &mut [f32], gradient: &[f32], at: usize) {
    let mut sums = [0.0; 16];
    sums.copy_from_slice(&values[at..at + 16]);
    let gradient = &gradient[at..at + 16];
    for lane in 0..16 {
        sums[lane] += gradient[lane];
    }
    values[at..at + 16].copy_from_slice(&sums);
}
