//! [`CheckedPush::reserve`]: the slots of a push's ids, and memory for the rows of those without one.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_types::tables::TableGradients;
use persia_types::{Id, TablesError};

use crate::request::push::CheckedPush;
use crate::request::shard_batch::{ShardBatch, for_each_batch};
use crate::request::slot_cache::{LookupSlots, PartSlots};
use crate::shard::{NO_SLOT, Shard, no_memory};
use crate::simd::{Lanes, SimdLoop};

impl CheckedPush<'_> {
    /// Find the slots of all ids, and make room for the rows of the others, so that [`Self::apply`] needs no memory.
    /// Nothing changes. `found` has the slots of the look-up, or is empty.
    ///
    /// # Errors
    /// `OutOfMemory`
    pub(crate) fn reserve(
        &self,
        shards: &[Mutex<Shard>],
        found: &mut LookupSlots,
    ) -> Result<(), TablesError> {
        // A push has the parts of its look-up: either all slots are cached or all are searched.
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
                let slots = &found.slots[part.ids.range(number)];
                if slots.is_empty() {
                    continue;
                }
                let mut shard = shard.lock();
                let missing = if found.is_stale(number, shard.eviction_generation()) {
                    slots.len()
                } else {
                    slots.iter().filter(|slot| **slot == NO_SLOT).count()
                };
                let reserved = shard.reserve_admissions(part.table, missing, run.admission.min_count);
                reserved.map_err(|error| no_memory(&self.schema.tables[part.table].name, error))?;
            }
        }
        Ok(())
    }

    /// Fill `found` with the slots of all ids.
    fn search(&self, shards: &[Mutex<Shard>], found: &mut LookupSlots) {
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

/// The part of the look-up that has the slots of a push's part.
pub(super) fn part_of(found: &LookupSlots, part: &TableGradients<'_>) -> Option<usize> {
    found.part_of(part.table, part.ids.len())
}

/// Finds the slots of one batch.
struct SearchBatch<'a, 'b, 'm, 's> {
    batch: ShardBatch<'b, 's>,
    table: usize,
    /// All ids of the table.
    ids: &'a [Id],
    oldest: u32,
    found: &'a mut PartSlots<'m>,
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
            let slot = found.slots[at];
            if slot != NO_SLOT && !batch.shards[shard].tables[table].is_alive(slot, oldest) {
                found.slots[at] = NO_SLOT;
            }
        }
    }
}
