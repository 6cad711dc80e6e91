//! Compares each rule with its formula in plain code, and the instruction sets with each other.

use persia_types::Optimizer;
use proptest::prelude::*;

use super::*;
use crate::simd::{InstructionSet, SimdLoop};

struct Update<'a, R> {
    rule: R,
    weights: &'a mut [f32],
    state: &'a mut [f32],
    gradient: &'a [f32],
}

impl<R: RowRule> SimdLoop for Update<'_, R> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.rule.update_row::<L>(self.weights, self.state, self.gradient);
    }
}

fn update(level: InstructionSet, rule: Rule, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    match rule {
        Rule::Sgd(rule) => level.run(Update { rule, weights, state, gradient }),
        Rule::Momentum(rule) => level.run(Update { rule, weights, state, gradient }),
        Rule::Adagrad(rule) => level.run(Update { rule, weights, state, gradient }),
        Rule::RowAdagrad(rule) => level.run(Update { rule, weights, state, gradient }),
        Rule::Adam(rule) => level.run(Update { rule, weights, state, gradient }),
    }
}

fn all(weight_decay: f32) -> [Optimizer; 6] {
    let adagrad = |vectorwise_shared, g_square_momentum| Optimizer::Adagrad {
        lr: 0.02,
        weight_decay,
        initial_accumulator_value: 0.1,
        g_square_momentum,
        eps: 1e-10,
        vectorwise_shared,
    };
    [
        Optimizer::Sgd { lr: 0.1, momentum: 0.0, weight_decay },
        Optimizer::Sgd { lr: 0.1, momentum: 0.9, weight_decay },
        adagrad(false, 1.0),
        adagrad(true, 1.0),
        adagrad(true, 0.95),
        Optimizer::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, weight_decay, eps: 1e-8 },
    ]
}

/// The documented formula, computed in f32, element by element, with the mean of a row and Adam's bias
/// correction in f64.
fn reference(optimizer: &Optimizer, step: u32, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    let dim = weights.len();
    let old = weights.to_vec();
    for i in 0..dim {
        let (w, g) = (old[i], gradient[i]);
        weights[i] = match *optimizer {
            Optimizer::Sgd { lr, momentum: 0.0, weight_decay } => w - lr * (g + weight_decay * w),
            Optimizer::Sgd { lr, momentum, weight_decay } => {
                state[i] = momentum * state[i] + g;
                w - lr * (state[i] + weight_decay * w)
            }
            Optimizer::Adagrad { lr, weight_decay, eps, g_square_momentum, vectorwise_shared, .. } => {
                let g = g + weight_decay * w;
                let s = if vectorwise_shared { 0 } else { i };
                let new = w - lr * g / (state[s] + eps).sqrt();
                if !vectorwise_shared {
                    state[i] = state[i] * g_square_momentum + g * g;
                }
                new
            }
            Optimizer::Adam { lr, beta1, beta2, weight_decay, eps } => {
                let g = g + weight_decay * w;
                state[i] = beta1 * state[i] + (1.0 - beta1) * g;
                state[dim + i] = beta2 * state[dim + i] + (1.0 - beta2) * g * g;
                let first = f64::from(state[i]) / (1.0 - f64::from(beta1).powi(step as i32));
                let second = f64::from(state[dim + i]) / (1.0 - f64::from(beta2).powi(step as i32));
                w - (f64::from(lr) * first / (second.sqrt() + f64::from(eps))) as f32
            }
        };
    }
    if let Optimizer::Adagrad { weight_decay, g_square_momentum, vectorwise_shared: true, .. } = *optimizer {
        let squares = old.iter().zip(gradient).map(|(w, g)| f64::from(g + weight_decay * w).powi(2));
        state[0] = state[0] * g_square_momentum + (squares.sum::<f64>() / dim as f64) as f32;
    }
}

fn ulps(a: f32, b: f32) -> u32 {
    if a == b { 0 } else { a.to_bits().abs_diff(b.to_bits()) }
}

fn values(dim: usize, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; dim];
    crate::math::initial::InitialWeights::new(
        seed,
        "test",
        persia_types::Initializer::Uniform { low: -1.0, high: 1.0 },
    )
    .write(0, &mut values);
    values
}

#[test]
fn weight_decay_and_momentum_are_applied() {
    for (plain, decayed) in all(0.0).iter().zip(&all(0.1)) {
        let run = |optimizer: &Optimizer| {
            let mut weights = values(16, 1);
            let mut state = vec![Rule::initial_state(optimizer); optimizer.state_len(16)];
            for step in 1..=3 {
                let rule = Rule::new(optimizer, 1.0, 0.0, step);
                update(
                    InstructionSet::PORTABLE,
                    rule,
                    &mut weights,
                    &mut state,
                    &values(16, 1 + u64::from(step)),
                );
            }
            weights
        };
        assert!(run(plain).iter().zip(run(decayed)).all(|(a, b)| *a != b), "{plain:?}");
    }
    let [_, momentum, ..] = all(0.0);
    let (mut weights, mut state) = (vec![0.0], vec![0.0]);
    for step in 1..=2 {
        update(
            InstructionSet::PORTABLE,
            Rule::new(&momentum, 1.0, 0.0, step),
            &mut weights,
            &mut state,
            &[1.0],
        );
    }
    assert_eq!((weights[0], state[0]), (-0.1 - 0.1 * 1.9, 1.9));
}

#[test]
fn a_bound_clamps_and_a_factor_scales() {
    let sgd = Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 };
    let run = |factor, bound, gradient: f32| {
        let mut weights = [0.0; 17];
        update(
            InstructionSet::detect(),
            Rule::new(&sgd, factor, bound, 1),
            &mut weights,
            &mut [],
            &[gradient; 17],
        );
        assert!(weights.iter().all(|w| *w == weights[0]));
        weights[0]
    };
    assert_eq!([run(1.0, 10.0, 30.0), run(1.0, 10.0, -30.0), run(1.0, 0.0, 30.0)], [-10.0, 10.0, -30.0]);
    assert_eq!(run(0.5, 10.0, 3.0), -1.5);
}

#[test]
fn adams_clock_is_the_global_step_not_a_count_of_requests() {
    let [.., adam] = all(0.0);
    let first_update = |step| {
        let (mut weights, mut state) = ([0.0], [0.0, 0.0]);
        update(InstructionSet::PORTABLE, Rule::new(&adam, 1.0, 0.0, step), &mut weights, &mut state, &[1.0]);
        f64::from(weights[0])
    };
    for step in [1u32, 10, 1_000, 1_000_000, u32::MAX] {
        let correct = |beta: f64| 1.0 - beta.powf(f64::from(step));
        let expected = -1e-3 * (0.1 / correct(0.9)) / ((0.001 / correct(0.999)).sqrt() + 1e-8);
        let found = first_update(step);
        assert!((found / expected - 1.0).abs() < 1e-4, "step {step}: {found} is not {expected}");
    }
}

#[test]
fn every_level_gives_the_same_bits_for_every_dim() {
    let levels = InstructionSet::supported();
    for optimizer in all(0.0).into_iter().chain(all(0.01)) {
        for dim in (1..=40).chain([64, 100, 128]) {
            let run = |level| {
                let mut weights = values(dim, 1);
                let mut state = vec![Rule::initial_state(&optimizer); optimizer.state_len(dim)];
                for step in 1..=5 {
                    let rule = Rule::new(&optimizer, 0.7, 0.9, step);
                    update(level, rule, &mut weights, &mut state, &values(dim, 1 + u64::from(step)));
                }
                weights.iter().chain(&state).map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let expected = run(levels[0]);
            for level in &levels[1..] {
                assert_eq!(run(*level), expected, "{level:?} {optimizer:?} dim {dim}");
            }
        }
    }
}

#[test]
fn one_bad_value_anywhere_is_seen_on_every_level() {
    struct Check<'a>(&'a [f32]);
    impl SimdLoop for Check<'_> {
        type Output = bool;
        #[inline(always)]
        fn run<L: Lanes>(self) -> bool {
            is_within_limit::<L>(self.0)
        }
    }
    for level in InstructionSet::supported() {
        for dim in [1, 7, 16, 33, 64] {
            let mut values = vec![MAX_GRADIENT.next_down(); dim];
            assert!(level.run(Check(&values)));
            for at in 0..dim {
                let (limit, max) = (MAX_GRADIENT, f32::MAX);
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, limit, -limit, max] {
                    values[at] = bad;
                    assert!(!level.run(Check(&values)), "{bad} at {at} of {dim}");
                }
                values[at] = f32::MIN_POSITIVE;
            }
        }
    }
}

/// Optimizers with the limits of the ranges that [`Optimizer::check`] allows.
fn extremes() -> Vec<Optimizer> {
    let mut optimizers = all(f32::MAX).to_vec();
    for (lr, weight_decay) in [(f32::MAX, 0.0), (f32::MAX, f32::MAX), (0.0, 1.0), (1.0, 1e-3)] {
        let near_one = 1.0f32.next_down();
        optimizers.push(Optimizer::Sgd { lr, momentum: 0.0, weight_decay });
        optimizers.push(Optimizer::Sgd { lr, momentum: near_one, weight_decay });
        for (vectorwise_shared, eps, initial_accumulator_value) in [
            (false, 1e30, f32::MAX),
            (true, 1e30, f32::MAX),
            (false, f32::MIN_POSITIVE, 0.0),
            (true, 1e-10, 0.0),
        ] {
            optimizers.push(Optimizer::Adagrad {
                lr,
                weight_decay,
                initial_accumulator_value,
                g_square_momentum: 1.0,
                eps,
                vectorwise_shared,
            });
        }
        optimizers.push(Optimizer::Adam { lr, beta1: near_one, beta2: near_one, weight_decay, eps: 1e-30 });
        optimizers.push(Optimizer::Adam { lr, beta1: 0.0, beta2: 0.0, weight_decay, eps: 1e30 });
    }
    optimizers
}

#[test]
fn gradients_within_the_limit_keep_rows_finite() {
    struct Apply<'a>(Rule, &'a mut [f32], &'a mut [f32], &'a [f32]);
    fn apply<L: Lanes, R: RowRule>(rule: R, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        if is_within_limit::<L>(gradient) && rule.decays_within_limit(weights) {
            rule.update_row::<L>(weights, state, gradient);
        }
    }
    impl SimdLoop for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Self(rule, weights, state, gradient) = self;
            match rule {
                Rule::Sgd(rule) => apply::<L, _>(rule, weights, state, gradient),
                Rule::Momentum(rule) => apply::<L, _>(rule, weights, state, gradient),
                Rule::Adagrad(rule) => apply::<L, _>(rule, weights, state, gradient),
                Rule::RowAdagrad(rule) => apply::<L, _>(rule, weights, state, gradient),
                Rule::Adam(rule) => apply::<L, _>(rule, weights, state, gradient),
            }
        }
    }
    let largest = MAX_GRADIENT.next_down();
    let gradients = [[largest; 19], [-largest; 19], [0.0; 19], [1e-30; 19], [1e20; 19], [f32::MAX; 19]];
    for (optimizer, level, factor) in extremes().into_iter().flat_map(|optimizer| {
        InstructionSet::supported()
            .into_iter()
            .flat_map(move |level| [0.0, 1.0, f32::MAX].map(|factor| (optimizer, level, factor)))
    }) {
        assert_eq!(optimizer.check(), Ok(()));
        let mut weights = values(19, 1);
        let mut state = vec![Rule::initial_state(&optimizer); optimizer.state_len(19)];
        for step in 1..=200 {
            let rule = Rule::new(&optimizer, factor, 0.0, step);
            let gradient = &gradients[(step as usize * 7 / 3) % gradients.len()];
            level.run(Apply(rule, &mut weights, &mut state, gradient));
            let finite = weights.iter().chain(&state).all(|number| number.is_finite());
            assert!(finite, "step {step}, {level:?}, factor {factor}: {optimizer:?} {weights:?} {state:?}");
        }
    }
}

proptest! {
    #[test]
    fn a_step_equals_its_formula_within_two_ulp(
        dim in 1usize..40,
        seed in any::<u64>(),
        step in 1u32..5_000,
        which in 0usize..6,
        decay in prop_oneof![Just(0.0f32), Just(0.01)],
    ) {
        let optimizer = all(decay)[which];
        // Weights have a magnitude of at least 1, so that cancellation does not magnify the rounding of the
        // update.
        let mut weights: Vec<f32> = values(dim, seed).iter().map(|w| w + w.signum()).collect();
        let mut state: Vec<f32> = values(optimizer.state_len(dim), !seed).iter().map(|s| s.abs() + 0.1).collect();
        let gradient = values(dim, seed ^ 1);
        let (mut want_weights, mut want_state) = (weights.clone(), state.clone());
        reference(&optimizer, step, &mut want_weights, &mut want_state, &gradient);
        update(InstructionSet::detect(), Rule::new(&optimizer, 1.0, 0.0, step), &mut weights, &mut state, &gradient);
        for (found, want) in weights.iter().zip(&want_weights).chain(state.iter().zip(&want_state)) {
            prop_assert!(ulps(*found, *want) <= 2, "{} is not {} ({:?})", found, want, optimizer);
        }
    }
}
