//! [`RowIndexCache`]: keeps the row indices that a look-up found for the push with the same token.
//!
//! Another push may evict rows between the look-up and its push. If rows have left a shard since the look-up, the push
//! checks the id at each index, and searches for the ids that are no longer there.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use persia_types::limits::MAX_STALENESS;
use persia_types::{Id, Token, VIRTUAL_SHARDS};

use crate::request::shard_batch::ShardBatch;
use crate::shard::NO_ROW;
use crate::simd::Lanes;

/// The maximum number of buffers that are kept for later look-ups.
const MAX_SPARE: usize = 8;

/// The row indices of one look-up, table by table, in the order of the request. The threads that execute the parts of a
/// request use it concurrently, each for the ids of its shards. The caller reads it only after they have ended, so
/// every access is [`Ordering::Relaxed`].
#[derive(Debug, Default)]
pub(crate) struct LookupRows {
    /// The step that determines whether rows are expired; 0 in a new buffer.
    step: u32,
    row_indices: Vec<AtomicU32>,
    /// `(table, row_indices)` for each table of the request.
    parts: Vec<(usize, Range<usize>)>,
    /// The [`eviction_count`](crate::shard::Shard::eviction_count) of each shard when its first row index was found.
    eviction_counts: Vec<AtomicU64>,
}

/// The eviction count recorded for a shard in which no row index was found.
const NEVER: u64 = u64::MAX;

/// The row indices of one table of a request.
#[derive(Clone, Copy)]
pub(super) struct TableRows<'a> {
    row_indices: &'a [AtomicU32],
    eviction_counts: &'a [AtomicU64],
}

impl TableRows<'_> {
    /// The row index of the id at position `at`.
    #[inline(always)]
    pub(super) fn get(&self, at: usize) -> u32 {
        self.row_indices[at].load(Ordering::Relaxed)
    }

    /// Set the row index of the id at position `at`.
    #[inline(always)]
    pub(super) fn set(&self, at: usize, row_index: u32) {
        self.row_indices[at].store(row_index, Ordering::Relaxed);
    }

    /// The number of ids without a row among the ids at the positions `range`.
    pub(super) fn missing(&self, range: Range<usize>) -> usize {
        let missing = |row_index: &&AtomicU32| row_index.load(Ordering::Relaxed) == NO_ROW;
        self.row_indices[range].iter().filter(missing).count()
    }

    /// Find the row indices of a batch of `ids`, the ids of the table.
    #[inline(always)]
    pub(super) fn find<L: Lanes>(&self, batch: &ShardBatch<'_, '_>, table: usize, ids: &[Id]) {
        for (number, shard) in batch.numbers.iter().zip(&*batch.shards) {
            self.note(*number, shard.eviction_count());
        }
        batch.find::<L>(table, ids, *self);
    }

    /// Record that row indices of a shard are about to be found.
    #[inline(always)]
    fn note(&self, shard: usize, eviction_count: u64) {
        let first = &self.eviction_counts[shard];
        if eviction_count < first.load(Ordering::Relaxed) {
            first.store(eviction_count, Ordering::Relaxed);
        }
    }

    /// Whether a row that was found in a shard may have left the shard since, or no row was searched for in
    /// that shard.
    #[inline(always)]
    pub(super) fn is_stale(&self, shard: usize, eviction_count: u64) -> bool {
        self.eviction_counts[shard].load(Ordering::Relaxed) != eviction_count
    }
}

impl LookupRows {
    /// Prepare for parts that are given as `(table, number of ids)`. Row indices are unspecified until
    /// written.
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
            self.row_indices.resize_with(end, AtomicU32::default);
        }
        self.eviction_counts.clear();
        self.eviction_counts.resize_with(VIRTUAL_SHARDS, || AtomicU64::new(NEVER));
    }

    /// The step of the request; 0 in a new buffer.
    pub(super) fn step(&self) -> u32 {
        self.step
    }

    /// The row indices of a part.
    pub(super) fn part(&self, part: usize) -> TableRows<'_> {
        let row_indices = &self.row_indices[self.parts[part].1.clone()];
        TableRows { row_indices, eviction_counts: &self.eviction_counts }
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

    /// Remove and return the row indices of a look-up, if they are still kept.
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

    /// Drop all row indices. Call this when all rows are replaced or dropped, or another run begins.
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
        assert_eq!(row_indices.part(0).row_indices.len(), 1);
    }

    #[test]
    fn the_first_eviction_count_of_a_shard_counts() {
        let mut row_indices = LookupRows::default();
        row_indices.reset(1, [(0, 1)].into_iter());
        let part = row_indices.part(0);
        assert!(part.is_stale(3, 0));
        part.note(3, 5);
        part.note(3, 6); // the row indices of another table, which are found later
        assert!(!part.is_stale(3, 5) && part.is_stale(3, 6) && part.is_stale(4, 5));
        row_indices.reset(1, [(0, 1)].into_iter());
        assert!(row_indices.part(0).is_stale(3, 5));
    }
}
