//! The path of a training request through a server: throttle → generation → turn → log → token → apply.
//!
//! 1. *Throttle*: a push waits while a snapshot in progress has used up its copy budget.
//! 2. *Generation*: a request of another job or generation is refused, and so is any request of an infer job.
//! 3. *Turn*: in a reproducible run with several ranks, the request waits for the requests before it.
//! 4. *Log*: with `durability: log`, a push, or the turn of a look-up, is appended to the log for a replay.
//! 5. *Token*: a push whose token was applied before changes nothing.
//! 6. *Apply*: the request is executed, and the turn advances. A look-up changes nothing.
//!
//! These steps are the admission of requests. The store decides on the admission of ids, that is, whether an id gets
//! a row.
//!
//! [`Node::admit`] does the first three steps, asynchronously. [`Node::lookup`] and [`Node::push`] do the
//! other steps, which compute and may wait for a disk. A request that fails before it is applied leaves
//! neither a record nor a token, and keeps its turn, so that its retry takes the same path.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use persia_types::tables::{LookupReport, LookupRequest, PushReport, PushRequest};
use persia_types::{Tables, TablesError, Token};

use super::{Fence, Node, Phase, Turn};
use crate::wal::WalRecord;

/// The minimum time between two log lines about a log that cannot be written.
const WARN_INTERVAL: Duration = Duration::from_secs(30);

impl Node {
    /// Wait until a training request may be applied. A push waits for the copy budget. If the requests of the
    /// run have an order, every request waits for its turn.
    ///
    /// # Errors
    /// `NotBegun`; `StaleGeneration`; `Incompatible` in an infer job; if requests have an order, `BadShape`
    /// for a rank that the run does not have or a step before its first one, and `Timeout`, with the missing
    /// requests.
    pub async fn admit(&self, token: Token, phase: Phase) -> Result<Option<Turn>, TablesError> {
        if phase == Phase::Push {
            self.throttle().await?;
        }
        self.check_fence_of(token)?;
        self.sequencer.turn(token, phase, self.options.turn_timeout, &self.peer).await
    }

    /// Wait until it is the turn of a training request, or its turn has passed. Never returns if requests have no
    /// order.
    pub async fn turn_comes(&self, token: Token, phase: Phase) {
        self.sequencer.comes(token, phase).await;
    }

    /// Read rows. A training look-up must be [admitted](Self::admit) first. Other look-ups have no turn and are not
    /// logged.
    ///
    /// # Errors
    /// Those of [`Tables::lookup`]; `Unable` if the log cannot be written; `Incompatible` if an infer job serves a
    /// checkpoint that the caller does not expect.
    pub fn lookup(
        &self,
        turn: Option<Turn>,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        if turn.is_none() {
            self.check_served(request.token)?;
            return self.store.lookup(request, rows).map_err(|error| self.named(error));
        }
        // The turn is recorded so that, after a restart, pushes of this step do not wait for a look-up that was
        // answered.
        let record = || WalRecord::lookup(request.token);
        self.log_and_apply(turn, record, || self.store.lookup(request, rows))
    }

    /// Apply the gradients of a push that was [admitted](Self::admit).
    ///
    /// # Errors
    /// Those of [`Tables::push`]; `Unable` if the log cannot be written.
    pub fn push(&self, turn: Option<Turn>, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.log_and_apply(turn, || WalRecord::push(request), || self.store.push(request))
    }

    /// Wait for the copy budget, but no longer than a quarter of the time that a request may wait for its turn. The
    /// request then proceeds in any case, because a slow disk may slow training down but must not stop it.
    async fn throttle(&self) -> Result<(), TablesError> {
        if !self.is_full() {
            return Ok(());
        }
        let (store, timeout) = (Arc::clone(&self.store), self.options.turn_timeout / 4);
        let waited = tokio::task::spawn_blocking(move || store.wait_for_room(timeout)).await;
        waited.map_err(|error| {
            let what = format!("cannot wait for memory of the snapshot in progress: {error}");
            self.io(io::ErrorKind::Other, &what)
        })
    }

    /// Whether pushes are throttled now.
    pub fn is_full(&self) -> bool {
        self.store.is_full()
    }

    /// Refuse a request of another job or generation, and any request in an infer job.
    pub(super) fn check_fence_of(&self, token: Token) -> Result<(), TablesError> {
        self.refuse_change()?;
        let Fence { job, generation } = self.current()?;
        if (job, generation) == (token.job, token.generation) {
            return Ok(());
        }
        Err(TablesError::StaleGeneration { token, current: generation })
    }

    fn log_and_apply<T>(
        &self,
        turn: Option<Turn>,
        record: impl FnOnce() -> WalRecord,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<T, TablesError> {
        // The store checks and records the token in `apply`.
        let apply = || {
            let report = apply().map_err(|error| self.named(error))?;
            turn.into_iter().for_each(Turn::done);
            Ok(report)
        };
        match &self.log {
            None => apply(),
            Some(log) => log.append(&record(), apply).map_err(|error| self.not_logged(error)),
        }
    }

    /// Convert an error of the log. A full disk may have space again soon, so the error becomes `Unable`, after which
    /// callers retry the request.
    fn not_logged(&self, error: TablesError) -> TablesError {
        let TablesError::Io { path, source } = error else { return error };
        let why = format!("{}: {source}", path.display());
        let warns = {
            let mut warned = self.warned.lock();
            let is_due = warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL);
            if is_due {
                *warned = Some(Instant::now());
            }
            is_due
        };
        if warns {
            tracing::error!(
                "cannot write the log, so a training request failed; its caller retries the request: {why}"
            );
        }
        TablesError::Unable { peer: self.peer.clone(), what: format!("it cannot write its log: {why}") }
    }

    /// Add the name of this server to the error for ids of other shards, because the store does not know the
    /// name.
    fn named(&self, error: TablesError) -> TablesError {
        match error {
            TablesError::WrongShard { held, shard, .. } => {
                TablesError::WrongShard { peer: self.peer.clone(), held, shard }
            }
            other => other,
        }
    }
}
