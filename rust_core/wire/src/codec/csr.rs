//! [`ReceivedCsr`]: the ids of each sample, as compressed sparse rows, which are sent after the head.

use futures_util::Stream;
use persia_kernels::{Bags, Csr, SegmentSum, ShapeError};
use persia_types::TablesError;
use tonic::Status;

use super::chunk::ChunkError;
use super::collect::Collector;
use super::parts::Part;
use super::receive;
use super::samples::{RequestKind, Samples};
use crate::proto::Chunk;

/// The lists of a look-up.
pub(crate) fn bag_words<'a>(bags: &Bags<'a>) -> [&'a [u32]; 4] {
    [bags.indices, bags.offsets.unwrap_or(&[]), floats(bags.per_sample_weights), floats(bags.divisors)]
}

/// The lists of a push.
pub(crate) fn sum_words<'a>(sum: &SegmentSum<'a>) -> [&'a [u32]; 4] {
    [sum.csr.indices, sum.csr.offsets, floats(sum.per_sample_weights), floats(sum.factors)]
}

fn floats(values: Option<&[f32]>) -> &[u32] {
    bytemuck::cast_slice(values.unwrap_or(&[]))
}

/// The ids of a part that each of its samples uses.
#[derive(Debug)]
pub struct ReceivedCsr {
    head: Samples,
    words: Vec<u32>,
}

/// The lists of [`ReceivedCsr`].
struct Lists<'a> {
    indices: &'a [u32],
    offsets: &'a [u32],
    per_sample_weights: Option<&'a [f32]>,
    factors: Option<&'a [f32]>,
}

impl ReceivedCsr {
    /// Split the words into lists. The head announces the number of words in each.
    fn lists(&self) -> Lists<'_> {
        let Samples { samples, indices, per_sample_weights, factors, .. } = self.head;
        let (list, rest) = self.words.split_at(indices);
        let (rest, last) = rest.split_at(rest.len() - if factors { samples } else { 0 });
        let (offsets, weights) = rest.split_at(rest.len() - if per_sample_weights { indices } else { 0 });
        let floats = |there: bool, words| there.then(|| bytemuck::cast_slice(words));
        Lists {
            indices: list,
            offsets,
            per_sample_weights: floats(per_sample_weights, weights),
            factors: floats(factors, last),
        }
    }

    /// For a look-up: the ids that each sample pools.
    pub fn bags(&self) -> Bags<'_> {
        let Lists { indices, offsets, per_sample_weights, factors } = self.lists();
        Bags { indices, offsets: Some(offsets), per_sample_weights, divisors: factors }
    }

    /// For a push: the sum for each id over the `gradients` of samples.
    pub fn sum<'a>(&'a self, gradients: &'a [f32], dim: usize) -> SegmentSum<'a> {
        let Lists { indices, offsets, per_sample_weights, factors } = self.lists();
        let csr = Csr { offsets, indices };
        SegmentSum { gradients, dim, csr, factors, per_sample_weights, scale: self.head.scale }
    }

    fn check(&self, kind: RequestKind, part: &Part) -> Result<(), TablesError> {
        let checked = match kind {
            RequestKind::Lookup => self.bags().check(part.len()),
            RequestKind::Push => self.sum(&[], part.format.dim).csr.check(part.len(), self.head.samples),
        };
        checked.map_err(|ShapeError(what)| TablesError::BadShape {
            what: format!("table {}: {what}", part.table),
        })
    }
}

/// Receive and check the lists of all parts with samples, which follow the head. `chunk` extracts the chunk from a
/// message.
///
/// # Errors
/// A status that states the problem.
pub async fn receive_csr<M>(
    stream: &mut (impl Stream<Item = Result<M, Status>> + Unpin),
    kind: RequestKind,
    parts: &[Part],
    chunk: impl Fn(M) -> Option<Chunk>,
) -> Result<Vec<Option<ReceivedCsr>>, Status> {
    let mut words = Collector::csr(parts, kind);
    while !words.is_complete() {
        // If the stream has ended, `finish` reports what is missing.
        let Some(message) = receive::next(stream).await? else { break };
        let Some(chunk) = chunk(message) else {
            return Err(Status::invalid_argument("after a head, the lists of all samples must come first"));
        };
        words.take(&chunk)?;
    }
    let words = words.finish()?;
    let mut all = Vec::with_capacity(parts.len());
    for (part, words) in parts.iter().zip(words) {
        let csr = part.samples.map(|head| ReceivedCsr { head, words });
        if let Some(csr) = &csr {
            csr.check(kind, part).map_err(ChunkError::from)?;
        }
        all.push(csr);
    }
    Ok(all)
}
