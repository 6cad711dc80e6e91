//! [`RankSequencer`]: the order of requests in a reproducible run with several ranks.
//!
//! At each step, the look-ups of ranks 0, 1, … come first, followed by their pushes. A request waits for its turn.
//! The turn advances when the request has been served. After a failure it does not advance, so that the request can
//! be retried.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use persia_types::{TablesError, Token};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;

/// The half of a step to which a request belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// The look-ups, which come first.
    Lookup,
    /// The pushes, which follow.
    Push,
}

/// The maximum number of requests that a message lists.
const NAMED: usize = 8;

/// The position of a request in the order. Positions are compared by `seq`, then by `phase`, and then by `rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Position {
    seq: u64,
    phase: Phase,
    rank: u32,
}

impl Position {
    fn next(self, ranks: u32) -> Self {
        let Self { seq, phase, rank } = self;
        match phase {
            _ if rank + 1 < ranks => Self { rank: rank + 1, ..self },
            Phase::Lookup => Self { seq, phase: Phase::Push, rank: 0 },
            Phase::Push => Self { seq: seq.saturating_add(1), phase: Phase::Lookup, rank: 0 },
        }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.phase {
            Phase::Lookup => "look-up",
            Phase::Push => "push",
        };
        write!(f, "{what} of rank {} for step {}", self.rank, self.seq)
    }
}

/// The progress of a run: the first seq, and the position whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reached(u64, Position);

/// The order of requests in one run.
#[derive(Debug)]
struct Sequence {
    generation: u64,
    ranks: u32,
    /// The first seq, which the first request of the run sets, and the position whose turn it is.
    turn: Option<(u64, Position)>,
    /// Whether the request at this position is being served.
    serving: bool,
    waiting: BTreeMap<Position, u32>,
}

/// Lets training requests pass in their order.
#[derive(Debug, Default)]
pub struct RankSequencer {
    sequence: Mutex<Option<Sequence>>,
    changed: Notify,
}

enum Answer {
    /// It is the turn of the request.
    Proceed,
    /// The request has no turn: requests have no order, or it was served before.
    NoTurn,
    Wait,
}

impl RankSequencer {
    /// Begin a run. With several `ranks`, the requests of the run have an order. With one rank, they have none.
    pub fn begin(&self, generation: u64, ranks: u32) {
        let sequence = Sequence { generation, ranks, turn: None, serving: false, waiting: BTreeMap::new() };
        *self.sequence.lock() = (ranks > 1).then_some(sequence);
        self.changed.notify_waiters();
    }

    /// The progress of the run, if its requests have an order and the first request has arrived.
    pub(super) fn reached(&self) -> Option<Reached> {
        self.sequence.lock().as_ref()?.turn.map(|(first, turn)| Reached(first, turn))
    }

    /// Resume at a position that [`Self::reached`] returned.
    pub(super) fn resume(&self, reached: Option<Reached>) {
        if let Some(sequence) = self.sequence.lock().as_mut() {
            sequence.turn = reached.map(|Reached(first, turn)| (first, turn));
        }
    }

    /// Advance past a request that an earlier process served.
    pub(super) fn advance(&self, token: Token, phase: Phase) {
        if let Some(sequence) = self.sequence.lock().as_mut() {
            let position = Position { seq: token.seq, phase, rank: token.rank };
            let (first, turn) = sequence.turn.unwrap_or((token.seq, position));
            // A repeated request does not move the turn back.
            sequence.turn = Some((first, turn.max(position.next(sequence.ranks))));
        }
    }

    /// Wait for the turn of a request. Returns None if requests have no order or the request was served before.
    ///
    /// # Errors
    /// `Timeout`, with the missing requests; `StaleGeneration` if another run began in the meantime; `BadShape` for a
    /// token before the run's first one, or of a rank that the run does not have.
    pub async fn turn(
        self: &Arc<Self>,
        token: Token,
        phase: Phase,
        timeout: Duration,
        peer: &str,
    ) -> Result<Option<Turn>, TablesError> {
        let position = Position { seq: token.seq, phase, rank: token.rank };
        let deadline = Instant::now() + timeout;
        let mut waiting = None;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Register for changes before the check, so that no change is missed.
            changed.as_mut().enable();
            match self.ask(token, position)? {
                Answer::NoTurn => return Ok(None),
                Answer::Proceed => {
                    return Ok(Some(Turn {
                        sequencer: Arc::clone(self),
                        position,
                        generation: token.generation,
                        done: false,
                    }));
                }
                Answer::Wait => {}
            }
            waiting.get_or_insert_with(|| Waiting::note(self, position, token.generation));
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                let what = self.missing(position, timeout);
                return Err(TablesError::Timeout { peer: peer.into(), what });
            }
        }
    }

    /// Wait until it is the turn of a request, or its turn has passed, as for a retry. Never returns if requests have
    /// no order or the request belongs to another run.
    pub async fn comes(&self, token: Token, phase: Phase) {
        let position = Position { seq: token.seq, phase, rank: token.rank };
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let is_turn = |sequence: &Sequence| {
                sequence.generation == token.generation
                    && sequence.turn.is_some_and(|(_, turn)| turn >= position)
            };
            if self.sequence.lock().as_ref().is_some_and(is_turn) {
                return;
            }
            changed.await;
        }
    }

    fn ask(&self, token: Token, position: Position) -> Result<Answer, TablesError> {
        let mut sequence = self.sequence.lock();
        let Some(sequence) = sequence.as_mut() else { return Ok(Answer::NoTurn) };
        if sequence.generation != token.generation {
            return Err(TablesError::StaleGeneration { token, current: sequence.generation });
        }
        if token.rank >= sequence.ranks {
            let what = format!(
                "request {token} comes from rank {}, but the highest rank of the run is {}",
                token.rank,
                sequence.ranks.saturating_sub(1)
            );
            return Err(TablesError::BadShape { what });
        }
        let (first, turn) = *sequence.turn.get_or_insert_with(|| {
            self.changed.notify_waiters();
            (token.seq, Position { seq: token.seq, phase: Phase::Lookup, rank: 0 })
        });
        if position.seq < first {
            let what = format!(
                "the {position} is before step {first}, at which the run began: all ranks must start at the same step"
            );
            return Err(TablesError::BadShape { what });
        }
        Ok(if position < turn {
            Answer::NoTurn
        } else if position > turn || sequence.serving {
            Answer::Wait
        } else {
            sequence.serving = true;
            Answer::Proceed
        })
    }

    /// Describe the requests for which the request at `position` waited.
    fn missing(&self, position: Position, timeout: Duration) -> String {
        let seconds = timeout.as_secs_f32();
        let mut text = format!("the {position} waited {seconds:.1} s for its turn");
        let sequence = self.sequence.lock();
        let Some((sequence, (_, turn))) = sequence.as_ref().and_then(|s| Some((s, s.turn?))) else {
            return text;
        };
        let ahead = std::iter::successors(Some(turn), |position| Some(position.next(sequence.ranks)));
        let absent = ahead
            .take_while(|ahead| *ahead < position)
            .filter(|ahead| !(sequence.waiting.contains_key(ahead) || *ahead == turn && sequence.serving));
        let absent: Vec<String> = absent.take(NAMED + 1).map(|position| position.to_string()).collect();
        if !absent.is_empty() {
            let more = if absent.len() > NAMED { ", …" } else { "" };
            let shown = &absent[..absent.len().min(NAMED)];
            let _ = write!(text, "; missing: {}{more}", shown.join(", "));
        }
        text
    }

    fn release(&self, position: Position, generation: u64, done: bool) {
        if let Some(sequence) =
            self.sequence.lock().as_mut().filter(|sequence| sequence.generation == generation)
        {
            sequence.serving = false;
            if let (true, Some((_, turn))) = (done, &mut sequence.turn) {
                *turn = position.next(sequence.ranks);
            }
        }
        self.changed.notify_waiters();
    }
}

/// The turn of a request that is being served. If this is dropped without [`Turn::done`], the turn does not advance, so
/// that a retry can take it.
#[derive(Debug)]
pub struct Turn {
    sequencer: Arc<RankSequencer>,
    position: Position,
    generation: u64,
    done: bool,
}

impl Turn {
    /// Record that the request was served, so that the turn advances.
    pub fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.sequencer.release(self.position, self.generation, self.done);
    }
}

/// Registers a request that waits, so that messages do not call it missing.
struct Waiting<'a> {
    sequencer: &'a RankSequencer,
    position: Position,
    generation: u64,
}

impl<'a> Waiting<'a> {
    fn note(sequencer: &'a RankSequencer, position: Position, generation: u64) -> Self {
        if let Some(sequence) = sequencer.sequence.lock().as_mut() {
            *sequence.waiting.entry(position).or_default() += 1;
        }
        Self { sequencer, position, generation }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut sequence = self.sequencer.sequence.lock();
        let Some(sequence) = sequence.as_mut().filter(|sequence| sequence.generation == self.generation)
        else {
            return;
        };
        if let Some(count) = sequence.waiting.get_mut(&self.position) {
            *count -= 1;
            if *count == 0 {
                sequence.waiting.remove(&self.position);
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

    fn sequencer(ranks: u32) -> Arc<RankSequencer> {
        let sequencer = Arc::new(RankSequencer::default());
        sequencer.begin(4, ranks);
        sequencer
    }

    /// Send all requests of `steps` steps concurrently, in the order of `shuffle`. Returns the order in which they
    /// were served.
    async fn served(ranks: u32, steps: u64, shuffle: u64) -> Vec<Position> {
        let sequencer = sequencer(ranks);
        let done = Arc::new(Mutex::new(Vec::new()));
        // The first request of a run belongs to its first step.
        sequencer.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap();
        let mut positions: Vec<Position> =
            std::iter::successors(Some(Position { seq: 1, phase: Phase::Lookup, rank: 0 }), |position| {
                Some(position.next(ranks))
            })
            .take_while(|position| position.seq <= steps)
            .collect();
        positions.sort_by_key(|position| {
            (position.seq * 31 + u64::from(position.rank) * 17 + position.phase as u64 * 7)
                .wrapping_mul(shuffle)
                % 101
        });
        let tasks: Vec<_> = positions
            .into_iter()
            .map(|position| {
                let (sequencer, done) = (Arc::clone(&sequencer), Arc::clone(&done));
                tokio::spawn(async move {
                    let turn = sequencer
                        .turn(token(position.rank, position.seq), position.phase, LONG, "")
                        .await
                        .unwrap();
                    done.lock().push(position);
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
    async fn requests_are_served_in_order_however_they_arrive() {
        for shuffle in [1, 7, 93, 12_345] {
            let positions = served(3, 5, shuffle).await;
            assert_eq!(positions.len(), 30);
            assert!(positions.is_sorted(), "{shuffle}: {positions:?}");
        }
    }

    #[tokio::test]
    async fn a_retry_of_a_served_request_does_not_wait_and_a_failed_request_keeps_its_turn() {
        let sequencer = sequencer(2);
        sequencer.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap().done();
        assert!(sequencer.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().is_none());
        drop(sequencer.turn(token(1, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap());
        assert!(sequencer.turn(token(1, 1), Phase::Lookup, LONG, "").await.unwrap().is_some());
    }

    #[tokio::test]
    async fn a_turn_is_announced_also_the_first_one() {
        let sequencer = sequencer(2);
        let announced = |rank, phase| {
            let sequencer = Arc::clone(&sequencer);
            tokio::spawn(async move { sequencer.comes(token(rank, 1), phase).await })
        };
        let (first, second, last) =
            (announced(0, Phase::Lookup), announced(1, Phase::Lookup), announced(1, Phase::Push));
        tokio::task::yield_now().await;
        let other = Arc::clone(&sequencer);
        let waits = tokio::spawn(async move { other.turn(token(1, 1), Phase::Lookup, LONG, "").await });
        first.await.unwrap();
        sequencer.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap().done();
        second.await.unwrap();
        waits.await.unwrap().unwrap().unwrap().done();
        assert!(!last.is_finished());
        last.abort();
    }

    #[tokio::test]
    async fn a_retry_whose_turn_has_passed_does_not_wait_for_it() {
        let sequencer = sequencer(2);
        sequencer.turn(token(0, 1), Phase::Lookup, LONG, "").await.unwrap().unwrap().done();
        let retry = sequencer.comes(token(0, 1), Phase::Lookup);
        tokio::time::timeout(Duration::ZERO, retry).await.expect("the turn has passed");
        let next = sequencer.comes(token(0, 1), Phase::Push);
        tokio::time::timeout(Duration::ZERO, next).await.expect_err("the look-up of rank 1 is missing");
    }

    #[tokio::test]
    async fn missing_requests_are_named() {
        let sequencer = sequencer(3);
        let soon = Duration::from_millis(30);
        let error = sequencer.turn(token(2, 9), Phase::Lookup, soon, "server 1 of 2").await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("server 1 of 2") && text.contains("look-up of rank 2 for step 9"), "{text}");
        let missing = "missing: look-up of rank 0 for step 9, look-up of rank 1 for step 9";
        assert!(text.ends_with(missing), "{text}");
        let early = sequencer.turn(token(0, 8), Phase::Lookup, soon, "").await.unwrap_err();
        assert!(matches!(early, TablesError::BadShape { .. }), "{early}");
    }

    #[tokio::test]
    async fn a_new_run_ends_the_waits_of_the_old() {
        let sequencer = sequencer(2);
        let other = Arc::clone(&sequencer);
        let waits = tokio::spawn(async move { other.turn(token(1, 1), Phase::Lookup, LONG, "").await });
        while sequencer.sequence.lock().as_ref().unwrap().waiting.is_empty() {
            tokio::task::yield_now().await;
        }
        sequencer.begin(5, 2);
        assert!(matches!(waits.await.unwrap().unwrap_err(), TablesError::StaleGeneration { current: 5, .. }));
        sequencer.begin(6, 1);
        let token = Token { generation: 6, ..token(1, 3) };
        assert!(sequencer.turn(token, Phase::Push, LONG, "").await.unwrap().is_none());
    }
}
