//! [`Memos`]: the slots a look-up found, kept until the push of the same token, which then need not search.
//!
//! A slot is only a guess by then: another look-up may have evicted its row. The push checks the id that stands
//! at the slot and searches where it is another.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use parking_lot::Mutex;
use persia_types::Token;
use persia_types::limits::MAX_STALENESS;

/// Memos whose memory is kept for coming look-ups.
const MAX_SPARE: usize = 8;

/// Slots of one look-up, table after table in the request's order.
#[derive(Debug, Default)]
pub(crate) struct Memo {
    slots: Vec<u32>,
    /// `(table, slots)` per table of the request.
    parts: Vec<(usize, Range<usize>)>,
    /// Room for one row, kept with the rest of a request's memory.
    row: Vec<f32>,
}

impl Memo {
    /// Make room for parts of these `(table, ids)`; slots are unspecified until written.
    pub(crate) fn reset(&mut self, parts: impl Iterator<Item = (usize, usize)>) {
        self.parts.clear();
        let mut end = 0;
        for (table, ids) in parts {
            self.parts.push((table, end..end + ids));
            end += ids;
        }
        // Old content need not be cleared: every slot is written before it is read.
        if self.slots.len() < end {
            self.slots.resize(end, 0);
        }
    }

    /// Slots of a part of the request, in the order of its ids.
    #[cfg(test)]
    fn part_mut(&mut self, part: usize) -> &mut [u32] {
        &mut self.slots[self.parts[part].1.clone()]
    }

    /// As [`Self::part_mut`], and room for a row of `dim` floats, whatever they were.
    pub(crate) fn part_and_row(&mut self, part: usize, dim: usize) -> (&mut [u32], &mut [f32]) {
        if self.row.len() < dim {
            self.row.resize(dim, 0.0);
        }
        (&mut self.slots[self.parts[part].1.clone()], &mut self.row[..dim])
    }

    /// The part that was looked up for `table`, if that had as many ids: a push of fewer is searched anew.
    pub(crate) fn part_of(&self, table: usize, ids: usize) -> Option<usize> {
        self.parts.iter().position(|(candidate, range)| *candidate == table && range.len() == ids)
    }
}

#[derive(Default)]
struct State {
    by_rank: HashMap<u32, BTreeMap<u64, Memo>>,
    /// Memory of memos that are no longer needed.
    spare: Vec<Memo>,
}

/// At most [`MAX_STALENESS`] memos per rank, the latest.
#[derive(Default)]
pub(crate) struct Memos(Mutex<State>);

impl Memos {
    /// A memo to write into.
    pub(crate) fn blank(&self) -> Memo {
        self.0.lock().spare.pop().unwrap_or_default()
    }

    /// Keep a memo until its push.
    pub(crate) fn keep(&self, token: Token, memo: Memo) {
        let mut state = self.0.lock();
        let kept = state.by_rank.entry(token.rank).or_default();
        let replaced = kept.insert(token.seq, memo);
        let oldest = if kept.len() > MAX_STALENESS { kept.pop_first() } else { None };
        state.spare.extend(replaced.into_iter().chain(oldest.map(|(_, memo)| memo)));
        state.spare.truncate(MAX_SPARE);
    }

    /// The memo of a look-up, once.
    pub(crate) fn take(&self, token: Token) -> Option<Memo> {
        self.0.lock().by_rank.get_mut(&token.rank)?.remove(&token.seq)
    }

    /// Give memory back for the next look-up.
    pub(crate) fn recycle(&self, memo: Memo) {
        let mut state = self.0.lock();
        if state.spare.len() < MAX_SPARE {
            state.spare.push(memo);
        }
    }

    /// Forget all: slots mean nothing any more.
    pub(crate) fn clear(&self) {
        *self.0.lock() = State::default();
    }
}

#[cfg(test)]
mod tests {
    use persia_types::JobId;

    use super::*;

    fn token(rank: u32, seq: u64) -> Token {
        Token { job: JobId(1), epoch: 1, rank, seq }
    }

    #[test]
    fn memory_is_bounded_per_rank_and_the_latest_stay() {
        let memos = Memos::default();
        for seq in 1..=1_000 {
            memos.keep(token(0, seq), memos.blank());
        }
        assert!(memos.take(token(0, 1_000 - MAX_STALENESS as u64)).is_none());
        assert!(memos.take(token(0, 1_001 - MAX_STALENESS as u64)).is_some());
        assert!(memos.take(token(0, 1_000)).is_some());
        assert!(memos.take(token(0, 1_000)).is_none());
        assert!(memos.take(token(1, 999)).is_none());
    }

    #[test]
    fn a_part_is_found_by_table_and_length() {
        let mut memo = Memo::default();
        memo.reset([(4, 3), (2, 2)].into_iter());
        memo.part_mut(1).copy_from_slice(&[8, 9]);
        assert_eq!((memo.part_of(2, 2), memo.part_of(2, 1), memo.part_of(3, 3)), (Some(1), None, None));
        memo.reset([(2, 1)].into_iter());
        assert_eq!(memo.part_mut(0).len(), 1);
    }
}
