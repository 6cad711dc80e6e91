//! [`Caller`]: makes a call, and retries it until it succeeds, is refused, or times out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use persia_types::{JobId, TablesError};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Request, Status};

use super::options::ClientOptions;
use super::pool::{Pool, Remote};
use crate::auth::{Credentials, Role};
use crate::backoff;
use crate::chunk::ChunkError;
use crate::error::{FORGOTTEN, from_failure, from_status, is_transient, is_transient_failure};
use crate::proto::{Failure, Fence};
use crate::rpc::Unary;

/// The failure of an attempt.
#[derive(Debug)]
pub(super) enum CallError {
    /// A retry may succeed. For example, the peer was not reached, did not reach a server, or sent a damaged
    /// reply.
    Transient(TablesError),
    /// A retry would fail as well.
    Permanent(TablesError),
}

impl CallError {
    pub(super) fn of_status(remote: &Remote, status: &Status) -> Self {
        let error = from_status(&remote.name, status);
        if is_transient(status) { Self::Transient(error) } else { Self::Permanent(error) }
    }

    pub(super) fn of_failure(remote: &Remote, failure: &Failure) -> Self {
        let error = from_failure(&remote.name, failure);
        if is_transient_failure(failure) { Self::Transient(error) } else { Self::Permanent(error) }
    }

    /// The error of an invalid or damaged chunk in a reply.
    pub(super) fn of_chunk(remote: &Remote, error: ChunkError) -> Self {
        match error {
            // The text of `BadShape` says that a request is malformed, so only `what` is used.
            ChunkError::Malformed(TablesError::BadShape { what }) => {
                Self::incompatible(remote, format!("its reply is invalid: {what}"))
            }
            ChunkError::Malformed(error) => {
                Self::incompatible(remote, format!("its reply is invalid: {error}"))
            }
            damaged => Self::unreachable(remote, format!("its reply was {damaged}")),
        }
    }

    pub(super) fn unreachable(remote: &Remote, what: impl Into<String>) -> Self {
        Self::Transient(TablesError::Unreachable { peer: remote.name.clone(), what: what.into() })
    }

    pub(super) fn incompatible(remote: &Remote, what: String) -> Self {
        Self::Permanent(TablesError::Incompatible { peer: remote.name.clone(), what })
    }
}

/// The time limits of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallTimeouts {
    /// The time limit for all attempts together; zero means one attempt.
    pub(super) total: Duration,
    /// The time limit for one attempt. If it is longer than `total`, it still applies in full to an attempt that
    /// started in time.
    pub(super) attempt: Duration,
    /// Whether the time limits exclude time in which a server recovers from its log and makes progress.
    pub(super) patient: bool,
}

/// The interval between log lines about a server that recovers from its log.
const REMIND_INTERVAL: Duration = Duration::from_secs(30);

impl CallTimeouts {
    /// The time limit for an attempt that starts after `elapsed`.
    fn limit(&self, elapsed: Duration) -> Duration {
        if self.attempt > self.total {
            self.attempt
        } else {
            self.attempt.min(self.total.saturating_sub(elapsed))
        }
    }
}

/// Calls the peers of a client.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) options: ClientOptions,
    /// The credentials of the role that looks up, pushes and reads statistics.
    pub(super) trainer: Credentials,
    admin: Credentials,
    /// The number of servers; 0 until it is known.
    pub(super) servers: AtomicU32,
    pool: Pool,
    /// The run in progress, if any.
    fence: Mutex<Option<Fence>>,
    /// Whether this process only reads rows of the run in progress, so that an outage loses nothing.
    observes: AtomicBool,
    /// The time of the last log line about a server that recovers from its log.
    reminded: Mutex<Option<Instant>>,
}

impl Caller {
    pub(super) fn new(options: ClientOptions) -> Self {
        Self {
            pool: Pool::new(&options),
            trainer: Credentials::new(Role::Trainer, options.secret.as_ref()),
            admin: Credentials::new(Role::Admin, options.secret.as_ref()),
            options,
            fence: Mutex::default(),
            observes: AtomicBool::new(false),
            reminded: Mutex::default(),
            servers: AtomicU32::new(0),
        }
    }

    pub(super) fn enter(&self, job: &str, generation: u64) {
        *self.fence.lock() = Some(Fence { job: JobId::from_name(job).0, generation });
    }

    pub(super) fn observe(&self, job: &str, generation: u64) {
        self.observes.store(true, Ordering::Relaxed);
        self.enter(job, generation);
    }

    pub(super) fn fence(&self) -> Option<Fence> {
        *self.fence.lock()
    }

    /// The time limits of look-ups, pushes, statistics and other short calls.
    pub(super) fn timeouts(&self) -> CallTimeouts {
        CallTimeouts {
            total: self.options.rpc_timeout,
            attempt: self.options.attempt_timeout(),
            patient: true,
        }
    }

    /// The time limits of long operations. Only attempts that start within `rpc_timeout` are made, but each
    /// of them may take up to `admin_timeout`.
    pub(super) fn admin_timeouts(&self) -> CallTimeouts {
        CallTimeouts { total: self.options.rpc_timeout, attempt: self.options.admin_timeout, patient: true }
    }

    /// The time limits of calls that get one attempt, because they need not succeed.
    pub(super) fn one_attempt(&self) -> CallTimeouts {
        CallTimeouts { total: Duration::ZERO, patient: false, ..self.timeouts() }
    }

    /// The time limits of long operations that must not run twice concurrently. They get one attempt, because an
    /// attempt whose reply was lost may still be running.
    pub(super) fn one_admin_attempt(&self) -> CallTimeouts {
        CallTimeouts { total: Duration::ZERO, patient: false, ..self.admin_timeouts() }
    }

    /// Call an administrative method. `what` names it in messages.
    pub(super) async fn administer<R: Unary + Clone>(
        &self,
        what: &str,
        timeouts: CallTimeouts,
        request: &R,
    ) -> Result<R::Reply, TablesError> {
        self.call(what, timeouts, async |remote, limit| self.attempt(remote, limit, request).await).await
    }

    /// Make one attempt to call an administrative method.
    pub(super) async fn attempt<R: Unary + Clone>(
        &self,
        remote: &Remote,
        limit: Duration,
        request: &R,
    ) -> Result<R::Reply, CallError> {
        let reply = remote.rpc(&self.admin).unary(with_deadline(limit, request.clone())).await;
        reply.map_err(|status| CallError::of_status(remote, &status))
    }

    /// Run `attempt` with one peer after another, each within its time limit. `what` names the call in
    /// messages.
    pub(super) async fn call<T>(
        &self,
        what: &str,
        timeouts: CallTimeouts,
        mut attempt: impl AsyncFnMut(&Remote, Duration) -> Result<T, CallError>,
    ) -> Result<T, TablesError> {
        let mut start = Instant::now();
        let mut attempts = 0;
        let mut recovered = BTreeMap::new();
        // The error of the previous attempt, if it is about a server.
        let mut of_server = None;
        loop {
            let error = match self.pool.pick(&self.options).await {
                Ok(remote) => {
                    let limit = timeouts.limit(start.elapsed());
                    match within(limit, &remote, attempt(&remote, limit)).await {
                        Ok(value) => {
                            remote.note_success();
                            return Ok(value);
                        }
                        Err(CallError::Permanent(error)) => return Err(self.judge(error, false)),
                        Err(CallError::Transient(error)) => {
                            if let TablesError::Recovering { peer, done, .. } = &error {
                                self.remind(&error);
                                // A server that restarts repeatedly makes no progress.
                                let before = recovered.get(peer).copied();
                                let grows = before.is_none_or(|before| before < *done);
                                if grows {
                                    recovered.insert(peer.clone(), *done);
                                }
                                if timeouts.patient && grows {
                                    (start, attempts) = (Instant::now(), 0);
                                }
                            } else {
                                remote.note_failure(&error);
                                self.pool.refresh(&self.options);
                            }
                            // An attempt with a shortened limit may end before the middleware names the
                            // server.
                            let shortened = limit < timeouts.attempt && !is_of_server(&error);
                            if shortened { of_server.take().unwrap_or(error) } else { error }
                        }
                    }
                }
                Err(error @ TablesError::Unreachable { .. }) => error,
                Err(error) => return Err(error),
            };
            attempts += 1;
            let pause = backoff::pause(attempts);
            if start.elapsed() + pause >= timeouts.total {
                // A server that makes progress resets `attempts`.
                let stalled = timeouts.patient && attempts > 1;
                return Err(self.judge(given_up(error, what, attempts, start.elapsed()), stalled));
            }
            of_server = Some(error).filter(is_of_server);
            sleep(pause).await;
        }
    }

    /// Log, at intervals, for which server the call waits.
    fn remind(&self, error: &TablesError) {
        let mut reminded = self.reminded.lock();
        if reminded.is_none_or(|at| at.elapsed() >= REMIND_INTERVAL) {
            *reminded = Some(Instant::now());
            tracing::warn!("{error}");
        }
    }

    /// Translate an error. Before a run, [`FORGOTTEN`] becomes [`TablesError::NotBegun`]. Once a run has begun,
    /// `NotBegun` becomes [`TablesError::Lost`]. An outage also becomes `Lost`, unless this process only observes the
    /// run. `stalled` is true if a recovering server made no progress between two attempts.
    fn judge(&self, error: TablesError, stalled: bool) -> TablesError {
        if self.fence.lock().is_none() {
            let forgotten = matches!(&error, TablesError::Lost { what, .. } if what == FORGOTTEN);
            return if forgotten { TablesError::NotBegun } else { error };
        }
        match error {
            TablesError::NotBegun => TablesError::Lost { peer: "the server".into(), what: FORGOTTEN.into() },
            TablesError::Unable { peer, what } | TablesError::Unreachable { peer, what }
                if !self.observes.load(Ordering::Relaxed) =>
            {
                TablesError::Lost { peer, what }
            }
            error @ TablesError::Recovering { .. } if !self.observes.load(Ordering::Relaxed) => {
                let TablesError::Recovering { peer, done, total } = error else { return error };
                let progress = if stalled { ", but makes no progress" } else { "" };
                let what = format!("it is still reading its rows{progress} ({done} of {total} bytes)");
                TablesError::Lost { peer, what }
            }
            other => other,
        }
    }
}

/// A request that its receiver cancels slightly after `limit`.
pub(super) fn with_deadline<T>(limit: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    // The timeout is slightly longer than the wait of `within`, because tonic's timeout error does not state
    // a duration.
    request.set_timeout(limit + limit / 20);
    request
}

/// The result of an attempt, or an error with the limit that was exceeded.
async fn within<T>(
    limit: Duration,
    remote: &Remote,
    attempt: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let timed_out = || {
        let what = format!(
            "no response within {:.1} s: the process is busy or stopped, or a firewall drops packets to its port",
            limit.as_secs_f32()
        );
        Err(CallError::unreachable(remote, what))
    };
    let start = Instant::now();
    match timeout(limit, attempt).await {
        Err(_) => timed_out(),
        // On a busy machine, tonic's timeout may expire first.
        Ok(Err(CallError::Transient(error))) if start.elapsed() >= limit && !is_of_server(&error) => {
            timed_out()
        }
        Ok(outcome) => outcome,
    }
}

/// Whether the error is about a server, not about a middleware. A middleware names a server as
/// [`crate::discovery::Peer::describe`] does: "server 1 of 2 at host:8888".
fn is_of_server(error: &TablesError) -> bool {
    match error {
        TablesError::Recovering { .. } => true,
        TablesError::Unable { peer, .. } | TablesError::Unreachable { peer, .. } => {
            peer.starts_with("server")
        }
        _ => false,
    }
}

fn given_up(error: TablesError, what: &str, attempts: u32, time: Duration) -> TablesError {
    let times = if attempts == 1 { "once".to_owned() } else { format!("{attempts} times") };
    let say = |why: String| format!("{what} failed {times} in {:.1} s: {why}", time.as_secs_f32());
    match error {
        TablesError::Unable { peer, what } => TablesError::Unable { peer, what: say(what) },
        TablesError::Unreachable { peer, what } => TablesError::Unreachable { peer, what: say(what) },
        TablesError::Timeout { peer, what } => TablesError::Timeout { peer, what: say(what) },
        other => other,
    }
}
