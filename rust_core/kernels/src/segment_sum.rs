//! Sums gradients per unique id, for all ids or one at a time.

use std::borrow::Cow;
use std::ops::Range;

use crate::pool::{Sum, fetch_ahead};
use crate::simd::{InstructionSet, Lanes, SimdLoop};
use crate::{ShapeError, bad_shape};

/// The samples of each unique id, as a compressed sparse matrix of ids and samples.
#[derive(Debug, Clone, Copy)]
pub struct Csr<'a> {
    /// The start of each unique id's samples in `indices`, as `unique + 1` offsets.
    pub offsets: &'a [u32],
    /// The samples, ordered by unique id, and in batch order for each id.
    pub indices: &'a [u32],
}

impl<'a> Csr<'a> {
    /// Check that there is a list for each of the `ids` unique ids, and that all samples are below `samples`.
    ///
    /// # Errors
    /// [`ShapeError`], with a message that says what is wrong.
    pub fn check(&self, ids: usize, samples: usize) -> Result<(), ShapeError> {
        if self.offsets.len() != ids + 1 {
            return bad_shape(format!("{} offsets for {ids} ids, expected {}", self.offsets.len(), ids + 1));
        }
        let (first, last, indices) = (self.offsets[0], self.offsets[ids] as usize, self.indices.len());
        if (first, last) != (0, indices) {
            return bad_shape(format!(
                "offsets of ids must ascend from 0 to {indices}, but go from {first} to {last}"
            ));
        }
        if let Some(at) = self.offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            return bad_shape(format!(
                "offsets of ids must ascend from 0 to {indices}, but offset {} is below offset {at}",
                at + 1
            ));
        }
        match self.indices.iter().max() {
            Some(last) if *last as usize >= samples => {
                bad_shape(format!("an id uses sample index {last}, but the number of samples is {samples}"))
            }
            _ => Ok(()),
        }
    }

    /// The positions in [`Self::indices`] of the samples of id number `unique`.
    #[inline(always)]
    pub fn range(&self, unique: usize) -> Range<usize> {
        self.offsets[unique] as usize..self.offsets[unique + 1] as usize
    }

    /// The samples of id number `unique`.
    #[inline(always)]
    pub fn of(&self, unique: usize) -> &'a [u32] {
        &self.indices[self.range(unique)]
    }
}

/// The gradient of each unique id as the sum over the samples that use it: `scale * sum of gradients[sample] *
/// (factors[sample] * weight)`. The terms are added to 0 in batch order, and the sum is scaled last.
#[derive(Debug, Clone, Copy)]
pub struct SegmentSum<'a> {
    /// The gradients of samples, with the shape `[samples, dim]`.
    pub gradients: &'a [f32],
    /// The number of floats in a row.
    pub dim: usize,
    /// The samples whose gradients are added for each unique id.
    pub csr: Csr<'a>,
    /// The factor of each sample's gradient; None means 1.
    pub factors: Option<&'a [f32]>,
    /// A further factor for each index of `csr`; None means 1.
    pub per_sample_weights: Option<&'a [f32]>,
    /// The factor of each sum.
    pub scale: f32,
}

impl SegmentSum<'_> {
    /// Check all lengths and the lists of samples, given the number of unique ids.
    ///
    /// # Errors
    /// [`ShapeError`], with a message that says what is wrong.
    pub fn check(&self, ids: usize) -> Result<(), ShapeError> {
        let (floats, dim) = (self.gradients.len(), self.dim);
        if dim == 0 || !floats.is_multiple_of(dim) {
            let what = format!("{floats} floats of gradients are not whole rows of {dim} floats");
            return bad_shape(what);
        }
        let samples = floats / dim;
        let other_length = |values: Option<&[f32]>, wanted: usize| {
            values.map(<[f32]>::len).filter(|length| *length != wanted)
        };
        if let Some(factors) = other_length(self.factors, samples) {
            let what = format!("the number of factors is {factors}, but the number of samples is {samples}");
            return bad_shape(what);
        }
        let indices = self.csr.indices.len();
        if let Some(weights) = other_length(self.per_sample_weights, indices) {
            let what = format!("the number of weights is {weights}, but the number of indices is {indices}");
            return bad_shape(what);
        }
        self.csr.check(ids, samples)
    }

    /// Write the sum for id number `unique` to `out`, which has `dim` floats.
    #[inline(always)]
    pub fn write(&self, unique: usize, out: &mut [f32]) {
        self.sum(unique, false, self.scale, out);
    }

    /// Prefetch the gradients that are needed `rows_ahead(dim)` samples after those of `unique`. If this is called
    /// for each id in order, each entry of `csr.indices` but the first `rows_ahead(dim)` is prefetched once.
    #[inline(always)]
    pub fn fetch_ahead(&self, unique: usize) {
        for at in self.csr.range(unique) {
            fetch_ahead(self.gradients, self.dim, self.csr.indices, at);
        }
    }

    /// Compute `out = ((onto ? out : 0) + sum) * scale`.
    #[inline(always)]
    fn sum(&self, unique: usize, onto: bool, scale: f32, out: &mut [f32]) {
        let samples = self.csr.of(unique);
        let row = |sample: u32| sample as usize * self.dim;
        let sum = Sum { rows: self.gradients, dim: self.dim, onto, scale };
        match (self.factors, self.per_sample_weights) {
            (None, None) => sum.write(samples.iter().map(|sample| (row(*sample), 1.0)), out),
            (Some(factors), None) => {
                sum.write(samples.iter().map(|sample| (row(*sample), factors[*sample as usize])), out);
            }
            (factors, Some(weights)) => {
                let weighted = samples.iter().zip(&weights[self.csr.range(unique)]);
                let factor = |sample: u32| factors.map_or(1.0, |factors| factors[sample as usize]);
                sum.write(weighted.map(|(sample, weight)| (row(*sample), factor(*sample) * weight)), out);
            }
        }
    }
}

/// The gradients of unique ids.
#[derive(Debug, Clone, Copy)]
pub enum Gradients<'a> {
    /// Gradients that are already summed, with the shape `[ids, dim]`. Row `i` is for id number `i`.
    Rows(&'a [f32]),
    /// Gradients of samples, which are summed when they are used.
    Samples(SegmentSum<'a>),
}

impl<'a> Gradients<'a> {
    /// Check all lengths and the lists of samples, given the number of unique ids and the dimension.
    ///
    /// # Errors
    /// [`ShapeError`], with a message that says what is wrong.
    pub fn check(&self, ids: usize, dim: usize) -> Result<(), ShapeError> {
        match self {
            Self::Rows(rows) if ids.checked_mul(dim) != Some(rows.len()) => {
                let floats = rows.len();
                bad_shape(format!("found {floats} floats of gradients, expected {ids} ids * {dim}"))
            }
            Self::Rows(_) => Ok(()),
            Self::Samples(sum) if sum.dim != dim => {
                bad_shape(format!("gradients have dim {}, but the rows of the ids have dim {dim}", sum.dim))
            }
            Self::Samples(sum) => sum.check(ids),
        }
    }

    /// The gradients of the ids in `range`, row by row. The caller has checked the lengths.
    pub fn rows(&self, range: Range<usize>, dim: usize) -> Cow<'a, [f32]> {
        match self {
            Self::Rows(rows) => Cow::Borrowed(&rows[range.start * dim..range.end * dim]),
            Self::Samples(sum) => {
                let mut rows = vec![0.0; range.len() * dim];
                segment_sum(sum, range.start, &mut rows);
                Cow::Owned(rows)
            }
        }
    }
}

/// Sum the gradients of the unique ids from `first` into `out`, row by row.
pub fn segment_sum(input: &SegmentSum<'_>, first: usize, out: &mut [f32]) {
    InstructionSet::detect().run(SegmentSumWork { input, first, out });
}

/// Add the gradients of each unique id to row `map[unique]` of `out`, unscaled.
pub fn segment_sum_onto(input: &SegmentSum<'_>, map: &[u32], out: &mut [f32]) {
    InstructionSet::detect().run(SegmentSumOntoWork { input, map, out });
}

pub(crate) struct SegmentSumWork<'a> {
    pub(crate) input: &'a SegmentSum<'a>,
    pub(crate) first: usize,
    pub(crate) out: &'a mut [f32],
}

impl SimdLoop for SegmentSumWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (at, out) in self.out.chunks_exact_mut(self.input.dim).enumerate() {
            self.input.fetch_ahead(self.first + at);
            self.input.write(self.first + at, out);
        }
    }
}

struct SegmentSumOntoWork<'a> {
    input: &'a SegmentSum<'a>,
    map: &'a [u32],
    out: &'a mut [f32],
}

impl SimdLoop for SegmentSumOntoWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.input.dim;
        for (unique, row) in self.map.iter().enumerate() {
            self.input.fetch_ahead(unique);
            self.input.sum(unique, true, 1.0, &mut self.out[*row as usize * dim..][..dim]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_do_not_fit_are_refused() {
        let refused = |offsets: &[u32], indices: &[u32]| {
            Csr { offsets, indices }.check(2, 3).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refused(&[0, 1, 3], &[2, 0, 1]), "");
        assert!(refused(&[0, 3], &[2, 0, 1]).contains("2 offsets for 2 ids"));
        assert!(refused(&[0, 1, 2], &[2, 0, 1]).contains("from 0 to 2"));
        assert!(refused(&[1, 1, 3], &[2, 0, 1]).contains("from 1 to 3"));
        assert!(refused(&[0, 4, 3], &[2, 0, 1]).contains("ascend"));
        assert!(refused(&[0, 1, 3], &[2, 0, 3]).contains("sample index 3, but the number of samples is 3"));
        let csr = Csr { offsets: &[0, 1, 3], indices: &[2, 0, 1] };
        let sum = SegmentSum {
            gradients: &[0.0; 6],
            dim: 2,
            csr,
            factors: None,
            per_sample_weights: None,
            scale: 1.0,
        };
        assert!(sum.check(2).is_ok());
        for bad in [
            SegmentSum { dim: 4, ..sum },
            SegmentSum { dim: 0, ..sum },
            SegmentSum { factors: Some(&[1.0; 2]), ..sum },
            SegmentSum { per_sample_weights: Some(&[1.0; 2]), ..sum },
            SegmentSum { gradients: &[0.0; 4], ..sum },
        ] {
            assert!(bad.check(2).is_err(), "{bad:?}");
        }
    }
}
