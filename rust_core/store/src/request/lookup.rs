//! [`CheckedLookup`]: reads rows, and changes nothing.

use std::convert::Infallible;
use std::ops::Range;

use parking_lot::Mutex;
use persia_kernels::{Csr, copy};
use persia_types::tables::{LookupReport, TableIds};
use persia_types::{Dtype, Id, Schema};

use crate::request::row_index_cache::{LookupRows, TableRows};
use crate::request::shard_batch::{ShardBatch, for_each_batch, positions};
use crate::request::shared_rows::SharedRows;
use crate::request::threads::RequestThreads;
use crate::run::ActiveRun;
use crate::shard::{Layout, NO_ROW, Shard};
use crate::simd::{InstructionSet, Lanes, Portable, SimdLoop};

/// A look-up whose request has been checked.
pub(crate) struct CheckedLookup<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) run: &'a ActiveRun,
    pub(crate) level: InstructionSet,
    /// The step that determines whether rows are expired and which ids would be admitted.
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
        threads: &RequestThreads,
        rows: &mut [&mut [f32]],
        found: &mut LookupRows,
    ) -> Vec<LookupReport> {
        found.reset(self.step, self.tables.iter().map(|part| (part.table, part.ids.len())));
        let dims = self.tables.iter().map(|part| self.schema.tables[part.table].dim);
        let rows: Vec<SharedRows<'_>> =
            rows.iter_mut().zip(dims).map(|(rows, dim)| SharedRows::new(rows, dim)).collect();
        let found = &*found;
        let of_parts = threads.map(asked(self.tables), |within| {
            ShardsLookup { lookup: self, shards, within, rows: &rows, found }.run()
        });
        let mut sums = vec![LookupReport::default(); self.tables.len()];
        for reports in of_parts {
            sums.iter_mut().zip(reports).for_each(|(sum, report)| *sum += report);
        }
        sums
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

/// The number of ids of a request.
pub(crate) fn asked(tables: &[TableIds<'_>]) -> usize {
    tables.iter().map(|part| part.ids.len()).sum()
}

/// The part of a look-up in some shards.
struct ShardsLookup<'a> {
    lookup: &'a CheckedLookup<'a>,
    shards: &'a [Mutex<Shard>],
    /// The shards of this part.
    within: Range<usize>,
    /// The destination of each table's rows.
    rows: &'a [SharedRows<'a>],
    found: &'a LookupRows,
}

impl ShardsLookup<'_> {
    /// Read the rows. Returns a report for each table.
    fn run(self) -> Vec<LookupReport> {
        let mut reports = vec![LookupReport::default(); self.lookup.tables.len()];
        for (number, report) in reports.iter_mut().enumerate() {
            report.hits = self.first_pass(number);
        }
        for (number, report) in reports.iter_mut().enumerate() {
            let asked = positions(self.lookup.tables[number].ids, &self.within).len();
            if report.hits < asked as u64 {
                self.second_pass(number, report);
            }
        }
        reports
    }

    /// Read the existing rows of one table, and return their number.
    fn first_pass(&self, number: usize) -> u64 {
        let Self { lookup, rows, .. } = self;
        let part = &lookup.tables[number];
        let (layout, step) = (lookup.run.table(part.table).layout, lookup.step);
        let (found, out) = (self.found.part(number), &rows[number]);
        let mut hits = 0;
        let Ok(()) = for_each_batch(self.shards, self.within.clone(), part.table, part.ids, |batch| {
            hits += match part.gathered() {
                None => {
                    let output = InOrder { out };
                    lookup.level.run(ReadBatch { batch, part, layout, found, output, step })
                }
                Some(csr) => {
                    let output = BySample { csr, out };
                    lookup.level.run(ReadBatch { batch, part, layout, found, output, step })
                }
            };
            Ok::<(), Infallible>(())
        });
        hits
    }

    /// Read every id of one table for which the first pass found no row.
    #[cold]
    fn second_pass(&self, number: usize, report: &mut LookupReport) {
        let Self { lookup, rows, .. } = self;
        let part = &lookup.tables[number];
        let dim = lookup.schema.tables[part.table].dim;
        let (found, out) = (self.found.part(number), &rows[number]);
        let mut scratch = vec![0.0; 2 * dim];
        let (row, scratch) = scratch.split_at_mut(dim);
        let Ok(()) = for_each_batch(self.shards, self.within.clone(), part.table, part.ids, |batch| {
            for (shard, at) in ShardBatch::walk(batch.ranges) {
                if found.get(at) == NO_ROW {
                    let id = part.ids.ids()[at];
                    lookup.read_missing(&batch.shards[shard], part.table, id, row, scratch, report);
                    match part.gathered() {
                        None => InOrder { out }.write::<Portable>(at, F32Row(row)),
                        Some(csr) => BySample { csr, out }.write::<Portable>(at, F32Row(row)),
                    }
                }
            }
            Ok::<(), Infallible>(())
        });
    }
}

/// The destination of the rows of one table.
trait Output {
    /// Write the row of the id at position `at` to every position that uses it.
    fn write<L: Lanes>(&self, at: usize, row: impl StoredRow);
}

/// A destination of the shape `[ids, dim]`: one row per id.
struct InOrder<'a> {
    out: &'a SharedRows<'a>,
}

impl Output for InOrder<'_> {
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write<L: Lanes>(&self, at: usize, row: impl StoredRow) {
        // SAFETY: a position belongs to one shard, and a shard to one part of the request.
        row.write::<L>(unsafe { self.out.row(at) });
    }
}

/// A destination of the shape `[samples, dim]`, in which each sample receives the row of its id. If the
/// request is divided among threads, no sample occurs twice.
struct BySample<'a> {
    csr: Csr<'a>,
    out: &'a SharedRows<'a>,
}

impl Output for BySample<'_> {
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write<L: Lanes>(&self, at: usize, row: impl StoredRow) {
        for sample in self.csr.of(at) {
            // SAFETY: a position belongs to one shard, and a shard to one part of the request. If several
            // threads write, no sample occurs twice.
            row.write::<L>(unsafe { self.out.row(*sample as usize) });
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
struct ReadBatch<'a, 'b, 's, O> {
    batch: ShardBatch<'b, 's>,
    part: &'a TableIds<'a>,
    layout: Layout,
    /// The row indices of all ids of the table.
    found: TableRows<'a>,
    output: O,
    /// The step that determines whether rows are expired.
    step: u32,
}

impl<O: Output> SimdLoop for ReadBatch<'_, '_, '_, O> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        if self.layout.dtype == Dtype::F32 { self.read::<L, true>() } else { self.read::<L, false>() }
    }
}

impl<O: Output> ReadBatch<'_, '_, '_, O> {
    #[inline(always)]
    fn read<L: Lanes, const F32: bool>(self) -> u64 {
        let Self { batch, part, layout, found, output, step } = self;
        let (number, words, oldest) = (part.table, layout.weight_words(), layout.oldest_alive(step));
        found.find::<L>(&batch, number, part.ids.ids());
        let rows = batch.rows(number, found, words, oldest > 0, |_| false);
        rows.start();
        let mut hits = 0;
        for (shard, range) in batch.shards.iter().zip(batch.ranges) {
            let table = &shard.tables[number];
            for at in range.clone() {
                rows.advance(at);
                let row_index = found.get(at);
                if row_index == NO_ROW {
                    continue;
                }
                if !table.is_alive(row_index, oldest) {
                    found.set(at, NO_ROW);
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
