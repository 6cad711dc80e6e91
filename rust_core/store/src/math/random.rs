//! Counter-based random numbers that are bit-identical on every machine, because they use only integers, f64 operations
//! that are not fused, and `libm` instead of the platform's library.

use persia_types::Id;

/// 2⁻⁵³, the resolution of [`unit`].
const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
/// 2⁶⁴ divided by the golden ratio, rounded to an odd integer, so that consecutive counters become distant
/// keys.
const STRIDE: u64 = 0x9E37_79B9_7F4A_7C15;

/// The key of a table in a run.
pub(crate) fn table_key(seed: u64, table: &str) -> u64 {
    table.bytes().fold(mix(seed), |key, byte| mix(key ^ u64::from(byte)))
}

/// The draw of `key` with the number `counter`.
pub(crate) fn draw(key: u64, counter: u64) -> u64 {
    mix(key.wrapping_add(counter.wrapping_mul(STRIDE)))
}

/// The finalizer of SplitMix64: a bijection whose every output bit depends on every input bit.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STRIDE);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// A draw from the uniform distribution over `[0, 1)`.
pub(crate) fn unit(key: u64, counter: u64) -> f64 {
    (draw(key, counter) >> 11) as f64 * UNIT
}

/// A draw from the standard normal distribution, by the Box–Muller transform.
pub(crate) fn normal(key: u64, counter: u64) -> f64 {
    let (radius, angle) = (unit(key, 2 * counter), unit(key, 2 * counter + 1));
    // 1 - radius lies in (0, 1], where the logarithm is finite.
    libm::sqrt(-2.0 * libm::log(1.0 - radius)) * libm::cos(2.0 * std::f64::consts::PI * angle)
}

/// A draw from the gamma distribution of scale 1: a transformed normal draw, accepted with a probability of more than
/// 95 % (Marsaglia and Tsang 2000, "A Simple Method for Generating Gamma Variables"). For a shape below 1, a draw for
/// `shape + 1` is multiplied by `u^(1 / shape)` (section 6 of that paper).
pub(crate) fn gamma(key: u64, counter: u64, shape: f64) -> f64 {
    let key = draw(key, counter);
    let uniform = mix(key);
    let boosted = shape < 1.0;
    let d = if boosted { shape + 1.0 } else { shape } - 1.0 / 3.0;
    let c = 1.0 / libm::sqrt(9.0 * d);
    let mut attempt = 0;
    let drawn = loop {
        let x = normal(key, attempt);
        let root = 1.0 + c * x;
        let v = root * root * root;
        let bound = 0.5 * x * x + d - d * v + d * libm::log(v);
        if v > 0.0 && libm::log(unit(uniform, attempt)) < bound {
            break d * v;
        }
        attempt += 1;
    };
    if boosted { drawn * libm::pow(unit(mix(uniform), 0), 1.0 / shape) } else { drawn }
}

/// A draw from the Poisson distribution: one less than the number of uniform factors whose product first reaches
/// `exp(-mean)` or less (Knuth, "The Art of Computer Programming" 2, 3.4.1). It takes `mean + 1` uniform draws on
/// average.
pub(crate) fn poisson(key: u64, counter: u64, mean: f64) -> f64 {
    let key = draw(key, counter);
    let limit = libm::exp(-mean);
    let mut product = 1.0;
    let mut factors = 0;
    loop {
        product *= unit(key, factors);
        if product <= limit {
            return factors as f64;
        }
        factors += 1;
    }
}

/// The random draws for the stochastic rounding of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounder {
    key: u64,
}

/// The random draws for one row at one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowDraws {
    key: u32,
}

impl Rounder {
    pub(crate) fn new(seed: u64, table: &str) -> Self {
        /// A constant that makes these draws independent of those for weights.
        const ROUNDING: u64 = 0x0072_6F75_6E64;
        Self { key: mix(table_key(seed, table) ^ ROUNDING) }
    }

    /// The draws for pushes of `rank`. Several ranks push in one step and must round independently. [`Self::new`]
    /// returns the draws for rank 0.
    pub(crate) fn of_rank(self, rank: u32) -> Self {
        Self { key: self.key.wrapping_add(u64::from(rank).wrapping_mul(0x9E37_79B9_7F4A_7C15)) }
    }

    /// The draws for the update of `id` at `step`.
    #[inline(always)]
    pub(crate) fn row(self, id: Id, step: u32) -> RowDraws {
        RowDraws { key: mix(mix(self.key ^ id).wrapping_add(u64::from(step))) as u32 }
    }
}

impl RowDraws {
    /// 32 bits for element `i`: `h(key + i * 0x9E3779B9)`, where `h` is `lowbias32` from Wellons's "Prospecting for
    /// Hash Functions". Unlike a 64-bit hash it can be vectorized.
    #[inline(always)]
    pub(crate) fn draw(self, i: u32) -> u32 {
        let value = self.key.wrapping_add(i.wrapping_mul(0x9E37_79B9));
        let value = (value ^ value >> 16).wrapping_mul(0x7FEB_352D);
        let value = (value ^ value >> 15).wrapping_mul(0x846C_A68B);
        value ^ value >> 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: u64 = 200_000;

    fn mean_and_variance(draw: impl Fn(u64) -> f64) -> (f64, f64) {
        let values: Vec<f64> = (0..DRAWS).map(draw).collect();
        let mean = values.iter().sum::<f64>() / DRAWS as f64;
        (mean, values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / DRAWS as f64)
    }

    #[test]
    fn gamma_has_its_moments_and_its_tail() {
        for shape in [0.2, 0.9, 1.0, 2.5, 30.0] {
            let (mean, variance) = mean_and_variance(|counter| gamma(3, counter, shape));
            let error = 5.0 * (shape / DRAWS as f64).sqrt();
            assert!((mean - shape).abs() < error, "mean of shape {shape}: {mean}");
            assert!((variance / shape - 1.0).abs() < 0.06, "variance of shape {shape}: {variance}");
        }
        // With shape 1, the gamma distribution is the exponential distribution.
        let beyond = (0..DRAWS).filter(|counter| gamma(4, *counter, 1.0) > 2.0).count() as f64;
        assert!((beyond / DRAWS as f64 - (-2.0f64).exp()).abs() < 0.004, "{beyond}");
    }

    #[test]
    fn poisson_has_its_moments_and_its_probabilities() {
        for mean_wanted in [0.0, 0.3, 4.0, 60.0] {
            let (mean, variance) = mean_and_variance(|counter| poisson(5, counter, mean_wanted));
            let error = 5.0 * (mean_wanted / DRAWS as f64).sqrt();
            assert!((mean - mean_wanted).abs() <= error, "mean of {mean_wanted}: {mean}");
            assert!((variance - mean_wanted).abs() <= 0.03 * mean_wanted, "{mean_wanted}: {variance}");
        }
        let twos = (0..DRAWS).filter(|counter| poisson(6, *counter, 2.0) == 2.0).count() as f64;
        assert!((twos / DRAWS as f64 - 2.0 * (-2.0f64).exp()).abs() < 0.005, "{twos}");
    }

    #[test]
    fn rounding_draws_are_uniform_and_differ_by_table_id_step_rank_and_element() {
        let row = |seed, table, id, step| Rounder::new(seed, table).row(id, step);
        let reference = row(1, "a", 7, 3);
        assert_eq!(reference.draw(5), row(1, "a", 7, 3).draw(5));
        let of_rank = |rank| Rounder::new(1, "a").of_rank(rank).row(7, 3);
        assert_eq!(reference.draw(5), of_rank(0).draw(5));
        let others = [row(2, "a", 7, 3), row(1, "b", 7, 3), row(1, "a", 8, 3), row(1, "a", 7, 4), of_rank(1)];
        assert!(others.iter().all(|other| other.draw(5) != reference.draw(5)));
        let (mean, variance) = mean_and_variance(|i| {
            f64::from(row(1, "a", i / 16, 3).draw(i as u32 % 16)) / f64::from(u32::MAX)
        });
        assert!((mean - 0.5).abs() < 0.003 && (variance - 1.0 / 12.0).abs() < 0.001, "{mean} {variance}");
    }

    /// All servers must compute the bits in this test, and checkpoints depend on them.
    #[test]
    fn the_first_draws_are_pinned() {
        let draws = [gamma(0, 0, 0.5), gamma(0, 0, 3.0), poisson(0, 0, 50.0)].map(f64::to_bits);
        assert_eq!(draws, [4578459785274447689, 4611714123415209196, 4632374429215621120]);
        let row = Rounder::new(0, "t").row(0, 1);
        assert_eq!([0, 1, 2].map(|i| row.draw(i)), [1833501691, 1219237585, 4037771543]);
    }
}
