//! How a table's part of a request is cut into work: neighbouring shards are locked together, so that even a request
//! of few ids per shard has many cache misses in flight at once.
//!
//! Table after table rather than shard after shard: what a feature's samples get or give then stays in a core's own
//! cache, and so few pages are in use at a time that their addresses do too.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use persia_kernels::rows_ahead;
use persia_types::id::hash_id;
use persia_types::{Id, ShardedIds};

use crate::index::NO_SLOT;
use crate::shard::Shard;
use crate::simd::{Lanes, prefetch, prefetch_from};

/// Ids whose cache misses are in flight together, and for which shards are locked at once. Their buckets stay in
/// the nearest cache from prefetch to use.
pub(crate) const SPAN: usize = 256;

/// Some ids of one table and the shards they are in.
pub(crate) struct Span<'a, 's> {
    /// Locked.
    pub(crate) shards: &'a mut [MutexGuard<'s, Shard>],
    /// Which they are of all.
    pub(crate) numbers: &'a [usize],
    /// Positions of each shard's ids among the table's; one follows the other.
    pub(crate) ranges: &'a [Range<usize>],
}

impl<'s> Span<'_, 's> {
    /// Every id of the span: the shard it is in, as an index into [`Self::shards`], and its position.
    pub(crate) fn walk(ranges: &[Range<usize>]) -> impl Iterator<Item = (usize, usize)> {
        ranges.iter().enumerate().flat_map(|(shard, range)| range.clone().map(move |at| (shard, at)))
    }

    #[inline(always)]
    fn shards(&self) -> impl Iterator<Item = (&MutexGuard<'s, Shard>, Range<usize>)> {
        self.shards.iter().zip(self.ranges.iter().cloned())
    }

    /// Search all ids, having asked for the first bucket of each.
    #[inline(always)]
    pub(crate) fn find<L: Lanes>(&self, table: usize, ids: &[Id], slots: &mut [u32]) {
        for (shard, range) in self.shards() {
            let index = &shard.tables[table].index;
            for id in &ids[range] {
                prefetch(index.buckets(), index.home(hash_id(*id)), 1);
            }
        }
        for (shard, range) in self.shards() {
            let table = &shard.tables[table];
            for (slot, id) in slots[range.clone()].iter_mut().zip(&ids[range]) {
                *slot = table.find::<L>(*id);
            }
        }
    }

    /// Where the rows of these slots are; ask for their `recency`, and for the ids of those in shards that `doubted` names,
    /// as indices into [`Self::shards`].
    #[inline(always)]
    pub(crate) fn addresses(
        &self,
        table: usize,
        slots: &[u32],
        recency: bool,
        doubted: impl Fn(usize) -> bool,
    ) -> Ahead {
        let first = self.ranges.first().map_or(0, |range| range.start);
        let mut rows = [std::ptr::null(); SPAN];
        for (number, (shard, range)) in self.shards().enumerate() {
            let table = &shard.tables[table];
            let (start, stride) = (table.rows().as_ptr(), table.layout().stride());
            let doubted = doubted(number);
            for (row, slot) in rows[range.start - first..].iter_mut().zip(&slots[range]) {
                if *slot != NO_SLOT {
                    *row = start.wrapping_add(*slot as usize * stride);
                    if recency || doubted {
                        prefetch(table.last_used(), *slot as usize, 1);
                    }
                    if doubted {
                        prefetch(table.ids(), *slot as usize, 1);
                    }
                }
            }
        }
        Ahead { first, rows }
    }
}

/// Addresses of a span's rows, to be brought near some ids before they are used: all at once would not stay there.
/// Null where there is no row; never read through.
pub(crate) struct Ahead {
    first: usize,
    rows: [*const f32; SPAN],
}

impl Ahead {
    /// Ask for the first `len` floats of the first rows.
    #[inline(always)]
    pub(crate) fn start(&self, len: usize) {
        let first = self.rows[..rows_ahead(len)].iter();
        first.filter(|row| !row.is_null()).for_each(|row| prefetch_from(*row, len));
    }

    /// Ask for the first `len` floats of the row that comes some ids after position `at`.
    #[inline(always)]
    pub(crate) fn fetch(&self, at: usize, len: usize) {
        if let Some(row) = self.rows.get(at - self.first + rows_ahead(len)).filter(|row| !row.is_null()) {
            prefetch_from(*row, len);
        }
    }
}

/// Call `work` with one span of `table` after the other until every one of `ids` was covered once. A span has [`SPAN`] ids, the
/// last one the rest.
///
/// Locks are taken in ascending order by every caller, so two requests cannot wait for each other; a shard
/// without ids is not locked.
pub(crate) fn for_each_span<E>(
    shards: &[Mutex<Shard>],
    table: usize,
    ids: &ShardedIds,
    mut work: impl FnMut(Span<'_, '_>) -> Result<(), E>,
) -> Result<(), E> {
    let most = SPAN.min(ids.len()).min(shards.len());
    let mut locked: Vec<MutexGuard<'_, Shard>> = Vec::with_capacity(most);
    let (mut numbers, mut ranges) = (Vec::with_capacity(most), Vec::with_capacity(most));
    let mut end = SPAN;
    for (number, shard) in shards.iter().enumerate() {
        let mut range = ids.range(number);
        while !range.is_empty() {
            let cut = range.end.min(end);
            let shard = shard.lock();
            // What is known of the table lies apart from the shard: all of a span's are on their way before one is read.
            prefetch(&shard.tables, table, 1);
            locked.push(shard);
            numbers.push(number);
            ranges.push(range.start..cut);
            range.start = cut;
            if cut == end || cut == ids.len() {
                work(Span { shards: &mut locked, numbers: &numbers, ranges: &ranges })?;
                locked.clear();
                numbers.clear();
                ranges.clear();
                end = cut + SPAN;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use persia_types::VIRTUAL_SHARDS;

    use super::*;

    fn check(ids: &[u64]) {
        let shards: Vec<Mutex<Shard>> = (0..VIRTUAL_SHARDS).map(|_| Mutex::new(Shard::new(&[], 1))).collect();
        let grouped = ShardedIds::group(ids).unwrap();
        let mut covered = 0;
        for_each_span(&shards, 0, &grouped, |span| {
            assert!(span.shards.len() == span.ranges.len() && span.numbers.len() == span.ranges.len());
            assert!(span.numbers.iter().zip(span.ranges).all(|(number, range)| {
                let whole = grouped.range(*number);
                whole.start <= range.start && range.end <= whole.end
            }));
            let start = covered;
            for (shard, at) in Span::walk(span.ranges) {
                assert!(shard < span.shards.len());
                assert_eq!(at, covered);
                covered += 1;
            }
            assert!(covered - start == SPAN || covered == ids.len());
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(covered, ids.len());
        assert!(shards.iter().all(|shard| shard.try_lock().is_some()));
    }

    #[test]
    fn every_id_is_covered_once_and_in_order() {
        check(&[]);
        check(&[7]);
        check(&(0..3_000).collect::<Vec<_>>());
        check(&(0..200_000).collect::<Vec<_>>());
        check(&[1; 5_000]);
        check(&[1; SPAN]);
    }
}
