//! Reading rows, and admitting those that are missing.

use parking_lot::{Mutex, MutexGuard};
use persia_types::id::hash_id;
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Id, Schema, ShardedIds, TablesError};

use crate::index::NO_SLOT;
use crate::memo::Memo;
use crate::run::ActiveRun;
use crate::shard::{Shard, no_memory};
use crate::simd::{LANES, Lanes, Level, Portable, Work, prefetch};
use crate::span::{Piece, blocks, for_each_span};

/// What a look-up may change, and how it reads what is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The first training look-up of a token, at this step: recency is noted, missing ids are admitted.
    Admit(u32),
    /// A repeated one: changes nothing; a missing id reads as the row it would be given, if it is admitted.
    Repeat(u32),
    /// Evaluation: changes nothing; a missing id reads as zeros.
    Read,
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
        let step = if let Effect::Admit(step) = self.effect { Some(step) } else { None };
        let mut report = LookupReport::default();
        for_each_span(shards, &parts, |locked, pieces| {
            let mut hits = 0;
            for block in blocks(pieces) {
                let tables = self.tables;
                hits += self.level.run(ReadBlock { locked, block, tables, rows, memo, step });
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
        let (Effect::Admit(step) | Effect::Repeat(step)) = self.effect else {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        };
        // An id that stands in the request twice got its row the first time.
        let slot = shard.tables[table].find::<Portable>(id);
        if slot != NO_SLOT {
            out.copy_from_slice(&shard.tables[table].row(slot)[..out.len()]);
            report.hits += 1;
            return Ok(slot);
        }
        if !self.run.admits(id, step) {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        self.run.write_initial(table, id, out);
        if matches!(self.effect, Effect::Repeat(_)) {
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        let fill = |row: &mut [f32]| {
            let (weights, state) = row.split_at_mut(out.len());
            weights.copy_from_slice(out);
            self.run.write_initial_state(state);
        };
        let inserted = shard.insert(table, id, step, fill);
        let (slot, evicted) = inserted.map_err(|error| no_memory(&self.schema.tables[table].name, error))?;
        report.inserted += 1;
        report.evicted += evicted;
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
    /// Recency to note.
    step: Option<u32>,
}

impl Work for ReadBlock<'_, '_, '_> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        let Self { locked, block, tables, rows, memo, step } = self;
        for piece in block {
            let index = &locked[piece.shard].tables[piece.table].index;
            for id in &tables[piece.part].ids.ids()[piece.range.clone()] {
                prefetch(index.buckets(), index.home(hash_id(*id)), 1);
            }
        }
        for piece in block {
            let table = &locked[piece.shard].tables[piece.table];
            let (dim, stride) = (table.layout().dim, table.layout().stride());
            let ids = &tables[piece.part].ids.ids()[piece.range.clone()];
            let slots = &mut memo.part_mut(piece.part)[piece.range.clone()];
            for (slot, id) in slots.iter_mut().zip(ids) {
                *slot = table.find::<L>(*id);
                if *slot != NO_SLOT {
                    prefetch(table.rows(), *slot as usize * stride, dim);
                    if step.is_some() {
                        prefetch(table.meta(), *slot as usize, 1);
                    }
                }
            }
        }
        let mut hits = 0;
        for piece in block {
            let table = &mut locked[piece.shard].tables[piece.table];
            let dim = table.layout().dim;
            let slots = &memo.part_mut(piece.part)[piece.range.clone()];
            let out = &mut rows[piece.part][piece.range.start * dim..piece.range.end * dim];
            for (slot, out) in slots.iter().zip(out.chunks_exact_mut(dim)) {
                if *slot != NO_SLOT {
                    hits += 1;
                    copy(&table.row(*slot)[..dim], out);
                    if let Some(step) = step {
                        table.touch(*slot, step);
                    }
                }
            }
        }
        hits
    }
}

/// Copy a row of any length in blocks that become single moves; a call to `memcpy` costs more than a short row.
#[inline(always)]
fn copy(from: &[f32], to: &mut [f32]) {
    let (blocks, rest) = from.as_chunks::<LANES>();
    let (out_blocks, out_rest) = to.as_chunks_mut::<LANES>();
    for (out, block) in out_blocks.iter_mut().zip(blocks) {
        *out = *block;
    }
    for (out, value) in out_rest.iter_mut().zip(rest) {
        *out = *value;
    }
}
