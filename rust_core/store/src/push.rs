//! Applying gradients. Everything that can fail was checked before; here nothing can.

use std::convert::Infallible;

use parking_lot::Mutex;
use persia_kernels::Gradients;
use persia_types::Dtype;
use persia_types::tables::{PushReport, TableGradients};

use crate::index::NO_SLOT;
use crate::memo::{Memo, MemoPart};
use crate::optimizer::{RowRule, Rule, all_finite};
use crate::random::{Rounder, RowDraws};
use crate::row::Layout;
use crate::run::ActiveRun;
use crate::shard::Shard;
use crate::simd::{Lanes, Level, Work};
use crate::span::{SPAN, Span, for_each_span};

/// One push whose request was checked.
pub(crate) struct Push<'a> {
    pub(crate) level: Level,
    pub(crate) step: u32,
    pub(crate) tables: &'a [TableGradients<'a>],
    /// How the rows of each of `tables` change.
    pub(crate) changes: Vec<Change>,
}

/// How the rows of one table change in one push.
pub(crate) struct Change {
    rule: Rule,
    rounder: Option<Rounder>,
    layout: Layout,
}

impl Change {
    /// None without optimizer.
    pub(crate) fn new(run: &ActiveRun, table: usize, lr_factor: f32, step: u32, rank: u32) -> Option<Self> {
        let table = run.table(table);
        let rule = Rule::new(table.optimizer.as_ref()?, lr_factor, run.weight_bound, step);
        let rounder = table.rounder.map(|rounder| rounder.of_rank(rank));
        Some(Self { rule, rounder, layout: table.layout })
    }
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
        for (number, change) in self.changes.iter().enumerate() {
            let memo_part = lookup_part(memo, &self.tables[number]).unwrap_or(number);
            let found = memo.part(memo_part, 2 * change.layout.dim);
            let part = Part { push: self, number, found, known, counts: &mut counts };
            match change.rule {
                Rule::Sgd(rule) => part.apply(shards, rule),
                Rule::Momentum(rule) => part.apply(shards, rule),
                Rule::Adagrad(rule) => part.apply(shards, rule),
                Rule::RowAdagrad(rule) => part.apply(shards, rule),
                Rule::Adam(rule) => part.apply(shards, rule),
            }
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

/// One table of a push.
struct Part<'a> {
    push: &'a Push<'a>,
    /// Which of the push's tables.
    number: usize,
    /// Slots of all the table's ids; room for a gradient, and for the weights of a row that is not of f32.
    found: MemoPart<'a>,
    /// Whether the slots come from a look-up rather than from a search here.
    known: bool,
    counts: &'a mut Counts,
}

impl Part<'_> {
    fn apply<R: RowRule>(mut self, shards: &[Mutex<Shard>], rule: R) {
        let push = self.push;
        let TableGradients { table, ids, .. } = &push.tables[self.number];
        let Ok(()) = for_each_span(shards, *table, ids, |span| {
            push.level.run(ApplySpan { span, part: &mut self, rule });
            Ok::<(), Infallible>(())
        });
    }
}

/// The rows of one span: as in a look-up, every loop asks for the lines that the next one needs.
struct ApplySpan<'a, 'b, 's, 'p, R> {
    span: Span<'b, 's>,
    part: &'a mut Part<'p>,
    rule: R,
}

impl<R: RowRule> Work for ApplySpan<'_, '_, '_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { span, part, rule } = self;
        let Part { push, number, found, known, counts } = part;
        let (push, number, known) = (*push, *number, *known);
        let (asked, Change { rounder, layout, .. }) = (&push.tables[number], &push.changes[number]);
        let (ids, table) = (asked.ids.ids(), asked.table);
        let (dim, stride, oldest) = (layout.dim, layout.stride(), layout.oldest_alive(push.step));
        if !known {
            span.find::<L>(table, ids, found.slots);
        }
        // A slot that a look-up found is to be checked if rows have left its shard since.
        let doubted =
            |shard: usize| known && !found.all_stayed(span.numbers[shard], span.shards[shard].departures());
        let ahead = span.addresses(table, found.slots, oldest > 0, doubted);
        let doubted: [bool; SPAN] = std::array::from_fn(|shard| shard < span.shards.len() && doubted(shard));
        let slots = &*found.slots;
        let (sum, wide) = found.room.split_at_mut(dim);
        ahead.start(stride);
        for ((shard, range), doubted) in span.shards.iter_mut().zip(span.ranges).zip(doubted) {
            let table = &mut shard.tables[table];
            for at in range.clone() {
                ahead.fetch(at, stride);
                let gradient: &[f32] = match &asked.gradients {
                    Gradients::Rows(rows) => &rows[at * dim..][..dim],
                    Gradients::Samples(samples) => {
                        samples.fetch_ahead(at);
                        samples.write(at, sum);
                        sum
                    }
                };
                if !all_finite::<L>(gradient) {
                    counts.nonfinite += 1;
                    counts.first_nonfinite.get_or_insert((number, at));
                    continue;
                }
                let (slot, id) = (slots[at], ids[at]);
                // An id that got no row then may have got one since.
                let wrong = slot == NO_SLOT && known || doubted && !table.holds(slot, id);
                let slot = if wrong { table.find::<L>(id) } else { slot };
                // A row that was looked up for this push is alive.
                if slot == NO_SLOT || !table.is_alive(slot, oldest) {
                    counts.missing += 1;
                    continue;
                }
                if table.frozen.is_some() {
                    table.keep(slot);
                }
                let row = table.row_mut(slot);
                if layout.dtype == Dtype::F32 {
                    let (weights, state) = row.split_at_mut(dim);
                    rule.row::<L>(weights, state, gradient);
                } else {
                    let draws = rounder.map(|rounder| rounder.row(id, push.step));
                    update_halves::<L, R>(rule, *layout, row, wide, gradient, draws);
                }
                counts.applied += 1;
            }
        }
    }
}

/// Update a row whose weights are of 16 bits, on an f32 copy of them.
#[inline(always)]
fn update_halves<L: Lanes, R: RowRule>(
    rule: R,
    layout: Layout,
    row: &mut [f32],
    wide: &mut [f32],
    gradient: &[f32],
    draws: Option<RowDraws>,
) {
    layout.read::<L>(row, wide);
    rule.row::<L>(wide, &mut row[layout.weight_words()..], gradient);
    layout.write::<L>(row, wide, draws);
}
