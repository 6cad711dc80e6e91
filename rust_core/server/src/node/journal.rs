//! [`Journal`]: what changed a server's rows behind its base, on disk, so that a server that is killed goes on from there.
//!
//! Of a directory of its own:
//!
//! ```text
//! base      where to begin: the files of a checkpoint, or no rows, and the first segment behind them; JSON behind its
//!           crc32c
//! 7, 8, …   segments: MAGIC, then records in the order in which they were applied
//! ```
//!
//! A record is written before its request is applied and before that is acknowledged, by one request after another; a
//! request that is refused takes its record back. A cut begins a segment, and a checkpoint that was made of the cut
//! becomes the base, whereupon the segments before it go. What cannot be read is no journal: the server then begins
//! with nothing, and the job with its last checkpoint.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use persia_store::Progress;
use persia_types::TablesError;
use persia_types::config::LogSync;
use persia_types::tables::{FileEntry, Run};
use serde::{Deserialize, Serialize};

use super::order::Reached;
use super::record::{Entry, Record};
use super::segment::{self, MAGIC};
use crate::exit::Exit;

const BASE: &str = "base";
const BASE_TEMPORARY: &str = ".base.tmp";
const SECOND: Duration = Duration::from_secs(1);

/// Where the run stood when a cut was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Mark {
    pub(super) progress: Progress,
    /// Of a run whose requests have an order.
    pub(super) reached: Option<Reached>,
}

/// What the first segment goes on behind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Base {
    pub(super) owner: Owner,
    pub(super) run: Run,
    /// None: no rows.
    pub(super) rows: Option<Rows>,
    pub(super) mark: Mark,
    segment: u64,
}

/// What decides how requests are applied, besides the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) version: String,
    pub(super) index: u32,
    pub(super) servers: u32,
    pub(super) capacity: u64,
}

/// Files of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rows {
    /// Below the checkpoint root.
    pub(super) directory: String,
    pub(super) files: Vec<FileEntry>,
}

/// See the module's documentation.
pub(super) struct Journal {
    shared: Arc<Shared>,
    /// Dropped to end the thread.
    beat: Option<Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

struct Shared {
    dir: PathBuf,
    sync: LogSync,
    owner: Owner,
    writing: Mutex<Writing>,
    synced: Mutex<Synced>,
    moved: Condvar,
}

/// The end of the journal.
#[derive(Default)]
struct Writing {
    /// None while there is no base.
    segment: Option<Segment>,
    base: Option<Base>,
    /// The last cut, of which no checkpoint is the base yet.
    cut: Option<Cut>,
    /// Bytes written since the process began.
    written: u64,
}

struct Cut {
    number: u64,
    /// The first one behind it.
    segment: u64,
    mark: Mark,
}

struct Segment {
    number: u64,
    path: PathBuf,
    file: Arc<File>,
    bytes: u64,
}

/// How much of what was written is durable.
#[derive(Default)]
struct Synced {
    up_to: u64,
    /// Whether somebody is at it.
    busy: bool,
    /// Why it can't be any more: after a failed `fsync` nobody knows what is on the disk.
    failed: Option<String>,
}

impl Journal {
    /// The journal in `dir`, which is made where it is missing.
    ///
    /// # Errors
    /// `Usage` when the directory or a thread can't be made.
    pub(super) fn open(dir: PathBuf, sync: LogSync, owner: Owner) -> Result<Self, Exit> {
        fs::create_dir_all(&dir)
            .map_err(|error| Exit::Usage(format!("journal in {}: {error}", dir.display())))?;
        let shared = Arc::new(Shared {
            dir,
            sync,
            owner,
            writing: Mutex::default(),
            synced: Mutex::default(),
            moved: Condvar::new(),
        });
        let (beat, beats) = channel::<()>();
        let of_thread = Arc::clone(&shared);
        let every_second = move || {
            let mut said = false;
            while beats.recv_timeout(SECOND) == Err(RecvTimeoutError::Timeout) {
                let written = of_thread.writing.lock().written;
                match of_thread.sync_to(written) {
                    Err(error) if !said => tracing::error!("{error}"),
                    _ => {}
                }
                said = of_thread.is_broken();
            }
        };
        let thread = thread::Builder::new().name("persia-journal".into()).spawn(every_second);
        let thread = thread.map_err(|error| Exit::Again(format!("cannot start a thread: {error}")))?;
        Ok(Self { shared, beat: Some(beat), thread: Some(thread) })
    }

    /// What another process left, if anything: its base, then every record, in order, is given to `apply`, which
    /// returns a cut that it made. From then on it is written to.
    ///
    /// # Errors
    /// Why it can't be used. What was applied by then is to be dropped.
    pub(super) fn recover(
        &self,
        begin: impl FnOnce(&Base) -> Result<(), String>,
        mut apply: impl FnMut(Entry) -> Result<Option<(u64, Mark)>, String>,
    ) -> Result<Option<Recovered>, String> {
        let shared = &*self.shared;
        let Some(base) = shared.read_base()? else { return Ok(None) };
        if base.owner != shared.owner {
            return Err(format!("it was written by {:?}, this server is {:?}", base.owner, shared.owner));
        }
        begin(&base)?;
        let mut recovered = Recovered::default();
        let mut cut = None;
        let mut number = base.segment;
        let segment = loop {
            let path = shared.path_of(number);
            let next =
                number.checked_add(1).ok_or_else(|| format!("{}: no more can follow", path.display()))?;
            let is_last = !shared.path_of(next).exists();
            let describe = |error: io::Error| format!("{}: {error}", path.display());
            let mut each = |entry| {
                recovered.records += 1;
                if matches!(entry, Entry::Begin(_)) {
                    cut = None;
                }
                if let Some((made, mark)) = apply(entry)? {
                    cut = Some(Cut { number: made, segment: next, mark });
                }
                Ok(())
            };
            if is_last && number > base.segment && segment::is_headless(&path).map_err(describe)? {
                let segment = shared.new_segment(number).map_err(|error| error.to_string())?;
                break segment;
            }
            let (bytes, torn) = segment::read(&path, &mut each)?;
            // The record of a cut is durable before anything comes behind it.
            let ends_here = is_last || torn > 0 && shared.holds_nothing_from(next).map_err(describe)?;
            if torn > 0 && !ends_here {
                return Err(format!("{}: its end is missing, and more comes behind it", path.display()));
            }
            if ends_here {
                shared.remove(&shared.path_of(next)).map_err(describe)?;
                recovered.torn = torn;
                let file = File::options().write(true).open(&path).map_err(describe)?;
                file.set_len(bytes).map_err(describe)?;
                (&file).seek(SeekFrom::End(0)).map_err(describe)?;
                break Segment { number, path, file: Arc::new(file), bytes };
            }
            number = next;
        };
        // A process may have ended between the record of a cut and the segment behind it.
        let cut = cut.filter(|cut: &Cut| cut.segment <= segment.number);
        let mut writing = shared.writing.lock();
        *writing = Writing { segment: Some(segment), base: Some(base), cut, written: 0 };
        Ok(Some(recovered))
    }

    /// Begin anew with what `change` makes: the run, the rows, and where it stands. What was there before is dropped first,
    /// so that a full disk is no obstacle; without a base a server that is killed then begins with nothing.
    ///
    /// # Errors
    /// What `change` says, before anything is dropped; `Io`, and no request is accepted until it succeeds.
    pub(super) fn restart(
        &self,
        change: impl FnOnce() -> Result<(Run, Option<Rows>, Mark), TablesError>,
    ) -> Result<(), TablesError> {
        let shared = &*self.shared;
        let mut writing = shared.writing.lock();
        let (run, rows, mark) = change()?;
        writing.segment = None;
        writing.base = None;
        writing.cut = None;
        shared.remove_all().map_err(|source| shared.io(source))?;
        let segment = shared.new_segment(1)?;
        let base = Base { owner: shared.owner.clone(), run, rows, mark, segment: 1 };
        shared.write_base(&base)?;
        writing.segment = Some(segment);
        writing.base = Some(base);
        // What was not durable is gone; a disk that failed may have been mended.
        *shared.synced.lock() = Synced { up_to: writing.written, ..Synced::default() };
        shared.moved.notify_all();
        Ok(())
    }

    /// Whether there is a base to go on behind.
    pub(super) fn has_base(&self) -> bool {
        self.shared.writing.lock().base.is_some()
    }

    /// Write `record`, then `apply` it, then wait until it is durable if every request is to be. One at a time.
    ///
    /// # Errors
    /// `Io` when it can't be written: nothing was applied then, unless it says that the disk failed to keep it. What
    /// `apply` says; the record is then taken back.
    pub(super) fn append<T>(
        &self,
        record: &Record,
        apply: impl FnOnce() -> Result<T, TablesError>,
    ) -> Result<T, TablesError> {
        let shared = &*self.shared;
        let (done, written) = {
            let mut writing = shared.writing.lock();
            shared.write(&mut writing, record)?;
            match apply() {
                Ok(done) => (done, writing.written),
                Err(error) => {
                    shared.take_back(&mut writing, record)?;
                    return Err(error);
                }
            }
        };
        if shared.sync == LogSync::Always {
            shared.sync_to(written)?;
        }
        Ok(done)
    }

    /// As [`Self::append`], for a run that goes on with the rows there are.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(super) fn begin(
        &self,
        run: &Run,
        start: impl FnOnce() -> Result<(), TablesError>,
    ) -> Result<(), TablesError> {
        let record = Record::begin(run).map_err(|source| self.shared.io(source))?;
        self.append(&record, start)?;
        // A cut before it is of another run.
        self.shared.writing.lock().cut = None;
        Ok(())
    }

    /// As [`Self::append`], for a cut: what comes behind it goes into another segment.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(super) fn cut(
        &self,
        number: u64,
        cut: impl FnOnce() -> Result<Mark, TablesError>,
    ) -> Result<(), TablesError> {
        let shared = &*self.shared;
        let mut writing = shared.writing.lock();
        let Some(next) = writing.segment.as_ref().map(|segment| segment.number + 1) else {
            return Err(shared.broken());
        };
        let record = Record::cut(number);
        shared.write(&mut writing, &record)?;
        let made = shared.new_segment(next).and_then(|segment| Ok((cut()?, segment)));
        let (mark, segment) = match made {
            Ok(made) => made,
            Err(error) => {
                shared.take_back(&mut writing, &record)?;
                shared.remove(&shared.path_of(next)).map_err(|source| shared.io(source))?;
                return Err(error);
            }
        };
        // Whoever syncs from now on syncs the new segment only.
        let synced = writing
            .segment
            .replace(segment)
            .map_or(Ok(()), |last| shared.sync_file(&last.file, writing.written));
        writing.cut = Some(Cut { number, segment: next, mark });
        synced
    }

    /// A checkpoint was made of this cut: it is the base from now on, if no other cut was made since.
    ///
    /// # Errors
    /// `Io`: the base is the one from before.
    pub(super) fn rebase(&self, cut: u64, run: Run, rows: Rows) -> Result<(), TablesError> {
        let shared = &*self.shared;
        let mut writing = shared.writing.lock();
        let (Some(base), Some(last)) = (&writing.base, &writing.cut) else { return Ok(()) };
        if last.number != cut {
            return Ok(());
        }
        let oldest = base.segment;
        let base = Base {
            owner: shared.owner.clone(),
            run,
            rows: Some(rows),
            mark: last.mark.clone(),
            segment: last.segment,
        };
        shared.write_base(&base)?;
        let removed = (oldest..base.segment).try_for_each(|number| shared.remove(&shared.path_of(number)));
        writing.base = Some(base);
        writing.cut = None;
        removed.map_err(|source| shared.io(source))
    }

    /// Bytes of its segments.
    pub(super) fn bytes(&self) -> u64 {
        let writing = self.shared.writing.lock();
        let (Some(base), Some(last)) = (&writing.base, &writing.segment) else { return 0 };
        let before = (base.segment..last.number)
            .filter_map(|number| self.shared.path_of(number).metadata().ok())
            .map(|metadata| metadata.len());
        before.sum::<u64>() + last.bytes
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.beat = None;
        let ended = self.thread.take().is_none_or(|thread| thread.join().is_ok());
        debug_assert!(ended, "the journal's thread does not panic");
    }
}

/// What was read of a journal.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Recovered {
    pub(super) records: u64,
    /// Bytes at its end that are no whole record; no request they are of was acknowledged.
    pub(super) torn: u64,
}

impl Shared {
    fn path_of(&self, segment: u64) -> PathBuf {
        self.dir.join(segment.to_string())
    }

    fn io(&self, source: io::Error) -> TablesError {
        TablesError::Io { path: self.dir.clone(), source }
    }

    fn broken(&self) -> TablesError {
        self.io(io::Error::other(
            "the journal could not be written; the next run, or a load, begins another one",
        ))
    }

    fn is_broken(&self) -> bool {
        let writing = self.writing.lock();
        writing.base.is_some() && writing.segment.is_none() || self.synced.lock().failed.is_some()
    }

    fn read_base(&self) -> Result<Option<Base>, String> {
        let path = self.dir.join(BASE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let damaged = || format!("{}: damaged", path.display());
        let (checksum, json) = text.split_first_chunk().ok_or_else(damaged)?;
        if crc32c::crc32c(json) != u32::from_le_bytes(*checksum) {
            return Err(damaged());
        }
        serde_json::from_slice(json).map(Some).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn write_base(&self, base: &Base) -> Result<(), TablesError> {
        let write = || {
            let temporary = self.dir.join(BASE_TEMPORARY);
            let json = serde_json::to_vec(base)?;
            let mut file = File::create(&temporary)?;
            file.write_all(&crc32c::crc32c(&json).to_le_bytes())?;
            file.write_all(&json)?;
            file.sync_all()?;
            fs::rename(&temporary, self.dir.join(BASE))?;
            self.sync_dir()
        };
        write().map_err(|source| self.io(source))
    }

    /// Base first: what is left without it is no journal.
    fn remove_all(&self) -> io::Result<()> {
        self.remove(&self.dir.join(BASE))?;
        self.sync_dir()?;
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let ours = entry.file_name().to_str().is_some_and(|name| name.parse::<u64>().is_ok());
            if ours || entry.file_name() == BASE_TEMPORARY {
                self.remove(&entry.path())?;
            }
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }

    /// Whether no request is in the segments from this one on.
    fn holds_nothing_from(&self, segment: u64) -> io::Result<bool> {
        let length = self.path_of(segment).metadata()?.len();
        let next = segment.checked_add(1).map(|next| self.path_of(next));
        Ok(length <= MAGIC.len() as u64 && !next.is_some_and(|path| path.exists()))
    }

    /// An empty segment, whose name is durable.
    fn new_segment(&self, number: u64) -> Result<Segment, TablesError> {
        let path = self.path_of(number);
        let make = || {
            let mut file = File::create(&path)?;
            file.write_all(MAGIC)?;
            file.sync_all()?;
            self.sync_dir()?;
            Ok(file)
        };
        let file = make().map_err(|source| TablesError::Io { path: path.clone(), source })?;
        Ok(Segment { number, path, file: Arc::new(file), bytes: MAGIC.len() as u64 })
    }

    /// Write a record whole, or not at all.
    fn write(&self, writing: &mut Writing, record: &Record) -> Result<(), TablesError> {
        if let Some(why) = &self.synced.lock().failed {
            return Err(self.io(io::Error::other(why.clone())));
        }
        let segment = writing.segment.as_mut().ok_or_else(|| self.broken())?;
        let bytes = record.bytes().map_err(|source| self.io(source))?;
        if let Err(source) = (&*segment.file).write_all(bytes) {
            let path = segment.path.clone();
            self.truncate(writing)?;
            return Err(TablesError::Io { path, source });
        }
        segment.bytes += bytes.len() as u64;
        writing.written += bytes.len() as u64;
        Ok(())
    }

    /// Take the last record back.
    fn take_back(&self, writing: &mut Writing, record: &Record) -> Result<(), TablesError> {
        let bytes = record.bytes().map_err(|source| self.io(source))?.len() as u64;
        if let Some(segment) = &mut writing.segment {
            segment.bytes -= bytes;
        }
        self.truncate(writing)
    }

    /// Cut the segment to its whole records. Where that fails, nothing more may be written behind them.
    fn truncate(&self, writing: &mut Writing) -> Result<(), TablesError> {
        let Some(segment) = &writing.segment else { return Ok(()) };
        let cut = segment
            .file
            .set_len(segment.bytes)
            .and_then(|()| (&*segment.file).seek(SeekFrom::Start(segment.bytes)));
        match cut {
            Ok(_) => Ok(()),
            Err(source) => {
                writing.segment = None;
                Err(self.io(source))
            }
        }
    }

    /// Wait until everything up to `position` is durable. One syncs for all who wait.
    fn sync_to(&self, position: u64) -> Result<(), TablesError> {
        let mut synced = self.synced.lock();
        loop {
            if let Some(why) = &synced.failed {
                return Err(self.io(io::Error::other(why.clone())));
            }
            if synced.up_to >= position {
                return Ok(());
            }
            if synced.busy {
                self.moved.wait(&mut synced);
                continue;
            }
            synced.busy = true;
            drop(synced);
            let (file, written) = {
                let writing = self.writing.lock();
                (writing.segment.as_ref().map(|segment| Arc::clone(&segment.file)), writing.written)
            };
            let result = file.ok_or_else(|| self.broken()).and_then(|file| self.sync_file(&file, written));
            synced = self.synced.lock();
            synced.busy = false;
            self.moved.notify_all();
            drop(synced);
            return result;
        }
    }

    fn sync_file(&self, file: &File, written: u64) -> Result<(), TablesError> {
        let result = file.sync_data();
        let mut synced = self.synced.lock();
        if let Err(source) = result {
            let why =
                format!("the disk failed to keep the journal ({source}); the next run begins another one");
            synced.failed = Some(why.clone());
            self.moved.notify_all();
            return Err(self.io(io::Error::other(why)));
        }
        synced.up_to = synced.up_to.max(written);
        self.moved.notify_all();
        Ok(())
    }
}
