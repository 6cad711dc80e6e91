//! [`RequestLog`]: a server's log with its base, which checkpoints replace.
//!
//! The base consists of the rows of a checkpoint, if any, and the progress of the run. The cut of a snapshot starts a
//! new segment. Once the snapshot is part of a checkpoint, that checkpoint becomes the base, and the segments before
//! the cut are removed. A server whose log cannot be used starts empty, and the job resumes from its last checkpoint.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use persia_store::Progress;
use persia_types::TablesError;
use persia_types::config::LogSync;
use persia_types::tables::{FileEntry, Run};
use serde::{Deserialize, Serialize};

use super::sequencer::Reached;
use crate::exit::Exit;
use crate::wal::{ReplayError, ReplayOp, Replayed, Wal, WalRecord};

/// The options of a server's log.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// The directory of the log, which must contain no other files.
    pub dir: PathBuf,
    /// When records become durable.
    pub sync: LogSync,
}

/// The progress of a run, as the base stores it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct WalPosition {
    pub(super) progress: Progress,
    /// The position in the order of requests; None if the requests have no order, or none has arrived.
    pub(super) reached: Option<Reached>,
}

/// The state to which the first record is applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct WalBase {
    pub(super) owner: Owner,
    pub(super) run: Run,
    /// The checkpoint with the rows; None means no rows.
    pub(super) rows: Option<Rows>,
    /// The progress. It is serialized under the name that the first version used.
    #[serde(rename = "mark")]
    pub(super) position: WalPosition,
    /// The first segment with records to apply.
    segment: u64,
}

/// The settings that affect how a request is applied. A log with different settings is not replayed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) version: String,
    pub(super) index: u32,
    pub(super) servers: u32,
    pub(super) capacity: u64,
}

/// The files of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rows {
    /// The directory, relative to the checkpoint root, or the URL.
    pub(super) directory: String,
    pub(super) files: Vec<FileEntry>,
}

/// The log of a server. Its administrative methods are called one at a time.
pub(super) struct RequestLog {
    wal: Wal,
    owner: Owner,
    /// The last cut, unless its checkpoint is the base. Lock it before the log.
    cut: Mutex<Option<Cut>>,
}

/// A cut, and the first segment after it.
struct Cut {
    number: u64,
    segment: u64,
    position: WalPosition,
}

impl RequestLog {
    /// Open the log. A request waits for a slow disk no longer than `timeout`.
    ///
    /// # Errors
    /// `Usage` if the directory cannot be used; `Again` if a thread cannot be started.
    pub(super) fn open(options: LogOptions, owner: Owner, timeout: Duration) -> Result<Self, Exit> {
        let LogOptions { dir, sync } = options;
        let failed = format!("cannot open the log in {} (below PERSIA_DATA_DIR)", dir.display());
        let wal = Wal::open(dir, sync, timeout).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => Exit::Again(format!("{failed}: cannot start a thread: {error}")),
            _ => Exit::Usage(format!("{failed}: {error}")),
        })?;
        Ok(Self { wal, owner, cut: Mutex::default() })
    }

    /// The base of the log that an earlier process left, if any.
    ///
    /// # Errors
    /// The reason why the log cannot be used.
    pub(super) fn base(&self) -> Result<Option<WalBase>, String> {
        let Some(base) = self.wal.base()? else { return Ok(None) };
        let base: WalBase = serde_json::from_slice(&base)
            .map_err(|error| format!("the file `base` of the log is malformed: {error}"))?;
        if base.owner != self.owner {
            let shown = |owner: &Owner| {
                let Owner { version, index, servers, capacity } = owner;
                format!("server {index} of {servers} with version {version} and capacity {capacity}")
            };
            let (theirs, own) = (shown(&base.owner), shown(&self.owner));
            return Err(format!("the log was written by {theirs}, but this is {own}"));
        }
        Ok(Some(base))
    }

    /// The size of the records after `base`, in bytes.
    pub(super) fn bytes_after(&self, base: &WalBase) -> u64 {
        self.wal.bytes_from(base.segment)
    }

    /// Pass every record after `base`, with its length, to `apply`, which returns the cut that the record made, if
    /// any. After that, records can be appended.
    ///
    /// # Errors
    /// The reason why the log cannot be used. The caller must drop what was applied until then.
    pub(super) fn replay(
        &self,
        base: &WalBase,
        mut apply: impl FnMut(ReplayOp, u64) -> Result<Option<(u64, WalPosition)>, ReplayError>,
    ) -> Result<Replayed, String> {
        let mut cut = None;
        let replayed = self.wal.replay(base.segment, |op, next, bytes| {
            let begins = matches!(op, ReplayOp::Begin(_));
            let made = apply(op, bytes)?;
            if begins {
                cut = None;
            }
            if let Some((number, position)) = made {
                cut = Some(Cut { number, segment: next, position });
            }
            Ok(())
        })?;
        // The process may have ended after it had logged a cut and before it began the next segment.
        *self.cut.lock() = cut.filter(|cut| cut.segment <= replayed.segment);
        Ok(replayed)
    }

    /// Refuse records until the log is [restarted](Self::restart), because the rows are not those of the log.
    pub(super) fn close(&self) {
        *self.cut.lock() = None;
        self.wal.close();
    }

    /// Whether the log has a base.
    pub(super) fn has_base(&self) -> bool {
        self.wal.has_base()
    }

    /// Apply `change` and start a new log from its result: the run, the rows, and the progress of the run.
    ///
    /// # Errors
    /// Those of `change`, after which the log is unchanged; `Io`, after which requests are refused until a restart of
    /// the log succeeds.
    pub(super) fn restart(
        &self,
        change: impl FnOnce() -> Result<(Run, Option<Rows>, WalPosition), TablesError>,
    ) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        self.wal.reset(|segment| {
            let (run, rows, position) = change()?;
            *cut = None;
            self.encode(WalBase { owner: self.owner.clone(), run, rows, position, segment })
        })
    }

    /// Log a training request, and then `apply` it. If the disk is too slow, wait before the request is logged.
    ///
    /// # Errors
    /// Those of [`Wal::wait_for_sync`] and [`Wal::append`].
    pub(super) fn append<T>(
        &self,
        record: &WalRecord,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<T, TablesError> {
        self.wal.wait_for_sync()?;
        self.wal.append(record, apply)
    }

    /// Log a run that continues with the current rows, and then `start` it.
    ///
    /// # Errors
    /// `BadRun` if the run cannot be encoded; those of [`Wal::append`].
    pub(super) fn begin(
        &self,
        run: &Run,
        start: impl FnOnce() -> Result<(), TablesError>,
    ) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        let record = WalRecord::begin(run).map_err(|error| TablesError::BadRun {
            what: format!("it cannot be encoded for the log: {error}"),
        })?;
        self.wal.append(&record, start)?;
        // The last cut belongs to an earlier run.
        *cut = None;
        Ok(())
    }

    /// Log the cut of a snapshot, and then make the cut.
    ///
    /// # Errors
    /// Those of [`Wal::append_and_rotate`].
    pub(super) fn prepare_snapshot(
        &self,
        number: u64,
        make: impl FnOnce() -> Result<WalPosition, TablesError>,
    ) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        let (position, segment) = self.wal.append_and_rotate(&WalRecord::prepare_snapshot(number), make)?;
        *cut = Some(Cut { number, segment, position });
        Ok(())
    }

    /// Log that a snapshot is aborted, so that a recovery need not preserve its rows. Without a base, nothing
    /// is logged.
    ///
    /// # Errors
    /// Those of [`Wal::append`].
    pub(super) fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        if !self.has_base() {
            return Ok(());
        }
        self.wal.append(&WalRecord::abort_snapshot(number), || Ok(()))
    }

    /// Make the checkpoint that contains this snapshot the base of the log, unless there has been a later cut. `rows`
    /// are the files of the checkpoint.
    ///
    /// # Errors
    /// `Io`, after which the old base may still be in place.
    pub(super) fn truncate_to_checkpoint(
        &self,
        number: u64,
        run: Run,
        rows: Rows,
    ) -> Result<(), TablesError> {
        let mut last = self.cut.lock();
        let Some(cut) = last.as_ref().filter(|cut| cut.number == number && self.has_base()) else {
            return Ok(());
        };
        let (owner, position, segment) = (self.owner.clone(), cut.position.clone(), cut.segment);
        let base = self.encode(WalBase { owner, run, rows: Some(rows), position, segment })?;
        self.wal.truncate(segment, &base)?;
        *last = None;
        Ok(())
    }

    /// The age of the oldest record that is not durable; zero if all are durable.
    pub(super) fn unsynced(&self) -> Duration {
        self.wal.unsynced()
    }

    /// The size of the segments, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.wal.bytes()
    }

    fn encode(&self, base: WalBase) -> Result<Vec<u8>, TablesError> {
        serde_json::to_vec(&base).map_err(|error| {
            let what = format!("cannot encode the base of the log: {error}");
            self.wal.error(io::Error::other(what))
        })
    }
}
