//! [`ShardTable`]: the rows of one table in one shard.
//!
//! Each row has an index in its table. The row starts at word `row_index * stride` of one region. Ids and recency are
//! in separate regions. A row therefore occupies as few cache lines as possible, and a cache line contains the recency
//! of sixteen rows.

use std::sync::Arc;

use persia_types::id::hash_id;
use persia_types::limits::MAX_ROWS_PER_SLAB;
use persia_types::tables::TableStats;

use crate::checkpoint::{TableRows, Values};
use crate::shard::copy_budget::CopyBudget;
use crate::shard::cow_snapshot::CowSnapshot;
use crate::shard::export::{RowList, RowRef};
use crate::shard::index::{Index, NO_ROW};
use crate::shard::region::{OutOfMemory, Region};
use crate::shard::row::{FREE, Layout};
use crate::simd::Lanes;

/// The numbers of inserted and removed rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RowChanges {
    pub(crate) inserted: u64,
    pub(crate) evicted: u64,
    pub(crate) expired: u64,
}

/// The rows of a table with their ids, recency and admission counts, and the snapshot that is held, if any.
pub(crate) struct ShardTable {
    layout: Layout,
    pub(crate) index: Index,
    rows: Region<f32>,
    /// The id of the row at each index; at a free index, the next free index.
    ids: Region<u64>,
    /// The step of the last push to the row at each index, from 1; [`FREE`] marks a free index.
    last_used: Region<u32>,
    /// The number of row indices that have ever been used. The free ones among them form a linked list.
    used: u32,
    first_free: u32,
    /// The row index below which [`Region::grow_filled`] has set the page size.
    collapsed: u32,
    len: usize,
    /// The admission counts: ids without a row, each with its number of pushes in place of a row index.
    pub(crate) admission_counts: Index,
    /// The number of ids whose admission count is 1.
    pub(super) seen_once: usize,
    /// The changes of rows since the run began.
    pub(crate) changes: RowChanges,
    snapshot: Option<Box<CowSnapshot>>,
}

impl ShardTable {
    /// Create an empty table without memory.
    pub(crate) fn new(layout: Layout) -> Self {
        Self {
            layout,
            index: Index::new(),
            rows: Region::new(),
            ids: Region::new(),
            last_used: Region::new(),
            used: 0,
            first_free: NO_ROW,
            collapsed: 0,
            len: 0,
            admission_counts: Index::new(),
            seen_once: 0,
            changes: RowChanges::default(),
            snapshot: None,
        }
    }

    /// Change the layout of a table without rows.
    pub(super) fn set_layout(&mut self, layout: Layout) {
        debug_assert_eq!(self.len, 0);
        let admission_counts = std::mem::replace(&mut self.admission_counts, Index::new());
        let snapshot = self.snapshot.take();
        let (seen_once, changes) = (self.seen_once, self.changes);
        *self = Self { admission_counts, seen_once, changes, snapshot, ..Self::new(layout) };
    }

    /// The layout of the table's rows.
    #[inline(always)]
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// The number of rows.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The statistics of this shard of the table, without its name and look-ups.
    pub(crate) fn stats(&self) -> TableStats {
        let RowChanges { inserted, evicted, expired } = self.changes;
        TableStats {
            rows: self.len as u64,
            payload_bytes: self.payload_bytes() as u64,
            memory_bytes: self.memory_bytes() as u64,
            inserted,
            evicted,
            expired,
            waiting: self.admission_counts.len() as u64,
            seen_once: self.seen_once as u64,
            ..TableStats::default()
        }
    }

    /// The size of all weights and state in the table, in bytes.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.len * self.layout.payload_bytes()
    }

    /// The resident memory of this table, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let used = self.used as usize;
        size_of::<Self>()
            + self.index.memory_bytes()
            + self.admission_counts.memory_bytes()
            + self.snapshot.as_ref().map_or(0, |snapshot| snapshot.memory_bytes())
            + self.rows.resident_bytes(used * self.layout.stride())
            + self.ids.resident_bytes(used)
            + self.last_used.resident_bytes(used)
    }

    /// All rows, for prefetching at `row_index * stride`.
    #[inline(always)]
    pub(crate) fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// The ids at all row indices, for prefetching.
    #[inline(always)]
    pub(crate) fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// The recency at all row indices, for prefetching.
    #[inline(always)]
    pub(crate) fn last_used(&self) -> &[u32] {
        &self.last_used
    }

    /// The row at a row index.
    #[inline(always)]
    pub(crate) fn row(&self, row_index: u32) -> &[f32] {
        let stride = self.layout.stride();
        &self.rows[row_index as usize * stride..][..stride]
    }

    /// The row at a row index, for a change. If a snapshot is held, call [`Self::preserve`] first.
    #[inline(always)]
    pub(crate) fn row_mut(&mut self, row_index: u32) -> &mut [f32] {
        let stride = self.layout.stride();
        &mut self.rows[row_index as usize * stride..][..stride]
    }

    /// Whether the row at `row_index`, which an earlier look-up found, is still that of `id`.
    #[inline(always)]
    pub(crate) fn holds(&self, row_index: u32, id: u64) -> bool {
        self.ids.get(row_index as usize) == Some(&id) && self.last_used[row_index as usize] != FREE
    }

    /// The row index of `id`, or [`NO_ROW`].
    #[inline(always)]
    pub(crate) fn find<L: Lanes>(&self, id: u64) -> u32 {
        self.index.find::<L>(id, hash_id(id))
    }

    /// Whether the row at a row index was used at step `oldest` or later.
    #[inline(always)]
    pub(crate) fn is_alive(&self, row_index: u32, oldest: u32) -> bool {
        oldest == 0 || self.last_used[row_index as usize] >= oldest
    }

    /// Record a use of the row at `row_index`. Steps of several ranks may arrive out of order, so the highest
    /// step is kept.
    #[inline(always)]
    pub(crate) fn touch(&mut self, row_index: u32, step: u32) {
        let last_used = &mut self.last_used[row_index as usize];
        *last_used = step.max(*last_used);
    }

    /// Reserve memory for up to `rows` more rows in a shard whose budget is `budget` rows.
    pub(super) fn reserve_rows(&mut self, rows: usize, budget: usize) -> Result<(), OutOfMemory> {
        let used = self.used as usize;
        let most = |held: usize| budget.max(held);
        let row_indices = (used + rows.saturating_sub(used - self.len)).min(most(used));
        let stride = self.layout.stride();
        if row_indices > MAX_ROWS_PER_SLAB {
            return Err(OutOfMemory { bytes: stride * size_of::<f32>() });
        }
        self.index.reserve_for((self.len + rows).min(most(self.len)))?;
        self.rows.grow(row_indices * stride)?;
        self.ids.grow(row_indices)?;
        self.last_used.grow(row_indices)
    }

    /// Reserve memory for `rows` more rows, all of which the caller is about to insert.
    pub(super) fn reserve(&mut self, rows: usize) -> Result<(), OutOfMemory> {
        let row_indices = self.used as usize + rows;
        self.index.reserve_for(self.len + rows)?;
        self.rows.grow_filled(row_indices * self.layout.stride())?;
        self.ids.grow_filled(row_indices)?;
        self.last_used.grow_filled(row_indices)?;
        self.collapsed = row_indices as u32;
        Ok(())
    }

    /// Insert the row of an id that has none; `fill` writes the row. A failure changes nothing.
    pub(super) fn insert(
        &mut self,
        id: u64,
        last_used: u32,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<u32, OutOfMemory> {
        self.index.reserve()?;
        let row_index = self.take_row_index()?;
        fill(self.row_mut(row_index));
        self.ids[row_index as usize] = id;
        self.last_used[row_index as usize] = last_used;
        self.index.insert(id, hash_id(id), row_index);
        self.len += 1;
        Ok(row_index)
    }

    /// Remove the row of `id`. The row must exist.
    pub(super) fn remove(&mut self, id: u64) {
        let row_index = self.index.remove(id, hash_id(id));
        debug_assert!(self.holds(row_index, id));
        if self.has_snapshot() {
            self.preserve(row_index);
        }
        self.ids[row_index as usize] = u64::from(self.first_free);
        self.last_used[row_index as usize] = FREE;
        self.first_free = row_index;
        self.len -= 1;
    }

    /// The `(row_index, id, last_used)` of every row, in the order of row indices.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u32, u64, u32)> {
        let used = self.ids[..self.used as usize].iter().zip(self.last_used.iter());
        (0..)
            .zip(used)
            .filter(|(_, (_, last_used))| **last_used != FREE)
            .map(|(row_index, (id, last_used))| (row_index, *id, *last_used))
    }

    fn take_row_index(&mut self) -> Result<u32, OutOfMemory> {
        if self.first_free != NO_ROW {
            let row_index = self.first_free;
            self.first_free = self.ids[row_index as usize] as u32;
            return Ok(row_index);
        }
        let (row_index, stride) = (self.used as usize, self.layout.stride());
        if row_index >= MAX_ROWS_PER_SLAB {
            return Err(OutOfMemory { bytes: stride * size_of::<f32>() });
        }
        self.rows.grow((row_index + 1) * stride)?;
        self.ids.grow(row_index + 1)?;
        self.last_used.grow(row_index + 1)?;
        if row_index >= self.collapsed as usize {
            self.rows.collapse_huge_pages(row_index * stride, (row_index + 1) * stride);
            self.ids.collapse_huge_pages(row_index, row_index + 1);
            self.last_used.collapse_huge_pages(row_index, row_index + 1);
        }
        self.used += 1;
        Ok(row_index as u32)
    }
}

/// The functions for snapshots.
impl ShardTable {
    /// Hold the current rows and counts until [`Self::end_snapshot`].
    pub(crate) fn begin_snapshot(&mut self, budget: &Arc<CopyBudget>) {
        let last_used = &self.last_used[..self.used as usize];
        self.snapshot = (!self.is_empty())
            .then(|| Box::new(CowSnapshot::begin(self.layout, self.len, last_used, budget)));
    }

    /// Release the snapshot, if any. Drop the result after the lock is released, because it may be large.
    pub(crate) fn end_snapshot(&mut self) -> Option<Box<CowSnapshot>> {
        self.snapshot.take()
    }

    /// Whether rows have to be [preserved](Self::preserve) before they change.
    #[inline(always)]
    pub(crate) fn has_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// Copy the row at `row_index` for the snapshot, because it is about to be changed or removed.
    #[cold]
    #[inline(never)]
    pub(crate) fn preserve(&mut self, row_index: u32) {
        let stride = self.layout.stride();
        if let Some(snapshot) = &mut self.snapshot {
            let row = &self.rows[row_index as usize * stride..][..stride];
            snapshot.preserve(row_index, self.ids[row_index as usize], row);
        }
    }

    /// Copy the admission counts for the snapshot, because they are about to change.
    pub(super) fn preserve_counts(&mut self) {
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.preserve_counts(&self.admission_counts);
        }
    }

    /// The rows and counts of the snapshot; None if it is empty or none is held.
    pub(crate) fn list_snapshot(&self) -> Option<RowList> {
        let snapshot = self.snapshot.as_deref()?;
        Some(snapshot.list(&self.ids, &self.admission_counts))
    }

    /// Take the values of rows of the snapshot. The rows may change from then on.
    pub(crate) fn take_from_snapshot(&mut self, rows: &[RowRef]) -> Values {
        let (stride, current) = (self.layout.stride(), &self.rows);
        self.snapshot.as_mut().map_or_else(
            || Values::with_capacity(self.layout, 0),
            |snapshot| snapshot.take(rows, |row_index| &current[row_index as usize * stride..][..stride]),
        )
    }

    /// All current rows and counts; None if there are none.
    pub(crate) fn export(&self, name: &str) -> Option<TableRows> {
        if self.is_empty() {
            return None;
        }
        let rows =
            self.entries().map(|(row_index, id, last_used)| RowRef { id, row_index, last_used }).collect();
        let admission_counts = self.admission_counts.entries().collect();
        let (rows, table) = RowList { layout: self.layout, rows, admission_counts }.sorted(name);
        let mut values = Values::with_capacity(self.layout, rows.len());
        rows.iter().for_each(|row| values.push(self.layout, self.row(row.row_index)));
        let Values { weights, state } = values;
        Some(TableRows { weights, state, ..table })
    }

    /// Whether the table has neither rows nor counts.
    fn is_empty(&self) -> bool {
        self.len + self.admission_counts.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use persia_types::Dtype;

    use super::*;
    use crate::simd::Portable;

    fn table() -> ShardTable {
        ShardTable::new(Layout { dim: 3, dtype: Dtype::F32, state_len: 2, ttl: None })
    }

    #[test]
    fn a_reused_row_index_is_not_mistaken_for_the_old_row() {
        let mut table = table();
        for id in [5, 0, u64::MAX] {
            table.insert(id, 1, |row| row.fill(id as f32)).unwrap();
        }
        let row_index = table.find::<Portable>(0);
        table.remove(0);
        assert!(!table.holds(row_index, 0));
        assert_eq!(table.find::<Portable>(0), NO_ROW);
        assert_eq!(table.insert(9, 2, |row| row.fill(9.0)).unwrap(), row_index);
        assert!(table.holds(row_index, 9) && !table.holds(row_index, 0) && !table.holds(NO_ROW, 9));
        assert_eq!(table.entries().map(|(_, id, _)| id).collect::<Vec<_>>(), [5, 9, u64::MAX]);
        assert_eq!(table.row(table.find::<Portable>(5)), [5.0; 5]);
    }

    #[test]
    fn all_free_row_indices_are_reused() {
        let mut table = table();
        for id in 0..100 {
            table.insert(id, 1, |row| row.fill(0.0)).unwrap();
        }
        for id in 0..100 {
            table.remove(id);
        }
        for id in 100..200 {
            table.insert(id, 1, |row| row.fill(id as f32)).unwrap();
        }
        assert_eq!((table.used, table.len()), (100, 100));
        assert!((100..200).all(|id| table.row(table.find::<Portable>(id)) == [id as f32; 5]));
    }

    #[test]
    fn a_look_up_out_of_order_does_not_lower_recency() {
        let mut table = table();
        let row_index = table.insert(1, 8, |row| row.fill(0.0)).unwrap();
        table.touch(row_index, 5);
        assert_eq!(table.entries().next().unwrap().2, 8);
    }
}
