//! [`Wal`]: a write-ahead log of pushes, in its own directory.
//!
//! ```text
//! base      where the log starts: crc32c, then what the caller says, which names the first segment
//! 7, 8, …   segments: MAGIC, then records in the order in which they were applied
//! ```
//!
//! A request is logged, applied, and then acknowledged, one request at a time. The record of a refused request is
//! removed. A log without a readable base is not valid.
//!
//! * [`record`][]: a request as bytes and back
//! * [`segment`][]: one file of records
//! * [`files`][]: the directory
//! * [`sync`][]: durability
//! * [`replay`][]: reading the log of an earlier process
//!
//! The caller defines the meaning of a base, and applies requests.

mod files;
mod record;
mod replay;
mod segment;
mod sync;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use persia_types::TablesError;
use persia_types::config::LogSync;

use self::files::Files;
use self::segment::Segment;
use self::sync::{SyncState, Ticker};

pub(crate) use self::record::{ReplayOp, WalRecord};
pub(crate) use self::replay::Replayed;

/// The first segment of a new log.
const FIRST_SEGMENT: u64 = 1;

/// A write-ahead log.
pub(crate) struct Wal {
    shared: Arc<Shared>,
    _sync_every_second: Ticker,
}

struct Shared {
    files: Files,
    sync: LogSync,
    writer: Mutex<Writer>,
    synced: SyncState,
}

/// The end of the log.
#[derive(Default)]
struct Writer {
    /// The first segment, if there is a base.
    first: Option<u64>,
    /// The segment that is appended to. None without a base, and after a record could not be removed.
    segment: Option<Segment>,
    /// Bytes written since the process began.
    written: u64,
}

impl Wal {
    /// Open the log in `dir`, which is created if it is missing. Nothing is read: see [`Self::base`] and
    /// [`Self::replay`].
    ///
    /// # Errors
    /// The directory or a thread could not be created.
    pub(crate) fn open(dir: PathBuf, sync: LogSync) -> io::Result<Self> {
        let files = Files::open(dir)?;
        let shared = Shared { files, sync, writer: Mutex::default(), synced: SyncState::default() };
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
    /// Why it cannot be read, with its path.
    pub(crate) fn base(&self) -> Result<Option<Vec<u8>>, String> {
        self.shared.files.read_base()
    }

    /// Whether the log has a base: records can be appended, unless a disk failed.
    pub(crate) fn has_base(&self) -> bool {
        self.shared.writer.lock().first.is_some()
    }

    /// Refuse records until a reset. The files stay.
    pub(crate) fn close(&self) {
        *self.shared.writer.lock() = Writer::default();
    }

    /// Replace the log by an empty one. `base` gets the number of its first segment; no record is appended meanwhile.
    /// The old log is removed before anything is written, which frees a full disk; a process that is killed
    /// in between leaves no log.
    ///
    /// # Errors
    /// Those of `base`, before anything is removed; `Io`, and records are refused until a reset succeeds.
    pub(crate) fn reset(
        &self,
        base: impl FnOnce(u64) -> Result<Vec<u8>, TablesError>,
    ) -> Result<(), TablesError> {
        let Shared { files, writer, synced, .. } = &*self.shared;
        let mut writer = writer.lock();
        let base = base(FIRST_SEGMENT)?;
        (writer.first, writer.segment) = (None, None);
        files.remove_all().map_err(|source| files.error(source))?;
        let segment = files.create_segment(FIRST_SEGMENT)?;
        files.write_base(&base)?;
        (writer.first, writer.segment) = (Some(FIRST_SEGMENT), Some(segment));
        synced.reset(writer.written);
        Ok(())
    }

    /// Log `record`, then `apply` it, then wait until it is durable if every request must be.
    ///
    /// # Errors
    /// `Io` if the record cannot be logged: nothing was applied, unless the error says that the disk failed to keep
    /// it. Those of `apply`; the record is then removed.
    pub(crate) fn append<T>(
        &self,
        record: &WalRecord,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<T, TablesError> {
        let shared = &*self.shared;
        let (applied, position) = {
            let mut writer = shared.writer.lock();
            let bytes = shared.write(&mut writer, record)?;
            match apply() {
                Ok(applied) => (applied, writer.written),
                Err(error) => {
                    shared.take_back(&mut writer, bytes)?;
                    return Err(error);
                }
            }
        };
        if shared.sync == LogSync::Always {
            shared.sync_to(position)?;
        }
        Ok(applied)
    }

    /// As [`Self::append`]; the records after this one are in a new segment, whose number is returned. This record
    /// is durable then.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn append_and_rotate<T>(
        &self,
        record: &WalRecord,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<(T, u64), TablesError> {
        let shared = &*self.shared;
        let mut writer = shared.writer.lock();
        let next = writer.segment.as_ref().map(|segment| segment.number + 1);
        let next = next.ok_or_else(|| shared.closed())?;
        let bytes = shared.write(&mut writer, record)?;
        let rotated = shared.files.create_segment(next).and_then(|segment| Ok((apply()?, segment)));
        let (applied, segment) = match rotated {
            Ok(rotated) => rotated,
            Err(error) => {
                shared.take_back(&mut writer, bytes)?;
                shared.files.remove_segment(next).map_err(|source| shared.files.error(source))?;
                return Err(error);
            }
        };
        // From now on only the new segment is synced.
        if let Some(last) = writer.segment.replace(segment) {
            let synced = shared.synced.sync(&(last.file(), writer.written));
            synced.map_err(|source| shared.files.error(source))?;
        }
        Ok((applied, next))
    }

    /// Replace the base by one that starts with the segment `first`, and remove the segments before it.
    ///
    /// # Errors
    /// `Io`: the old base may still be in place.
    pub(crate) fn truncate(&self, first: u64, base: &[u8]) -> Result<(), TablesError> {
        let Shared { files, writer, .. } = &*self.shared;
        let mut writer = writer.lock();
        let Some(oldest) = writer.first else { return Ok(()) };
        files.write_base(base)?;
        writer.first = Some(first);
        let removed = (oldest..first).try_for_each(|number| files.remove_segment(number));
        removed.map_err(|source| files.error(source))
    }

    /// Bytes of all segments.
    pub(crate) fn bytes(&self) -> u64 {
        let writer = self.shared.writer.lock();
        let (Some(first), Some(last)) = (writer.first, &writer.segment) else { return 0 };
        let before = (first..last.number)
            .filter_map(|number| self.shared.files.segment(number).metadata().ok())
            .map(|metadata| metadata.len());
        before.sum::<u64>() + last.bytes
    }
}

impl Shared {
    /// The reason why nothing can be appended.
    fn closed(&self) -> TablesError {
        let why = "the log could not be written; a fresh run or a restore starts another log";
        self.files.error(io::Error::other(why))
    }

    /// Append a whole record, or nothing. Returns its length.
    fn write(&self, writer: &mut Writer, record: &WalRecord) -> Result<u64, TablesError> {
        self.synced.check().map_err(|source| self.files.error(source))?;
        let segment = writer.segment.as_mut().ok_or_else(|| self.closed())?;
        match segment.append(record) {
            Ok(bytes) => {
                writer.written += bytes;
                Ok(bytes)
            }
            Err(error) => {
                self.truncate(writer)?;
                Err(error)
            }
        }
    }

    /// Remove the last record, which has this many bytes.
    fn take_back(&self, writer: &mut Writer, bytes: u64) -> Result<(), TablesError> {
        if let Some(segment) = &mut writer.segment {
            segment.bytes -= bytes;
        }
        self.truncate(writer)
    }

    /// Truncate the log after the last whole record. If that fails, nothing may be appended.
    fn truncate(&self, writer: &mut Writer) -> Result<(), TablesError> {
        let truncated = writer.segment.as_ref().map_or(Ok(()), Segment::truncate);
        truncated.map_err(|source| {
            writer.segment = None;
            self.files.error(source)
        })
    }

    /// Wait until everything up to `position` is durable.
    fn sync_to(&self, position: u64) -> Result<(), TablesError> {
        let end = || {
            let writer = self.writer.lock();
            let segment =
                writer.segment.as_ref().ok_or_else(|| io::Error::other("the log could not be written"))?;
            Ok((segment.file(), writer.written))
        };
        self.synced.sync_to(position, end).map_err(|source| self.files.error(source))
    }
}
