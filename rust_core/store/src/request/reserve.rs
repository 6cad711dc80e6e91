//! [`CheckedPush::reserve`]: finds the row indices of a push's ids, and reserves memory for the missing rows.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_types::tables::TableGradients;
use persia_types::{Id, TablesError};

use crate::request::push::CheckedPush;
use crate::request::row_index_cache::{LookupRows, PartRows};
use crate::request::shard_batch::{ShardBatch, for_each_batch};
use crate::shard::{NO_ROW, Shard, no_memory};
use crate::simd::{Lanes, SimdLoop};

impl CheckedPush<'_> {
    /// Find the row indices of all ids and reserve memory for the missing rows, so that [`Self::apply`] needs no
    /// memory. No row changes. `found` contains the row indices of the look-up, or is empty.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn reserve(&self, shards: &[Mutex<Shard>], found: &mut LookupRows) -> Result<(), TablesError> {
        // A push has the same parts as its look-up, so either all row indices are cached or all must be
        // searched.
        let cached =
            found.step() == self.step && self.tables.iter().all(|part| part_of(found, part).is_some());
        if !cached {
            self.search(shards, found);
        }
        for part in self.tables {
            let run = self.run.table(part.table);
            let lookup_part = part_of(found, part).unwrap_or_default();
            let found = found.part(lookup_part, 0);
            for (number, shard) in shards.iter().enumerate() {
                let row_indices = &found.row_indices[part.ids.range(number)];
                if row_indices.is_empty() {
                    continue;
                }
                let mut shard = shard.lock();
                let missing = if found.is_stale(number, shard.eviction_count()) {
                    row_indices.len()
                } else {
                    row_indices.iter().filter(|row_index| **row_index == NO_ROW).count()
                };
                let reserved = shard.reserve_admissions(part.table, missing, run.admission.min_count);
                reserved.map_err(|error| no_memory(&self.schema.tables[part.table].name, error))?;
            }
        }
        Ok(())
    }

    /// Fill `found` with the row indices of all ids.
    fn search(&self, shards: &[Mutex<Shard>], found: &mut LookupRows) {
        found.reset(self.step, self.tables.iter().map(|part| (part.table, part.ids.len())));
        for (number, part) in self.tables.iter().enumerate() {
            let (table, ids) = (part.table, part.ids.ids());
            let oldest = self.run.table(table).layout.oldest_alive(self.step);
            let mut found = found.part(number, 0);
            let Ok(()) = for_each_batch(shards, table, part.ids, |batch| {
                self.level.run(SearchBatch { batch, table, ids, oldest, found: &mut found });
                Ok::<(), Infallible>(())
            });
        }
    }
}

/// The part of the look-up that contains the row indices for a part of a push.
pub(super) fn part_of(found: &LookupRows, part: &TableGradients<'_>) -> Option<usize> {
    found.part_of(part.table, part.ids.len())
}

/// Finds the row indices of one batch.
struct SearchBatch<'a, 'b, 'm, 's> {
    batch: ShardBatch<'b, 's>,
    table: usize,
    /// All ids of the table.
    ids: &'a [Id],
    oldest: u32,
    found: &'a mut PartRows<'m>,
}

impl SimdLoop for SearchBatch<'_, '_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { batch, table, ids, oldest, found } = self;
        found.find::<L>(&batch, table, ids);
        if oldest == 0 {
            return;
        }
        for (shard, at) in ShardBatch::walk(batch.ranges) {
            let row_index = found.row_indices[at];
            if row_index != NO_ROW && !batch.shards[shard].tables[table].is_alive(row_index, oldest) {
                found.row_indices[at] = NO_ROW;
            }
        }
    }
}
