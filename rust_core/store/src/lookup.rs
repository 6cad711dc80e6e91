//! Reading rows, and admitting those that are missing.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_kernels::{Csr, copy};
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Dtype, Id, Schema, TablesError};

use crate::index::NO_SLOT;
use crate::memo::{Memo, MemoPart};
use crate::row::Layout;
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
    /// What the first look-up of the token found, if this one repeats it and that is known still.
    pub(crate) first: Option<&'a Memo>,
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
        let (step, trains) = (self.effect.step(), matches!(self.effect, Effect::Admit(_)));
        let (mut report, mut asked) = (LookupReport::default(), 0);
        if trains {
            report.expired += self.sweep(shards, step);
        }
        for (number, part) in self.tables.iter().enumerate() {
            let layout = self.run.table(part.table).layout;
            let mut found = memo.part(number, 0);
            let (dim, out) = (layout.dim, &mut *rows[number]);
            let Ok(()) = for_each_span(shards, part.table, part.ids, |span| {
                let found = &mut found;
                report.hits += match part.gathered() {
                    None => {
                        let places = InOrder { dim, out };
                        self.level.run(ReadSpan { span, part, layout, found, places, step, trains })
                    }
                    Some(csr) => {
                        let places = BySample { dim, csr, out };
                        self.level.run(ReadSpan { span, part, layout, found, places, step, trains })
                    }
                };
                Ok::<(), Infallible>(())
            });
            asked += part.ids.len() as u64;
        }
        if report.hits < asked {
            self.absent(shards, rows, memo, &mut report)?;
        }
        Ok(report)
    }

    /// Free the memory of expired rows in the shard that is due at this step, if the request has ids there.
    fn sweep(&self, shards: &[Mutex<Shard>], step: u32) -> u64 {
        let due = step as usize % shards.len();
        let asked = self.tables.iter().any(|part| !part.ids.range(due).is_empty());
        if asked { shards[due].lock().sweep_once(step) } else { 0 }
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
            let MemoPart { slots, room, .. } = memo.part(number, 2 * dim);
            if !slots.contains(&NO_SLOT) {
                continue;
            }
            let first = self.first.and_then(|memo| memo.slots_of(part.table, part.ids.len()));
            let (row, room) = room.split_at_mut(dim);
            let out = &mut *rows[number];
            for_each_span(shards, part.table, part.ids, |span| {
                for (shard, at) in Span::walk(span.ranges) {
                    if slots[at] == NO_SLOT {
                        let absent = Absent {
                            table: part.table,
                            id: part.ids.ids()[at],
                            admitted: first.map(|slots| slots[at] != NO_SLOT),
                        };
                        slots[at] = self.absent_id(&mut span.shards[shard], &absent, row, room, report)?;
                        match part.gathered() {
                            None => InOrder { dim, out }.write::<Portable>(at, Whole(row)),
                            Some(csr) => BySample { dim, csr, out }.write::<Portable>(at, Whole(row)),
                        }
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
        absent: &Absent,
        out: &mut [f32],
        room: &mut [f32],
        report: &mut LookupReport,
    ) -> Result<u32, TablesError> {
        let Absent { table, id, admitted } = *absent;
        if let Effect::Read(_) = self.effect {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        let (step, run) = (self.effect.step(), self.run.table(table));
        let out_of_memory = |error| no_memory(&self.schema.tables[table].name, error);
        let trains = matches!(self.effect, Effect::Admit(_));
        let slot = shard.tables[table].find::<Portable>(id);
        if slot != NO_SLOT && shard.tables[table].is_alive(slot, run.layout.oldest_alive(step)) {
            // Between the passes another request gave it a row, or it stands in this one twice.
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
        let comes = if trains {
            let asked_enough = shard.count(table, id, run.admission.min_count).map_err(out_of_memory)?;
            asked_enough && self.run.draws_admission(table, id, step)
        } else {
            let drawn = || !shard.is_waiting(table, id) && self.run.draws_admission(table, id, step);
            admitted.unwrap_or_else(drawn)
        };
        if !comes {
            out.fill(0.0);
            report.missing += 1;
            return Ok(NO_SLOT);
        }
        run.initial_weights(id, out, room);
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

/// An id without row.
struct Absent {
    table: usize,
    id: Id,
    /// Whether the first look-up gave it one, where this one repeats it and that is known.
    admitted: Option<bool>,
}

/// Where the rows of one table go.
trait Places {
    /// Call [`Kept::write`] for every place that wants the row of id number `at`.
    fn write<L: Lanes>(&mut self, at: usize, row: impl Kept);
}

/// `[ids, dim]`: in the order of ids.
struct InOrder<'a> {
    dim: usize,
    out: &'a mut [f32],
}

impl Places for InOrder<'_> {
    #[inline(always)]
    fn write<L: Lanes>(&mut self, at: usize, row: impl Kept) {
        row.write::<L>(&mut self.out[at * self.dim..][..self.dim]);
    }
}

/// `[samples, dim]`: to each sample that uses the id.
struct BySample<'a> {
    dim: usize,
    csr: Csr<'a>,
    out: &'a mut [f32],
}

impl Places for BySample<'_> {
    #[inline(always)]
    fn write<L: Lanes>(&mut self, at: usize, row: impl Kept) {
        for sample in self.csr.of(at) {
            row.write::<L>(&mut self.out[*sample as usize * self.dim..][..self.dim]);
        }
    }
}

/// A row as it is kept.
trait Kept: Copy {
    /// Write its weights to `out`, of `dim` floats.
    fn write<L: Lanes>(self, out: &mut [f32]);
}

/// One whose weights are f32, and come first.
#[derive(Clone, Copy)]
struct Whole<'a>(&'a [f32]);

impl Kept for Whole<'_> {
    #[inline(always)]
    fn write<L: Lanes>(self, out: &mut [f32]) {
        copy(&self.0[..out.len()], out);
    }
}

/// One of any dtype.
#[derive(Clone, Copy)]
struct Any<'a>(Layout, &'a [f32]);

impl Kept for Any<'_> {
    #[inline(always)]
    fn write<L: Lanes>(self, out: &mut [f32]) {
        self.0.read::<L>(self.1, out);
    }
}

/// The first pass: find and copy what is there. Returns the number of ids that have a row.
///
/// Compiled for each kind of place and of row: a choice inside the loop costs more than a short row.
struct ReadSpan<'a, 'b, 'm, 's, P> {
    span: Span<'b, 's>,
    part: &'a TableIds<'a>,
    layout: Layout,
    /// Of all the table's ids.
    found: &'a mut MemoPart<'m>,
    places: P,
    /// Decides which rows are expired.
    step: u32,
    /// Whether to note their use at that step.
    trains: bool,
}

impl<P: Places> Work for ReadSpan<'_, '_, '_, '_, P> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        if self.layout.dtype == Dtype::F32 { self.read::<L, true>() } else { self.read::<L, false>() }
    }
}

impl<P: Places> ReadSpan<'_, '_, '_, '_, P> {
    #[inline(always)]
    fn read<L: Lanes, const WHOLE: bool>(self) -> u64 {
        let Self { span, part, layout, found, mut places, step, trains } = self;
        let (number, words, oldest) = (part.table, layout.weight_words(), layout.oldest_alive(step));
        for (number, shard) in span.numbers.iter().zip(&*span.shards) {
            found.note(*number, shard.departures());
        }
        let slots = &mut *found.slots;
        span.find::<L>(number, part.ids.ids(), slots);
        let ahead = span.addresses(number, slots, trains || oldest > 0, |_| false);
        ahead.start(words);
        let mut hits = 0;
        for (shard, range) in span.shards.iter_mut().zip(span.ranges) {
            let table = &mut shard.tables[number];
            for at in range.clone() {
                ahead.fetch(at, words);
                let slot = slots[at];
                if slot == NO_SLOT {
                    continue;
                }
                if !table.is_alive(slot, oldest) {
                    slots[at] = NO_SLOT;
                    continue;
                }
                hits += 1;
                if WHOLE {
                    places.write::<L>(at, Whole(table.row(slot)));
                } else {
                    places.write::<L>(at, Any(layout, table.row(slot)));
                }
                if trains {
                    table.touch(slot, step);
                }
            }
        }
        hits
    }
}
