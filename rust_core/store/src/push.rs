//! Applying gradients. Everything that can fail was checked before; here nothing can.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_types::Schema;
use persia_types::kernels::Gradients;
use persia_types::tables::{PushReport, TableGradients};

use crate::index::NO_SLOT;
use crate::memo::Memo;
use crate::optimizer::{RowRule, Rule, all_finite};
use crate::shard::Shard;
use crate::simd::{Lanes, Level, Work};
use crate::span::{Span, for_each_span};

/// One push whose request was checked.
pub(crate) struct Push<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) level: Level,
    pub(crate) rule: Rule,
    pub(crate) tables: &'a [TableGradients<'a>],
}

/// What became of rows, and the first with a bad gradient as `(part, position)`.
#[derive(Default)]
struct Counts {
    applied: u64,
    missing: u64,
    nonfinite: u64,
    first_nonfinite: Option<(usize, usize)>,
}

impl Push<'_> {
    /// Apply it. `memo` holds the slots of the look-up that this answers.
    pub(crate) fn apply(&self, shards: &[Mutex<Shard>], memo: &mut Option<Memo>) -> PushReport {
        match self.rule {
            Rule::Sgd(rule) => self.apply_rule(shards, memo, rule),
            Rule::Momentum(rule) => self.apply_rule(shards, memo, rule),
            Rule::Adagrad(rule) => self.apply_rule(shards, memo, rule),
            Rule::RowAdagrad(rule) => self.apply_rule(shards, memo, rule),
            Rule::Adam(rule) => self.apply_rule(shards, memo, rule),
        }
    }

    fn apply_rule<R: RowRule>(
        &self,
        shards: &[Mutex<Shard>],
        memo: &mut Option<Memo>,
        rule: R,
    ) -> PushReport {
        // Either all parts have remembered slots or all are searched: a push is the answer to its look-up.
        let lookup_part = |memo: &Memo, part: &TableGradients<'_>| memo.part_of(part.table, part.ids.len());
        let known = memo
            .as_ref()
            .is_some_and(|memo| self.tables.iter().all(|part| lookup_part(memo, part).is_some()));
        let memo = memo.get_or_insert_default();
        if !known {
            memo.reset(self.tables.iter().map(|part| (part.table, part.ids.len())));
        }
        let mut counts = Counts::default();
        for (number, part) in self.tables.iter().enumerate() {
            let dim = self.schema.tables[part.table].dim;
            let memo_part = lookup_part(memo, part).unwrap_or(number);
            let (slots, row) = memo.part_and_row(memo_part, dim);
            let Ok(()) = for_each_span(shards, part.ids, |span| {
                let counts = &mut counts;
                self.level.run(ApplySpan { span, number, part, slots, row, known, rule, counts });
                Ok::<(), Infallible>(())
            });
        }
        self.report(&counts)
    }

    fn report(&self, counts: &Counts) -> PushReport {
        PushReport {
            rows_pushed: self.tables.iter().map(|part| part.ids.len() as u64).sum(),
            rows_applied: counts.applied,
            rows_missing: counts.missing,
            rows_nonfinite: counts.nonfinite,
            rows_duplicate: 0,
            first_nonfinite: counts
                .first_nonfinite
                .map(|(part, at)| (self.tables[part].table, self.tables[part].ids.ids()[at])),
        }
    }
}

/// The rows of one span: as in a look-up, every loop asks for the lines that the next one needs.
struct ApplySpan<'a, 'b, 's, R> {
    span: Span<'b, 's>,
    /// Which of the push's tables.
    number: usize,
    part: &'a TableGradients<'a>,
    /// Of all the table's ids.
    slots: &'a mut [u32],
    /// Room for a gradient.
    row: &'a mut [f32],
    /// Whether the slots come from a look-up, to be checked, rather than from a search here.
    known: bool,
    rule: R,
    counts: &'a mut Counts,
}

impl<R: RowRule> Work for ApplySpan<'_, '_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { span, number, part, slots, row, known, rule, counts } = self;
        let (ids, dim) = (part.ids.ids(), row.len());
        if !known {
            span.find::<L>(part.table, ids, slots);
        }
        let ahead = span.addresses(part.table, slots, known);
        let stride = span.stride(part.table);
        ahead.start(stride);
        for (shard, range) in span.shards.iter_mut().zip(span.ranges) {
            let table = &mut shard.tables[part.table];
            for at in range.clone() {
                ahead.fetch(at, stride);
                let gradient: &[f32] = match &part.gradients {
                    Gradients::Rows(rows) => &rows[at * dim..][..dim],
                    Gradients::Samples(sum) => {
                        sum.fetch_ahead(at);
                        sum.write(at, row);
                        row
                    }
                };
                if !all_finite::<L>(gradient) {
                    counts.nonfinite += 1;
                    counts.first_nonfinite.get_or_insert((number, at));
                    continue;
                }
                let slot = slots[at];
                let slot = if known && !table.holds(slot, ids[at]) { table.find::<L>(ids[at]) } else { slot };
                if slot == NO_SLOT {
                    counts.missing += 1;
                    continue;
                }
                let (weights, state) = table.row_mut(slot).split_at_mut(dim);
                rule.row::<L>(weights, state, gradient);
                counts.applied += 1;
            }
        }
    }
}
