//! [`Shard`]: one virtual shard of all tables, with eviction, expiry and admission by count.
//!
//! From the outside in:
//!
//! * [`table`]: the rows of one table; [`row`]: how a row is stored
//! * [`index`]: maps ids to row indices
//! * [`region`]: growable arrays; [`block_allocator`]: the memory of small arrays
//! * [`cow_snapshot`]: the rows at one point in time; [`copy_budget`]: the limit for copies of rows
//! * [`export`]: copies rows for a checkpoint

mod block_allocator;
mod copy_budget;
mod cow_snapshot;
mod export;
mod index;
mod region;
mod row;
mod table;

use persia_types::TablesError;
use persia_types::id::hash_id;
use persia_types::limits::COUNTED_IDS_PER_SHARD;

use crate::simd::Portable;
pub(crate) use copy_budget::CopyBudget;
pub(crate) use index::{Bucket, NO_ROW};
use region::OutOfMemory;
#[cfg(test)]
pub(crate) use region::refusal;
pub(crate) use row::Layout;
pub(crate) use table::{RowChanges, ShardTable};

/// An insertion into a full shard removes at least the budget divided by this value, so that many insertions
/// share the cost of its scan.
const EVICTED_PART: usize = 16;

/// One virtual shard: the unit of locking, of the row budget and of checkpoint files. The alignment keeps its lock and
/// content out of the cache lines of other shards.
///
/// # Eviction and time to live
///
/// A shard holds at most `budget = max(1, ceil(capacity / 256))` rows over *all* its tables. An insertion into a full
/// shard first removes all expired rows. If these are fewer than `max(1, budget / 16)`, it evicts the rows with the
/// smallest `(last_used, table, id)` until that many rows have been removed. `last_used` is the highest step at which
/// the row was pushed, and `table` is the index in the schema. The row being inserted is not a candidate.
///
/// A row of a table with a time to live is expired at step `t` if `last_used + ttl < t`. Look-ups and pushes of step
/// `t` treat its id as one without a row. Its memory is freed when a push contains the id, when an insertion needs
/// space, or by a sweep. A sweep is made by a push of step `t` with ids in shard `t % 256`, which first removes the
/// expired rows of that shard.
///
/// A push makes two passes over the request, in the order of its tables and ids. The first pass records the use of
/// every existing row and updates the row. The second pass inserts a row for every other id that is admitted, and
/// updates that row. (If the second pass evicts the row of an id that occurs later in the request, the row is inserted
/// again.)
///
/// # Admission by count
///
/// If a table requires `min_count` pushes before an id gets a row, each push of an id without a row adds one to the
/// id's count, up to `min_count`. The insertion of the row removes the count. A shard counts at most `2 * budget` ids,
/// clamped to [`COUNTED_IDS_PER_SHARD`]. To make room for one more id, all counts are halved and ids whose count
/// reaches 0 are dropped, as often as needed.
///
/// None of this depends on row indices, on time, or on the assignment of shards to servers.
#[repr(align(64))]
pub(crate) struct Shard {
    pub(crate) tables: Vec<ShardTable>,
    /// The number of rows of all tables.
    rows: usize,
    budget: usize,
    /// The number of ids with an admission count, over all tables.
    counted: usize,
    /// The step of the last sweep.
    swept: u32,
    /// The number of removals so far. As long as it is unchanged, every row is still at its index.
    eviction_count: u64,
}

/// The numbers of removed rows, by the reason of their removal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EvictionCounts {
    pub(crate) evicted: u64,
    pub(crate) expired: u64,
}

/// A row that may be evicted. The order of fields is the order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    last_used: u32,
    table: u32,
    id: u64,
}

impl Shard {
    /// Create empty tables with these layouts.
    pub(crate) fn new(layouts: &[Layout], budget: usize) -> Self {
        let tables = layouts.iter().map(|layout| ShardTable::new(*layout)).collect();
        Self { tables, rows: 0, budget, counted: 0, swept: 0, eviction_count: 0 }
    }

    /// Drop all rows and admission counts, and free their memory.
    pub(crate) fn clear(&mut self) {
        let layouts: Vec<Layout> = self.tables.iter().map(ShardTable::layout).collect();
        *self = Self::new(&layouts, self.budget);
    }

    /// Reset the counts of row changes to 0.
    pub(crate) fn reset_changes(&mut self) {
        self.tables.iter_mut().for_each(|table| table.changes = RowChanges::default());
    }

    /// Set the layouts of the tables. The caller ensures that tables with rows already have these layouts.
    pub(crate) fn set_layouts(&mut self, layouts: &[Layout]) {
        for (table, layout) in self.tables.iter_mut().zip(layouts) {
            if table.layout() != *layout {
                table.set_layout(*layout);
            }
        }
    }

    /// Insert the row of an id that has none. If the shard is full, rows are removed first. Returns the row
    /// index and the numbers of removed rows.
    pub(crate) fn insert(
        &mut self,
        table: usize,
        id: u64,
        step: u32,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<(u32, EvictionCounts), OutOfMemory> {
        let left = if self.rows < self.budget {
            EvictionCounts::default()
        } else {
            let count = (self.budget / EVICTED_PART).max(1);
            let expired = self.sweep(step);
            EvictionCounts { evicted: self.evict(count.saturating_sub(expired as usize)), expired }
        };
        let row_index = self.tables[table].insert(id, step, fill)?;
        self.rows += 1;
        let table = &mut self.tables[table];
        table.changes.inserted += 1;
        if table.admission_counts.len() > 0 {
            table.preserve_counts();
            let count = table.admission_counts.remove(id, hash_id(id));
            if count != NO_ROW {
                self.counted -= 1;
                table.seen_once -= usize::from(count == 1);
            }
        }
        Ok((row_index, left))
    }

    /// Remove the expired row of `id`. The row must exist.
    pub(crate) fn remove_expired(&mut self, table: usize, id: u64) {
        self.tables[table].remove(id);
        self.tables[table].changes.expired += 1;
        self.rows -= 1;
        self.eviction_count += 1;
    }

    /// The number of removals so far. As long as it is unchanged, every row of the shard is still at its
    /// index.
    #[inline(always)]
    pub(crate) fn eviction_count(&self) -> u64 {
        self.eviction_count
    }

    /// Like [`Self::sweep`], but only once per step, however many ranks push.
    pub(crate) fn sweep_once(&mut self, step: u32) -> u64 {
        if self.swept >= step {
            return 0;
        }
        self.swept = step;
        self.sweep(step)
    }

    /// Remove all rows that are expired at `step`. Returns the number of removed rows.
    fn sweep(&mut self, step: u32) -> u64 {
        let before = self.rows;
        for table in &mut self.tables {
            let oldest = table.layout().oldest_alive(step);
            if oldest == 0 {
                continue;
            }
            let expired: Vec<u64> =
                table.entries().filter(|(.., last_used)| *last_used < oldest).map(|(_, id, _)| id).collect();
            self.rows -= expired.len();
            self.eviction_count += expired.len() as u64;
            table.changes.expired += expired.len() as u64;
            expired.into_iter().for_each(|id| table.remove(id));
        }
        (before - self.rows) as u64
    }

    /// Reserve memory for the rows and admission counts of `ids` more ids, so that [`Self::count`] and
    /// [`Self::insert`] need no memory for them.
    pub(crate) fn reserve_admissions(
        &mut self,
        table: usize,
        ids: usize,
        min_count: u32,
    ) -> Result<(), OutOfMemory> {
        if ids == 0 {
            return Ok(());
        }
        let (budget, counted) = (self.budget, self.counted_limit());
        let table = &mut self.tables[table];
        if min_count > 1 {
            let counts = &mut table.admission_counts;
            counts.reserve_for((counts.len() + ids).min(counted.max(counts.len())))?;
        }
        table.reserve_rows(ids, budget)
    }

    /// Count a push of an id without a row, unless `min_count` is 1. Returns whether the count has reached
    /// `min_count`.
    pub(crate) fn count(&mut self, table: usize, id: u64, min_count: u32) -> Result<bool, OutOfMemory> {
        let hash = hash_id(id);
        let before = self.tables[table].admission_counts.find::<Portable>(id, hash);
        let count = match before {
            _ if min_count == 1 => return Ok(true),
            NO_ROW => {
                self.halve_counts_to(self.counted_limit() - 1);
                1
            }
            count => count.saturating_add(1).min(min_count),
        };
        let table = &mut self.tables[table];
        table.preserve_counts();
        let counts = &mut table.admission_counts;
        if before == NO_ROW {
            counts.reserve()?;
            self.counted += 1;
            table.seen_once += 1;
        } else {
            counts.remove(id, hash);
            table.seen_once -= usize::from(before == 1);
        }
        counts.insert(id, hash, count);
        Ok(count >= min_count)
    }

    /// The count that [`Self::count`] would reach if `min_count` did not limit it.
    pub(crate) fn would_count(&self, table: usize, id: u64) -> u32 {
        match self.tables[table].admission_counts.find::<Portable>(id, hash_id(id)) {
            NO_ROW => 1,
            count => count.saturating_add(1),
        }
    }

    /// Add an admission count from a checkpoint.
    pub(crate) fn load_count(&mut self, table: usize, id: u64, count: u32) -> Result<(), OutOfMemory> {
        let table = &mut self.tables[table];
        table.admission_counts.reserve()?;
        table.admission_counts.insert(id, hash_id(id), count);
        table.seen_once += usize::from(count == 1);
        self.counted += 1;
        Ok(())
    }

    fn counted_limit(&self) -> usize {
        let (least, most) = COUNTED_IDS_PER_SHARD.into_inner();
        self.budget.saturating_mul(2).clamp(least, most)
    }

    /// Halve all counts until at most `most` ids have a count. The index is changed in place, so that it
    /// cannot run out of memory.
    fn halve_counts_to(&mut self, most: usize) {
        while self.counted > most {
            for table in &mut self.tables {
                table.preserve_counts();
                let counts: Vec<(u64, u32)> = table.admission_counts.entries().collect();
                for (id, count) in counts {
                    let hash = hash_id(id);
                    table.admission_counts.remove(id, hash);
                    if count > 1 {
                        table.admission_counts.insert(id, hash, count / 2);
                        table.seen_once += usize::from(count / 2 == 1);
                    } else {
                        self.counted -= 1;
                        table.seen_once -= 1;
                    }
                }
            }
        }
    }

    /// Evict rows until the budget is met, and halve counts until their limit is met, because a checkpoint
    /// may come from a job with a larger capacity.
    pub(crate) fn fit_budget(&mut self) {
        if self.rows > self.budget {
            self.evict(self.rows - self.budget);
        }
        self.halve_counts_to(self.counted_limit());
    }

    /// Reserve memory for `rows` more rows from a checkpoint.
    pub(crate) fn reserve(&mut self, table: usize, rows: usize) -> Result<(), OutOfMemory> {
        self.tables[table].reserve(rows)
    }

    /// Insert a row from a checkpoint, even above the budget.
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

    /// Evict the `count` least recently used rows. Returns the number of evicted rows.
    #[cold]
    fn evict(&mut self, count: usize) -> u64 {
        if count == 0 {
            return 0;
        }
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
            let table = &mut self.tables[candidate.table as usize];
            table.remove(candidate.id);
            table.changes.evicted += 1;
        }
        self.rows -= count;
        self.eviction_count += count as u64;
        count as u64
    }
}

/// The error for a table that cannot grow.
pub(crate) fn no_memory(table: &str, error: OutOfMemory) -> TablesError {
    TablesError::OutOfMemory { table: table.to_owned(), bytes: error.bytes as u64 }
}

#[cfg(test)]
mod tests;
