//! [`Order`]: the sequence of requests in a reproducible run of several ranks.
//!
//! Of every step, first the look-ups of ranks 0, 1, …, then their pushes. A request waits for its turn; the turn
//! moves on when it was served. One that failed leaves the turn where it is, for its retry.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use persia_types::{TablesError, Token};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Which half of a step a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Look-ups come first.
    Lookup,
    /// Then pushes.
    Push,
}

/// Ranks that a message names at most.
const NAMED: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place {
    seq: u64,
    phase: Phase,
    rank: u32,
}

impl Place {
    fn next(self, ranks: u32) -> Self {
        let Self { seq, phase, rank } = self;
        match phase {
            _ if rank + 1 < ranks => Self { rank: rank + 1, ..self },
            Phase::Lookup => Self { seq, phase: Phase::Push, rank: 0 },
            Phase::Push => Self { seq: seq.saturating_add(1), phase: Phase::Lookup, rank: 0 },
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verb = match self.phase {
            Phase::Lookup => "look-up",
            Phase::Push => "push",
        };
        write!(f, "{verb} {} of rank {}", self.seq, self.rank)
    }
}

/// How far the sequence of a run has come: the first seq, and whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reached(u64, Place);

/// The sequence of one run.
#[derive(Debug)]
struct Sequence {
    generation: u64,
    ranks: u32,
    /// The run's first request defines where it starts: (first seq, whose turn it is).
    turn: Option<(u64, Place)>,
    served: bool,
    waiting: BTreeMap<Place, u32>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Order {
    sequence: Mutex<Option<Sequence>>,
    moved: Notify,
}

enum Answer {
    Go,
    Repeat,
    Wait,
}

impl Order {
    /// Requests of `generation` come in sequence if there are several `ranks`, and as they like with one.
    pub fn begin(&self, generation: u64, ranks: u32) {
        let sequence = Sequence { generation, ranks, turn: None, served: false, waiting: BTreeMap::new() };
        *self.sequence.lock() = (ranks > 1).then_some(sequence);
        self.moved.notify_waiters();
    }

    /// How far it has come, if there is a sequence and it has begun.
    pub(super) fn reached(&self) -> Option<Reached> {
        self.sequence.lock().as_ref()?.turn.map(|(first, turn)| Reached(first, turn))
    }

    /// Go on behind what [`Self::reached`] returned.
    pub(super) fn resume(&self, reached: Option<Reached>) {
        if let Some(sequence) = self.sequence.lock().as_mut() {
            sequence.turn = reached.map(|Reached(first, turn)| (first, turn));
        }
    }

    /// Note that a request was served, by a process before this one.
    pub(super) fn pass(&self, token: Token, phase: Phase) {
        if let Some(sequence) = self.sequence.lock().as_mut() {
            let place = Place { seq: token.seq, phase, rank: token.rank };
            let (first, turn) = sequence.turn.unwrap_or((token.seq, place));
            // A repeated request moves nothing.
            sequence.turn = Some((first, turn.max(place.next(sequence.ranks))));
        }
    }

    /// Wait for the turn of a request. None where there is no sequence, or the request was served before.
    ///
    /// # Errors
    /// `Timeout` naming whoever is missing; `StaleGeneration` when another run began meanwhile; `BadShape` for a token
    /// from before the run's first, or of a rank that the run does not have.
    pub async fn turn(
        self: &Arc<Self>,
        token: Token,
        phase: Phase,
        patience: Duration,
        peer: &str,
    ) -> Result<Option<Turn>, TablesError> {
        let place = Place { seq: token.seq, phase, rank: token.rank };
        let deadline = Instant::now() + patience;
        let mut waiting = None;
        loop {
            let moved = self.moved.notified();
            tokio::pin!(moved);
            // Registered before looking, so that no move in between is missed.
            moved.as_mut().enable();
            match self.ask(token, place)? {
                Answer::Repeat => return Ok(None),
                Answer::Go => {
                    return Ok(Some(Turn {
                        order: Arc::clone(self),
                        place,
                        generation: token.generation,
                        done: false,
                    }));
                }
                Answer::Wait => {}
            }
            waiting.get_or_insert_with(|| Waiting::note(self, place, token.generation));
            if tokio::time::timeout_at(deadline, moved).await.is_err() {
                let what = self.missing(place, patience);
                return Err(TablesError::Timeout { peer: peer.into(), what });
            }
        }
    }

    fn ask(&self, token: Token, place: Place) -> Result<Answer, TablesError> {
        let mut sequence = self.sequence.lock();
        let Some(sequence) = sequence.as_mut() else { return Ok(Answer::Repeat) };
        if sequence.generation != token.generation {
            return Err(TablesError::StaleGeneration { token, current: sequence.generation });
        }
        if token.rank >= sequence.ranks {
            let what =
                format!("request {token} is of rank {}, the run has {} ranks", token.rank, sequence.ranks);
            return Err(TablesError::BadShape { what });
        }
        let start = Place { seq: token.seq, phase: Phase::Lookup, rank: 0 };
        let (first, turn) = *sequence.turn.get_or_insert((token.seq, start));
        if place.seq < first {
            let what =
                format!("{place} in a run whose ranks started at {first}: all ranks start at one step");
            return Err(TablesError::BadShape { what });
        }
        Ok(if place < turn {
            Answer::Repeat
        } else if place > turn || sequence.served {
            Answer::Wait
        } else {
            sequence.served = true;
            Answer::Go
        })
    }

    /// What the request at `place` waited for in vain.
    fn missing(&self, place: Place, patience: Duration) -> String {
        let seconds = patience.as_secs_f32();
        let mut text = format!("{place} waited {seconds} s for its turn");
        let sequence = self.sequence.lock();
        let Some((sequence, (_, turn))) = sequence.as_ref().and_then(|s| Some((s, s.turn?))) else {
            return text;
        };
        let ahead = std::iter::successors(Some(turn), |place| Some(place.next(sequence.ranks)));
        let absent = ahead
            .take_while(|ahead| *ahead < place)
            .filter(|ahead| !(sequence.waiting.contains_key(ahead) || *ahead == turn && sequence.served));
        let absent: Vec<String> = absent.take(NAMED + 1).map(|place| place.to_string()).collect();
        if !absent.is_empty() {
            let more = if absent.len() > NAMED { ", …" } else { "" };
            let shown = &absent[..absent.len().min(NAMED)];
            let _ = write!(text, "; missing: {}{more}", shown.join(", "));
        }
        text
    }

    fn leave(&self, place: Place, generation: u64, done: bool) {
        if let Some(sequence) = self.sequence.lock().as_mut().filter(|sequence| sequence.generation == generation) {
            sequence.served = false;
            if let (true, Some((_, turn))) = (done, &mut sequence.turn) {
                *turn = place.next(sequence.ranks);
            }
        }
        self.moved.notify_waiters();
    }
}

/// A request that is being served. Dropped without [`Turn::done`] it keeps its place, for a retry.
#[derive(Debug)]
pub struct Turn {
    order: Arc<Order>,
    place: Place,
    generation: u64,
    done: bool,
}

impl Turn {
    /// It was served: the next, please.
    pub fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.order.leave(self.place, self.generation, self.done);
    }
}

/// A note that a request has arrived, for messages.
struct Waiting<'a> {
    order: &'a Order,
    place: Place,
    generation: u64,
}

impl<'a> Waiting<'a> {
    fn note(order: &'a Order, place: Place, generation: u64) -> Self {
        if let Some(sequence) = order.sequence.lock().as_mut() {
            *sequence.waiting.entry(place).or_default() += 1;
        }
        Self { order, place, generation }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut sequence = self.order.sequence.lock();
        let Some(sequence) = sequence.as_mut().filter(|sequence| sequence.generation == self.generation) else {
            return;
        };
        if let Some(count) = sequence.waiting.get_mut(&self.place) {
            *count -= 1;
            if *count == 0 {
                sequence.waiting.remove(&self.place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use persia_types::JobId;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn token(rank: u32, seq: u64) -> Token {
        Token { job: JobId(1), generation: 4, rank, seq }
    }

    fn order(ranks: u32) -> Arc<Order> {
        let order = Arc::new(Order::default());
        order.begin(4, ranks);
        order
    }

    /// Every request of `steps` steps at once, in the order of `shuffle`; returns the order they were served in.
    async fn served(ranks: u32, steps: u64, shuffle: u64) -> Vec<Place> {
        let order = order(ranks);
        let done = Arc::new(Mutex::new(Vec::new()));
        // The first request of a run is one of its first step.
        order.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap();
        let mut places: Vec<Place> =
            std::iter::successors(Some(Place { seq: 1, phase: Phase::Lookup, rank: 0 }), |place| {
                Some(place.next(ranks))
            })
            .take_while(|place| place.seq <= steps)
            .collect();
        places.sort_by_key(|place| {
            (place.seq * 31 + u64::from(place.rank) * 17 + place.phase as u64 * 7).wrapping_mul(shuffle) % 101
        });
        let tasks: Vec<_> = places
            .into_iter()
            .map(|place| {
                let (order, done) = (Arc::clone(&order), Arc::clone(&done));
                tokio::spawn(async move {
                    let turn = order.turn(token(place.rank, place.seq), place.phase, LONG, "").await.unwrap();
                    done.lock().push(place);
                    turn.expect("the first of its token").done();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        Arc::into_inner(done).unwrap().into_inner()
    }

    #[tokio::test]
    async fn requests_are_served_in_order_whatever_order_they_come_in() {
        for shuffle in [1, 7, 93, 12_345] {
            let places = served(3, 5, shuffle).await;
            assert_eq!(places.len(), 30);
            assert!(places.is_sorted(), "{shuffle}: {places:?}");
        }
    }

    #[tokio::test]
    async fn a_retry_of_what_was_served_does_not_wait_and_a_failed_one_keeps_its_turn() {
        let order = order(2);
        order.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap().done();
        assert!(order.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().is_none());
        drop(order.turn(token(1, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap());
        assert!(order.turn(token(1, 1), Phase::Lookup, LONG, "").await.unwrap().is_some());
    }

    #[tokio::test]
    async fn who_is_missing_is_named() {
        let order = order(3);
        let soon = Duration::from_millis(30);
        let error = order.turn(token(2, 9), Phase::Lookup, soon, "server 1 of 2").await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("server 1 of 2") && text.contains("look-up 9 of rank 2"), "{text}");
        assert!(text.ends_with("missing: look-up 9 of rank 0, look-up 9 of rank 1"), "{text}");
        let early = order.turn(token(0, 8), Phase::Lookup, soon, "").await.unwrap_err();
        assert!(matches!(early, TablesError::BadShape { .. }), "{early}");
    }

    #[tokio::test]
    async fn a_new_run_ends_the_waits_of_the_old() {
        let order = order(2);
        let other = Arc::clone(&order);
        let waits = tokio::spawn(async move { other.turn(token(1, 1), Phase::Lookup, LONG, "").await });
        while order.sequence.lock().as_ref().unwrap().waiting.is_empty() {
            tokio::task::yield_now().await;
        }
        order.begin(5, 2);
        assert!(matches!(waits.await.unwrap().unwrap_err(), TablesError::StaleGeneration { current: 5, .. }));
        order.begin(6, 1);
        let token = Token { generation: 6, ..token(1, 3) };
        assert!(order.turn(token, Phase::Push, LONG, "").await.unwrap().is_none());
    }
}
