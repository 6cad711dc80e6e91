//! [`SyncState`]: tracks which part of the log is durable. [`Ticker`]: makes a call every second.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

const SECOND: Duration = Duration::from_secs(1);
/// Requests wait while a record that is not durable is at least this old.
const LONGEST_UNSYNCED: Duration = Duration::from_secs(2);

/// Tracks up to which position, in the bytes written, the log is durable.
#[derive(Default)]
pub(super) struct SyncState {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of logs before this one. A sync that began with an earlier log does not count for this one.
    log: u64,
    durable: u64,
    syncing: bool,
    /// The time at which the oldest record in the current sync was written.
    synced_since: Option<Instant>,
    /// The time at which the oldest record that no sync includes yet was written.
    written_since: Option<Instant>,
    /// The error of a failed sync. After it, the content of the disk is unknown, so nothing more is written
    /// until a reset.
    failed: Option<String>,
}

impl State {
    fn check(&self) -> io::Result<()> {
        self.failed.as_ref().map_or(Ok(()), |why| Err(io::Error::other(why.clone())))
    }

    /// The age of the oldest record that is not durable; zero if all are durable.
    fn unsynced(&self) -> Duration {
        self.synced_since.or(self.written_since).map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl SyncState {
    /// Check that more may be written.
    ///
    /// # Errors
    /// The error of an earlier sync.
    pub(super) fn check(&self) -> io::Result<()> {
        self.state.lock().check()
    }

    /// The age of the oldest record that is not durable; zero if all are durable.
    pub(super) fn unsynced(&self) -> Duration {
        self.state.lock().unsynced()
    }

    /// Wait while a record older than [`LONGEST_UNSYNCED`] is not durable, but no longer than `timeout`, and
    /// not after a failed sync. Returns whether it waited.
    ///
    /// # Errors
    /// `TimedOut`.
    pub(super) fn wait_for_sync(&self, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        let mut waited = false;
        while state.failed.is_none() && state.unsynced() >= LONGEST_UNSYNCED {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                let age = state.unsynced().as_secs_f32();
                let what = format!("the disk is slow: a record that is {age:.1} s old is not durable yet");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            waited = true;
        }
        Ok(waited)
    }

    /// Note that a record was written. The caller holds the lock on the end of the log.
    pub(super) fn written(&self) {
        self.state.lock().written_since.get_or_insert_with(Instant::now);
    }

    /// Note that a sync includes all records written so far. The caller holds the lock on the end of the log.
    pub(super) fn captured(&self) {
        let mut state = self.state.lock();
        state.synced_since = state.written_since.take();
    }

    /// Start over with an empty log. Records that were not durable are dropped, and a failed disk may have recovered.
    pub(super) fn reset(&self, durable: u64) {
        let mut state = self.state.lock();
        *state = State { log: state.log + 1, durable, ..State::default() };
        self.changed.notify_all();
    }

    /// Wait until everything up to `position` is durable. One caller calls `sync` for all waiting callers. `sync`
    /// returns the position up to which the log is durable, or None if there is no log. If another log begins during
    /// the call, the records of this one are no longer needed.
    ///
    /// # Errors
    /// The error of this sync or of an earlier one.
    pub(super) fn sync_to(
        &self,
        position: u64,
        sync: impl FnOnce() -> io::Result<Option<u64>>,
    ) -> io::Result<()> {
        let log = {
            let mut state = self.state.lock();
            while state.syncing && state.failed.is_none() && state.durable < position {
                self.changed.wait(&mut state);
            }
            state.check()?;
            if state.durable >= position {
                return Ok(());
            }
            state.syncing = true;
            state.log
        };
        let result = sync();
        let mut state = self.state.lock();
        if state.log != log {
            return Ok(());
        }
        state.syncing = false;
        match result {
            Ok(durable) => {
                state.durable = state.durable.max(durable.unwrap_or(0));
                state.synced_since = None;
            }
            Err(error) => {
                state.failed = Some(format!(
                    "cannot sync the log to the disk: {error}; loading a checkpoint, or a run that begins with empty \
                     tables, starts a new log"
                ));
            }
        }
        self.changed.notify_all();
        state.check()
    }
}

/// A thread that makes a call every second, or immediately after a call that took longer, until the ticker is
/// dropped.
pub(super) struct Ticker {
    /// Dropping this ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(mut call: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            let mut pause = SECOND;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let start = Instant::now();
                call();
                pause = SECOND.saturating_sub(start.elapsed());
            }
        };
        let thread = thread::Builder::new().name("persia-log".into()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop = None;
        let ended = self.thread.take().is_none_or(|thread| thread.join().is_ok());
        debug_assert!(ended, "the log's thread does not panic");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_of_an_earlier_log_says_nothing_about_this_one() {
        let synced = SyncState::default();
        let sync_of_earlier_log = |result: io::Result<Option<u64>>| {
            let replaced = || {
                synced.reset(0);
                synced.written();
                result
            };
            synced.sync_to(100, replaced).unwrap();
        };
        sync_of_earlier_log(Ok(Some(100)));
        assert!(synced.unsynced() > Duration::ZERO, "the record of this log is not durable");
        let mut asked = false;
        let sync = || {
            asked = true;
            Ok(Some(50))
        };
        synced.sync_to(50, sync).unwrap();
        assert!(asked, "50 of the earlier log's 100 bytes");

        sync_of_earlier_log(Err(io::Error::other("the old disk")));
        synced.check().unwrap();

        let of_this_log = || synced.state.lock().syncing = true;
        let replaced = || {
            synced.reset(0);
            of_this_log();
            Ok(Some(100))
        };
        synced.sync_to(100, replaced).unwrap();
        assert!(synced.state.lock().syncing, "it ended the sync of this log");
    }
}
