//! [`CheckedPush`]: admits ids and applies gradients. Before that, `reserve.rs` reserves memory for the
//! missing rows.

use std::convert::Infallible;
use std::ops::Range;

use parking_lot::Mutex;
use persia_kernels::Gradients;
use persia_types::tables::{PushReport, TableGradients};
use persia_types::{Dtype, Id, Schema, TablesError};

use crate::math::optimizer::{RowRule, Rule, is_within_limit};
use crate::math::random::{Rounder, RowDraws};
use crate::request::reserve::part_of;
use crate::request::row_index_cache::{LookupRows, TableRows};
use crate::request::shard_batch::{BATCH_IDS, ShardBatch, for_each_batch, positions};
use crate::request::threads::RequestThreads;
use crate::run::ActiveRun;
use crate::shard::{Layout, NO_ROW, Shard, ShardTable, no_memory};
use crate::simd::{InstructionSet, Lanes, SimdLoop};

/// A push whose request has been checked.
pub(crate) struct CheckedPush<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) run: &'a ActiveRun,
    pub(crate) level: InstructionSet,
    pub(crate) step: u32,
    pub(crate) tables: &'a [TableGradients<'a>],
    /// One update for each of `tables`.
    pub(crate) updates: Vec<TableUpdate>,
}

/// The update of one table's rows by one push.
pub(crate) struct TableUpdate {
    rule: Rule,
    rounder: Option<Rounder>,
    layout: Layout,
}

impl TableUpdate {
    /// The update of `table`; None if the table has no optimizer.
    pub(crate) fn new(run: &ActiveRun, table: usize, lr_factor: f32, step: u32, rank: u32) -> Option<Self> {
        let table = run.table(table);
        let rule = Rule::new(table.optimizer.as_ref()?, lr_factor, run.weight_bound, step);
        let rounder = table.rounder.map(|rounder| rounder.of_rank(rank));
        Some(Self { rule, rounder, layout: table.layout })
    }
}

/// The outcome of one pass over one table of a push, in some shards.
#[derive(Default)]
struct Outcome {
    report: PushReport,
    /// The error of the first row for which memory was missing.
    failed: Option<TablesError>,
}

/// The part of a push that a pass covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// The ids that have a row.
    Existing,
    /// The other ids. They are admitted after all existing rows of the request are updated, so that the existing rows
    /// are not the first to be evicted.
    Missing,
}

/// The passes, in their order. A shard's passes do not wait for other shards, because rows are evicted by shard.
const PASSES: [Pass; 2] = [Pass::Existing, Pass::Missing];

impl CheckedPush<'_> {
    /// Apply the push, after [`Self::reserve`].
    ///
    /// # Errors
    /// `OutOfMemory` if an admitted id got no row because another push took the memory. The rest of the push was
    /// applied, so the push must not be repeated. With a log, pushes are applied one after another, so this error
    /// does not occur.
    pub(crate) fn apply(
        &self,
        shards: &[Mutex<Shard>],
        threads: &RequestThreads,
        found: &LookupRows,
    ) -> Result<PushReport, TablesError> {
        let rows_expired = self.sweep(shards);
        let of_parts = threads.map(self.asked(), |within| self.apply_in(shards, &within, found));
        let mut sum = PushReport { rows_pushed: self.asked() as u64, rows_expired, ..PushReport::default() };
        let mut failed = None;
        // Add the outcomes pass by pass and table by table, so that `first_nonfinite` of the report is the
        // same for every number of parts.
        let mut of_parts: Vec<_> = of_parts.into_iter().map(Vec::into_iter).collect();
        for _ in 0..PASSES.len() * self.tables.len() {
            for outcome in of_parts.iter_mut().filter_map(Iterator::next) {
                sum += outcome.report;
                failed = failed.or(outcome.failed);
            }
        }
        failed.map_or(Ok(sum), Err)
    }

    /// The number of ids of the push.
    pub(super) fn asked(&self) -> usize {
        self.tables.iter().map(|part| part.ids.len()).sum()
    }

    /// Apply the push in the shards `within`. Returns an outcome for each pass and, within a pass, for each table.
    fn apply_in(&self, shards: &[Mutex<Shard>], within: &Range<usize>, found: &LookupRows) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(PASSES.len() * self.tables.len());
        let dim = self.updates.iter().map(|update| update.layout.dim).max().unwrap_or_default();
        let mut scratch = vec![0.0; 2 * dim];
        for pass in PASSES {
            for (index, update) in self.updates.iter().enumerate() {
                let part = &self.tables[index];
                let found = found.part(part_of(found, part).unwrap_or(index));
                let scratch = &mut scratch[..2 * update.layout.dim];
                let mut outcome = Outcome::default();
                if pass == Pass::Existing || found.missing(positions(part.ids, within)) > 0 {
                    let outcome = &mut outcome;
                    let part = PartPush { push: self, index, within, found, scratch, outcome };
                    match update.rule {
                        Rule::Sgd(rule) => part.apply(shards, rule, pass),
                        Rule::Momentum(rule) => part.apply(shards, rule, pass),
                        Rule::Adagrad(rule) => part.apply(shards, rule, pass),
                        Rule::RowAdagrad(rule) => part.apply(shards, rule, pass),
                        Rule::Adam(rule) => part.apply(shards, rule, pass),
                    }
                }
                outcomes.push(outcome);
            }
        }
        outcomes
    }

    /// Remove the expired rows of the shard whose sweep is due at this step, if the request has ids in that
    /// shard. Returns their number.
    fn sweep(&self, shards: &[Mutex<Shard>]) -> u64 {
        let due = self.step as usize % shards.len();
        let asked = self.tables.iter().any(|part| !part.ids.range(due).is_empty());
        if asked { shards[due].lock().sweep_once(self.step) } else { 0 }
    }

    /// Insert the row of an id that the first pass did not find, if the id is admitted and still has no row.
    /// Returns the row index; None if the id is not admitted. `row_index` is the current row index of the id,
    /// or [`NO_ROW`]. `scratch` has `2 * dim` floats.
    fn admit(
        &self,
        shard: &mut Shard,
        table: usize,
        id: Id,
        row_index: u32,
        scratch: &mut [f32],
        report: &mut PushReport,
    ) -> Result<Option<u32>, TablesError> {
        let (run, step) = (self.run.table(table), self.step);
        if row_index != NO_ROW {
            if shard.tables[table].is_alive(row_index, run.layout.oldest_alive(step)) {
                return Ok(Some(row_index)); // another request inserted it between the passes
            }
            shard.remove_expired(table, id);
            report.rows_expired += 1;
        }
        let no_memory = |error| no_memory(&self.schema.tables[table].name, error);
        let enough = shard.count(table, id, run.admission.min_count).map_err(no_memory)?;
        if !enough || !self.run.draws_admission(table, id, step) {
            return Ok(None);
        }
        let (weights, scratch) = scratch.split_at_mut(run.layout.dim);
        run.initial_weights(id, weights, scratch);
        let (row_index, left) =
            shard.insert(table, id, step, |row| run.write_initial(row, weights)).map_err(no_memory)?;
        report.rows_inserted += 1;
        report.rows_evicted += left.evicted;
        report.rows_expired += left.expired;
        Ok(Some(row_index))
    }
}

/// One part of a push.
struct PartPush<'a> {
    push: &'a CheckedPush<'a>,
    /// The index among the tables of the push.
    index: usize,
    /// The shards in which it is applied.
    within: &'a Range<usize>,
    /// The row indices of all ids of the part. After the first pass, ids without a row have [`NO_ROW`].
    found: TableRows<'a>,
    /// Memory for a gradient and for the f32 weights of a 16-bit row: `2 * dim` floats.
    scratch: &'a mut [f32],
    outcome: &'a mut Outcome,
}

impl PartPush<'_> {
    fn apply<R: RowRule>(mut self, shards: &[Mutex<Shard>], rule: R, pass: Pass) {
        let push = self.push;
        let TableGradients { table, ids, .. } = &push.tables[self.index];
        let Ok(()) = for_each_batch(shards, self.within.clone(), *table, ids, |batch| {
            let part = &mut self;
            match (pass, rule.decay() == 0.0) {
                (Pass::Existing, true) => push.level.run(ApplyBatch::<R, false> { batch, part, rule }),
                (Pass::Existing, false) => push.level.run(ApplyBatch::<R, true> { batch, part, rule }),
                (Pass::Missing, true) => push.level.run(AdmitBatch::<R, false> { batch, part, rule }),
                (Pass::Missing, false) => push.level.run(AdmitBatch::<R, true> { batch, part, rule }),
            }
            Ok::<(), Infallible>(())
        });
    }
}

/// Applies the gradients of one batch to existing rows. As in a look-up, each loop prefetches what the next one
/// needs.
///
/// `DECAYS` is true if there is weight decay. It is a constant parameter because a test in the loop would
/// slow down updates without weight decay by up to a fifth.
struct ApplyBatch<'a, 'b, 's, 'p, R, const DECAYS: bool> {
    batch: ShardBatch<'b, 's>,
    part: &'a mut PartPush<'p>,
    rule: R,
}

impl<R: RowRule, const DECAYS: bool> SimdLoop for ApplyBatch<'_, '_, '_, '_, R, DECAYS> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { batch, part, rule } = self;
        let PartPush { push, index, found, scratch, outcome, .. } = part;
        let (push, index, found, report) = (*push, *index, *found, &mut outcome.report);
        let (part, update) = (&push.tables[index], &push.updates[index]);
        let (ids, number) = (part.ids.ids(), part.table);
        let (stride, oldest) = (update.layout.stride(), update.layout.oldest_alive(push.step));
        // If rows have left the shard since the row indices were found, the indices must be checked.
        let is_stale =
            |shard: usize| found.is_stale(batch.numbers[shard], batch.shards[shard].eviction_count());
        let rows = batch.rows(number, found, stride, true, is_stale);
        let stale: [bool; BATCH_IDS] =
            std::array::from_fn(|shard| shard < batch.shards.len() && is_stale(shard));
        rows.start();
        for ((shard, range), stale) in batch.shards.iter_mut().zip(batch.ranges).zip(stale) {
            let table = &mut shard.tables[number];
            for at in range.clone() {
                rows.advance(at);
                if let Gradients::Samples(samples) = &part.gradients {
                    samples.fetch_ahead(at);
                }
                let id = ids[at];
                let mut row_index = found.get(at);
                // An id that had no row at the look-up may have one by now.
                if row_index == NO_ROW || stale && !table.holds(row_index, id) {
                    row_index = table.find::<L>(id);
                }
                if row_index == NO_ROW || !table.is_alive(row_index, oldest) {
                    found.set(at, NO_ROW);
                    continue;
                }
                found.set(at, row_index);
                let row = RowPush { table, row_index, at, part, update, step: push.step };
                row.apply::<L, R, DECAYS>(rule, scratch, report);
            }
        }
    }
}

/// Admits the ids of one batch that have no row, and applies their gradients.
struct AdmitBatch<'a, 'b, 's, 'p, R, const DECAYS: bool> {
    batch: ShardBatch<'b, 's>,
    part: &'a mut PartPush<'p>,
    rule: R,
}

impl<R: RowRule, const DECAYS: bool> SimdLoop for AdmitBatch<'_, '_, '_, '_, R, DECAYS> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { batch, part, rule } = self;
        let PartPush { push, index, found, scratch, outcome, .. } = part;
        let (push, Outcome { report, failed }) = (*push, &mut **outcome);
        let (part, update) = (&push.tables[*index], &push.updates[*index]);
        let (number, ids, found) = (part.table, part.ids.ids(), *found);
        let buckets = batch.buckets(number, ids, |at| found.get(at) == NO_ROW);
        buckets.start();
        for (shard, at) in ShardBatch::walk(batch.ranges) {
            buckets.advance(at);
            if found.get(at) != NO_ROW {
                continue;
            }
            let (shard, id) = (&mut *batch.shards[shard], ids[at]);
            let row_index = shard.tables[number].find::<L>(id);
            match push.admit(shard, number, id, row_index, scratch, report) {
                Ok(Some(row_index)) => {
                    let table = &mut shard.tables[number];
                    let row = RowPush { table, row_index, at, part, update, step: push.step };
                    row.apply::<L, R, DECAYS>(rule, scratch, report);
                }
                Ok(None) => report.rows_missing += 1,
                Err(error) => {
                    report.rows_missing += 1;
                    failed.get_or_insert(error);
                }
            }
        }
    }
}

/// The update of one row. Pushes change existing rows only through this type.
struct RowPush<'a> {
    table: &'a mut ShardTable,
    row_index: u32,
    /// The position of the row's id in the part.
    at: usize,
    part: &'a TableGradients<'a>,
    update: &'a TableUpdate,
    step: u32,
}

impl RowPush<'_> {
    /// Record the use of the row, and apply its gradient if `is_within_limit` accepts it. `scratch` has `2 * dim`
    /// floats.
    #[inline(always)]
    fn apply<L: Lanes, R: RowRule, const DECAYS: bool>(
        self,
        rule: R,
        scratch: &mut [f32],
        report: &mut PushReport,
    ) {
        let Self { table, row_index, at, part, update, step } = self;
        let TableUpdate { rounder, layout, .. } = update;
        let (dim, id) = (layout.dim, part.ids.ids()[at]);
        let (sum, wide) = scratch.split_at_mut(dim);
        table.touch(row_index, step);
        let gradient: &[f32] = match &part.gradients {
            Gradients::Rows(rows) => &rows[at * dim..][..dim],
            Gradients::Samples(samples) => {
                samples.write(at, sum);
                sum
            }
        };
        if !is_within_limit::<L>(gradient) {
            report.add_nonfinite(part.table, id);
            return;
        }
        if table.has_snapshot() {
            table.preserve(row_index);
        }
        let row = table.row_mut(row_index);
        let updated = if layout.dtype == Dtype::F32 {
            let (weights, state) = row.split_at_mut(dim);
            update_floats::<L, R, DECAYS>(rule, weights, state, gradient)
        } else {
            let draws = rounder.map(|rounder| rounder.row(id, step));
            update_halves::<L, R, DECAYS>(rule, *layout, row, wide, gradient, draws)
        };
        if updated {
            report.rows_applied += 1;
        } else {
            report.add_nonfinite(part.table, id);
        }
    }
}

/// Update a row, unless the weight decay of a weight reaches `MAX_GRADIENT`. Returns whether the row was
/// updated.
#[inline(always)]
fn update_floats<L: Lanes, R: RowRule, const DECAYS: bool>(
    rule: R,
    weights: &mut [f32],
    state: &mut [f32],
    gradient: &[f32],
) -> bool {
    let updates = !DECAYS || rule.decays_within_limit(weights);
    if updates {
        rule.update_row::<L>(weights, state, gradient);
    }
    updates
}

/// Like [`update_floats`], for a row with 16-bit weights. The update is made to an f32 copy of the weights.
#[inline(always)]
fn update_halves<L: Lanes, R: RowRule, const DECAYS: bool>(
    rule: R,
    layout: Layout,
    row: &mut [f32],
    wide: &mut [f32],
    gradient: &[f32],
    draws: Option<RowDraws>,
) -> bool {
    layout.read::<L>(row, wide);
    let updated = update_floats::<L, R, DECAYS>(rule, wide, &mut row[layout.weight_words()..], gradient);
    if updated {
        layout.write::<L>(row, wide, draws);
    }
    updated
}
