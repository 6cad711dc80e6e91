//! Applying gradients. Everything that can fail was checked before; here nothing can.

use std::convert::Infallible;

use parking_lot::{Mutex, MutexGuard};
use persia_types::id::hash_id;
use persia_types::limits::MAX_DIM;
use persia_types::tables::{PushReport, TableGradients};
use persia_types::{Dtype, ShardedIds};

use crate::index::NO_SLOT;
use crate::memo::Memo;
use crate::optimizer::{RowRule, Rule, all_finite};
use crate::random::{Rounder, RowDraws};
use crate::row::Layout;
use crate::run::ActiveRun;
use crate::shard::Shard;
use crate::simd::{Lanes, Level, Work, prefetch};
use crate::span::{Piece, blocks, for_each_span};

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
}

impl Change {
    /// None without optimizer.
    pub(crate) fn new(run: &ActiveRun, table: usize, lr_factor: f32, step: u32) -> Option<Self> {
        let table = run.table(table);
        let rule = Rule::new(table.optimizer.as_ref()?, lr_factor, run.weight_bound, step);
        Some(Self { rule, rounder: table.rounder })
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
        let mut wide = [0.0; MAX_DIM];
        let Ok(()) = for_each_span(shards, &parts, |locked, pieces| {
            for block in blocks(pieces) {
                let (push, memo_parts, counts, wide) = (self, &memo_parts[..], &mut counts, &mut wide);
                self.level.run(ApplyBlock { locked, block, push, memo, memo_parts, known, counts, wide });
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
struct ApplyBlock<'a, 's> {
    locked: &'a mut [MutexGuard<'s, Shard>],
    block: &'a [Piece],
    push: &'a Push<'a>,
    memo: &'a mut Memo,
    /// Which part of the memo belongs to which part of the push.
    memo_parts: &'a [usize],
    /// Whether the memo's slots come from a look-up, to be checked, rather than from a search here.
    known: bool,
    counts: &'a mut Counts,
    /// Room for the weights of a row that is not of f32.
    wide: &'a mut [f32; MAX_DIM],
}

impl Work for ApplyBlock<'_, '_> {
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

impl ApplyBlock<'_, '_> {
    #[inline(always)]
    fn search<L: Lanes>(&mut self) {
        for piece in self.block {
            let index = &self.locked[piece.shard].tables[piece.table].index;
            for id in &self.push.tables[piece.part].ids.ids()[piece.range.clone()] {
                prefetch(index.buckets(), index.home(hash_id(*id)), 1);
            }
        }
        for piece in self.block {
            let table = &self.locked[piece.shard].tables[piece.table];
            let ids = &self.push.tables[piece.part].ids.ids()[piece.range.clone()];
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
            match self.push.changes[piece.part].rule {
                Rule::Sgd(rule) => self.update_piece::<L, _>(piece, rule),
                Rule::Momentum(rule) => self.update_piece::<L, _>(piece, rule),
                Rule::Adagrad(rule) => self.update_piece::<L, _>(piece, rule),
                Rule::RowAdagrad(rule) => self.update_piece::<L, _>(piece, rule),
                Rule::Adam(rule) => self.update_piece::<L, _>(piece, rule),
            }
        }
    }

    #[inline(always)]
    fn update_piece<L: Lanes, R: RowRule>(&mut self, piece: &Piece, rule: R) {
        let (step, rounder) = (self.push.step, self.push.changes[piece.part].rounder);
        let table = &mut self.locked[piece.shard].tables[piece.table];
        let layout = table.layout();
        let (dim, oldest) = (layout.dim, layout.oldest_alive(step));
        let part = &self.push.tables[piece.part];
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
            // A row looked up since is alive; only one that nobody looked up for this push can be expired.
            if slot == NO_SLOT || !table.is_alive(slot, oldest) {
                self.counts.missing += 1;
                continue;
            }
            let row = table.row_mut(slot);
            if layout.dtype == Dtype::F32 {
                let (weights, state) = row.split_at_mut(dim);
                rule.row::<L>(weights, state, gradient);
            } else {
                let draws = rounder.map(|rounder| rounder.row(*id, step));
                update_halves::<L, R>(rule, layout, row, &mut self.wide[..dim], gradient, draws);
            }
            self.counts.applied += 1;
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
