//! [`Bags`]: the rows of each sample of a feature, with weights and divisors.

use std::ops::Range;

use crate::{ShapeError, bad_shape};

/// The rows of each sample of one feature. All fields but `divisors` are named as in FBGEMM and PyTorch.
#[derive(Debug, Clone, Copy)]
pub struct Bags<'a> {
    /// The indices of rows, sample by sample, in batch order.
    pub indices: &'a [u32],
    /// The start of each sample's rows in `indices`, as `samples + 1` offsets; None means one row per sample.
    pub offsets: Option<&'a [u32]>,
    /// The factor of the row of each index; None means 1.
    pub per_sample_weights: Option<&'a [f32]>,
    /// The divisor of each sample's sum; None means 1. [`pool`](crate::pool()) ignores it if `offsets` and
    /// `per_sample_weights` are both None.
    pub divisors: Option<&'a [f32]>,
}

impl<'a> Bags<'a> {
    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.offsets.map_or(self.indices.len(), |offsets| offsets.len().saturating_sub(1))
    }

    /// The bags of a range of samples. The caller has checked the lengths.
    pub fn of(&self, samples: Range<usize>) -> Self {
        let divisors = self.divisors.map(|divisors| &divisors[samples.clone()]);
        match self.offsets {
            Some(offsets) => Self { offsets: Some(&offsets[samples.start..=samples.end]), divisors, ..*self },
            None => {
                let per_sample_weights = self.per_sample_weights.map(|weights| &weights[samples.clone()]);
                Self { indices: &self.indices[samples], per_sample_weights, divisors, ..*self }
            }
        }
    }

    /// Check the bags for use with `rows` rows. The lengths must match, and indices must be below `rows`.
    /// Offsets must ascend from 0 to the number of indices. Weights must be finite, and divisors must be
    /// finite and above 0.
    ///
    /// # Errors
    /// [`ShapeError`], with a message that says what is wrong.
    pub fn check(&self, rows: usize) -> Result<(), ShapeError> {
        let (indices, samples) = (self.indices.len(), self.samples());
        if let Some(offsets) = self.offsets {
            let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
                return bad_shape(
                    "no offsets of samples, expected one more than the number of samples".into(),
                );
            };
            if *first != 0 || *last as usize != indices {
                return bad_shape(format!(
                    "offsets of samples must ascend from 0 to {indices}, but go from {first} to {last}"
                ));
            }
            if let Some(at) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
                return bad_shape(format!(
                    "offsets of samples must ascend from 0 to {indices}, but offset {} is below offset {at}",
                    at + 1
                ));
            }
        }
        if let Some(index) = self.indices.iter().max().filter(|index| **index as usize >= rows) {
            return bad_shape(format!("a sample uses row index {index}, but the number of rows is {rows}"));
        }
        let other_length = |values: Option<&[f32]>, wanted: usize| {
            values.map(<[f32]>::len).filter(|length| *length != wanted)
        };
        if let Some(weights) = other_length(self.per_sample_weights, indices) {
            return bad_shape(format!(
                "the number of weights is {weights}, but the number of indices is {indices}"
            ));
        }
        if let Some(divisors) = other_length(self.divisors, samples) {
            return bad_shape(format!(
                "the number of divisors is {divisors}, but the number of samples is {samples}"
            ));
        }
        let first = |values: Option<&'a [f32]>, good: fn(f32) -> bool| {
            values.and_then(|values| values.iter().position(|value| !good(*value)).map(|at| (at, values[at])))
        };
        if let Some((at, weight)) = first(self.per_sample_weights, f32::is_finite) {
            return bad_shape(format!("weight {weight} at index {at} is not finite"));
        }
        if let Some((at, divisor)) = first(self.divisors, |divisor| divisor.is_finite() && divisor > 0.0) {
            return bad_shape(format!("divisor {divisor} of sample {at} is not a finite number above 0"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Pool, pool};

    const GOOD: Bags<'_> = Bags {
        indices: &[2, 0, 1],
        offsets: Some(&[0, 2, 2, 3]),
        per_sample_weights: Some(&[1.0, -2.0, 0.0]),
        divisors: Some(&[2.0, 1.0, 0.5]),
    };

    #[test]
    fn bags_that_do_not_fit_are_refused_by_name() {
        let refused = |bags: Bags<'_>| bags.check(3).err().map(|e| e.to_string()).unwrap_or_default();
        let single = Bags { offsets: None, ..GOOD };
        for good in [GOOD, single, Bags { per_sample_weights: None, divisors: None, ..GOOD }] {
            assert_eq!((refused(good), good.samples()), (String::new(), 3));
        }
        for (bad, named) in [
            (Bags { indices: &[2, 0, 3], ..GOOD }, "row index 3, but the number of rows is 3"),
            (Bags { offsets: Some(&[]), ..GOOD }, "no offsets"),
            (Bags { offsets: Some(&[1, 2, 2, 3]), ..GOOD }, "from 1 to 3"),
            (Bags { offsets: Some(&[0, 2, 2, 4]), ..GOOD }, "from 0 to 4"),
            (Bags { offsets: Some(&[0, 9, 2, 3]), ..GOOD }, "ascend"),
            (Bags { per_sample_weights: Some(&[1.0; 4]), ..GOOD }, "number of weights is 4"),
            (Bags { per_sample_weights: Some(&[1.0, f32::NAN, 1.0]), ..GOOD }, "weight NaN at index 1"),
            (Bags { divisors: Some(&[1.0; 2]), ..GOOD }, "number of divisors is 2"),
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
