//! What a new row is and whether it may come: pure functions of (seed, table, id, step), equal on every server.

use persia_types::{Id, Initializer};

/// 2⁻⁵³, the distance between the doubles that [`unit`] draws.
const UNIT: f64 = 1.0 / (1u64 << 53) as f64;

/// Writes the weights of new rows of one table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InitialWeights {
    initializer: Initializer,
    /// Of the run's seed and the table's name.
    key: u64,
}

impl InitialWeights {
    pub(crate) fn new(seed: u64, table: &str, initializer: Initializer) -> Self {
        let key = table.bytes().fold(mix(seed), |key, byte| mix(key ^ u64::from(byte)));
        Self { initializer, key }
    }

    /// Write the weights of `id`. Element `i` is drawn by counter, so it does not depend on the others.
    pub(crate) fn write(&self, id: Id, weights: &mut [f32]) {
        let key = mix(self.key ^ mix(id));
        match self.initializer {
            Initializer::Zero => weights.fill(0.0),
            Initializer::Uniform { low, high } => {
                let below_high = high.next_down().max(low);
                for (i, weight) in weights.iter_mut().enumerate() {
                    let drawn = f64::from(low) + (f64::from(high) - f64::from(low)) * unit(key, i as u64);
                    *weight = (drawn as f32).min(below_high);
                }
            }
            Initializer::Normal { mean, std } => {
                for (i, weight) in weights.iter_mut().enumerate() {
                    *weight = (f64::from(mean) + f64::from(std) * normal(key, i as u64)) as f32;
                }
            }
        }
    }
}

/// Whether a missing id gets a row at this step.
pub(crate) fn admits(seed: u64, id: Id, step: u64, probability: f32) -> bool {
    probability >= 1.0 || unit(mix(mix(seed ^ ADMISSION) ^ mix(id)), step) < f64::from(probability)
}

/// Keeps the draws of admission apart from those of weights.
const ADMISSION: u64 = 0x61_64_6d_69_74;

/// Uniform in `[0, 1)`, the draw number `counter` of `key`.
fn unit(key: u64, counter: u64) -> f64 {
    (draw(key, counter) >> 11) as f64 * UNIT
}

/// Standard normal, by the transform of Box and Muller. `libm`, not the platform's library: the same bits everywhere.
fn normal(key: u64, counter: u64) -> f64 {
    let radius = (draw(key, 2 * counter) >> 11) as f64 * UNIT;
    let angle = unit(key, 2 * counter + 1);
    // 1 - radius lies in (0, 1], where the logarithm is finite.
    libm::sqrt(-2.0 * libm::log(1.0 - radius)) * libm::cos(2.0 * std::f64::consts::PI * angle)
}

fn draw(key: u64, counter: u64) -> u64 {
    mix(key.wrapping_add(counter.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// The finaliser of SplitMix64: a bijection whose every output bit depends on every input bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

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
    fn a_row_depends_on_seed_table_and_id_and_on_nothing_else() {
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

    /// These bits are part of the contract between servers: a change of them is a change of format.
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
        let admitted = |probability| (0..50_000).filter(|id| admits(1, *id, 1, probability)).count();
        assert_eq!((admitted(0.0), admitted(1.0)), (0, 50_000));
        assert!((12_000..13_000).contains(&admitted(0.25)), "{}", admitted(0.25));
        let by_step: Vec<bool> = (1..50).map(|step| admits(1, 7, step, 0.5)).collect();
        assert!(by_step.contains(&true) && by_step.contains(&false));
    }
}
