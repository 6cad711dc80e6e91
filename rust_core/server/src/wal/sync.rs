//! [`SyncState`]: the durable part of the log. [`Ticker`]: a call every second.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

const SECOND: Duration = Duration::from_secs(1);

/// The file to sync, and the position that it reaches: bytes written since the process began.
pub(super) type End = (Arc<File>, u64);

/// The durable part of the written bytes.
#[derive(Default)]
pub(super) struct SyncState {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    durable: u64,
    syncing: bool,
    /// After a failed `fsync` the content of the disk is unknown: nothing more is written.
    failed: Option<String>,
}

impl State {
    fn check(&self) -> io::Result<()> {
        self.failed.as_ref().map_or(Ok(()), |why| Err(io::Error::other(why.clone())))
    }
}

impl SyncState {
    /// Whether more may be written.
    ///
    /// # Errors
    /// Why a sync failed.
    pub(super) fn check(&self) -> io::Result<()> {
        self.state.lock().check()
    }

    /// Start over with an empty log: records that were not durable are dropped, and a failed disk may have recovered.
    pub(super) fn reset(&self, durable: u64) {
        *self.state.lock() = State { durable, ..State::default() };
        self.changed.notify_all();
    }

    /// Wait until everything up to `position` is durable. One caller syncs for all waiting ones.
    ///
    /// # Errors
    /// Why a sync failed, this one or an earlier one.
    pub(super) fn sync_to(&self, position: u64, end: impl FnOnce() -> io::Result<End>) -> io::Result<()> {
        {
            let mut state = self.state.lock();
            while state.syncing && state.failed.is_none() && state.durable < position {
                self.changed.wait(&mut state);
            }
            state.check()?;
            if state.durable >= position {
                return Ok(());
            }
            state.syncing = true;
        }
        let result = end().and_then(|end| self.sync(&end));
        self.state.lock().syncing = false;
        self.changed.notify_all();
        result
    }

    /// Sync this file now.
    ///
    /// # Errors
    /// Why the sync failed.
    pub(super) fn sync(&self, (file, written): &End) -> io::Result<()> {
        let result = file.sync_data();
        let mut state = self.state.lock();
        match result {
            Ok(()) => state.durable = state.durable.max(*written),
            Err(error) => {
                state.failed = Some(format!(
                    "the log could not be written to the disk ({error}); a new run or a restore starts a new log"
                ));
            }
        }
        self.changed.notify_all();
        state.check()
    }
}

/// A thread that makes a call every second until this is dropped.
pub(super) struct Ticker {
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// # Errors
    /// The thread could not be started.
    pub(super) fn start(mut call: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            while stopped.recv_timeout(SECOND) == Err(RecvTimeoutError::Timeout) {
                call();
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
