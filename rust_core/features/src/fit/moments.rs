//! [`Moments`]: the mean, standard deviation and range, computed exactly and independently of the order of the
//! numbers.

/// The sums of numbers, by exponent. Numbers with equal exponents are integer multiples of the same power of two.
/// Their sums are integers, so nothing is rounded before the end, and the result does not depend on how the rows are
/// split.
#[derive(Debug, Clone)]
pub(super) struct Moments {
    groups: Vec<Group>,
    min: f32,
    max: f32,
}

/// The numbers of one exponent: `mantissa * 2^(exponent - 150)`.
#[derive(Debug, Clone, Copy, Default)]
struct Group {
    count: u64,
    sum: i64,
    squares: u128,
}

/// The number of exponents of an f32, including the exponent of infinity and NaN.
const EXPONENTS: usize = 256;

impl Default for Moments {
    fn default() -> Self {
        Self { groups: vec![Group::default(); EXPONENTS], min: f32::INFINITY, max: f32::NEG_INFINITY }
    }
}

impl Moments {
    /// Add a finite number.
    #[inline]
    pub(super) fn add(&mut self, value: f32) {
        self.add_many(value, 1);
    }

    /// Add a finite number that occurs `count` times.
    #[inline]
    pub(super) fn add_many(&mut self, value: f32, count: u64) {
        let bits = value.to_bits();
        let exponent = (bits >> 23) & 0xFF;
        let fraction = i64::from(bits & 0x7F_FFFF);
        // Subnormal numbers have the same unit as exponent 1, and no implicit leading bit.
        let mantissa = if exponent == 0 { fraction } else { fraction | 0x80_0000 };
        let group = &mut self.groups[exponent.max(1) as usize];
        group.count += count;
        group.sum += count as i64 * if value.is_sign_negative() { -mantissa } else { mantissa };
        group.squares += u128::from(count) * (mantissa * mantissa) as u128;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Add the numbers of other moments.
    pub(super) fn merge(&mut self, other: &Self) {
        for (group, more) in self.groups.iter_mut().zip(&other.groups) {
            group.count += more.count;
            group.sum += more.sum;
            group.squares += more.squares;
        }
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// The smallest and largest number; None if there are no numbers.
    pub(super) fn range(&self) -> Option<(f32, f32)> {
        (self.min <= self.max).then_some((self.min, self.max))
    }

    /// The mean and the population standard deviation; None if there are no numbers.
    pub(super) fn mean_std(&self) -> Option<(f64, f64)> {
        let mut all = Spread::default();
        for (exponent, group) in self.groups.iter().enumerate().filter(|(_, group)| group.count > 0) {
            all.add(&group.spread(exponent as i32));
        }
        (all.count > 0.0).then(|| (all.mean, (all.squares / all.count).max(0.0).sqrt()))
    }
}

impl Group {
    fn spread(&self, exponent: i32) -> Spread {
        let (count, sum) = (self.count as f64, self.sum as f64);
        // Compute n * sum of squares - square of the sum without cancellation: both are integers below 2^127 for n <
        // 2^39.
        let square = u128::from(self.sum.unsigned_abs()).pow(2);
        let difference = u128::from(self.count).saturating_mul(self.squares).saturating_sub(square);
        let unit = 2f64.powi(exponent - 150);
        Spread { count, mean: sum / count * unit, squares: difference as f64 / count * unit * unit }
    }
}

/// The count, the mean, and the sum of squared differences from the mean.
#[derive(Debug, Clone, Copy, Default)]
struct Spread {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Spread {
    /// Combine the variances of two sets, by the formula of Chan, Golub and LeVeque (1983).
    fn add(&mut self, other: &Self) {
        let count = self.count + other.count;
        let delta = other.mean - self.mean;
        self.squares += other.squares + delta * delta * (self.count * other.count / count);
        self.mean += delta * (other.count / count);
        self.count = count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn moments(values: &[f32]) -> Moments {
        let mut moments = Moments::default();
        values.iter().for_each(|value| moments.add(*value));
        moments
    }

    #[test]
    fn mean_and_deviation_are_those_of_the_numbers() {
        let (mean, std) = moments(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).mean_std().unwrap();
        assert_eq!(mean, 5.0);
        assert!((std - 2.0).abs() < 1e-15, "{std}");
        assert_eq!(moments(&[-3.5]).mean_std(), Some((-3.5, 0.0)));
        assert_eq!(moments(&[]).mean_std(), None);
        assert_eq!(moments(&[f32::MAX, f32::MAX]).mean_std(), Some((f64::from(f32::MAX), 0.0)));
    }

    #[test]
    fn a_small_deviation_beside_a_large_mean_is_kept() {
        let values: Vec<f32> = (0..1000).map(|i| 1.0e7 + (i % 2) as f32).collect();
        let (mean, std) = moments(&values).mean_std().unwrap();
        assert_eq!(mean, 1.0e7 + 0.5);
        assert!((std - 0.5).abs() < 1e-12, "{std}");
    }

    proptest! {
        #[test]
        fn any_order_and_split_gives_equal_bits(
            mut values in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO, 1..80),
            cut in 0usize..80,
        ) {
            let whole = moments(&values);
            values.reverse();
            let (one, other) = values.split_at(cut.min(values.len()));
            let mut merged = moments(other);
            merged.merge(&moments(one));
            prop_assert_eq!(whole.mean_std(), merged.mean_std());
            prop_assert_eq!(whole.range(), merged.range());
            let exact = values.iter().map(|value| f64::from(*value) / values.len() as f64).sum::<f64>();
            let largest = values.iter().fold(0f64, |most, value| most.max(f64::from(value.abs())));
            let (mean, _) = whole.mean_std().unwrap();
            prop_assert!((mean - exact).abs() <= largest * 1e-12, "{} {}", mean, exact);
        }
    }
}
