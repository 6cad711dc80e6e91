//! [`CheckedLookup`]: reads rows, and changes nothing.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_kernels::{Csr, copy};
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Dtype, Id, Schema};

use crate::request::row_index_cache::{LookupRows, PartRows};
use crate::request::shard_batch::{ShardBatch, for_each_batch};
use crate::run::ActiveRun;
use crate::shard::{Layout, NO_ROW, Shard};
use crate::simd::{InstructionSet, Lanes, Portable, SimdLoop};

/// A look-up whose request has been checked.
pub(crate) struct CheckedLookup<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) run: &'a ActiveRun,
    pub(crate) level: InstructionSet,
    /// The step that determines whether rows are expired.
    pub(crate) step: u32,
    /// Whether a missing id that a push of this step would admit reads as its new row. Otherwise it reads as zeros.
    pub(crate) trains: bool,
    pub(crate) tables: &'a [TableIds<'a>],
}

impl CheckedLookup<'_> {
    /// Write the rows to `rows`, and their row indices to `found`. Returns a report for each table of the request.
    pub(crate) fn run(
        &self,
        shards: &[Mutex<Shard>],
        rows: &mut [&mut [f32]],
        found: &mut LookupRows,
    ) -> Vec<LookupReport> {
        found.reset(self.step, self.tables.iter().map(|part| (part.table, part.ids.len())));
        let (step, mut asked, mut all_hits) = (self.step, 0, 0);
        let mut reports = vec![LookupReport::default(); self.tables.len()];
        for (number, part) in self.tables.iter().enumerate() {
            let layout = self.run.table(part.table).layout;
            let mut found = found.part(number, 0);
            let (dim, out) = (layout.dim, &mut *rows[number]);
            let hits = &mut reports[number].hits;
            let Ok(()) = for_each_batch(shards, part.table, part.ids, |batch| {
                let found = &mut found;
                *hits += match part.gathered() {
                    None => {
                        let output = InOrder { dim, out };
                        self.level.run(ReadBatch { batch, part, layout, found, output, step })
                    }
                    Some(csr) => {
                        let output = BySample { dim, csr, out };
                        self.level.run(ReadBatch { batch, part, layout, found, output, step })
                    }
                };
                Ok::<(), Infallible>(())
            });
            asked += part.ids.len() as u64;
            all_hits += *hits;
        }
        if all_hits < asked {
            self.second_pass(shards, rows, found, &mut reports);
        }
        reports
    }

    /// Read every id in which the first pass found no row.
    #[cold]
    fn second_pass(
        &self,
        shards: &[Mutex<Shard>],
        rows: &mut [&mut [f32]],
        found: &mut LookupRows,
        reports: &mut [LookupReport],
    ) {
        for (number, part) in self.tables.iter().enumerate() {
            let dim = self.schema.tables[part.table].dim;
            let PartRows { row_indices, scratch, .. } = found.part(number, 2 * dim);
            if !row_indices.contains(&NO_ROW) {
                continue;
            }
            let (row, scratch) = scratch.split_at_mut(dim);
            let (out, report) = (&mut *rows[number], &mut reports[number]);
            let Ok(()) = for_each_batch(shards, part.table, part.ids, |batch| {
                for (shard, at) in ShardBatch::walk(batch.ranges) {
                    if row_indices[at] == NO_ROW {
                        let id = part.ids.ids()[at];
                        self.read_missing(&batch.shards[shard], part.table, id, row, scratch, report);
                        match part.gathered() {
                            None => InOrder { dim, out }.write::<Portable>(at, F32Row(row)),
                            Some(csr) => BySample { dim, csr, out }.write::<Portable>(at, F32Row(row)),
                        }
                    }
                }
                Ok::<(), Infallible>(())
            });
        }
    }

    /// Read an id without a row into `out`: its initial weights if a push of this step would admit it,
    /// otherwise zeros.
    fn read_missing(
        &self,
        shard: &Shard,
        table: usize,
        id: Id,
        out: &mut [f32],
        scratch: &mut [f32],
        report: &mut LookupReport,
    ) {
        let run = self.run.table(table);
        if self.trains
            && shard.would_count(table, id) >= run.admission.min_count
            && self.run.draws_admission(table, id, self.step)
        {
            run.initial_weights(id, out, scratch);
            report.initial += 1;
        } else {
            out.fill(0.0);
            report.missing += 1;
        }
    }
}

/// The destination of the rows of one table.
trait Output {
    /// Write the row of the id at position `at` to every position that uses it.
    fn write<L: Lanes>(&mut self, at: usize, row: impl StoredRow);
}

/// A destination of the shape `[ids, dim]`: one row per id.
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

/// A destination of the shape `[samples, dim]`: for each sample, the row of its id.
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

/// A row in its storage format.
trait StoredRow: Copy {
    /// Write its weights to `out`, which has `dim` floats.
    fn write<L: Lanes>(self, out: &mut [f32]);
}

/// A row whose weights are f32.
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

/// The first pass over a batch: find and copy existing rows. Returns the number of ids that have a row.
///
/// It is compiled for each type of output and row, because a branch in the loop costs more than copying a short
/// row.
struct ReadBatch<'a, 'b, 'm, 's, O> {
    batch: ShardBatch<'b, 's>,
    part: &'a TableIds<'a>,
    layout: Layout,
    /// The row indices of all ids of the table.
    found: &'a mut PartRows<'m>,
    output: O,
    /// The step that determines whether rows are expired.
    step: u32,
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
        let Self { batch, part, layout, found, mut output, step } = self;
        let (number, words, oldest) = (part.table, layout.weight_words(), layout.oldest_alive(step));
        found.find::<L>(&batch, number, part.ids.ids());
        let row_indices = &mut *found.row_indices;
        let prefetcher = batch.prefetcher(number, row_indices, oldest > 0, |_| false);
        prefetcher.start(words);
        let mut hits = 0;
        for (shard, range) in batch.shards.iter().zip(batch.ranges) {
            let table = &shard.tables[number];
            for at in range.clone() {
                prefetcher.advance(at, words);
                let row_index = row_indices[at];
                if row_index == NO_ROW {
                    continue;
                }
                if !table.is_alive(row_index, oldest) {
                    row_indices[at] = NO_ROW;
                    continue;
                }
                hits += 1;
                if F32 {
                    output.write::<L>(at, F32Row(table.row(row_index)));
                } else {
                    output.write::<L>(at, AnyRow(layout, table.row(row_index)));
                }
            }
        }
        hits
    }
}
