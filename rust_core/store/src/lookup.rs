//! Reading rows, and admitting those that are missing.

use parking_lot::{Mutex, MutexGuard};
use persia_types::id::hash_id;
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Id, Schema, ShardedIds, TablesError};

use crate::index::NO_SLOT;
use crate::memo::Memo;
use crate::run::ActiveRun;
use crate::shard::{Shard, no_memory};
use crate::simd::{Lanes, Level, Portable, Work, prefetch};
use crate::span::{Piece, blocks, for_each_span};

/// What a look-up may change, and how it reads what is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The first training look-up of a token, at this step: recency is noted, missing ids are admitted.
    Admit(u32),
    /// A repeated one: changes nothing; a missing id reads as the row it would be given, if it is admitted.
    Repeat(u32),
    /// Evaluation at this step: changes nothing; a missing id reads as zeros.
    Read(u32),
}

impl Effect {
    fn step(self) -> u32 {
        let (Self::Admit(step) | Self::Repeat(step) | Self::Read(step)) = self;
        step
    }
}

/// One look-up whose request was checked.
pub(crate) struct Lookup<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) run: &'a ActiveRun,
    pub(crate) level: Level,
    pub(crate) effect: Effect,
    pub(crate) tables: &'a [TableIds<'a>],
}

impl Lookup<'_> {
    /// Fill `rows`, and `memo` with the slots found. Should memory run out, rows admitted so far stay; a retry
    /// finds them.
    pub(crate) fn run(
        &self,
        shards: &[Mutex<Shard>],
        rows: &mut [&mut [f32]],
        memo: &mut Memo,
    ) -> Result<LookupReport, TablesError> {
        memo.reset(self.tables.iter().map(|part| (part.table, part.ids.len())));
        let parts: Vec<(usize, &ShardedIds)> =
            self.tables.iter().map(|part| (part.table, part.ids)).collect();
        let (step, trains) = (self.effect.step(), matches!(self.effect, Effect::Admit(_)));
        let mut report = LookupReport::default();
        if trains {
            report.expired += self.sweep(shards, step);
        }
        for_each_span(shards, &parts, |locked, pieces| {
            let mut hits = 0;
            for block in blocks(pieces) {
                let tables = self.tables;
                hits += self.level.run(ReadBlock { locked, block, tables, rows, memo, step, trains });
            }
            let asked: usize = pieces.iter().map(|piece| piece.range.len()).sum();
            report.hits += hits;
            if hits < asked as u64 {
                return self.absent(locked, pieces, rows, memo, &mut report);
            }
            Ok(())
        })?;
        Ok(report)
    }

    /// Free the memory of expired rows in the shard that is due at this step, if the request has ids there.
    fn sweep(&self, shards: &[Mutex<Shard>], step: u32) -> u64 {
        let due = step as usize % shards.len();
        let asked = self.tables.iter().any(|part| !part.ids.range(due).is_empty());
        if asked { shards[due].lock().sweep(step) } else { 0 }
    }

    /// The second pass over some shards: every id that the first did not find.
    #[cold]
    fn absent(
        &self,
        locked: &mut [MutexGuard<'_, Shard>],
        pieces: &[Piece],
        rows: &mut [&mut [f32]],
        memo: &mut Memo,
        report: &mut LookupReport,
    ) -> Result<(), TablesError> {
        for piece in pieces {
            let dim = self.schema.tables[piece.table].dim;
            let ids = self.tables[piece.part].ids.ids();
            let slots = memo.part_mut(piece.part);
            for at in piece.range.clone() {
                if slots[at] != NO_SLOT {
                    continue;
                }
                let out = &mut rows[piece.part][at * dim..][..dim];
                let shard = &mut *locked[piece.shard];
                slots[at] = self.absent_id(shard, piece.table, ids[at], out, report)?;
            }
        }
        Ok(())
    }

    fn absent_id(
        &self,
        shard: &mut Shard,
        table: usize,
        id: Id,
        out: &mut [f32],
        report: &mut LookupReport,
    ) -> Result<u32, TablesError> {
        if let Effect::Read(_) = self.effect {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        let (step, run) = (self.effect.step(), self.run.table(table));
        let out_of_memory = |error| no_memory(&self.schema.tables[table].name, error);
        let slot = shard.tables[table].find::<Portable>(id);
        if slot != NO_SLOT && shard.tables[table].is_alive(slot, run.layout.oldest_alive(step)) {
            // An id that stands in the request twice got its row the first time.
            run.layout.read::<Portable>(shard.tables[table].row(slot), out);
            report.hits += 1;
            return Ok(slot);
        }
        let trains = matches!(self.effect, Effect::Admit(_));
        if slot != NO_SLOT && trains {
            shard.remove(table, id);
            report.expired += 1;
        }
        let asked_enough = if trains {
            shard.count(table, id, run.admission.min_count).map_err(out_of_memory)?
        } else {
            !shard.is_waiting(table, id)
        };
        if !asked_enough || !self.run.draws_admission(table, id, step) {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        run.initial_weights(id, out);
        if !trains {
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        let inserted = shard.insert(table, id, step, |row| run.write_initial(row, out));
        let (slot, left) = inserted.map_err(out_of_memory)?;
        report.inserted += 1;
        report.evicted += left.evicted;
        report.expired += left.expired;
        Ok(slot)
    }
}

/// The first pass: find and copy what is there. Returns the number of ids that have a row.
///
/// Three loops, each of which only asks for the cache lines that the next one reads, keep as many misses in
/// flight as the processor can.
struct ReadBlock<'a, 'r, 's> {
    locked: &'a mut [MutexGuard<'s, Shard>],
    block: &'a [Piece],
    tables: &'a [TableIds<'a>],
    rows: &'a mut [&'r mut [f32]],
    memo: &'a mut Memo,
    /// Decides which rows are expired.
    step: u32,
    /// Whether to note their use at that step.
    trains: bool,
}

impl Work for ReadBlock<'_, '_, '_> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        let Self { locked, block, tables, rows, memo, step, trains } = self;
        for piece in block {
            let index = &locked[piece.shard].tables[piece.table].index;
            for id in &tables[piece.part].ids.ids()[piece.range.clone()] {
                prefetch(index.buckets(), index.home(hash_id(*id)), 1);
            }
        }
        for piece in block {
            let table = &locked[piece.shard].tables[piece.table];
            let layout = table.layout();
            let (words, stride) = (layout.weight_words(), layout.stride());
            let reads_meta = trains || layout.oldest_alive(step) > 0;
            let ids = &tables[piece.part].ids.ids()[piece.range.clone()];
            let slots = &mut memo.part_mut(piece.part)[piece.range.clone()];
            for (slot, id) in slots.iter_mut().zip(ids) {
                *slot = table.find::<L>(*id);
                if *slot != NO_SLOT {
                    prefetch(table.rows(), *slot as usize * stride, words);
                    if reads_meta {
                        prefetch(table.meta(), *slot as usize, 1);
                    }
                }
            }
        }
        let mut hits = 0;
        for piece in block {
            let table = &mut locked[piece.shard].tables[piece.table];
            let layout = table.layout();
            let (dim, oldest) = (layout.dim, layout.oldest_alive(step));
            let slots = &mut memo.part_mut(piece.part)[piece.range.clone()];
            let out = &mut rows[piece.part][piece.range.start * dim..piece.range.end * dim];
            for (slot, out) in slots.iter_mut().zip(out.chunks_exact_mut(dim)) {
                if *slot == NO_SLOT {
                    continue;
                }
                if !table.is_alive(*slot, oldest) {
                    *slot = NO_SLOT;
                    continue;
                }
                hits += 1;
                layout.read::<L>(table.row(*slot), out);
                if trains {
                    table.touch(*slot, step);
                }
            }
        }
        hits
    }
}
