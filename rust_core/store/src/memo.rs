//! [`Memos`]: the slots a look-up found, kept until the push of the same token, which then need not search.
//!
//! A slot is only a guess by then: another look-up may have evicted its row. Where rows have left a shard since, the push
//! checks the id that stands at the slot and searches where it is another.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use parking_lot::Mutex;
use persia_types::limits::MAX_STALENESS;
use persia_types::{Token, VIRTUAL_SHARDS};

/// Memos whose memory is kept for coming look-ups.
const MAX_SPARE: usize = 8;

/// Slots of one look-up, table after table in the request's order.
#[derive(Debug, Default)]
pub(crate) struct Memo {
    slots: Vec<u32>,
    /// `(table, slots)` per table of the request.
    parts: Vec<(usize, Range<usize>)>,
    /// Room for rows, kept with the rest of a request's memory.
    room: Vec<f32>,
    /// Of each shard its [`departures`](crate::shard::Shard::departures) when its first slot was noted.
    departures: Vec<u64>,
}

/// Departures of a shard of which no slot was noted.
const NEVER: u64 = u64::MAX;

/// One part of a memo, and what goes with it.
pub(crate) struct MemoPart<'a> {
    /// In the order of the part's ids.
    pub(crate) slots: &'a mut [u32],
    /// As many floats as were asked for, whatever they were.
    pub(crate) room: &'a mut [f32],
    departures: &'a mut [u64],
}

impl MemoPart<'_> {
    /// Slots of a shard are about to be noted.
    #[inline(always)]
    pub(crate) fn note(&mut self, shard: usize, departures: u64) {
        let first = &mut self.departures[shard];
        *first = departures.min(*first);
    }

    /// Whether every slot that was noted of a shard holds its row still.
    #[inline(always)]
    pub(crate) fn all_stayed(&self, shard: usize, departures: u64) -> bool {
        self.departures[shard] == departures
    }
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
        self.departures.clear();
        self.departures.resize(VIRTUAL_SHARDS, NEVER);
    }

    /// A part of the request, with room for so many floats.
    pub(crate) fn part(&mut self, part: usize, room: usize) -> MemoPart<'_> {
        if self.room.len() < room {
            self.room.resize(room, 0.0);
        }
        MemoPart {
            slots: &mut self.slots[self.parts[part].1.clone()],
            room: &mut self.room[..room],
            departures: &mut self.departures,
        }
    }

    /// The slots noted for `table`, if it was looked up with as many ids.
    pub(crate) fn slots_of(&self, table: usize, ids: usize) -> Option<&[u32]> {
        self.part_of(table, ids).map(|part| &self.slots[self.parts[part].1.clone()])
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
        Token { job: JobId(1), generation: 1, rank, seq }
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
        memo.part(1, 0).slots.copy_from_slice(&[8, 9]);
        assert_eq!((memo.slots_of(2, 2), memo.slots_of(2, 3)), (Some(&[8, 9][..]), None));
        assert_eq!((memo.part_of(2, 2), memo.part_of(2, 1), memo.part_of(3, 3)), (Some(1), None, None));
        memo.reset([(2, 1)].into_iter());
        assert_eq!(memo.part(0, 0).slots.len(), 1);
    }

    #[test]
    fn the_first_departures_noted_of_a_shard_count() {
        let mut memo = Memo::default();
        memo.reset([(0, 1)].into_iter());
        let mut part = memo.part(0, 0);
        assert!(!part.all_stayed(3, 0));
        part.note(3, 5);
        part.note(3, 6); // another table's slots, noted later
        assert!(part.all_stayed(3, 5) && !part.all_stayed(3, 6) && !part.all_stayed(4, 5));
        memo.reset([(0, 1)].into_iter());
        assert!(!memo.part(0, 0).all_stayed(3, 5));
    }
}
