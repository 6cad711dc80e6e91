//! [`CheckedLookup`]: reads rows, and admits those that are missing.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_kernels::{Csr, copy};
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Dtype, Id, Schema, TablesError};

use crate::request::shard_batch::{ShardBatch, for_each_batch};
use crate::request::slot_cache::{LookupSlots, PartSlots};
use crate::run::ActiveRun;
use crate::shard::{Layout, NO_SLOT, Shard, no_memory};
use crate::simd::{InstructionSet, Lanes, Portable, SimdLoop};

/// The effects of a look-up at a step, and its results for missing ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookupEffect {
    /// The first training look-up of a token: updates recency and admits missing ids.
    Admit(u32),
    /// A repeated training look-up: changes nothing. An id that is admitted reads as its new row.
    Repeat(u32),
    /// Evaluation: changes nothing. A missing id reads as zeros.
    Read(u32),
}

impl LookupEffect {
    fn step(self) -> u32 {
        let (Self::Admit(step) | Self::Repeat(step) | Self::Read(step)) = self;
        step
    }
}

/// A look-up whose request was checked.
pub(crate) struct CheckedLookup<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) run: &'a ActiveRun,
    pub(crate) level: InstructionSet,
    pub(crate) effect: LookupEffect,
    pub(crate) tables: &'a [TableIds<'a>],
    /// The slots that the first look-up of the token found, if this one repeats it and they are cached.
    pub(crate) first: Option<&'a LookupSlots>,
}

impl CheckedLookup<'_> {
    /// Fill `rows`, and `found` with the slots. If memory runs out, the rows admitted so far stay for a retry.
    pub(crate) fn run(
        &self,
        shards: &[Mutex<Shard>],
        rows: &mut [&mut [f32]],
        found: &mut LookupSlots,
    ) -> Result<LookupReport, TablesError> {
        found.reset(self.tables.iter().map(|part| (part.table, part.ids.len())));
        let (step, trains) = (self.effect.step(), matches!(self.effect, LookupEffect::Admit(_)));
        let (mut report, mut asked) = (LookupReport::default(), 0);
        if trains {
            report.expired += self.sweep(shards, step);
        }
        for (number, part) in self.tables.iter().enumerate() {
            let layout = self.run.table(part.table).layout;
            let mut found = found.part(number, 0);
            let (dim, out) = (layout.dim, &mut *rows[number]);
            let Ok(()) = for_each_batch(shards, part.table, part.ids, |batch| {
                let found = &mut found;
                report.hits += match part.gathered() {
                    None => {
                        let output = InOrder { dim, out };
                        self.level.run(ReadBatch { batch, part, layout, found, output, step, trains })
                    }
                    Some(csr) => {
                        let output = BySample { dim, csr, out };
                        self.level.run(ReadBatch { batch, part, layout, found, output, step, trains })
                    }
                };
                Ok::<(), Infallible>(())
            });
            asked += part.ids.len() as u64;
        }
        if report.hits < asked {
            self.second_pass(shards, rows, found, &mut report)?;
        }
        Ok(report)
    }

    /// Remove the expired rows of the shard that is due at this step, if the request has ids there.
    fn sweep(&self, shards: &[Mutex<Shard>], step: u32) -> u64 {
        let due = step as usize % shards.len();
        let asked = self.tables.iter().any(|part| !part.ids.range(due).is_empty());
        if asked { shards[due].lock().sweep_once(step) } else { 0 }
    }

    /// Resolve every id that the first pass did not find.
    #[cold]
    fn second_pass(
        &self,
        shards: &[Mutex<Shard>],
        rows: &mut [&mut [f32]],
        found: &mut LookupSlots,
        report: &mut LookupReport,
    ) -> Result<(), TablesError> {
        for (number, part) in self.tables.iter().enumerate() {
            let dim = self.schema.tables[part.table].dim;
            let PartSlots { slots, scratch, .. } = found.part(number, 2 * dim);
            if !slots.contains(&NO_SLOT) {
                continue;
            }
            let first = self.first.and_then(|first| first.slots_of(part.table, part.ids.len()));
            let (row, scratch) = scratch.split_at_mut(dim);
            let out = &mut *rows[number];
            for_each_batch(shards, part.table, part.ids, |batch| {
                for (shard, at) in ShardBatch::walk(batch.ranges) {
                    if slots[at] == NO_SLOT {
                        let missing = Missing {
                            table: part.table,
                            id: part.ids.ids()[at],
                            admitted: first.map(|slots| slots[at] != NO_SLOT),
                        };
                        let shard = &mut batch.shards[shard];
                        slots[at] = self.resolve_missing(shard, &missing, row, scratch, report)?;
                        match part.gathered() {
                            None => InOrder { dim, out }.write::<Portable>(at, F32Row(row)),
                            Some(csr) => BySample { dim, csr, out }.write::<Portable>(at, F32Row(row)),
                        }
                    }
                }
                Ok::<(), TablesError>(())
            })?;
        }
        Ok(())
    }

    /// Read an id without a row into `out`, after inserting its row if it is admitted. Returns its slot.
    fn resolve_missing(
        &self,
        shard: &mut Shard,
        missing: &Missing,
        out: &mut [f32],
        scratch: &mut [f32],
        report: &mut LookupReport,
    ) -> Result<u32, TablesError> {
        let Missing { table, id, .. } = *missing;
        if let LookupEffect::Read(_) = self.effect {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        let (step, run) = (self.effect.step(), self.run.table(table));
        let trains = matches!(self.effect, LookupEffect::Admit(_));
        let slot = shard.tables[table].find::<Portable>(id);
        if slot != NO_SLOT && shard.tables[table].is_alive(slot, run.layout.oldest_alive(step)) {
            // Another request inserted it between the passes, or this one names it twice.
            run.layout.read::<Portable>(shard.tables[table].row(slot), out);
            if trains {
                shard.tables[table].touch(slot, step);
            }
            report.hits += 1;
            return Ok(slot);
        }
        if slot != NO_SLOT && trains {
            shard.remove(table, id);
            report.expired += 1;
        }
        if !self.is_admitted(shard, missing)? {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        run.initial_weights(id, out, scratch);
        if !trains {
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        let inserted = shard.insert(table, id, step, |row| run.write_initial(row, out));
        let (slot, left) = inserted.map_err(|error| no_memory(&self.schema.tables[table].name, error))?;
        report.inserted += 1;
        report.evicted += left.evicted;
        report.expired += left.expired;
        Ok(slot)
    }

    /// Whether a missing id gets a row at this step. The first look-up of a token counts for its `min_count`.
    fn is_admitted(&self, shard: &mut Shard, missing: &Missing) -> Result<bool, TablesError> {
        let Missing { table, id, admitted } = *missing;
        let step = self.effect.step();
        if let LookupEffect::Admit(_) = self.effect {
            let enough = shard.count(table, id, self.run.table(table).admission.min_count);
            let enough = enough.map_err(|error| no_memory(&self.schema.tables[table].name, error))?;
            return Ok(enough && self.run.draws_admission(table, id, step));
        }
        let drawn = || !shard.has_count(table, id) && self.run.draws_admission(table, id, step);
        Ok(admitted.unwrap_or_else(drawn))
    }
}

/// An id without a row.
struct Missing {
    table: usize,
    id: Id,
    /// Whether the first look-up of the token inserted it, if that is cached.
    admitted: Option<bool>,
}

/// The destination of one table's rows.
trait Output {
    /// Write the row of the id at position `at` wherever it is used.
    fn write<L: Lanes>(&mut self, at: usize, row: impl StoredRow);
}

/// `[ids, dim]`: one row per id.
struct InOrder<'a> {
    dim: usize,
    out: &'a mut [f32],
}

impl Output for InOrder<'_> {
    #[inline(always)]
    fn write<L: Lanes>(&mut self, at: usize, row: impl StoredRow) {
        row.write::<L>(&mut self.out[at * self.dim..][..self.dim]);
    }
}

/// `[samples, dim]`: one row per sample, that of its id.
struct BySample<'a> {
    dim: usize,
    csr: Csr<'a>,
    out: &'a mut [f32],
}

impl Output for BySample<'_> {
    #[inline(always)]
    fn write<L: Lanes>(&mut self, at: usize, row: impl StoredRow) {
        for sample in self.csr.of(at) {
            row.write::<L>(&mut self.out[*sample as usize * self.dim..][..self.dim]);
        }
    }
}

/// A row as it is stored.
trait StoredRow: Copy {
    /// Write its weights to `out`, which has `dim` floats.
    fn write<L: Lanes>(self, out: &mut [f32]);
}

/// A row that begins with weights of f32.
#[derive(Clone, Copy)]
struct F32Row<'a>(&'a [f32]);

impl StoredRow for F32Row<'_> {
    #[inline(always)]
    fn write<L: Lanes>(self, out: &mut [f32]) {
        copy(&self.0[..out.len()], out);
    }
}

/// A row of any dtype.
#[derive(Clone, Copy)]
struct AnyRow<'a>(Layout, &'a [f32]);

impl StoredRow for AnyRow<'_> {
    #[inline(always)]
    fn write<L: Lanes>(self, out: &mut [f32]) {
        self.0.read::<L>(self.1, out);
    }
}

/// The first pass over a batch: find and copy existing rows. Returns the number of ids that have one.
///
/// Compiled for each kind of output and row: a branch inside the loop costs more than a short row.
struct ReadBatch<'a, 'b, 'm, 's, O> {
    batch: ShardBatch<'b, 's>,
    part: &'a TableIds<'a>,
    layout: Layout,
    /// The slots of all ids of the table.
    found: &'a mut PartSlots<'m>,
    output: O,
    /// The step that determines whether rows are expired.
    step: u32,
    /// Whether to record the use of rows at this step.
    trains: bool,
}

impl<O: Output> SimdLoop for ReadBatch<'_, '_, '_, '_, O> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        if self.layout.dtype == Dtype::F32 { self.read::<L, true>() } else { self.read::<L, false>() }
    }
}

impl<O: Output> ReadBatch<'_, '_, '_, '_, O> {
    #[inline(always)]
    fn read<L: Lanes, const F32: bool>(self) -> u64 {
        let Self { batch, part, layout, found, mut output, step, trains } = self;
        let (number, words, oldest) = (part.table, layout.weight_words(), layout.oldest_alive(step));
        for (number, shard) in batch.numbers.iter().zip(&*batch.shards) {
            found.note(*number, shard.eviction_generation());
        }
        let slots = &mut *found.slots;
        batch.find::<L>(number, part.ids.ids(), slots);
        let prefetcher = batch.prefetcher(number, slots, trains || oldest > 0, |_| false);
        prefetcher.start(words);
        let mut hits = 0;
        for (shard, range) in batch.shards.iter_mut().zip(batch.ranges) {
            let table = &mut shard.tables[number];
            for at in range.clone() {
                prefetcher.advance(at, words);
                let slot = slots[at];
                if slot == NO_SLOT {
                    continue;
                }
                if !table.is_alive(slot, oldest) {
                    slots[at] = NO_SLOT;
                    continue;
                }
                hits += 1;
                if F32 {
                    output.write::<L>(at, F32Row(table.row(slot)));
                } else {
                    output.write::<L>(at, AnyRow(layout, table.row(slot)));
                }
                if trains {
                    table.touch(slot, step);
                }
            }
        }
        hits
    }
}
