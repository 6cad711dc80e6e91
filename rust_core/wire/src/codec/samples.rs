//! [`Samples`]: the part of a head that describes samples. Vectors of samples are sent instead of rows of ids if
//! they are smaller.
//!
//! A middleware then pools rows and sums gradients, with the same kernels as a trainer.

use persia_kernels::{Bags, SegmentSum};
use persia_types::limits::{MAX_BATCH_SIZE, MAX_OCCURRENCES};

use super::floats::RowFormat;
use crate::proto;

/// The samples of a part, as announced by the head. The values in a received head have been checked against
/// their limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Samples {
    /// The number of samples.
    pub samples: usize,
    /// The number of indices, that is, of uses of ids by the samples.
    pub indices: usize,
    /// Whether each index has a weight.
    pub per_sample_weights: bool,
    /// Whether each sample has a divisor or, in a push, a factor.
    pub factors: bool,
    /// In a push, the factor of all sums.
    pub scale: f32,
}

/// The kind of a request. A look-up has indices for each sample, and a push has indices for each id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// A look-up, which sums rows for each sample.
    Lookup,
    /// A push, which sums gradients for each id.
    Push,
}

impl Samples {
    /// The samples of a look-up. None if every sample uses one id.
    pub fn of_bags(bags: &Bags<'_>) -> Option<Self> {
        bags.offsets.map(|_| Self {
            samples: bags.samples(),
            indices: bags.indices.len(),
            per_sample_weights: bags.per_sample_weights.is_some(),
            factors: bags.divisors.is_some(),
            scale: 0.0,
        })
    }

    /// The samples of a push.
    pub fn of_sum(sum: &SegmentSum<'_>) -> Self {
        Self {
            samples: sum.gradients.len().checked_div(sum.dim).unwrap_or(0),
            indices: sum.csr.indices.len(),
            per_sample_weights: sum.per_sample_weights.is_some(),
            factors: sum.factors.is_some(),
            scale: sum.scale,
        }
    }

    /// Whether vectors of samples and their lists take fewer bytes than the rows of `ids` ids.
    pub fn save(&self, kind: RequestKind, ids: usize, format: RowFormat) -> bool {
        let width = format.width().0;
        self.samples * width + self.words(kind, ids) * size_of::<u32>() < ids * width
    }

    /// The number of words in all lists.
    pub fn words(&self, kind: RequestKind, ids: usize) -> usize {
        let Self { samples, indices, per_sample_weights, factors, .. } = *self;
        let lists = if kind == RequestKind::Lookup { samples } else { ids };
        indices + lists + 1 + if per_sample_weights { indices } else { 0 } + if factors { samples } else { 0 }
    }

    /// The message.
    pub(crate) fn to_proto(self) -> proto::Samples {
        let Self { samples, indices, per_sample_weights, factors, scale } = self;
        proto::Samples {
            samples: samples as u32,
            indices: indices as u32,
            per_sample_weights,
            factors,
            scale,
        }
    }

    /// Check the samples of a part with `ids` ids. Also returns the announced size of vectors and words, in
    /// bytes.
    pub(crate) fn check(sent: &proto::Samples, ids: usize, dim: usize) -> Result<(Self, u64), String> {
        let proto::Samples { samples, indices, per_sample_weights, factors, scale } = *sent;
        let (samples, indices) = (samples as usize, indices as usize);
        if ids == 0 {
            return Err(format!("{samples} samples use no ids"));
        }
        if samples > MAX_BATCH_SIZE {
            return Err(format!("{samples} samples, but the limit is {MAX_BATCH_SIZE}"));
        }
        if indices > MAX_OCCURRENCES {
            return Err(format!("{indices} indices of ids, but the limit is {MAX_OCCURRENCES}"));
        }
        let checked = Self { samples, indices, per_sample_weights, factors, scale };
        let words =
            [RequestKind::Lookup, RequestKind::Push].map(|kind| checked.words(kind, ids)).into_iter().max();
        let values = samples as u64 * dim as u64 + words.unwrap_or(0) as u64;
        Ok((checked, values * 4))
    }
}
