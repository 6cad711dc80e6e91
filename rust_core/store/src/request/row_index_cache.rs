//! [`RowIndexCache`]: keeps the row indices that a look-up found for the push with the same token.
//!
//! Another push may evict rows between the look-up and its push. If rows have left a shard since the look-up, the push
//! checks the id at each index, and searches for the ids that are no longer there.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use parking_lot::Mutex;
use persia_types::limits::MAX_STALENESS;
use persia_types::{Id, Token, VIRTUAL_SHARDS};

use crate::request::shard_batch::ShardBatch;
use crate::simd::Lanes;

/// The maximum number of buffers that are kept for later look-ups.
const MAX_SPARE: usize = 8;

/// The row indices of one look-up, table by table, in the order of the request.
#[derive(Debug, Default)]
pub(crate) struct LookupRows {
    /// The step that determines whether rows are expired; 0 if no row index was found.
    step: u32,
    row_indices: Vec<u32>,
    /// `(table, row_indices)` for each table of the request.
    parts: Vec<(usize, Range<usize>)>,
    /// Scratch memory for single rows. It is kept here so that it is reused like the other buffers of a
    /// request.
    scratch: Vec<f32>,
    /// The [`eviction_count`](crate::shard::Shard::eviction_count) of each shard when its first row index was found.
    eviction_counts: Vec<u64>,
}

/// The eviction count recorded for a shard in which no row index was found.
const NEVER: u64 = u64::MAX;

/// The row indices of one part of a request, with scratch memory.
pub(super) struct PartRows<'a> {
    /// The row indices, in the order of the part's ids.
    pub(super) row_indices: &'a mut [u32],
    /// Scratch memory: floats with unspecified content.
    pub(super) scratch: &'a mut [f32],
    eviction_counts: &'a mut [u64],
}

impl PartRows<'_> {
    /// Find the row indices of a batch of `ids`, the ids of the part.
    #[inline(always)]
    pub(super) fn find<L: Lanes>(&mut self, batch: &ShardBatch<'_, '_>, table: usize, ids: &[Id]) {
        for (number, shard) in batch.numbers.iter().zip(&*batch.shards) {
            self.note(*number, shard.eviction_count());
        }
        batch.find::<L>(table, ids, self.row_indices);
    }

    /// Record that row indices of a shard are about to be found.
    #[inline(always)]
    fn note(&mut self, shard: usize, eviction_count: u64) {
        let first = &mut self.eviction_counts[shard];
        *first = eviction_count.min(*first);
    }

    /// Whether a row that was found in a shard may have left it since.
    #[inline(always)]
    pub(super) fn is_stale(&self, shard: usize, eviction_count: u64) -> bool {
        self.eviction_counts[shard] != eviction_count
    }
}

impl LookupRows {
    /// Prepare for parts with these `(table, ids)`. Row indices are unspecified until written.
    pub(super) fn reset(&mut self, step: u32, parts: impl Iterator<Item = (usize, usize)>) {
        self.step = step;
        self.parts.clear();
        let mut end = 0;
        for (table, ids) in parts {
            self.parts.push((table, end..end + ids));
            end += ids;
        }
        // The old content need not be cleared, because every row index is written before it is read.
        if self.row_indices.len() < end {
            self.row_indices.resize(end, 0);
        }
        self.eviction_counts.clear();
        self.eviction_counts.resize(VIRTUAL_SHARDS, NEVER);
    }

    /// The step of the request.
    pub(super) fn step(&self) -> u32 {
        self.step
    }

    /// The row indices of a part, with `scratch` floats of scratch memory.
    pub(super) fn part(&mut self, part: usize, scratch: usize) -> PartRows<'_> {
        if self.scratch.len() < scratch {
            self.scratch.resize(scratch, 0.0);
        }
        PartRows {
            row_indices: &mut self.row_indices[self.parts[part].1.clone()],
            scratch: &mut self.scratch[..scratch],
            eviction_counts: &mut self.eviction_counts,
        }
    }

    /// The part of `table`, if the look-up had the same number of ids. A push of fewer ids must search for
    /// its rows.
    pub(super) fn part_of(&self, table: usize, ids: usize) -> Option<usize> {
        self.parts.iter().position(|(candidate, range)| *candidate == table && range.len() == ids)
    }
}

#[derive(Default)]
struct State {
    by_rank: HashMap<u32, BTreeMap<u64, LookupRows>>,
    /// Buffers for later look-ups.
    spare: Vec<LookupRows>,
}

/// The row indices of the latest look-ups, at most [`MAX_STALENESS`] per rank.
#[derive(Default)]
pub(crate) struct RowIndexCache(Mutex<State>);

impl RowIndexCache {
    /// A buffer for a look-up.
    pub(crate) fn buffer(&self) -> LookupRows {
        self.0.lock().spare.pop().unwrap_or_default()
    }

    /// Keep the row indices of a look-up until its push. Returns false if this replaces row indices of the same token.
    pub(crate) fn insert(&self, token: Token, row_indices: LookupRows) -> bool {
        let mut state = self.0.lock();
        let of_rank = state.by_rank.entry(token.rank).or_default();
        let replaced = of_rank.insert(token.seq, row_indices);
        let is_new = replaced.is_none();
        let oldest = if of_rank.len() > MAX_STALENESS { of_rank.pop_first() } else { None };
        state.spare.extend(replaced.into_iter().chain(oldest.map(|(_, row_indices)| row_indices)));
        state.spare.truncate(MAX_SPARE);
        is_new
    }

    /// Remove and return the row indices of a look-up.
    pub(crate) fn take(&self, token: Token) -> Option<LookupRows> {
        self.0.lock().by_rank.get_mut(&token.rank)?.remove(&token.seq)
    }

    /// Keep a buffer for a later look-up.
    pub(crate) fn recycle(&self, row_indices: LookupRows) {
        let mut state = self.0.lock();
        if state.spare.len() < MAX_SPARE {
            state.spare.push(row_indices);
        }
    }

    /// Drop all row indices, because all rows changed.
    pub(crate) fn clear(&self) {
        *self.0.lock() = State::default();
    }
}

#[cfg(test)]
mod tests {
    use persia_types::JobId;

    use super::*;

    fn token(rank: u32, seq: u64) -> Token {
        Token { job: JobId(1), generation: 1, rank, seq }
    }

    #[test]
    fn memory_is_bounded_per_rank_and_the_latest_stay() {
        let cache = RowIndexCache::default();
        for seq in 1..=1_000 {
            cache.insert(token(0, seq), cache.buffer());
        }
        assert!(cache.take(token(0, 1_000 - MAX_STALENESS as u64)).is_none());
        assert!(cache.take(token(0, 1_001 - MAX_STALENESS as u64)).is_some());
        assert!(cache.take(token(0, 1_000)).is_some());
        assert!(cache.take(token(0, 1_000)).is_none());
        assert!(cache.take(token(1, 999)).is_none());
    }

    #[test]
    fn a_part_is_found_by_table_and_length() {
        let mut row_indices = LookupRows::default();
        row_indices.reset(1, [(4, 3), (2, 2)].into_iter());
        assert_eq!(
            (row_indices.part_of(2, 2), row_indices.part_of(2, 1), row_indices.part_of(3, 3)),
            (Some(1), None, None)
        );
        row_indices.reset(1, [(2, 1)].into_iter());
        assert_eq!(row_indices.part(0, 0).row_indices.len(), 1);
    }

    #[test]
    fn the_first_eviction_count_of_a_shard_counts() {
        let mut row_indices = LookupRows::default();
        row_indices.reset(1, [(0, 1)].into_iter());
        let mut part = row_indices.part(0, 0);
        assert!(part.is_stale(3, 0));
        part.note(3, 5);
        part.note(3, 6); // the row indices of another table, which are found later
        assert!(!part.is_stale(3, 5) && part.is_stale(3, 6) && part.is_stale(4, 5));
        row_indices.reset(1, [(0, 1)].into_iter());
        assert!(row_indices.part(0, 0).is_stale(3, 5));
    }
}
