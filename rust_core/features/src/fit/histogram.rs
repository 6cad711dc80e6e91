//! [`Histogram`]: computes quantiles from counts.

/// Counts of numbers by sign, exponent and the first bits of the mantissa, as in an HDR histogram. Counts are
/// integers, so quantiles do not depend on how the rows are split. Numbers with up to 12 significant bits,
/// such as integers up to 4096, are exact. Other numbers are rounded towards 0 by less than 2^-11 of their
/// value, except for subnormal numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Histogram {
    /// The groups by sign and exponent, in ascending order of their numbers. A group is empty until its first number is
    /// added.
    groups: Vec<Vec<u64>>,
    count: u64,
}

/// The number of bits of the mantissa that are kept.
const BITS: u32 = 11;
const PER_GROUP: usize = 1 << BITS;
/// The number of groups: two signs of 256 exponents.
const GROUPS: usize = 512;

/// The position of a number among all numbers in ascending order.
fn place(value: f32) -> usize {
    // 0 and -0 are the same number.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    (ordered >> (23 - BITS)) as usize
}

/// The number nearest to 0 that has this position.
fn number(place: usize) -> f32 {
    let ordered = (place as u32) << (23 - BITS);
    let rest = (1u32 << (23 - BITS)) - 1;
    if ordered >> 31 == 1 { f32::from_bits(ordered & 0x7FFF_FFFF) } else { f32::from_bits(!(ordered | rest)) }
}

impl Histogram {
    /// Add a finite number.
    #[inline]
    pub(super) fn add(&mut self, value: f32) {
        let place = place(value);
        if self.groups.is_empty() {
            self.groups = vec![Vec::new(); GROUPS];
        }
        let group = &mut self.groups[place / PER_GROUP];
        if group.is_empty() {
            *group = vec![0; PER_GROUP];
        }
        group[place % PER_GROUP] += 1;
        self.count += 1;
    }

    /// Add the numbers of another histogram.
    pub(super) fn merge(&mut self, other: &Self) {
        if self.groups.is_empty() {
            *self = other.clone();
            return;
        }
        for (group, more) in self.groups.iter_mut().zip(&other.groups) {
            if group.is_empty() {
                group.clone_from(more);
            } else {
                group.iter_mut().zip(more).for_each(|(count, more)| *count += more);
            }
        }
        self.count += other.count;
    }

    /// The numbers in ascending order, with their counts.
    pub(super) fn counts(&self) -> impl Iterator<Item = (f32, u64)> {
        let groups = self.groups.iter().enumerate();
        groups.flat_map(|(group, counts)| {
            let places = counts.iter().enumerate().filter(|(_, count)| **count > 0);
            places.map(move |(within, count)| (number(group * PER_GROUP + within), *count))
        })
    }

    /// For each of the ascending `shares`, from 0 to 1, the smallest number that at least this share of all numbers
    /// does not exceed (`inverted_cdf` in NumPy). The result is empty if there are no numbers.
    pub(super) fn quantiles(&self, shares: &[f64]) -> Vec<f32> {
        let mut found = Vec::with_capacity(shares.len());
        let mut sum = 0;
        for (value, count) in self.counts() {
            sum += count;
            while shares.get(found.len()).is_some_and(|share| sum as f64 >= share * self.count as f64) {
                found.push(value);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn histogram(values: &[f32]) -> Histogram {
        let mut histogram = Histogram::default();
        values.iter().for_each(|value| histogram.add(*value));
        histogram
    }

    #[test]
    fn short_numbers_are_exact() {
        for value in [0.0, 1.0, -1.0, 0.5, -0.75, 4096.0, 4095.0, -4095.0, 1e-3 / 1e-3, 3.0e38_f32.trunc()] {
            let back = number(place(value));
            assert!(
                back == value || (value.abs() > 1e38 && (back / value - 1.0).abs() < 5e-4),
                "{value} {back}"
            );
        }
        let values: Vec<f32> = (1..=1000).map(|i| i as f32).collect();
        assert_eq!(
            histogram(&values).quantiles(&[0.0, 0.001, 0.25, 0.5, 0.999, 1.0]),
            [1.0, 1.0, 250.0, 500.0, 999.0, 1000.0]
        );
        assert!(histogram(&[]).quantiles(&[0.5]).is_empty());
    }

    proptest! {
        #[test]
        fn quantiles_are_near_those_of_sorted_numbers(
            mut values in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::ZERO, 1..200),
            share in 0.0f64..=1.0,
            cut in 0usize..200,
        ) {
            let (one, other) = values.split_at(cut.min(values.len()));
            let mut merged = histogram(other);
            merged.merge(&histogram(one));
            let found = merged.quantiles(&[share])[0];
            prop_assert_eq!(&histogram(&values).quantiles(&[share]), &[found]);
            values.sort_by(f32::total_cmp);
            let rank = ((share * values.len() as f64).ceil() as usize).max(1) - 1;
            let exact = values[rank];
            prop_assert!((found - exact).abs() <= exact.abs() / 2048.0, "{} {}", found, exact);
        }
    }
}
