//! One call, tried until it succeeds, is refused, or time is up.

use std::sync::atomic::Ordering;
use std::time::Duration;

use persia_types::TablesError;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Request, Status};

use super::Inner;
use super::pool::Remote;
use crate::backoff;
use crate::chunk::ChunkError;
use crate::error::{FORGOTTEN, from_failure, from_status, is_transient, is_transient_failure};
use crate::proto::Failure;

/// Why a try did not succeed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Another try may: the peer was not reached, or did not reach a server.
    Again(TablesError),
    /// No other try will.
    Final(TablesError),
}

impl Trouble {
    pub(super) fn of_status(remote: &Remote, status: &Status) -> Self {
        let error = from_status(&remote.name, status);
        if is_transient(status) { Self::Again(error) } else { Self::Final(error) }
    }

    pub(super) fn of_failure(remote: &Remote, failure: &Failure) -> Self {
        let error = from_failure(&remote.name, failure);
        if is_transient_failure(failure) { Self::Again(error) } else { Self::Final(error) }
    }

    /// Trouble with a reply.
    pub(super) fn of_chunk(remote: &Remote, error: ChunkError) -> Self {
        let peer = remote.name.clone();
        match error {
            ChunkError::Malformed(error) => {
                Self::Final(TablesError::Incompatible { peer, what: format!("its reply is {error}") })
            }
            damaged => {
                Self::Again(TablesError::Unreachable { peer, what: format!("its reply was {damaged}") })
            }
        }
    }

    pub(super) fn unreachable(remote: &Remote, what: &str) -> Self {
        Self::Again(TablesError::Unreachable { peer: remote.name.clone(), what: what.to_owned() })
    }
}

/// How long one verb may take: all its tries, and each of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    pub(super) all: Duration,
    pub(super) each: Duration,
}

impl Inner {
    pub(super) fn patience(&self) -> Patience {
        Patience { all: self.options.rpc_timeout, each: self.options.try_timeout() }
    }

    /// For what may take long, and is tried again only where it was not begun.
    pub(super) fn admin_patience(&self) -> Patience {
        Patience { all: self.options.rpc_timeout, each: self.options.admin_timeout }
    }

    /// Try `attempt` with one peer after another; it is given what it may take. `what` names the call in messages.
    /// An administrative call that began in time may use up what it is given.
    pub(super) async fn call<T>(
        &self,
        what: &str,
        patience: Patience,
        mut attempt: impl AsyncFnMut(&Remote, Duration) -> Result<T, Trouble>,
    ) -> Result<T, TablesError> {
        let start = Instant::now();
        let mut tries = 0;
        let mut server_trouble = None;
        loop {
            let trouble = match self.pool.pick(&self.options).await {
                Ok(remote) => {
                    let left = patience.all.saturating_sub(start.elapsed());
                    let each =
                        if patience.each > patience.all { patience.each } else { patience.each.min(left) };
                    let silent = || {
                        let silent = format!("no answer within {:.1} s", each.as_secs_f32());
                        Err(Trouble::unreachable(&remote, &silent))
                    };
                    let began = Instant::now();
                    let outcome = match timeout(each, attempt(&remote, each)).await {
                        Err(_) => silent(),
                        // A busy machine may see tonic's end of the call first.
                        Ok(Err(Trouble::Again(error)))
                            if began.elapsed() >= each && !is_of_server(&error) =>
                        {
                            silent()
                        }
                        Ok(outcome) => outcome,
                    };
                    match outcome {
                        Ok(value) => {
                            remote.note_success();
                            return Ok(value);
                        }
                        Err(Trouble::Final(error)) => return Err(self.judge(error)),
                        Err(Trouble::Again(error)) => {
                            remote.note_failure(&error);
                            self.pool.look_again(&self.options);
                            // The end of the time left may cut off what a middleware has to say of a server.
                            if each < patience.each && !is_of_server(&error) {
                                server_trouble.take().unwrap_or(error)
                            } else {
                                error
                            }
                        }
                    }
                }
                Err(error @ TablesError::Unreachable { .. }) => error,
                Err(error) => return Err(error),
            };
            tries += 1;
            let pause = backoff::pause(tries);
            if start.elapsed() + pause >= patience.all {
                return Err(self.judge(given_up(trouble, what, tries, start.elapsed())));
            }
            server_trouble = Some(trouble).filter(is_of_server);
            sleep(pause).await;
        }
    }

    /// What an error means for a run that has begun, and [`FORGOTTEN`] for one that has not.
    fn judge(&self, error: TablesError) -> TablesError {
        if self.fence.lock().is_none() {
            let forgotten = matches!(&error, TablesError::Lost { what, .. } if what == FORGOTTEN);
            return if forgotten { TablesError::NotBegun } else { error };
        }
        match error {
            TablesError::NotBegun => TablesError::Lost { peer: "the server".into(), what: FORGOTTEN.into() },
            TablesError::Unreachable { peer, what } if !self.observes.load(Ordering::Relaxed) => {
                TablesError::Lost { peer, what }
            }
            other => other,
        }
    }
}

/// A message that its receiver serves within `each`, or gives up.
pub(super) fn within<T>(each: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    // A little more, because tonic's own end of a call does not say how long it waited.
    request.set_timeout(each + each / 20);
    request
}

/// Whether a server was not reached. A middleware names it as [`crate::discovery::Peer::describe`] does: "server 1 of 2
/// at host:8888".
fn is_of_server(error: &TablesError) -> bool {
    matches!(error, TablesError::Unreachable { peer, .. } if peer.starts_with("server"))
}

fn given_up(error: TablesError, what: &str, tries: u32, time: Duration) -> TablesError {
    let say = |why: String| format!("{what} failed {tries} times in {:.1} s: {why}", time.as_secs_f32());
    match error {
        TablesError::Unreachable { peer, what } => TablesError::Unreachable { peer, what: say(what) },
        TablesError::Timeout { peer, what } => TablesError::Timeout { peer, what: say(what) },
        other => other,
    }
}
