//! [`CheckedPush::reserve`]: finds the row indices of a push's ids, and reserves memory for the missing rows.

use std::convert::Infallible;
use std::ops::Range;

use parking_lot::Mutex;
use persia_types::tables::TableGradients;
use persia_types::{Id, TablesError};

use crate::request::push::CheckedPush;
use crate::request::row_index_cache::{LookupRows, TableRows};
use crate::request::shard_batch::{ShardBatch, for_each_batch};
use crate::request::threads::RequestThreads;
use crate::shard::{NO_ROW, Shard, no_memory};
use crate::simd::{Lanes, SimdLoop};

impl CheckedPush<'_> {
    /// Find the row indices of all ids and reserve memory for the missing rows. [`Self::apply`] then needs no
    /// memory, unless another push uses the reserved memory first. No row changes. `found` contains the row
    /// indices of the look-up, or is empty.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn reserve(
        &self,
        shards: &[Mutex<Shard>],
        threads: &RequestThreads,
        found: &mut LookupRows,
    ) -> Result<(), TablesError> {
        // The cached row indices are used only if the step is that of the look-up and every part has as many
        // ids as in the look-up. Otherwise all row indices are searched.
        let cached =
            found.step() == self.step && self.tables.iter().all(|part| part_of(found, part).is_some());
        if !cached {
            found.reset(self.step, self.tables.iter().map(|part| (part.table, part.ids.len())));
        }
        let found = &*found;
        let of_parts = threads.map(self.asked(), |within| {
            if !cached {
                self.search(shards, within.clone(), found);
            }
            self.reserve_in(shards, within, found)
        });
        of_parts.into_iter().collect()
    }

    /// Reserve memory in the shards `within`.
    fn reserve_in(
        &self,
        shards: &[Mutex<Shard>],
        within: Range<usize>,
        found: &LookupRows,
    ) -> Result<(), TablesError> {
        for part in self.tables {
            let run = self.run.table(part.table);
            let found = found.part(part_of(found, part).unwrap_or_default());
            for number in within.clone() {
                let positions = part.ids.range(number);
                if positions.is_empty() {
                    continue;
                }
                let mut shard = shards[number].lock();
                let missing = if found.is_stale(number, shard.eviction_count()) {
                    positions.len()
                } else {
                    found.missing(positions)
                };
                let reserved = shard.reserve_admissions(part.table, missing, run.admission.min_count);
                reserved.map_err(|error| no_memory(&self.schema.tables[part.table].name, error))?;
            }
        }
        Ok(())
    }

    /// Find the row indices of all ids in the shards `within`.
    fn search(&self, shards: &[Mutex<Shard>], within: Range<usize>, found: &LookupRows) {
        for (number, part) in self.tables.iter().enumerate() {
            let (table, ids) = (part.table, part.ids.ids());
            let oldest = self.run.table(table).layout.oldest_alive(self.step);
            let found = found.part(number);
            let Ok(()) = for_each_batch(shards, within.clone(), table, part.ids, |batch| {
                self.level.run(SearchBatch { batch, table, ids, oldest, found });
                Ok::<(), Infallible>(())
            });
        }
    }
}

/// The part of the look-up that contains the row indices for a part of a push, if there is one.
pub(super) fn part_of(found: &LookupRows, part: &TableGradients<'_>) -> Option<usize> {
    found.part_of(part.table, part.ids.len())
}

/// Finds the row indices of one batch.
struct SearchBatch<'a, 'b, 's> {
    batch: ShardBatch<'b, 's>,
    table: usize,
    /// All ids of the table in the request.
    ids: &'a [Id],
    oldest: u32,
    found: TableRows<'a>,
}

impl SimdLoop for SearchBatch<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { batch, table, ids, oldest, found } = self;
        found.find::<L>(&batch, table, ids);
        if oldest == 0 {
            return;
        }
        for (shard, at) in ShardBatch::walk(batch.ranges) {
            let row_index = found.get(at);
            if row_index != NO_ROW && !batch.shards[shard].tables[table].is_alive(row_index, oldest) {
                found.set(at, NO_ROW);
            }
        }
    }
}
