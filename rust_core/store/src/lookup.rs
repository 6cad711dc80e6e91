//! Reading rows, and admitting those that are missing.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_types::kernels::{Uses, copy};
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Id, Schema, TablesError};

use crate::index::NO_SLOT;
use crate::memo::Memo;
use crate::run::ActiveRun;
use crate::shard::{Shard, no_memory};
use crate::simd::{Lanes, Level, Portable, Work};
use crate::span::{Span, for_each_span};

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
        let step = if let Effect::Admit(step) = self.effect { Some(step) } else { None };
        let (mut report, mut asked) = (LookupReport::default(), 0);
        for (number, part) in self.tables.iter().enumerate() {
            let dim = self.schema.tables[part.table].dim;
            let (slots, _) = memo.part_and_row(number, dim);
            let mut target = Target { dim, uses: part.uses, out: &mut *rows[number] };
            let Ok(()) = for_each_span(shards, part.ids, |span| {
                let read = ReadSpan { span, part, slots, target: &mut target, step };
                report.hits += self.level.run(read);
                Ok::<(), Infallible>(())
            });
            asked += part.ids.len() as u64;
        }
        if report.hits < asked {
            self.absent(shards, rows, memo, &mut report)?;
        }
        Ok(report)
    }

    /// The second pass: every id that the first did not find.
    #[cold]
    fn absent(
        &self,
        shards: &[Mutex<Shard>],
        rows: &mut [&mut [f32]],
        memo: &mut Memo,
        report: &mut LookupReport,
    ) -> Result<(), TablesError> {
        for (number, part) in self.tables.iter().enumerate() {
            let dim = self.schema.tables[part.table].dim;
            let (slots, row) = memo.part_and_row(number, dim);
            if !slots.contains(&NO_SLOT) {
                continue;
            }
            let mut target = Target { dim, uses: part.uses, out: &mut *rows[number] };
            for_each_span(shards, part.ids, |span| {
                for (shard, at) in Span::walk(span.ranges) {
                    if slots[at] == NO_SLOT {
                        let id = part.ids.ids()[at];
                        slots[at] = self.absent_id(&mut span.shards[shard], part.table, id, row, report)?;
                        target.write(at, row);
                    }
                }
                Ok::<(), TablesError>(())
            })?;
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

/// Where the rows of one table go.
struct Target<'a> {
    dim: usize,
    uses: Option<Uses<'a>>,
    /// `[ids, dim]`, or `[samples, dim]` where samples use the ids.
    out: &'a mut [f32],
}

impl Target<'_> {
    /// Write the row of id number `at` wherever it is wanted.
    #[inline(always)]
    fn write(&mut self, at: usize, row: &[f32]) {
        let dim = self.dim;
        match self.uses {
            None => copy(row, &mut self.out[at * dim..][..dim]),
            Some(uses) => {
                for sample in uses.of(at) {
                    copy(row, &mut self.out[*sample as usize * dim..][..dim]);
                }
            }
        }
    }
}

/// The first pass: find and copy what is there. Returns the number of ids that have a row.
struct ReadSpan<'a, 'b, 's, 't> {
    span: Span<'b, 's>,
    part: &'a TableIds<'a>,
    /// Of all the table's ids.
    slots: &'a mut [u32],
    target: &'a mut Target<'t>,
    /// Recency to note.
    step: Option<u32>,
}

impl Work for ReadSpan<'_, '_, '_, '_> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        let Self { span, part, slots, target, step } = self;
        let number = part.table;
        span.find::<L>(number, part.ids.ids(), slots);
        let ahead = span.addresses(number, slots, step.is_some());
        ahead.start(target.dim);
        let mut hits = 0;
        for (shard, range) in span.shards.iter_mut().zip(span.ranges) {
            let table = &mut shard.tables[number];
            for at in range.clone() {
                ahead.fetch(at, target.dim);
                let slot = slots[at];
                if slot != NO_SLOT {
                    hits += 1;
                    target.write(at, &table.row(slot)[..target.dim]);
                    if let Some(step) = step {
                        table.touch(slot, step);
                    }
                }
            }
        }
        hits
    }
}
