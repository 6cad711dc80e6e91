//! Optimizers: the formulas by which a gradient changes a row, in one pass over it.
//!
//! `lr` is the learning rate times the factor of the push, and `g` is the summed gradient. Operations are done in the
//! order written, each rounded to f32:
//!
//! * SGD: `w -= lr * (g + wd * w)`; with momentum `v = momentum * v + g; w -= lr * (v + wd * w)`
//! * Adagrad: `g += wd * w; w -= (lr * g) / sqrt(s + eps); s = s * g_square_momentum + g * g`
//! * Adagrad by row: the same with one `s` per row, to which `sum(g * g) / dim` is added. Element `i` belongs to
//!   partial sum `i % 16`. The upper half of the partial sums is added to the lower half until one sum is left
//! * Adam: `g += wd * w; m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * (g * g);`
//!   `w -= (a * m) / (sqrt(v * b) + eps)` where `a = lr / (1 - beta1^t)` and `b = 1 / (1 - beta2^t)` are
//!   computed in f64 and rounded once
//!
//! Finally, `w` is clamped to ± `weight_bound` or, without a bound, to ± the largest finite number.
//!
//! Rows stay finite. A push skips a row whose `g` or `wd * w` is too large ([`is_within_limit`]). Learning rates are
//! clamped to the largest finite number, and [`Optimizer::check`] bounds the other settings. Adam's `v` is therefore
//! below 2^103, and `v * b` is finite.

use persia_types::Optimizer;
use persia_types::limits::{MAX_GRADIENT, MAX_GRADIENT_EXPONENT};

use crate::simd::{LANES, Lanes};

/// The rule by which an optimizer updates one row.
pub(crate) trait RowRule: Copy {
    /// `weights` and `gradient` have the same length. The length of `state` is [`Optimizer::state_len`].
    fn update_row<L: Lanes>(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]);

    /// The weight decay.
    fn decay(&self) -> f32;

    /// Whether the magnitude of the weight decay of every weight is below [`MAX_GRADIENT`].
    #[inline(always)]
    fn decays_within_limit(&self, weights: &[f32]) -> bool {
        let decay = self.decay();
        weights.iter().fold(true, |within, weight| within & ((decay * weight).abs() < MAX_GRADIENT))
    }
}

/// An optimizer with the hyper-parameters of one push.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    Sgd(Sgd),
    Momentum(Momentum),
    Adagrad(Adagrad),
    RowAdagrad(RowAdagrad),
    Adam(Adam),
}

impl Rule {
    /// The rule for a push of `step`. A `weight_bound` of 0 means no bound.
    pub(crate) fn new(optimizer: &Optimizer, lr_factor: f32, weight_bound: f32, step: u32) -> Self {
        let bound = if weight_bound > 0.0 { weight_bound } else { f32::MAX };
        let rate = |lr: f32| (lr * lr_factor).min(f32::MAX);
        match *optimizer {
            Optimizer::Sgd { lr, momentum: 0.0, weight_decay } => {
                Self::Sgd(Sgd { lr: rate(lr), decay: weight_decay, bound })
            }
            Optimizer::Sgd { lr, momentum, weight_decay } => {
                Self::Momentum(Momentum { lr: rate(lr), momentum, decay: weight_decay, bound })
            }
            Optimizer::Adagrad { lr, weight_decay, g_square_momentum, eps, vectorwise_shared, .. } => {
                let rule = Adagrad { lr: rate(lr), decay: weight_decay, keep: g_square_momentum, eps, bound };
                if vectorwise_shared { Self::RowAdagrad(RowAdagrad(rule)) } else { Self::Adagrad(rule) }
            }
            Optimizer::Adam { lr, beta1, beta2, weight_decay, eps } => Self::Adam(Adam {
                rate: ((f64::from(rate(lr)) / (1.0 - power(beta1, step))) as f32).min(f32::MAX),
                scale: (1.0 / (1.0 - power(beta2, step))) as f32,
                beta1,
                beta2,
                decay: weight_decay,
                eps,
                bound,
            }),
        }
    }

    /// The value of every float of a new row's optimizer state.
    pub(crate) fn initial_state(optimizer: &Optimizer) -> f32 {
        match optimizer {
            Optimizer::Adagrad { initial_accumulator_value, .. } => *initial_accumulator_value,
            Optimizer::Sgd { .. } | Optimizer::Adam { .. } => 0.0,
        }
    }
}

/// `base` to the power of `exponent`, by squaring: the results of multiplications are bit-identical on every machine.
fn power(base: f32, mut exponent: u32) -> f64 {
    let (mut square, mut result) = (f64::from(base), 1.0);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

/// Whether a gradient may be applied: every element is finite and its magnitude is below [`MAX_GRADIENT`].
#[inline(always)]
pub(crate) fn is_within_limit<L: Lanes>(gradient: &[f32]) -> bool {
    let (blocks, rest) = gradient.as_chunks::<LANES>();
    // This is a loop and not `all`, because a closure would be compiled without the instruction set of `L`.
    for block in blocks {
        if !L::all_below(block, MAX_GRADIENT_EXPONENT) {
            return false;
        }
    }
    rest.iter().all(|value| value.abs() < MAX_GRADIENT)
}

/// A rule that updates each element independently, with `S` floats of state per weight.
trait ElementRule<const S: usize> {
    /// The new weight and state.
    fn element(&self, weight: f32, state: [f32; S], gradient: f32) -> (f32, [f32; S]);
}

/// Apply an element-wise rule to a row, in blocks that are compiled to vector instructions.
#[inline(always)]
fn elements<const S: usize, R: ElementRule<S>>(
    rule: &R,
    weights: &mut [f32],
    state: &mut [f32],
    gradient: &[f32],
) {
    let dim = weights.len();
    let mut at = 0;
    while at + LANES <= dim {
        block::<LANES, S, R>(rule, weights, state, gradient, at);
        at += LANES;
    }
    if at + 8 <= dim {
        block::<8, S, R>(rule, weights, state, gradient, at);
        at += 8;
    }
    if at + 4 <= dim {
        block::<4, S, R>(rule, weights, state, gradient, at);
        at += 4;
    }
    while at < dim {
        block::<1, S, R>(rule, weights, state, gradient, at);
        at += 1;
    }
}

#[inline(always)]
fn block<const W: usize, const S: usize, R: ElementRule<S>>(
    rule: &R,
    weights: &mut [f32],
    state: &mut [f32],
    gradient: &[f32],
    at: usize,
) {
    let dim = weights.len();
    let mut new_weights = [0.0; W];
    let mut new_state = [[0.0; W]; S];
    new_weights.copy_from_slice(&weights[at..at + W]);
    for (part, lanes) in new_state.iter_mut().enumerate() {
        lanes.copy_from_slice(&state[part * dim + at..][..W]);
    }
    let gradient = &gradient[at..at + W];
    for lane in 0..W {
        let old = std::array::from_fn(|part| new_state[part][lane]);
        let (weight, state) = rule.element(new_weights[lane], old, gradient[lane]);
        new_weights[lane] = weight;
        for part in 0..S {
            new_state[part][lane] = state[part];
        }
    }
    weights[at..at + W].copy_from_slice(&new_weights);
    for (part, lanes) in new_state.iter().enumerate() {
        state[part * dim + at..][..W].copy_from_slice(lanes);
    }
}

/// Clamp to ± `bound`. A NaN is not changed.
#[inline(always)]
fn clamp(weight: f32, bound: f32) -> f32 {
    let below = if weight > bound { bound } else { weight };
    if below < -bound { -bound } else { below }
}

/// `w -= lr * (g + wd * w)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sgd {
    lr: f32,
    decay: f32,
    bound: f32,
}

impl ElementRule<0> for Sgd {
    #[inline(always)]
    fn element(&self, weight: f32, state: [f32; 0], gradient: f32) -> (f32, [f32; 0]) {
        (clamp(weight - self.lr * (gradient + self.decay * weight), self.bound), state)
    }
}

impl RowRule for Sgd {
    #[inline(always)]
    fn decay(&self) -> f32 {
        self.decay
    }

    #[inline(always)]
    fn update_row<L: Lanes>(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        elements(self, weights, state, gradient);
    }
}

/// SGD with momentum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Momentum {
    lr: f32,
    momentum: f32,
    decay: f32,
    bound: f32,
}

impl ElementRule<1> for Momentum {
    #[inline(always)]
    fn element(&self, weight: f32, [velocity]: [f32; 1], gradient: f32) -> (f32, [f32; 1]) {
        let velocity = self.momentum * velocity + gradient;
        (clamp(weight - self.lr * (velocity + self.decay * weight), self.bound), [velocity])
    }
}

impl RowRule for Momentum {
    #[inline(always)]
    fn decay(&self) -> f32 {
        self.decay
    }

    #[inline(always)]
    fn update_row<L: Lanes>(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        elements(self, weights, state, gradient);
    }
}

/// Adagrad with one accumulator per weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adagrad {
    lr: f32,
    decay: f32,
    keep: f32,
    eps: f32,
    bound: f32,
}

impl ElementRule<1> for Adagrad {
    #[inline(always)]
    fn element(&self, weight: f32, [sum]: [f32; 1], gradient: f32) -> (f32, [f32; 1]) {
        let gradient = gradient + self.decay * weight;
        let weight = weight - self.lr * gradient / (sum + self.eps).sqrt();
        (clamp(weight, self.bound), [sum * self.keep + gradient * gradient])
    }
}

impl RowRule for Adagrad {
    #[inline(always)]
    fn decay(&self) -> f32 {
        self.decay
    }

    #[inline(always)]
    fn update_row<L: Lanes>(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        elements(self, weights, state, gradient);
    }
}

/// Adagrad with one accumulator per row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowAdagrad(Adagrad);

/// The element-wise part of [`RowAdagrad`], with the square root already computed.
struct Rooted {
    rule: Adagrad,
    root: f32,
}

impl ElementRule<0> for Rooted {
    #[inline(always)]
    fn element(&self, weight: f32, state: [f32; 0], gradient: f32) -> (f32, [f32; 0]) {
        let gradient = gradient + self.rule.decay * weight;
        (clamp(weight - self.rule.lr * gradient / self.root, self.rule.bound), state)
    }
}

impl RowRule for RowAdagrad {
    #[inline(always)]
    fn decay(&self) -> f32 {
        self.0.decay
    }

    #[inline(always)]
    fn update_row<L: Lanes>(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let rule = self.0;
        let grown = state[0] * rule.keep + mean_square::<L>(weights, gradient, rule.decay);
        elements(&Rooted { rule, root: (state[0] + rule.eps).sqrt() }, weights, &mut [], gradient);
        state[0] = grown;
    }
}

/// The mean of `(g + decay * w)²`, computed with [`LANES`] partial sums.
#[inline(always)]
fn mean_square<L: Lanes>(weights: &[f32], gradient: &[f32], decay: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (weight_blocks, weight_rest) = weights.as_chunks::<LANES>();
    let (gradient_blocks, gradient_rest) = gradient.as_chunks::<LANES>();
    for (weights, gradient) in weight_blocks.iter().zip(gradient_blocks) {
        L::add_squares(&mut sums, weights, gradient, decay);
    }
    if !weight_rest.is_empty() {
        let (mut weights, mut gradient) = ([0.0; LANES], [0.0; LANES]);
        weights[..weight_rest.len()].copy_from_slice(weight_rest);
        gradient[..gradient_rest.len()].copy_from_slice(gradient_rest);
        L::add_squares(&mut sums, &weights, &gradient, decay);
    }
    L::fold(&sums) / weights.len() as f32
}

/// Adam with bias correction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adam {
    /// `a` in the formula of Adam.
    rate: f32,
    /// `b` in the formula of Adam.
    scale: f32,
    beta1: f32,
    beta2: f32,
    decay: f32,
    eps: f32,
    bound: f32,
}

impl ElementRule<2> for Adam {
    #[inline(always)]
    fn element(&self, weight: f32, [first, second]: [f32; 2], gradient: f32) -> (f32, [f32; 2]) {
        let gradient = gradient + self.decay * weight;
        let first = self.beta1 * first + (1.0 - self.beta1) * gradient;
        let second = self.beta2 * second + (1.0 - self.beta2) * (gradient * gradient);
        let weight = weight - self.rate * first / ((second * self.scale).sqrt() + self.eps);
        (clamp(weight, self.bound), [first, second])
    }
}

impl RowRule for Adam {
    #[inline(always)]
    fn decay(&self) -> f32 {
        self.decay
    }

    #[inline(always)]
    fn update_row<L: Lanes>(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        elements(self, weights, state, gradient);
    }
}

#[cfg(test)]
#[path = "optimizer_tests.rs"]
mod tests;
