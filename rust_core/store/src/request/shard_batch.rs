//! [`ShardBatch`]: the ids of one table that are processed together, with their shards.
//!
//! Neighboring shards are locked together, so that even a request with few ids per shard has many cache
//! misses in flight. A request is processed table by table, not shard by shard. The vectors of a feature's
//! samples therefore stay in the core's private cache, and few pages are in use at a time.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use persia_types::id::hash_id;
use persia_types::{Id, ShardedIds};

use crate::request::row_index_cache::TableRows;
use crate::shard::{Bucket, NO_ROW, Shard};
use crate::simd::{Lanes, prefetch, prefetch_row};

/// The maximum number of ids of a batch.
pub(super) const BATCH_IDS: usize = 256;
/// The number of ids by which the prefetch of a bucket is ahead.
const BUCKETS_AHEAD: usize = 24;

/// The number of ids by which the prefetch of a row of `len` floats is ahead. It is smaller for long rows, so that the
/// first-level cache holds all of them.
#[inline(always)]
fn rows_ahead(len: usize) -> usize {
    (4_096 / len.max(1)).clamp(8, 16)
}

/// The ids of a batch of one table, whose shards are locked.
pub(super) struct ShardBatch<'a, 's> {
    /// The locked shards.
    pub(super) shards: &'a mut [MutexGuard<'s, Shard>],
    /// The number of each locked shard.
    pub(super) numbers: &'a [usize],
    /// The positions of each shard's ids among the ids of the table. The ranges are contiguous.
    pub(super) ranges: &'a [Range<usize>],
}

impl<'s> ShardBatch<'_, 's> {
    /// For every id of the batch: the index of its shard in [`Self::shards`], and its position.
    pub(super) fn walk(ranges: &[Range<usize>]) -> impl Iterator<Item = (usize, usize)> {
        ranges.iter().enumerate().flat_map(|(shard, range)| range.clone().map(move |at| (shard, at)))
    }

    #[inline(always)]
    fn shards(&self) -> impl Iterator<Item = (&MutexGuard<'s, Shard>, Range<usize>)> {
        self.shards.iter().zip(self.ranges.iter().cloned())
    }

    /// The position of the first id.
    #[inline(always)]
    fn first(&self) -> usize {
        self.ranges.first().map_or(0, |range| range.start)
    }

    /// Find the row indices of all ids.
    #[inline(always)]
    pub(super) fn find<L: Lanes>(&self, table: usize, ids: &[Id], rows: TableRows<'_>) {
        let buckets = self.buckets(table, ids, |_| true);
        buckets.start();
        for (shard, range) in self.shards() {
            let table = &shard.tables[table];
            for at in range {
                buckets.advance(at);
                rows.set(at, table.find::<L>(ids[at]));
            }
        }
    }

    /// The first bucket of each id whose position is `searched`.
    #[inline(always)]
    pub(super) fn buckets(
        &self,
        table: usize,
        ids: &[Id],
        searched: impl Fn(usize) -> bool,
    ) -> Prefetches<Bucket> {
        let mut buckets = Prefetches::new(self.first(), BUCKETS_AHEAD, 1);
        for (shard, range) in self.shards() {
            let index = &shard.tables[table].index;
            for at in range.filter(|at| searched(*at)) {
                buckets.set(at, index.buckets(), index.home(hash_id(ids[at])));
            }
        }
        buckets
    }

    /// The first `len` floats of the rows that were found, and their recency if `recency` is set. In shards for
    /// which `is_stale` is true, also their recency and ids. `is_stale` takes an index into [`Self::shards`].
    #[inline(always)]
    pub(super) fn rows(
        &self,
        table: usize,
        found: TableRows<'_>,
        len: usize,
        recency: bool,
        is_stale: impl Fn(usize) -> bool,
    ) -> RowPrefetches {
        let (first, ahead) = (self.first(), rows_ahead(len));
        let any_stale = (0..self.shards.len()).any(&is_stale);
        let mut rows = Prefetches::new(first, ahead, len);
        let mut last_used = (recency || any_stale).then(|| Prefetches::new(first, ahead, 1));
        let mut ids = any_stale.then(|| Prefetches::new(first, ahead, 1));
        for (number, (shard, range)) in self.shards().enumerate() {
            let table = &shard.tables[table];
            let stride = table.layout().stride();
            let stale = is_stale(number);
            for at in range {
                let row_index = found.get(at);
                if row_index == NO_ROW {
                    continue;
                }
                let row_index = row_index as usize;
                rows.set(at, table.rows(), row_index * stride);
                if let Some(last_used) = &mut last_used {
                    last_used.set(at, table.last_used(), row_index);
                }
                if let Some(ids) = ids.as_mut().filter(|_| stale) {
                    ids.set(at, table.ids(), row_index);
                }
            }
        }
        RowPrefetches { rows, last_used, ids }
    }
}

/// Addresses that are prefetched for the ids of a batch, each a few ids before its use. A core can wait for only a few
/// cache lines at a time, so prefetches of a whole batch at once would stop it.
pub(super) struct Prefetches<T> {
    /// The position of the first id.
    first: usize,
    /// The number of ids by which a prefetch is ahead.
    ahead: usize,
    /// The number of values at each address.
    len: usize,
    /// The address for each id, or null. Addresses are never dereferenced.
    addresses: [*const T; BATCH_IDS],
}

impl<T> Prefetches<T> {
    #[inline(always)]
    fn new(first: usize, ahead: usize, len: usize) -> Self {
        Self { first, ahead, len, addresses: [std::ptr::null(); BATCH_IDS] }
    }

    #[inline(always)]
    fn set(&mut self, at: usize, values: &[T], index: usize) {
        self.addresses[at - self.first] = values.as_ptr().wrapping_add(index);
    }

    /// Prefetch for the first ids.
    #[inline(always)]
    pub(super) fn start(&self) {
        self.addresses[..self.ahead].iter().for_each(|address| self.prefetch(*address));
    }

    /// Prefetch for the id that is a few ids after position `at`.
    #[inline(always)]
    pub(super) fn advance(&self, at: usize) {
        if let Some(address) = self.addresses.get(at - self.first + self.ahead) {
            self.prefetch(*address);
        }
    }

    #[inline(always)]
    fn prefetch(&self, address: *const T) {
        if !address.is_null() {
            prefetch_row(address, self.len);
        }
    }
}

/// The addresses of a batch's rows, and of what is read with them.
pub(super) struct RowPrefetches {
    rows: Prefetches<f32>,
    last_used: Option<Prefetches<u32>>,
    ids: Option<Prefetches<u64>>,
}

impl RowPrefetches {
    /// Prefetch for the first ids.
    #[inline(always)]
    pub(super) fn start(&self) {
        self.rows.start();
        self.last_used.iter().for_each(Prefetches::start);
        self.ids.iter().for_each(Prefetches::start);
    }

    /// Prefetch for the id that is a few ids after position `at`.
    #[inline(always)]
    pub(super) fn advance(&self, at: usize) {
        self.rows.advance(at);
        if let Some(last_used) = &self.last_used {
            last_used.advance(at);
        }
        if let Some(ids) = &self.ids {
            ids.advance(at);
        }
    }
}

/// The positions of the ids of the shards `within`, which is not empty.
pub(super) fn positions(ids: &ShardedIds, within: &Range<usize>) -> Range<usize> {
    ids.range(within.start).start..ids.range(within.end - 1).end
}

/// Call `work` with every batch of `table` in the shards `within`, in the order of `ids`, until it returns an
/// error. Each batch has [`BATCH_IDS`] ids, except that the last one has the remaining ids.
///
/// Shards are always locked in ascending order, so two requests cannot deadlock. A shard without ids is not locked.
pub(super) fn for_each_batch<E>(
    shards: &[Mutex<Shard>],
    within: Range<usize>,
    table: usize,
    ids: &ShardedIds,
    mut work: impl FnMut(ShardBatch<'_, '_>) -> Result<(), E>,
) -> Result<(), E> {
    let covered = positions(ids, &within);
    let most = BATCH_IDS.min(covered.len()).min(within.len());
    let mut locked: Vec<MutexGuard<'_, Shard>> = Vec::with_capacity(most);
    let (mut numbers, mut ranges) = (Vec::with_capacity(most), Vec::with_capacity(most));
    let mut end = covered.start + BATCH_IDS;
    for number in within {
        let mut range = ids.range(number);
        while !range.is_empty() {
            let cut = range.end.min(end);
            let shard = shards[number].lock();
            // The table is not in the same cache lines as its shard. Prefetch it for all shards of the batch before
            // reading one.
            prefetch(&shard.tables, table, 1);
            locked.push(shard);
            numbers.push(number);
            ranges.push(range.start..cut);
            range.start = cut;
            if cut == end || cut == covered.end {
                work(ShardBatch { shards: &mut locked, numbers: &numbers, ranges: &ranges })?;
                locked.clear();
                numbers.clear();
                ranges.clear();
                end = cut + BATCH_IDS;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use persia_types::VIRTUAL_SHARDS;

    use super::*;

    fn check(ids: &[u64], within: Range<usize>) {
        let shards: Vec<Mutex<Shard>> = (0..VIRTUAL_SHARDS).map(|_| Mutex::new(Shard::new(&[], 1))).collect();
        let grouped = ShardedIds::group(ids).unwrap();
        let Range { start: first, end: last } = positions(&grouped, &within);
        let mut covered = first;
        for_each_batch(&shards, within, 0, &grouped, |batch| {
            assert!(batch.shards.len() == batch.ranges.len() && batch.numbers.len() == batch.ranges.len());
            assert!(batch.numbers.iter().zip(batch.ranges).all(|(number, range)| {
                let whole = grouped.range(*number);
                whole.start <= range.start && range.end <= whole.end
            }));
            let start = covered;
            for (shard, at) in ShardBatch::walk(batch.ranges) {
                assert!(shard < batch.shards.len());
                assert_eq!(at, covered);
                covered += 1;
            }
            assert!(covered - start == BATCH_IDS || covered == last);
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(covered, last);
        assert!(shards.iter().all(|shard| shard.try_lock().is_some()));
    }

    #[test]
    fn every_id_is_covered_once_and_in_order() {
        for within in [0..VIRTUAL_SHARDS, 0..1, 17..40, VIRTUAL_SHARDS - 1..VIRTUAL_SHARDS] {
            check(&[], within.clone());
            check(&[7], within.clone());
            check(&(0..3_000).collect::<Vec<_>>(), within.clone());
            check(&(0..200_000).collect::<Vec<_>>(), within.clone());
            check(&[1; 5_000], within.clone());
            check(&[1; BATCH_IDS], within);
        }
    }
}
