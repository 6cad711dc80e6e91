//! [`Bags`]: which rows each sample of a feature uses, and how they are added.

use std::ops::Range;

use crate::tables::TablesError;

/// Which rows each sample of one feature uses.
#[derive(Debug, Clone, Copy)]
pub struct Bags<'a> {
    /// Per occurrence the row it uses, in batch order.
    pub places: &'a [u32],
    /// Where each sample's occurrences start (`samples + 1`); `None` is one per sample.
    pub offsets: Option<&'a [u32]>,
    /// Per occurrence what its row is multiplied by; `None` is 1.
    pub weights: Option<&'a [f32]>,
    /// Per sample what its sum is divided by; `None` is 1.
    pub divisors: Option<&'a [f32]>,
}

impl<'a> Bags<'a> {
    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.offsets.map_or(self.places.len(), |offsets| offsets.len().saturating_sub(1))
    }

    /// Those of some samples; lengths were checked.
    pub fn of(&self, samples: Range<usize>) -> Self {
        let divisors = self.divisors.map(|divisors| &divisors[samples.clone()]);
        match self.offsets {
            Some(offsets) => Self { offsets: Some(&offsets[samples.start..=samples.end]), divisors, ..*self },
            None => {
                let weights = self.weights.map(|weights| &weights[samples.clone()]);
                Self { places: &self.places[samples], weights, divisors, ..*self }
            }
        }
    }

    /// Check everything for `rows` rows: lengths, that places are below `rows` and offsets ascend, that weights are
    /// finite, and divisors besides above 0.
    ///
    /// # Errors
    /// `BadShape` with what is wrong.
    pub fn check(&self, rows: usize) -> Result<(), TablesError> {
        let bad = |what: String| Err(TablesError::BadShape { what });
        let (uses, samples) = (self.places.len(), self.samples());
        if let Some(offsets) = self.offsets {
            let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
                return bad("no offsets of samples, want one more than samples".into());
            };
            let ascend = offsets.is_sorted();
            if *first != 0 || *last as usize != uses || !ascend {
                return bad(format!(
                    "offsets of samples ascend from 0 to {uses}, these go from {first} to {last}"
                ));
            }
        }
        if let Some(place) = self.places.iter().max().filter(|place| **place as usize >= rows) {
            return bad(format!("a sample uses row {place} of {rows}"));
        }
        let other_length = |values: Option<&[f32]>, wanted: usize| values.is_some_and(|v| v.len() != wanted);
        if other_length(self.weights, uses) {
            return bad(format!("{uses} uses of rows have another number of weights"));
        }
        if other_length(self.divisors, samples) {
            return bad(format!("{samples} samples have another number of divisors"));
        }
        let first = |values: Option<&'a [f32]>, good: fn(f32) -> bool| {
            values.and_then(|values| values.iter().position(|value| !good(*value)).map(|at| (at, values[at])))
        };
        if let Some((at, weight)) = first(self.weights, f32::is_finite) {
            return bad(format!("weight {weight} of use {at} is not finite"));
        }
        if let Some((at, divisor)) = first(self.divisors, |divisor| divisor.is_finite() && divisor > 0.0) {
            return bad(format!("divisor {divisor} of sample {at} is not a finite number above 0"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Pool, pool};

    const GOOD: Bags<'_> = Bags {
        places: &[2, 0, 1],
        offsets: Some(&[0, 2, 2, 3]),
        weights: Some(&[1.0, -2.0, 0.0]),
        divisors: Some(&[2.0, 1.0, 0.5]),
    };

    #[test]
    fn bags_that_do_not_fit_are_refused_by_name() {
        let refused = |bags: Bags<'_>| bags.check(3).err().map(|e| e.to_string()).unwrap_or_default();
        let single = Bags { offsets: None, ..GOOD };
        for good in [GOOD, single, Bags { weights: None, divisors: None, ..GOOD }] {
            assert_eq!((refused(good), good.samples()), (String::new(), 3));
        }
        for (bad, named) in [
            (Bags { places: &[2, 0, 3], ..GOOD }, "row 3 of 3"),
            (Bags { offsets: Some(&[]), ..GOOD }, "no offsets"),
            (Bags { offsets: Some(&[1, 2, 2, 3]), ..GOOD }, "from 1 to 3"),
            (Bags { offsets: Some(&[0, 2, 2, 4]), ..GOOD }, "from 0 to 4"),
            (Bags { offsets: Some(&[0, 9, 2, 3]), ..GOOD }, "ascend"),
            (Bags { weights: Some(&[1.0; 4]), ..GOOD }, "number of weights"),
            (Bags { weights: Some(&[1.0, f32::NAN, 1.0]), ..GOOD }, "weight NaN of use 1"),
            (Bags { divisors: Some(&[1.0; 2]), ..GOOD }, "number of divisors"),
            (Bags { divisors: Some(&[1.0, 0.0, 1.0]), ..GOOD }, "divisor 0 of sample 1"),
            (Bags { divisors: Some(&[1.0, 1.0, f32::INFINITY]), ..GOOD }, "divisor inf of sample 2"),
        ] {
            assert!(refused(bad).contains(named), "{bad:?}: {}", refused(bad));
        }
    }

    #[test]
    fn some_samples_get_what_they_get_among_all() {
        let rows: Vec<f32> = (0..6).map(|value| value as f32 + 0.5).collect();
        for bags in [GOOD, Bags { offsets: None, ..GOOD }] {
            let mut whole = [f32::NAN; 6];
            pool(&Pool { rows: &rows, dim: 2, bags }, &mut whole);
            for (start, end) in [(0, 1), (1, 3), (0, 3), (2, 2)] {
                let mut part = vec![f32::NAN; (end - start) * 2];
                pool(&Pool { rows: &rows, dim: 2, bags: bags.of(start..end) }, &mut part);
                assert_eq!(part, whole[start * 2..end * 2]);
            }
        }
    }
}
