//! Applying gradients. Everything that can fail was checked before; here nothing can.

use std::convert::Infallible;

use parking_lot::{Mutex, MutexGuard};
use persia_types::ShardedIds;
use persia_types::id::hash_id;
use persia_types::tables::{PushReport, TableGradients};

use crate::index::NO_SLOT;
use crate::memo::Memo;
use crate::optimizer::{RowRule, Rule, all_finite};
use crate::shard::Shard;
use crate::simd::{Lanes, Level, Work, prefetch};
use crate::span::{Piece, blocks, for_each_span};

/// One push whose request was checked.
pub(crate) struct Push<'a> {
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
        let remembered: Option<Vec<usize>> =
            memo.as_ref().and_then(|memo| self.tables.iter().map(|part| lookup_part(memo, part)).collect());
        let known = remembered.is_some();
        let memo = memo.get_or_insert_default();
        let memo_parts = remembered.unwrap_or_else(|| {
            memo.reset(self.tables.iter().map(|part| (part.table, part.ids.len())));
            (0..self.tables.len()).collect()
        });
        let parts: Vec<(usize, &ShardedIds)> =
            self.tables.iter().map(|part| (part.table, part.ids)).collect();
        let mut counts = Counts::default();
        let Ok(()) = for_each_span(shards, &parts, |locked, pieces| {
            for block in blocks(pieces) {
                let (tables, memo_parts, counts) = (self.tables, &memo_parts[..], &mut counts);
                self.level.run(ApplyBlock { locked, block, tables, memo, memo_parts, known, rule, counts });
            }
            Ok::<(), Infallible>(())
        });
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

/// The rows of one block: as in a look-up, every loop asks for the lines that the next one needs.
struct ApplyBlock<'a, 's, R> {
    locked: &'a mut [MutexGuard<'s, Shard>],
    block: &'a [Piece],
    tables: &'a [TableGradients<'a>],
    memo: &'a mut Memo,
    /// Which part of the memo belongs to which part of the push.
    memo_parts: &'a [usize],
    /// Whether the memo's slots come from a look-up, to be checked, rather than from a search here.
    known: bool,
    rule: R,
    counts: &'a mut Counts,
}

impl<R: RowRule> Work for ApplyBlock<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        if !self.known {
            self.search::<L>();
        }
        self.prefetch_rows();
        self.update::<L>();
    }
}

impl<R: RowRule> ApplyBlock<'_, '_, R> {
    #[inline(always)]
    fn search<L: Lanes>(&mut self) {
        for piece in self.block {
            let index = &self.locked[piece.shard].tables[piece.table].index;
            for id in &self.tables[piece.part].ids.ids()[piece.range.clone()] {
                prefetch(index.buckets(), index.home(hash_id(*id)), 1);
            }
        }
        for piece in self.block {
            let table = &self.locked[piece.shard].tables[piece.table];
            let ids = &self.tables[piece.part].ids.ids()[piece.range.clone()];
            let slots = &mut self.memo.part_mut(self.memo_parts[piece.part])[piece.range.clone()];
            for (slot, id) in slots.iter_mut().zip(ids) {
                *slot = table.find::<L>(*id);
            }
        }
    }

    #[inline(always)]
    fn prefetch_rows(&mut self) {
        for piece in self.block {
            let table = &self.locked[piece.shard].tables[piece.table];
            let stride = table.layout().stride();
            for slot in &self.memo.part_mut(self.memo_parts[piece.part])[piece.range.clone()] {
                if *slot != NO_SLOT {
                    prefetch(table.rows(), *slot as usize * stride, stride);
                    if self.known {
                        prefetch(table.meta(), *slot as usize, 1);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn update<L: Lanes>(&mut self) {
        for piece in self.block {
            let table = &mut self.locked[piece.shard].tables[piece.table];
            let dim = table.layout().dim;
            let part = &self.tables[piece.part];
            let slots = &self.memo.part_mut(self.memo_parts[piece.part])[piece.range.clone()];
            let ids = &part.ids.ids()[piece.range.clone()];
            let gradients = part.gradients[piece.range.start * dim..piece.range.end * dim].chunks_exact(dim);
            for (at, ((slot, id), gradient)) in slots.iter().zip(ids).zip(gradients).enumerate() {
                if !all_finite::<L>(gradient) {
                    self.counts.nonfinite += 1;
                    let first = self.counts.first_nonfinite.get_or_insert((usize::MAX, 0));
                    *first = (*first).min((piece.part, piece.range.start + at));
                    continue;
                }
                let slot = if self.known && !table.holds(*slot, *id) { table.find::<L>(*id) } else { *slot };
                if slot == NO_SLOT {
                    self.counts.missing += 1;
                    continue;
                }
                let (weights, state) = table.row_mut(slot).split_at_mut(dim);
                self.rule.row::<L>(weights, state, gradient);
                self.counts.applied += 1;
            }
        }
    }
}
