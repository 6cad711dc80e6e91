//! [`Shard`]: one virtual shard of all tables, and the policy by which its rows leave.

use persia_types::TablesError;

use crate::memory::OutOfMemory;
use crate::table::{Layout, ShardTable};

/// Part of a shard's budget that one eviction frees, so that its scan is paid for by many insertions.
const EVICTED_PART: usize = 16;

/// One virtual shard: the unit of lock, budget and checkpoint file. Aligned, so that a lock and what it guards
/// share no cache line with another shard's.
///
/// # Eviction
///
/// A shard holds at most `budget` rows over *all* its tables, `max(1, ceil(capacity / 256))`. When a row is to
/// be inserted into a shard that holds `budget` rows, the `max(1, budget / 16)` rows with the smallest
/// `(last_used, table, id)` leave first; `last_used` is the highest step of a training look-up that asked for
/// the row, `table` the index in the schema. The row to be inserted is not among those that may leave.
///
/// A training look-up works on a shard in two passes over the request, tables in the request's order and ids in
/// the given order: first every id that has a row is noted as used; then every other id that is admitted is
/// inserted. (An id that the second pass evicted and the request names again is inserted again.)
///
/// Nothing in this depends on slots, on time, or on how shards are spread over servers.
#[repr(align(64))]
pub(crate) struct Shard {
    pub(crate) tables: Vec<ShardTable>,
    /// Rows of all tables together.
    rows: usize,
    budget: usize,
}

/// A row that may leave; the order of fields is the order of leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    last_used: u32,
    table: u32,
    id: u64,
}

impl Shard {
    /// Empty tables of these layouts.
    pub(crate) fn new(layouts: &[Layout], budget: usize) -> Self {
        Self { tables: layouts.iter().map(|layout| ShardTable::new(*layout)).collect(), rows: 0, budget }
    }

    /// Drop all rows and give their memory back.
    pub(crate) fn clear(&mut self) {
        let layouts: Vec<Layout> = self.tables.iter().map(ShardTable::layout).collect();
        *self = Self::new(&layouts, self.budget);
    }

    /// Give the tables these layouts; those that hold rows have theirs already.
    pub(crate) fn adopt(&mut self, layouts: &[Layout]) {
        for (table, layout) in self.tables.iter_mut().zip(layouts) {
            if table.layout() != *layout {
                debug_assert_eq!(table.len(), 0);
                *table = ShardTable::new(*layout);
            }
        }
    }

    /// Add the row of an id that has none, evicting where the budget asks for it. Returns `(slot, evicted)`.
    pub(crate) fn insert(
        &mut self,
        table: usize,
        id: u64,
        last_used: u32,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<(u32, u64), OutOfMemory> {
        let evicted =
            if self.rows < self.budget { 0 } else { self.evict((self.budget / EVICTED_PART).max(1)) };
        let slot = self.tables[table].insert(id, last_used, fill)?;
        self.rows += 1;
        Ok((slot, evicted))
    }

    /// Evict down to the budget: a restored checkpoint may come from a larger capacity.
    pub(crate) fn fit_budget(&mut self) {
        if self.rows > self.budget {
            self.evict(self.rows - self.budget);
        }
    }

    /// Add a row of a checkpoint, beyond the budget if need be.
    pub(crate) fn load(
        &mut self,
        table: usize,
        id: u64,
        last_used: u32,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<(), OutOfMemory> {
        self.tables[table].insert(id, last_used, fill)?;
        self.rows += 1;
        Ok(())
    }

    /// Evict `count` rows by the policy above; how many there were.
    #[cold]
    fn evict(&mut self, count: usize) -> u64 {
        let mut candidates = Vec::with_capacity(self.rows);
        for (number, table) in self.tables.iter().enumerate() {
            let entries = table.entries();
            candidates.extend(entries.map(|(_, id, last_used)| Candidate {
                last_used,
                table: number as u32,
                id,
            }));
        }
        let count = count.min(candidates.len());
        if count < candidates.len() {
            candidates.select_nth_unstable(count);
        }
        for candidate in &candidates[..count] {
            self.tables[candidate.table as usize].remove(candidate.id);
        }
        self.rows -= count;
        count as u64
    }
}

/// The error of a table that could not grow.
pub(crate) fn no_memory(table: &str, error: OutOfMemory) -> TablesError {
    TablesError::OutOfMemory { table: table.to_owned(), bytes: error.bytes as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::NO_SLOT;
    use crate::simd::Portable;

    fn ids(shard: &Shard, table: usize) -> Vec<u64> {
        let mut ids: Vec<u64> = shard.tables[table].entries().map(|(_, id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn the_oldest_leave_then_the_first_table_then_the_smallest_id() {
        let layout = Layout { dim: 1, state_len: 0 };
        let mut shard = Shard::new(&[layout, layout], 5);
        for (table, id, step) in [(1, 7, 2), (0, 9, 2), (0, 3, 2), (1, 1, 1), (0, 4, 3)] {
            assert_eq!(shard.insert(table, id, step, |row| row.fill(0.0)).unwrap().1, 0);
        }
        for (id, left_0, left_1) in [
            (100, &[3, 4, 9, 100][..], &[7][..]),
            (101, &[4, 9, 100, 101], &[7]),
            (102, &[4, 100, 101, 102], &[7]),
        ] {
            assert_eq!(shard.insert(0, id, 9, |row| row.fill(0.0)).unwrap().1, 1);
            assert_eq!((ids(&shard, 0), ids(&shard, 1)), (left_0.to_vec(), left_1.to_vec()));
        }
    }

    #[test]
    fn a_batch_leaves_at_once_and_survivors_keep_their_rows() {
        let mut shard = Shard::new(&[Layout { dim: 2, state_len: 1 }], 160);
        for id in 0..160 {
            shard.insert(0, id, 1 + id as u32, |row| row.fill(id as f32)).unwrap();
        }
        assert_eq!(shard.insert(0, 1000, 500, |row| row.fill(1000.0)).unwrap().1, 10);
        let table = &shard.tables[0];
        assert!((0..10).all(|id| table.find::<Portable>(id) == NO_SLOT));
        assert!((10..160).chain([1000]).all(|id| table.row(table.find::<Portable>(id)) == [id as f32; 3]));
    }

    #[test]
    fn fitting_the_budget_keeps_the_newest() {
        let mut shard = Shard::new(&[Layout { dim: 1, state_len: 0 }], 3);
        for id in 0..10 {
            shard.load(0, id, 1 + id as u32, |row| row.fill(0.0)).unwrap();
        }
        shard.fit_budget();
        assert_eq!(ids(&shard, 0), [7, 8, 9]);
    }
}
