//! [`ShardBatch`]: the ids of one table that are processed together, with their shards.
//!
//! Neighboring shards are locked together, so that even a request with few ids per shard has many cache
//! misses in flight. A request is processed table by table, not shard by shard. The vectors of a feature's
//! samples therefore stay in the core's private cache, and few pages are in use at a time.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use persia_kernels::rows_ahead;
use persia_types::id::hash_id;
use persia_types::{Id, ShardedIds};

use crate::request::row_index_cache::TableRows;
use crate::shard::{NO_ROW, Shard};
use crate::simd::{Lanes, prefetch, prefetch_row};

/// The maximum number of ids of a batch. Their buckets stay in the first-level cache from prefetch to use.
pub(super) const BATCH_IDS: usize = 256;

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

    /// Find the row indices of all ids, after prefetching the first bucket of each.
    #[inline(always)]
    pub(super) fn find<L: Lanes>(&self, table: usize, ids: &[Id], rows: TableRows<'_>) {
        for (shard, range) in self.shards() {
            let index = &shard.tables[table].index;
            for id in &ids[range] {
                prefetch(index.buckets(), index.home(hash_id(*id)), 1);
            }
        }
        for (shard, range) in self.shards() {
            let table = &shard.tables[table];
            for at in range {
                rows.set(at, table.find::<L>(ids[at]));
            }
        }
    }

    /// A prefetcher for the rows that were found. Prefetches their recency if `recency` is set. In shards for
    /// which `is_stale` is true, prefetches their recency and ids. `is_stale` takes an index into
    /// [`Self::shards`].
    #[inline(always)]
    pub(super) fn prefetcher(
        &self,
        table: usize,
        found: TableRows<'_>,
        recency: bool,
        is_stale: impl Fn(usize) -> bool,
    ) -> Prefetcher {
        let first = self.ranges.first().map_or(0, |range| range.start);
        let mut rows = [std::ptr::null(); BATCH_IDS];
        for (number, (shard, range)) in self.shards().enumerate() {
            let table = &shard.tables[table];
            let (start, stride) = (table.rows().as_ptr(), table.layout().stride());
            let stale = is_stale(number);
            for at in range {
                let row_index = found.get(at);
                if row_index != NO_ROW {
                    rows[at - first] = start.wrapping_add(row_index as usize * stride);
                    if recency || stale {
                        prefetch(table.last_used(), row_index as usize, 1);
                    }
                    if stale {
                        prefetch(table.ids(), row_index as usize, 1);
                    }
                }
            }
        }
        Prefetcher { first, rows }
    }
}

/// The addresses of a batch's rows. Each row is prefetched [`rows_ahead`] ids before its use, because the cache does
/// not hold all rows at once. The address of a missing row is null. Addresses are never dereferenced.
pub(super) struct Prefetcher {
    first: usize,
    rows: [*const f32; BATCH_IDS],
}

impl Prefetcher {
    /// Prefetch the first `len` floats of the first rows.
    #[inline(always)]
    pub(super) fn start(&self, len: usize) {
        let first = self.rows[..rows_ahead(len)].iter();
        first.filter(|row| !row.is_null()).for_each(|row| prefetch_row(*row, len));
    }

    /// Prefetch the first `len` floats of the row that is [`rows_ahead`] ids after position `at`.
    #[inline(always)]
    pub(super) fn advance(&self, at: usize, len: usize) {
        if let Some(row) = self.rows.get(at - self.first + rows_ahead(len)).filter(|row| !row.is_null()) {
            prefetch_row(*row, len);
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
