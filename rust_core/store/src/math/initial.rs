//! Weights of new rows and admission by probability. The weights are a pure function of (seed, table, id),
//! and the draw for admission is a pure function of (seed, id, step). Both are equal on every server.

use persia_types::{Id, Initializer};

use crate::math::random::{gamma, mix, normal, poisson, table_key, unit};

/// Computes the weights of new rows of one table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InitialWeights {
    initializer: Initializer,
    /// A hash of the run's seed and the table's name.
    key: u64,
}

impl InitialWeights {
    pub(crate) fn new(seed: u64, table: &str, initializer: Initializer) -> Self {
        Self { initializer, key: table_key(seed, table) }
    }

    /// Write the weights of `id`, all of them finite. Each weight depends on its position but on no other
    /// weight.
    pub(crate) fn write(&self, id: Id, weights: &mut [f32]) {
        let key = mix(self.key ^ mix(id));
        let mut each = |draw: &dyn Fn(u64) -> f64| {
            for (i, weight) in (0..).zip(weights.iter_mut()) {
                *weight = (draw(i) as f32).clamp(f32::MIN, f32::MAX);
            }
        };
        match self.initializer {
            Initializer::Zero => weights.fill(0.0),
            Initializer::Uniform { low, high } => uniform(key, low, high, weights),
            Initializer::InverseSqrtDim => {
                let bound = (1.0 / libm::sqrt(weights.len() as f64)) as f32;
                uniform(key, -bound, bound, weights);
            }
            Initializer::Normal { mean, std } => {
                each(&|i| f64::from(mean) + f64::from(std) * normal(key, i));
            }
            Initializer::Gamma { shape, scale } => {
                each(&|i| f64::from(scale) * gamma(key, i, f64::from(shape)))
            }
            Initializer::Poisson { lam } => each(&|i| poisson(key, i, f64::from(lam))),
        }
    }
}

fn uniform(key: u64, low: f32, high: f32, weights: &mut [f32]) {
    let below_high = high.next_down().max(low);
    for (i, weight) in (0..).zip(weights) {
        let drawn = f64::from(low) + (f64::from(high) - f64::from(low)) * unit(key, i);
        *weight = (drawn as f32).min(below_high);
    }
}

/// Whether a missing id gets a row at this step, drawn with the given probability.
pub(crate) fn draws_admission(seed: u64, id: Id, step: u64, probability: f32) -> bool {
    probability >= 1.0 || unit(mix(mix(seed ^ ADMISSION) ^ mix(id)), step) < f64::from(probability)
}

/// A constant that makes the draws for admission independent of those for weights.
const ADMISSION: u64 = 0x61_64_6d_69_74;

#[cfg(test)]
mod tests {
    use super::*;

    fn draw_rows(initializer: Initializer, rows: u64) -> Vec<f32> {
        let initial = InitialWeights::new(3, "user", initializer);
        let mut weights = vec![0.0; rows as usize * 10];
        for (id, row) in weights.chunks_exact_mut(10).enumerate() {
            initial.write(id as u64, row);
        }
        weights
    }

    fn moments(values: &[f32]) -> (f64, f64) {
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
        let variance =
            values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, variance.sqrt())
    }

    #[test]
    fn uniform_stays_in_its_half_open_range_and_fills_it() {
        let values = draw_rows(Initializer::Uniform { low: -0.01, high: 0.01 }, 20_000);
        assert!(values.iter().all(|v| (-0.01..0.01).contains(v)));
        let (mean, std) = moments(&values);
        assert!(mean.abs() < 1e-4 && (std - 0.02 / 12f64.sqrt()).abs() < 1e-4, "{mean} {std}");
        let narrow = draw_rows(Initializer::Uniform { low: 1.0, high: 1.0f32.next_up() }, 100);
        assert!(narrow.iter().all(|v| *v == 1.0));
        assert!(draw_rows(Initializer::Uniform { low: 0.5, high: 0.5 }, 2).iter().all(|v| *v == 0.5));
    }

    #[test]
    fn normal_has_its_moments() {
        let values = draw_rows(Initializer::Normal { mean: 0.5, std: 2.0 }, 20_000);
        let (mean, std) = moments(&values);
        assert!((mean - 0.5).abs() < 0.02 && (std - 2.0).abs() < 0.02, "{mean} {std}");
        let within = values.iter().filter(|v| (**v - 0.5).abs() < 2.0).count() as f64 / values.len() as f64;
        assert!((within - 0.6827).abs() < 0.005, "{within}");
    }

    #[test]
    fn gamma_poisson_and_inverse_sqrt_dim_have_their_moments() {
        let (mean, std) = moments(&draw_rows(Initializer::Gamma { shape: 2.0, scale: 0.5 }, 20_000));
        assert!((mean - 1.0).abs() < 0.01 && (std - 0.5f64.sqrt()).abs() < 0.01, "{mean} {std}");
        let (mean, std) = moments(&draw_rows(Initializer::Poisson { lam: 3.0 }, 20_000));
        assert!((mean - 3.0).abs() < 0.02 && (std - 3f64.sqrt()).abs() < 0.02, "{mean} {std}");
        let values = draw_rows(Initializer::InverseSqrtDim, 20_000);
        let bound = 0.1f32.sqrt();
        assert!(values.iter().all(|v| (-bound..bound).contains(v)));
        let squared_length = 10.0 * moments(&values).1.powi(2);
        assert!((squared_length - 1.0 / 3.0).abs() < 0.005, "{squared_length}");
    }

    #[test]
    fn weights_are_finite_whatever_the_parameters() {
        let largest = [
            Initializer::Normal { mean: 0.0, std: f32::MAX },
            Initializer::Gamma { shape: f32::MAX, scale: f32::MAX },
        ];
        for initializer in largest {
            let values = draw_rows(initializer, 100);
            assert!(values.iter().all(|v| v.is_finite()) && values.contains(&f32::MAX), "{initializer:?}");
        }
    }

    #[test]
    fn a_row_depends_on_seed_table_and_id_only() {
        let initializer = Initializer::Uniform { low: 0.0, high: 1.0 };
        let row = |seed, table: &str, id, dim: usize| {
            let mut weights = vec![0.0; dim];
            InitialWeights::new(seed, table, initializer).write(id, &mut weights);
            weights
        };
        let reference = row(1, "a", 7, 8);
        assert_eq!(row(1, "a", 7, 8), reference);
        assert_eq!(row(1, "a", 7, 20)[..8], reference);
        for other in [row(2, "a", 7, 8), row(1, "b", 7, 8), row(1, "a", 8, 8), row(1, "aa", 7, 8)] {
            assert!(other.iter().zip(&reference).all(|(a, b)| a != b));
        }
    }

    /// All servers must compute the bits in this test, and checkpoints depend on them.
    #[test]
    fn the_first_draws_are_pinned() {
        let mut weights = [0.0; 2];
        InitialWeights::new(0, "t", Initializer::Uniform { low: 0.0, high: 1.0 }).write(0, &mut weights);
        assert_eq!(weights.map(f32::to_bits), [1060560593, 1062110658]);
        InitialWeights::new(0, "t", Initializer::Normal { mean: 0.0, std: 1.0 }).write(0, &mut weights);
        assert_eq!(weights.map(f32::to_bits), [1057843157, 3211632469]);
    }

    #[test]
    fn admission_follows_its_probability_step_by_step() {
        let admitted = |probability| (0..50_000).filter(|id| draws_admission(1, *id, 1, probability)).count();
        assert_eq!((admitted(0.0), admitted(1.0)), (0, 50_000));
        assert!((12_000..13_000).contains(&admitted(0.25)), "{}", admitted(0.25));
        let by_step: Vec<bool> = (1..50).map(|step| draws_admission(1, 7, step, 0.5)).collect();
        assert!(by_step.contains(&true) && by_step.contains(&false));
    }
}
