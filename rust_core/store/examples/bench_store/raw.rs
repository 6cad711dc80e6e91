//! The memory limit: the same memory traffic, with row positions known in advance.
//!
//! The limit must be as fast as possible: rows start at a cache line if their length allows it, all their cache
//! lines are prefetched, the loops use the widest registers, and the best of several prefetch distances is used.
//!
//! [`RawRows::train`] is a second, stricter limit: a push must also record the use of a row, refuse gradients that are
//! not finite, and compute the optimizer.

use persia_types::Optimizer;

use crate::machine::{cpu_ns, on_huge_pages, prefetch, prefetch_second, widest};

/// The prefetch distances to try, in rows.
const AHEAD: [usize; 7] = [4, 8, 12, 16, 32, 64, 128];

/// The rows, in one array.
pub(crate) struct RawRows {
    values: Vec<f32>,
    /// The start of the first row, which is aligned to a cache line.
    first: usize,
    stride: usize,
    /// The step of the last use of each row.
    last_used: Vec<f32>,
    gather_ahead: usize,
    update_ahead: usize,
    train_ahead: usize,
    /// Whether [`Self::train`] prefetches rows into the second-level cache.
    into_second: bool,
}

impl RawRows {
    /// Create the rows. `slots` lists the rows with which prefetch distances are tried.
    pub(crate) fn new(rows: usize, dim: usize, optimizer: &Optimizer, slots: &[Vec<u32>]) -> Self {
        let stride = dim + optimizer.state_len(dim);
        let values = on_huge_pages(rows * stride + 16);
        let first = values.as_ptr().align_offset(64);
        let last_used = on_huge_pages(rows);
        let mut raw = Self {
            values,
            first,
            stride,
            last_used,
            gather_ahead: 0,
            update_ahead: 0,
            train_ahead: 0,
            into_second: false,
        };
        let mut buffer = vec![0.0; slots[0].len() * dim];
        let (_, ahead) = fastest(slots, |slots, ahead| {
            raw.gather_ahead = ahead;
            raw.gather(slots, &mut buffer, dim);
        });
        raw.gather_ahead = ahead;
        let (_, ahead) = fastest(slots, |slots, ahead| {
            raw.update_ahead = ahead;
            raw.update(slots, &buffer, dim);
        });
        raw.update_ahead = ahead;
        buffer.fill(1e-3);
        let [first, second] = [false, true].map(|into_second| {
            raw.into_second = into_second;
            fastest(slots, |slots, ahead| {
                raw.train_ahead = ahead;
                raw.train(slots, &buffer, optimizer, dim, 2.0);
            })
        });
        raw.into_second = second.0 < first.0;
        raw.train_ahead = if raw.into_second { second.1 } else { first.1 };
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

impl RawRows {
    /// Record that the row of every slot is used at `step`, and update it with the optimizer if its gradient is finite.
    pub(crate) fn train(
        &mut self,
        slots: &[u32],
        gradients: &[f32],
        optimizer: &Optimizer,
        dim: usize,
        step: f32,
    ) {
        let (rows, last_used) = (&mut self.values[self.first..], &mut self.last_used[..]);
        let (stride, ahead, into_second) = (self.stride, self.train_ahead, self.into_second);
        let mut train = Train { rows, last_used, stride, ahead, into_second, dim, step };
        match *optimizer {
            Optimizer::Adagrad { lr, eps, vectorwise_shared: false, .. } => widest(
                #[inline(always)]
                || train.run(slots, gradients, |row, gradient| adagrad(row, gradient, lr, eps)),
            ),
            Optimizer::Adagrad { lr, eps, .. } => widest(
                #[inline(always)]
                || train.run(slots, gradients, |row, gradient| row_wise(row, gradient, lr, eps)),
            ),
            Optimizer::Adam { lr, beta1, beta2, eps, .. } => widest(
                #[inline(always)]
                || train.run(slots, gradients, |row, gradient| adam(row, gradient, [lr, beta1, beta2, eps])),
            ),
            Optimizer::Sgd { .. } => unreachable!("not measured"),
        }
    }
}

/// The loop of [`RawRows::train`].
struct Train<'a> {
    rows: &'a mut [f32],
    last_used: &'a mut [f32],
    stride: usize,
    ahead: usize,
    into_second: bool,
    dim: usize,
    step: f32,
}

impl Train<'_> {
    #[inline(always)]
    fn fetch(&self, slot: u32) {
        if self.into_second {
            prefetch_second(self.rows, slot as usize * self.stride, self.stride);
        } else {
            prefetch(self.rows, slot as usize * self.stride, self.stride);
        }
        prefetch(self.last_used, slot as usize, 1);
    }

    /// `work` updates a row of weights and state.
    #[inline(always)]
    fn run(&mut self, slots: &[u32], gradients: &[f32], work: impl Fn(&mut [f32], &[f32])) {
        slots.iter().take(self.ahead).for_each(|slot| self.fetch(*slot));
        for (at, (slot, gradient)) in slots.iter().zip(gradients.chunks_exact(self.dim)).enumerate() {
            if let Some(next) = slots.get(at + self.ahead) {
                self.fetch(*next);
            }
            let last_used = &mut self.last_used[*slot as usize];
            *last_used = last_used.max(self.step);
            let mut largest = [0; 16];
            for block in gradient.as_chunks::<16>().0 {
                for lane in 0..16 {
                    largest[lane] = largest[lane].max(block[lane].to_bits() & i32::MAX as u32);
                }
            }
            if largest.iter().max() < Some(&1e30_f32.to_bits()) {
                work(&mut self.rows[*slot as usize * self.stride..][..self.stride], gradient);
            }
        }
    }
}

#[inline(always)]
fn adagrad(row: &mut [f32], gradient: &[f32], lr: f32, eps: f32) {
    let (weights, sums) = row.split_at_mut(gradient.len());
    let blocks = weights.as_chunks_mut::<16>().0.iter_mut().zip(sums.as_chunks_mut::<16>().0);
    for ((weights, sums), gradient) in blocks.zip(gradient.as_chunks::<16>().0) {
        // Copies, because the compiler does not use vector instructions otherwise.
        let (mut new_weights, mut new_sums) = (*weights, *sums);
        for lane in 0..16 {
            new_weights[lane] -= lr * gradient[lane] / (new_sums[lane] + eps).sqrt();
            new_sums[lane] += gradient[lane] * gradient[lane];
        }
        (*weights, *sums) = (new_weights, new_sums);
    }
}

#[inline(always)]
fn row_wise(row: &mut [f32], gradient: &[f32], lr: f32, eps: f32) {
    let (weights, sum) = row.split_at_mut(gradient.len());
    let rate = lr / (sum[0] + eps).sqrt();
    let mut squares = [0.0; 16];
    for (weights, gradient) in weights.as_chunks_mut::<16>().0.iter_mut().zip(gradient.as_chunks::<16>().0) {
        let mut new_weights = *weights;
        for lane in 0..16 {
            new_weights[lane] -= rate * gradient[lane];
            squares[lane] += gradient[lane] * gradient[lane];
        }
        *weights = new_weights;
    }
    sum[0] += squares.iter().sum::<f32>() / gradient.len() as f32;
}

#[inline(always)]
fn adam(row: &mut [f32], gradient: &[f32], [lr, beta1, beta2, eps]: [f32; 4]) {
    let (weights, state) = row.split_at_mut(gradient.len());
    let (means, squares) = state.split_at_mut(gradient.len());
    let blocks = weights.as_chunks_mut::<16>().0.iter_mut().zip(means.as_chunks_mut::<16>().0);
    let blocks = blocks.zip(squares.as_chunks_mut::<16>().0).zip(gradient.as_chunks::<16>().0);
    for (((weights, means), squares), gradient) in blocks {
        let (mut new_weights, mut new_means, mut new_squares) = (*weights, *means, *squares);
        for lane in 0..16 {
            let gradient = gradient[lane];
            new_means[lane] = beta1 * new_means[lane] + (1.0 - beta1) * gradient;
            new_squares[lane] = beta2 * new_squares[lane] + (1.0 - beta2) * gradient * gradient;
            new_weights[lane] -= lr * new_means[lane] / (new_squares[lane].sqrt() + eps);
        }
        (*weights, *means, *squares) = (new_weights, new_means, new_squares);
    }
}

/// The least time of `work` over all `slots`, and the prefetch distance with which it is reached.
fn fastest(slots: &[Vec<u32>], mut work: impl FnMut(&[u32], usize)) -> (f64, usize) {
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
    best
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
