//! [`Shard`]: one virtual shard of all tables, and the policy by which its rows leave.

use persia_types::TablesError;
use persia_types::id::hash_id;
use persia_types::limits::WAITING_IDS_PER_SHARD;

use crate::index::{Index, NO_SLOT};
use crate::memory::OutOfMemory;
use crate::row::Layout;
use crate::simd::Portable;
use crate::table::ShardTable;

/// Part of a shard's budget that one eviction frees, so that its scan is paid for by many insertions.
const EVICTED_PART: usize = 16;

/// One virtual shard: the unit of lock, budget and checkpoint file. Aligned, so that a lock and what it guards
/// share no cache line with another shard's.
///
/// # Eviction and time to live
///
/// A shard holds at most `budget` rows over *all* its tables, `max(1, ceil(capacity / 256))`. When a row is to
/// be inserted into a shard that holds `budget` rows, all rows that are expired leave first. Are they fewer than
/// `max(1, budget / 16)`, the rows with the smallest `(last_used, table, id)` leave until that many have left;
/// `last_used` is the highest step of a training look-up that asked for the row, `table` the index in the schema.
/// The row to be inserted is not among those that may leave.
///
/// A row of a table with a time to live is expired at step `t` when `last_used + ttl < t`. From then on look-ups and
/// pushes of such steps treat its id as one without row. Its memory is free again when a training look-up asks for
/// the id, when rows have to leave, or when the hand comes round: a training look-up of step `t` with ids in shard
/// `t % 256` first removes the expired rows of that shard.
///
/// A training look-up works on a shard in two passes over the request, tables in the request's order and ids in
/// the given order: first every id that has a row is noted as used; then every other id that is admitted is
/// inserted. (An id that the second pass evicted and the request names again is inserted again.)
///
/// # Admission by count
///
/// A table whose ids must be asked for `min_count` times has them counted: each training look-up that finds an id
/// without row adds one, up to `min_count`. A row's insertion ends the counting of its id. A shard counts
/// `2 * budget` ids, within [`WAITING_IDS_PER_SHARD`]. When one more comes, all counts are halved and ids that are
/// at 0 forgotten, until there is room.
///
/// Nothing in all this depends on slots, on time, or on how shards are spread over servers.
#[repr(align(64))]
pub(crate) struct Shard {
    pub(crate) tables: Vec<ShardTable>,
    /// Rows of all tables together.
    rows: usize,
    budget: usize,
    /// Ids of all tables together that are counted for admission.
    waiting: usize,
    /// The step at which expired rows were removed last, because the hand came round.
    swept: u32,
    /// Grows whenever a slot loses its row: slots found since the last time still hold theirs.
    departures: u64,
}

/// How many rows left, and why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) evicted: u64,
    pub(crate) expired: u64,
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
        let tables = layouts.iter().map(|layout| ShardTable::new(*layout)).collect();
        Self { tables, rows: 0, budget, waiting: 0, swept: 0, departures: 0 }
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
                table.adopt(*layout);
            }
        }
    }

    /// Add the row of an id that has none at this step, evicting where the budget asks for it. Returns
    /// `(slot, rows that left)`.
    pub(crate) fn insert(
        &mut self,
        table: usize,
        id: u64,
        step: u32,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<(u32, Left), OutOfMemory> {
        let left = if self.rows < self.budget {
            Left::default()
        } else {
            let count = (self.budget / EVICTED_PART).max(1);
            let expired = self.sweep(step);
            Left { evicted: self.evict(count.saturating_sub(expired as usize)), expired }
        };
        let slot = self.tables[table].insert(id, step, fill)?;
        self.rows += 1;
        let table = &mut self.tables[table];
        if table.waiting.len() > 0 {
            table.keep_waiting();
            if table.waiting.remove(id, hash_id(id)) != NO_SLOT {
                self.waiting -= 1;
            }
        }
        Ok((slot, left))
    }

    /// Drop the row of `id`, which must have one.
    pub(crate) fn remove(&mut self, table: usize, id: u64) {
        self.tables[table].remove(id);
        self.rows -= 1;
        self.departures += 1;
    }

    /// See the field.
    #[inline(always)]
    pub(crate) fn departures(&self) -> u64 {
        self.departures
    }

    /// [`Self::sweep`], once for all ranks of a step.
    pub(crate) fn sweep_once(&mut self, step: u32) -> u64 {
        if self.swept >= step {
            return 0;
        }
        self.swept = step;
        self.sweep(step)
    }

    /// Drop all rows that are expired at `step`; how many there were.
    pub(crate) fn sweep(&mut self, step: u32) -> u64 {
        let before = self.rows;
        for table in &mut self.tables {
            let oldest = table.layout().oldest_alive(step);
            if oldest == 0 {
                continue;
            }
            let expired: Vec<u64> =
                table.entries().filter(|(.., last_used)| *last_used < oldest).map(|(_, id, _)| id).collect();
            self.rows -= expired.len();
            self.departures += expired.len() as u64;
            expired.into_iter().for_each(|id| table.remove(id));
        }
        (before - self.rows) as u64
    }

    /// Count a look-up of an id without row. Returns whether there were `min_count` by now, this one included.
    pub(crate) fn count(&mut self, table: usize, id: u64, min_count: u32) -> Result<bool, OutOfMemory> {
        let hash = hash_id(id);
        let before = self.tables[table].waiting.find::<Portable>(id, hash);
        let count = match before {
            _ if min_count == 1 => return Ok(true),
            NO_SLOT => {
                self.forget_to(self.waiting_limit() - 1)?;
                1
            }
            count => count.saturating_add(1).min(min_count),
        };
        self.tables[table].keep_waiting();
        let waiting = &mut self.tables[table].waiting;
        if before == NO_SLOT {
            waiting.reserve()?;
            self.waiting += 1;
        } else {
            waiting.remove(id, hash);
        }
        waiting.insert(id, hash, count);
        Ok(count >= min_count)
    }

    /// Whether look-ups of an id without row are counted, and it did not get one yet.
    pub(crate) fn is_waiting(&self, table: usize, id: u64) -> bool {
        self.tables[table].waiting.find::<Portable>(id, hash_id(id)) != NO_SLOT
    }

    /// Take over what a checkpoint counted.
    pub(crate) fn load_waiting(&mut self, table: usize, id: u64, count: u32) -> Result<(), OutOfMemory> {
        let waiting = &mut self.tables[table].waiting;
        waiting.reserve()?;
        waiting.insert(id, hash_id(id), count);
        self.waiting += 1;
        Ok(())
    }

    fn waiting_limit(&self) -> usize {
        let (least, most) = WAITING_IDS_PER_SHARD.into_inner();
        self.budget.saturating_mul(2).clamp(least, most)
    }

    /// Halve counts until at most `most` ids are left.
    fn forget_to(&mut self, most: usize) -> Result<(), OutOfMemory> {
        while self.waiting > most {
            for table in &mut self.tables {
                let mut kept = Index::new();
                for (id, count) in table.waiting.entries().filter(|(_, count)| *count > 1) {
                    kept.reserve()?;
                    kept.insert(id, hash_id(id), count / 2);
                }
                self.waiting -= table.waiting.len() - kept.len();
                table.keep_waiting();
                table.waiting = kept;
            }
        }
        Ok(())
    }

    /// Evict down to the budget: a restored checkpoint may come from a larger capacity.
    pub(crate) fn fit_budget(&mut self) -> Result<(), OutOfMemory> {
        if self.rows > self.budget {
            self.evict(self.rows - self.budget);
        }
        self.forget_to(self.waiting_limit())
    }

    /// Make room for `rows` of a checkpoint.
    pub(crate) fn reserve(&mut self, table: usize, rows: usize) -> Result<(), OutOfMemory> {
        self.tables[table].reserve(rows)
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

    /// Evict the `count` rows that were used least recently; how many there were.
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
            self.tables[candidate.table as usize].remove(candidate.id);
        }
        self.rows -= count;
        self.departures += count as u64;
        count as u64
    }
}

/// The error of a table that could not grow.
pub(crate) fn no_memory(table: &str, error: OutOfMemory) -> TablesError {
    TablesError::OutOfMemory { table: table.to_owned(), bytes: error.bytes as u64 }
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
