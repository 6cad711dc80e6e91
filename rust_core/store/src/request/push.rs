//! [`CheckedPush`]: applies gradients. All checks were made before, so nothing here can fail.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_kernels::Gradients;
use persia_types::Dtype;
use persia_types::tables::{PushReport, TableGradients};

use crate::math::optimizer::{RowRule, Rule, is_within_limit};
use crate::math::random::{Rounder, RowDraws};
use crate::request::shard_batch::{BATCH_IDS, ShardBatch, for_each_batch};
use crate::request::slot_cache::{LookupSlots, PartSlots};
use crate::run::ActiveRun;
use crate::shard::{Layout, NO_SLOT, Shard};
use crate::simd::{InstructionSet, Lanes, SimdLoop};

/// A push whose request was checked.
pub(crate) struct CheckedPush<'a> {
    pub(crate) level: InstructionSet,
    pub(crate) step: u32,
    pub(crate) tables: &'a [TableGradients<'a>],
    /// One for each of `tables`.
    pub(crate) updates: Vec<TableUpdate>,
}

/// The update of one table's rows by one push.
pub(crate) struct TableUpdate {
    rule: Rule,
    rounder: Option<Rounder>,
    layout: Layout,
}

impl TableUpdate {
    /// None without an optimizer.
    pub(crate) fn new(run: &ActiveRun, table: usize, lr_factor: f32, step: u32, rank: u32) -> Option<Self> {
        let table = run.table(table);
        let rule = Rule::new(table.optimizer.as_ref()?, lr_factor, run.weight_bound, step);
        let rounder = table.rounder.map(|rounder| rounder.of_rank(rank));
        Some(Self { rule, rounder, layout: table.layout })
    }
}

impl CheckedPush<'_> {
    /// Apply the push. `found` has the slots of its look-up, if they are cached.
    pub(crate) fn apply(&self, shards: &[Mutex<Shard>], found: &mut Option<LookupSlots>) -> PushReport {
        // A push has the parts of its look-up: either all slots are cached or all are searched.
        let lookup_part =
            |found: &LookupSlots, part: &TableGradients<'_>| found.part_of(part.table, part.ids.len());
        let cached = found
            .as_ref()
            .is_some_and(|found| self.tables.iter().all(|part| lookup_part(found, part).is_some()));
        let found = found.get_or_insert_default();
        if !cached {
            found.reset(self.tables.iter().map(|part| (part.table, part.ids.len())));
        }
        let rows_pushed = self.tables.iter().map(|part| part.ids.len() as u64).sum();
        let mut report = PushReport { rows_pushed, ..PushReport::default() };
        for (index, update) in self.updates.iter().enumerate() {
            let lookup_part = lookup_part(found, &self.tables[index]).unwrap_or(index);
            let found = found.part(lookup_part, 2 * update.layout.dim);
            let part = PartPush { push: self, index, found, cached, report: &mut report };
            match update.rule {
                Rule::Sgd(rule) => part.apply(shards, rule),
                Rule::Momentum(rule) => part.apply(shards, rule),
                Rule::Adagrad(rule) => part.apply(shards, rule),
                Rule::RowAdagrad(rule) => part.apply(shards, rule),
                Rule::Adam(rule) => part.apply(shards, rule),
            }
        }
        report
    }
}

/// One part of a push.
struct PartPush<'a> {
    push: &'a CheckedPush<'a>,
    /// In the tables of the push.
    index: usize,
    /// Slots of all ids of the part. Its scratch is for a gradient, and for f32 weights of a row of 16 bits.
    found: PartSlots<'a>,
    /// Whether the slots are those of the look-up, and need no search.
    cached: bool,
    report: &'a mut PushReport,
}

impl PartPush<'_> {
    fn apply<R: RowRule>(mut self, shards: &[Mutex<Shard>], rule: R) {
        let push = self.push;
        let TableGradients { table, ids, .. } = &push.tables[self.index];
        let Ok(()) = for_each_batch(shards, *table, ids, |batch| {
            let part = &mut self;
            if rule.decay() == 0.0 {
                push.level.run(ApplyBatch::<R, false> { batch, part, rule });
            } else {
                push.level.run(ApplyBatch::<R, true> { batch, part, rule });
            }
            Ok::<(), Infallible>(())
        });
    }
}

/// Applies the gradients of one batch: the place where a row changes. As in a look-up, each loop prefetches for the next
/// one.
///
/// `DECAYS`: with weight decay. A test of it in the loop would cost updates without it up to a fifth.
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
        let PartPush { push, index, found, cached, report } = part;
        let (push, index, cached) = (*push, *index, *cached);
        let (part, TableUpdate { rounder, layout, .. }) = (&push.tables[index], &push.updates[index]);
        let (ids, number) = (part.ids.ids(), part.table);
        let (dim, stride, oldest) = (layout.dim, layout.stride(), layout.oldest_alive(push.step));
        if !cached {
            batch.find::<L>(number, ids, found.slots);
        }
        // Rows have left the shard since the look-up: its slots need a check.
        let is_stale = |shard: usize| {
            cached && found.is_stale(batch.numbers[shard], batch.shards[shard].eviction_generation())
        };
        let prefetcher = batch.prefetcher(number, found.slots, oldest > 0, is_stale);
        let stale: [bool; BATCH_IDS] =
            std::array::from_fn(|shard| shard < batch.shards.len() && is_stale(shard));
        let slots = &*found.slots;
        let (sum, wide) = found.scratch.split_at_mut(dim);
        prefetcher.start(stride);
        for ((shard, range), stale) in batch.shards.iter_mut().zip(batch.ranges).zip(stale) {
            let table = &mut shard.tables[number];
            for at in range.clone() {
                prefetcher.advance(at, stride);
                let gradient: &[f32] = match &part.gradients {
                    Gradients::Rows(rows) => &rows[at * dim..][..dim],
                    Gradients::Samples(samples) => {
                        samples.fetch_ahead(at);
                        samples.write(at, sum);
                        sum
                    }
                };
                if !is_within_limit::<L>(gradient) {
                    report.add_nonfinite(number, ids[at]);
                    continue;
                }
                let (slot, id) = (slots[at], ids[at]);
                // An id without a row at the look-up may have one now.
                let wrong = slot == NO_SLOT && cached || stale && !table.holds(slot, id);
                let slot = if wrong { table.find::<L>(id) } else { slot };
                // The look-up of this push has updated the recency of its rows, so none is expired.
                if slot == NO_SLOT || !table.is_alive(slot, oldest) {
                    report.rows_missing += 1;
                    continue;
                }
                if table.has_snapshot() {
                    table.preserve(slot);
                }
                let row = table.row_mut(slot);
                let updated = if layout.dtype == Dtype::F32 {
                    let (weights, state) = row.split_at_mut(dim);
                    update_floats::<L, R, DECAYS>(rule, weights, state, gradient)
                } else {
                    let draws = rounder.map(|rounder| rounder.row(id, push.step));
                    update_halves::<L, R, DECAYS>(rule, *layout, row, wide, gradient, draws)
                };
                if updated {
                    report.rows_applied += 1;
                } else {
                    report.add_nonfinite(number, id);
                }
            }
        }
    }
}

/// Update a row, unless the weight decay is beyond the limit of a gradient. Return whether it was updated.
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

/// As [`update_floats`], for a row with weights of 16 bits, on an f32 copy of them.
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
