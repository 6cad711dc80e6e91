//! [`Wal`]: a write-ahead log of pushes, in a separate directory.
//!
//! ```text
//! base     where the log starts: crc32c, then the content of the caller, which names the first segment
//! 7, 8, …  segments: MAGIC, then records in the order in which they were applied
//! ```
//!
//! Each request is logged, applied, and then acknowledged. Requests are logged and applied one at a time. The record of
//! a refused request is removed. A log without a readable base is invalid.
//!
//! Requests never wait for a sync while they hold the lock on the end of the log. With a sync every second, a request
//! is not logged while a record older than two seconds is not durable.
//!
//! * [`record`][]: encodes and decodes a request
//! * [`segment`][]: one file of records
//! * [`files`][]: the directory of the log
//! * [`sync`][]: durability
//! * [`replay`][]: reads the log of an earlier process
//!
//! The caller defines what a base means, and applies requests.

mod files;
mod record;
mod replay;
mod segment;
mod sync;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use persia_types::TablesError;
use persia_types::config::LogSync;

use self::files::Files;
use self::segment::Segment;
use self::sync::{SyncState, Ticker};
use crate::metrics;

pub(crate) use self::record::{ReplayOp, WalRecord};
pub(crate) use self::replay::{ReplayError, Replayed};

/// The number of the first segment of a new log.
const FIRST_SEGMENT: u64 = 1;

/// A write-ahead log.
pub(crate) struct Wal {
    shared: Arc<Shared>,
    _sync_every_second: Ticker,
}

struct Shared {
    files: Files,
    sync: LogSync,
    /// The maximum time that a request waits for a slow disk.
    timeout: Duration,
    writer: Mutex<Writer>,
    synced: SyncState,
}

/// The end of the log.
#[derive(Default)]
struct Writer {
    /// The first segment; None without a base.
    first: Option<u64>,
    /// The segment to which records are appended; None without a base.
    segment: Option<Segment>,
    /// The earlier segments that may not be durable yet.
    rotated: Vec<Arc<File>>,
    /// A position that grows with each record that is written, also after a reset, so that syncs can be compared. It
    /// is not the length of the log.
    written: u64,
}

impl Wal {
    /// Open the log in `dir`, which is created if it does not exist. A request waits for a slow disk no longer than
    /// `timeout`. This method reads nothing. [`Self::base`] and [`Self::replay`] read the log.
    ///
    /// # Errors
    /// The directory or a thread cannot be created.
    pub(crate) fn open(dir: PathBuf, sync: LogSync, timeout: Duration) -> io::Result<Self> {
        let files = Files::open(dir)?;
        let shared = Shared { files, sync, timeout, writer: Mutex::default(), synced: SyncState::default() };
        let shared = Arc::new(shared);
        let of_thread = Arc::clone(&shared);
        let mut failing = false;
        let ticker = Ticker::start(move || {
            let written = of_thread.writer.lock().written;
            let synced = of_thread.sync_to(written);
            if let (Err(error), false) = (&synced, failing) {
                tracing::error!("{error}");
            }
            failing = synced.is_err();
        })?;
        Ok(Self { shared, _sync_every_second: ticker })
    }

    /// The base that an earlier process left, if any.
    ///
    /// # Errors
    /// The reason why it cannot be read, with its path.
    pub(crate) fn base(&self) -> Result<Option<Vec<u8>>, String> {
        self.shared.files.read_base()
    }

    /// Whether the log has a base, so that records can be appended unless a disk has failed.
    pub(crate) fn has_base(&self) -> bool {
        self.shared.writer.lock().first.is_some()
    }

    /// Refuse records until a reset. The files are kept.
    pub(crate) fn close(&self) {
        let mut writer = self.shared.writer.lock();
        *writer = Writer::default();
        self.shared.synced.reset(0);
    }

    /// Replace the log by an empty one. `base` is called with the number of the first segment. No record is appended
    /// during this call. The old log is removed before anything is written, to free space on a full disk. A process
    /// that is killed in between leaves no log.
    ///
    /// # Errors
    /// Those of `base`, before anything is removed; `Io`, after which records are refused until a reset succeeds.
    pub(crate) fn reset(
        &self,
        base: impl FnOnce(u64) -> Result<Vec<u8>, TablesError>,
    ) -> Result<(), TablesError> {
        let Shared { files, writer, synced, .. } = &*self.shared;
        let mut writer = writer.lock();
        let base = base(FIRST_SEGMENT)?;
        *writer = Writer { written: writer.written, ..Writer::default() };
        files.remove_all().map_err(|source| files.error(source))?;
        let segment = files.create_segment(FIRST_SEGMENT)?;
        segment.file().sync_all().map_err(|source| files.error(source))?;
        files.write_base(&base)?; // this also syncs the names of the files
        (writer.first, writer.segment) = (Some(FIRST_SEGMENT), Some(segment));
        synced.reset(writer.written);
        Ok(())
    }

    /// Wait while the disk is too slow for a sync every second.
    ///
    /// # Errors
    /// `Io` after the timeout.
    pub(crate) fn wait_for_sync(&self) -> Result<(), TablesError> {
        let Shared { files, sync, timeout, synced, .. } = &*self.shared;
        if *sync == LogSync::Always {
            return Ok(()); // each request waits for its own sync
        }
        let waited = synced.wait_for_sync(*timeout);
        if !matches!(waited, Ok(false)) {
            metrics::waited_for_sync();
        }
        waited.map(drop).map_err(|source| files.error(source))
    }

    /// Add the path of the log to an error.
    pub(crate) fn error(&self, source: io::Error) -> TablesError {
        self.shared.files.error(source)
    }

    /// The age of the oldest record that is not durable; zero if all are durable.
    pub(crate) fn unsynced(&self) -> Duration {
        self.shared.synced.unsynced()
    }

    /// Log `record`, then `apply` it, and then, if every request must be durable, wait until it is.
    ///
    /// # Errors
    /// `Io` if the record cannot be appended, after which nothing was applied. `Io` if a sync fails, after which the
    /// change was applied. Those of `apply`, after which the record is removed.
    pub(crate) fn append<T>(
        &self,
        record: &WalRecord,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<T, TablesError> {
        let shared = &*self.shared;
        let (applied, position) = {
            let mut writer = shared.writer.lock();
            let bytes = shared.write(&mut writer, record)?;
            let applied = apply().inspect_err(|_| writer.take_back(bytes))?;
            (applied, writer.written)
        };
        shared.sync_if_always(position)?;
        Ok(applied)
    }

    /// Like [`Self::append`], but later records go to a new segment, whose number is returned. The caller must not
    /// call this or [`Self::reset`] concurrently.
    ///
    /// # Errors
    /// Those of [`Self::append`].
    pub(crate) fn append_and_rotate<T>(
        &self,
        record: &WalRecord,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<(T, u64), TablesError> {
        let shared = &*self.shared;
        let next = shared.writer.lock().segment.as_ref().map(|segment| segment.number + 1);
        let next = next.ok_or_else(|| shared.closed())?;
        let segment = shared.files.create_segment(next)?;
        let rotated = shared.rotate(record, segment, apply);
        let (applied, position) = match rotated {
            Ok(rotated) => rotated,
            Err(error) => {
                shared.files.remove_segment(next).map_err(|source| shared.files.error(source))?;
                return Err(error);
            }
        };
        shared.sync_if_always(position)?;
        Ok((applied, next))
    }

    /// Replace the base by one that starts at the segment `first`, and remove the segments before it. The caller must
    /// not call this or [`Self::reset`] concurrently.
    ///
    /// # Errors
    /// `Io`, after which the old base may still be in place.
    pub(crate) fn truncate(&self, first: u64, base: &[u8]) -> Result<(), TablesError> {
        let Shared { files, writer, .. } = &*self.shared;
        if !self.has_base() {
            return Ok(());
        }
        files.write_base(base)?; // without the lock: requests do not wait for the disk
        writer.lock().first = Some(first);
        files.keep_segments(first..=u64::MAX).map_err(|source| files.error(source))
    }

    /// The size of all segments, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let (first, last, bytes) = {
            let writer = self.shared.writer.lock();
            let (Some(first), Some(last)) = (writer.first, &writer.segment) else { return 0 };
            (first, last.number, last.bytes)
        };
        let before = (first..last)
            .filter_map(|number| self.shared.files.segment(number).metadata().ok())
            .map(|metadata| metadata.len());
        before.sum::<u64>() + bytes
    }
}

impl Writer {
    fn take_back(&mut self, bytes: u64) {
        if let Some(segment) = &mut self.segment {
            segment.take_back(bytes);
        }
    }
}

/// The files that a sync includes, and the position up to which it makes the log durable.
struct Capture {
    rotated: Vec<Arc<File>>,
    segment: Arc<File>,
    number: u64,
    written: u64,
}

impl Shared {
    /// The reason why nothing can be appended.
    fn closed(&self) -> TablesError {
        let why = "the log is closed: it could not be written, or it does not contain the current rows; loading a \
                   checkpoint, or a run that begins with empty tables, starts a new log";
        self.files.error(io::Error::other(why))
    }

    /// Append a complete record or nothing. Returns the length of the record.
    fn write(&self, writer: &mut Writer, record: &WalRecord) -> Result<u64, TablesError> {
        self.synced.check().map_err(|source| self.files.error(source))?;
        let segment = writer.segment.as_mut().ok_or_else(|| self.closed())?;
        let bytes = segment.append(record)?;
        writer.written += bytes;
        self.synced.written();
        Ok(bytes)
    }

    /// Append `record` to the last segment, `apply` it, and continue with the new `segment`. Also returns the
    /// position up to which the log must then be durable.
    fn rotate<T>(
        &self,
        record: &WalRecord,
        mut segment: Segment,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<(T, u64), TablesError> {
        let mut writer = self.writer.lock();
        let bytes = self.write(&mut writer, record)?;
        let before = writer.segment.as_ref().map_or(0, |segment| segment.bytes);
        let applied = segment.append(&WalRecord::follows(before)).and_then(|_| apply());
        let applied = applied.inspect_err(|_| writer.take_back(bytes))?;
        if let Some(last) = writer.segment.replace(segment) {
            writer.rotated.push(last.file());
        }
        Ok((applied, writer.written))
    }

    fn sync_if_always(&self, position: u64) -> Result<(), TablesError> {
        if self.sync == LogSync::Always { self.sync_to(position) } else { Ok(()) }
    }

    /// Wait until everything up to `position`, a value of [`Writer::written`], is durable.
    fn sync_to(&self, position: u64) -> Result<(), TablesError> {
        let sync = || {
            let Some(capture) = self.capture() else { return Ok(None) };
            for file in &capture.rotated {
                file.sync_data()?;
            }
            capture.segment.sync_data()?;
            if !capture.rotated.is_empty() {
                self.files.sync()?;
                self.note_durable(&capture);
            }
            Ok(Some(capture.written))
        };
        self.synced.sync_to(position, sync).map_err(|source| self.files.error(source))
    }

    fn capture(&self) -> Option<Capture> {
        let writer = self.writer.lock();
        let segment = writer.segment.as_ref()?;
        self.synced.captured();
        let (rotated, number) = (writer.rotated.clone(), segment.number);
        Some(Capture { rotated, segment: segment.file(), number, written: writer.written })
    }

    /// Record in the log that the segments before the one in `capture` are durable.
    fn note_durable(&self, capture: &Capture) {
        let mut writer = self.writer.lock();
        let captured = capture.rotated.len();
        let same = writer.rotated.iter().zip(&capture.rotated).filter(|(own, other)| Arc::ptr_eq(own, other));
        if same.count() < captured {
            return; // another log has begun
        }
        // If this record cannot be written, the segments are synced again later.
        match self.write(&mut writer, &WalRecord::durable(capture.number)) {
            Ok(_) => drop(writer.rotated.drain(..captured)),
            Err(error) => tracing::debug!("cannot record in the log which segments are durable: {error}"),
        }
    }
}

#[cfg(test)]
mod tests;
