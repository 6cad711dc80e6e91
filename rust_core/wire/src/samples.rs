//! Vectors of samples in the place of rows of ids: what a head says of them, and how their uses of ids travel.
//!
//! A middleware adds up rows and gradients itself, by the same kernels as a trainer, where that makes a request smaller
//! ([`Samples::save`]). It needs nothing for a push that came with the look-up.

use futures_util::Stream;
use persia_kernels::{Bags, Csr, SegmentSum, ShapeError};
use persia_types::TablesError;
use persia_types::limits::{MAX_BATCH_SIZE, MAX_OCCURRENCES};
use tonic::Status;

use crate::chunk::{ChunkError, Collect};
use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto::{self, Chunk};
use crate::receive;

/// What a head says of a part's samples; a number was checked against its limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Samples {
    /// Their number.
    pub samples: usize,
    /// How often they use an id.
    pub uses: usize,
    /// Whether there is a weight for each use.
    pub weights: bool,
    /// Whether there is a divisor, or in a push a factor, for each sample.
    pub factors: bool,
    /// Of a push: what sums are multiplied by.
    pub scale: f32,
}

/// What is added up, and so what there is a list of uses for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Rows, for each sample.
    Lookup,
    /// Gradients, for each id.
    Push,
}

impl Samples {
    /// Those of a look-up, if a sample may use several ids.
    pub fn of_bags(bags: &Bags<'_>) -> Option<Self> {
        bags.offsets.map(|_| Self {
            samples: bags.samples(),
            uses: bags.indices.len(),
            weights: bags.per_sample_weights.is_some(),
            factors: bags.divisors.is_some(),
            scale: 0.0,
        })
    }

    /// Those of a push.
    pub fn of_sum(sum: &SegmentSum<'_>) -> Self {
        Self {
            samples: sum.gradients.len().checked_div(sum.dim).unwrap_or(0),
            uses: sum.csr.indices.len(),
            weights: sum.per_sample_weights.is_some(),
            factors: sum.factors.is_some(),
            scale: sum.scale,
        }
    }

    /// Whether vectors of samples, and what is said of their uses, are fewer bytes than the rows of `ids` ids.
    pub fn save(&self, verb: Verb, ids: usize, format: RowFormat) -> bool {
        let width = format.width().0;
        self.samples * width + self.words(verb, ids) * size_of::<u32>() < ids * width
    }

    /// Words that describe the uses.
    pub fn words(&self, verb: Verb, ids: usize) -> usize {
        let Self { samples, uses, weights, factors, .. } = *self;
        let lists = if verb == Verb::Lookup { samples } else { ids };
        uses + lists + 1 + if weights { uses } else { 0 } + if factors { samples } else { 0 }
    }

    /// As it travels.
    pub(crate) fn to_proto(self) -> proto::Samples {
        let Self { samples, uses, weights, factors, scale } = self;
        proto::Samples { samples: samples as u32, uses: uses as u32, weights, factors, scale }
    }

    /// Check the samples of a part with some ids; also the bytes of vectors and words that are announced.
    pub(crate) fn check(sent: &proto::Samples, ids: usize, dim: usize) -> Result<(Self, u64), String> {
        let proto::Samples { samples, uses, weights, factors, scale } = *sent;
        let (samples, uses) = (samples as usize, uses as usize);
        if ids == 0 {
            return Err(format!("{samples} samples use no ids"));
        }
        if samples > MAX_BATCH_SIZE {
            return Err(format!("{samples} samples, the limit is {MAX_BATCH_SIZE}"));
        }
        if uses > MAX_OCCURRENCES {
            return Err(format!("{uses} uses of ids, the limit is {MAX_OCCURRENCES}"));
        }
        let checked = Self { samples, uses, weights, factors, scale };
        let words = [Verb::Lookup, Verb::Push].map(|verb| checked.words(verb, ids)).into_iter().max();
        let values = samples as u64 * dim as u64 + words.unwrap_or(0) as u64;
        Ok((checked, values * 4))
    }
}

/// The words of a look-up's uses, in their order.
pub(crate) fn bag_words<'a>(bags: &Bags<'a>) -> [&'a [u32]; 4] {
    [bags.indices, bags.offsets.unwrap_or(&[]), floats(bags.per_sample_weights), floats(bags.divisors)]
}

/// The words of a push's uses, in their order.
pub(crate) fn sum_words<'a>(sum: &SegmentSum<'a>) -> [&'a [u32]; 4] {
    [sum.csr.indices, sum.csr.offsets, floats(sum.per_sample_weights), floats(sum.factors)]
}

fn floats(values: Option<&[f32]>) -> &[u32] {
    bytemuck::cast_slice(values.unwrap_or(&[]))
}

/// How the samples of one part use its ids, as it was sent.
#[derive(Debug)]
pub struct SentUses {
    head: Samples,
    words: Vec<u32>,
}

/// The same, taken apart.
struct Lists<'a> {
    uses: &'a [u32],
    starts: &'a [u32],
    weights: Option<&'a [f32]>,
    factors: Option<&'a [f32]>,
}

impl SentUses {
    /// Their number of words was checked.
    fn lists(&self) -> Lists<'_> {
        let Samples { samples, uses, weights, factors, .. } = self.head;
        let (list, rest) = self.words.split_at(uses);
        let (rest, last) = rest.split_at(rest.len() - if factors { samples } else { 0 });
        let (starts, middle) = rest.split_at(rest.len() - if weights { uses } else { 0 });
        let floats = |there: bool, words| there.then(|| bytemuck::cast_slice(words));
        Lists { uses: list, starts, weights: floats(weights, middle), factors: floats(factors, last) }
    }

    /// Of a look-up: what each sample adds up.
    pub fn bags(&self) -> Bags<'_> {
        let Lists { uses, starts, weights, factors } = self.lists();
        Bags { indices: uses, offsets: Some(starts), per_sample_weights: weights, divisors: factors }
    }

    /// Of a push: the gradient of each id, from `gradients` of samples.
    pub fn sum<'a>(&'a self, gradients: &'a [f32], dim: usize) -> SegmentSum<'a> {
        let Lists { uses, starts, weights, factors } = self.lists();
        let csr = Csr { offsets: starts, indices: uses };
        SegmentSum { gradients, dim, csr, factors, per_sample_weights: weights, scale: self.head.scale }
    }

    fn check(&self, verb: Verb, part: &Part) -> Result<(), TablesError> {
        let checked = match verb {
            Verb::Lookup => self.bags().check(part.len()),
            Verb::Push => self.sum(&[], part.format.dim).csr.check(part.len(), self.head.samples),
        };
        checked.map_err(|ShapeError(what)| TablesError::BadShape {
            what: format!("table {}: {what}", part.table),
        })
    }
}

/// The uses of all parts that have samples, which come right behind a head, checked. `chunk` takes one out of a message.
///
/// # Errors
/// A status that says what is wrong with them.
pub async fn receive_uses<M>(
    stream: &mut (impl Stream<Item = Result<M, Status>> + Unpin),
    verb: Verb,
    parts: &[Part],
    chunk: impl Fn(M) -> Option<Chunk>,
) -> Result<Vec<Option<SentUses>>, Status> {
    let mut words = Collect::uses(parts, verb);
    while !words.is_complete() {
        // Where the stream ends, `finish` says what is missing.
        let Some(message) = receive::next(stream).await? else { break };
        let Some(chunk) = chunk(message) else {
            return Err(Status::invalid_argument("after a head, the uses of all its samples come first"));
        };
        words.take(&chunk)?;
    }
    let words = words.finish()?;
    let mut all = Vec::with_capacity(parts.len());
    for (part, words) in parts.iter().zip(words) {
        let uses = part.samples.map(|head| SentUses { head, words });
        if let Some(uses) = &uses {
            uses.check(verb, part).map_err(ChunkError::from)?;
        }
        all.push(uses);
    }
    Ok(all)
}

#[cfg(test)]
#[path = "samples_tests.rs"]
mod tests;
