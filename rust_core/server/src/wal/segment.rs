//! [`Segment`]: the file to which records are appended; [`read`]: reads the records of one file, up to the last
//! complete one.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use persia_types::TablesError;

use super::record::{self, Entry, ReadOutcome, WalRecord};

/// The first bytes of a segment.
pub(super) const MAGIC: &[u8] = b"persia journal 3";
/// The number of bytes that a disk writes atomically.
const SECTOR: u64 = 512;

/// A segment, open for appending.
pub(super) struct Segment {
    pub(super) number: u64,
    /// The length of MAGIC and the complete records.
    pub(super) bytes: u64,
    path: PathBuf,
    file: Arc<File>,
    /// Whether the file may contain more than `bytes`: a part of a record, or a refused record.
    has_rest: bool,
}

impl Segment {
    /// Create an empty segment. It becomes durable when it and the directory are synced.
    pub(super) fn create(path: PathBuf, number: u64) -> io::Result<Self> {
        let mut file = File::create(&path)?;
        file.write_all(MAGIC)?;
        Ok(Self { number, bytes: MAGIC.len() as u64, path, file: Arc::new(file), has_rest: false })
    }

    /// Open a segment whose first `bytes` bytes are MAGIC and complete records, and remove the rest.
    pub(super) fn reopen(path: PathBuf, number: u64, bytes: u64) -> io::Result<Self> {
        let file = Arc::new(File::options().write(true).open(&path)?);
        let mut segment = Self { number, bytes, path, file, has_rest: true };
        segment.truncate()?;
        Ok(segment)
    }

    /// Append a complete record or nothing. Returns the length of the record.
    pub(super) fn append(&mut self, record: &WalRecord) -> Result<u64, TablesError> {
        self.try_append(record).map_err(|source| TablesError::Io { path: self.path.clone(), source })
    }

    fn try_append(&mut self, record: &WalRecord) -> io::Result<u64> {
        self.truncate()?;
        let bytes = record.bytes()?;
        if let Err(error) = (&*self.file).write_all(bytes) {
            self.has_rest = true;
            self.truncate_or_warn();
            return Err(error);
        }
        self.bytes += bytes.len() as u64;
        Ok(bytes.len() as u64)
    }

    /// Remove the last record, which has `bytes` bytes. If the file cannot be truncated now, it is truncated before
    /// the next record is appended. Until then, a replay drops the record.
    pub(super) fn take_back(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.has_rest = true;
        self.truncate_or_warn();
    }

    fn truncate_or_warn(&mut self) {
        if let Err(error) = self.truncate() {
            tracing::warn!(
                path = %self.path.display(),
                "cannot remove an incomplete or refused record from the log: {error}; each later request \
                 retries the removal, and is refused until the removal succeeds"
            );
        }
    }

    /// Truncate the file after the last complete record.
    fn truncate(&mut self) -> io::Result<()> {
        if self.has_rest {
            self.file.set_len(self.bytes)?;
            (&*self.file).seek(SeekFrom::Start(self.bytes))?;
            self.has_rest = false;
        }
        Ok(())
    }

    /// The file, for syncing.
    pub(super) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }
}

/// Whether a segment is shorter than MAGIC, because the process ended or the power failed before MAGIC was written.
fn is_headless(path: &Path) -> io::Result<bool> {
    Ok(path.metadata()?.len() < MAGIC.len() as u64)
}

/// The length of the previous segment, as stated by the first record of this one; None if that record was not written.
///
/// # Errors
/// The reason why the beginning of the segment is damaged.
pub(super) fn follows(path: &Path) -> Result<Option<u64>, String> {
    if is_headless(path).map_err(|error| format!("{}: {error}", path.display()))? {
        return Ok(None);
    }
    let mut first = None;
    let read = read(path, &mut |entry, _, _| {
        first = Some(entry);
        Err(Stop::Here)
    })?;
    match (first, read) {
        (Some(Entry::Follows(bytes)), _) => Ok(Some(bytes)),
        (Some(_), _) => {
            Err(format!("{}: its first record is not the length of the previous segment", path.display()))
        }
        (None, _) => Ok(None),
    }
}

/// Whether the segment at `path` states that the segments up to `number` are durable. Records after the first
/// unreadable record are ignored.
pub(super) fn states_durable(path: &Path, number: u64) -> bool {
    let mut found = false;
    let read = read(path, &mut |entry, _, _| {
        found |= matches!(entry, Entry::Durable(before) if before > number);
        Ok(())
    });
    drop(read);
    found
}

/// The reason why reading a segment ends at a record.
pub(super) enum Stop {
    /// The record and all bytes after it count as not written.
    Here,
    /// The log cannot be used.
    Failed(String),
}

/// Pass every record to `each`, with its length and whether it is the last one in the file. Returns the
/// length of MAGIC and the complete records, and the number of bytes after them.
pub(super) fn read(
    path: &Path,
    each: &mut impl FnMut(Entry, u64, bool) -> Result<(), Stop>,
) -> Result<(u64, u64), String> {
    let describe = |error: io::Error| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(describe)?;
    let length = file.metadata().map_err(describe)?.len();
    // This is the first segment, because `follows` handles a later segment without a header. The header of the first
    // segment is durable before the base that names it, unless the power failed shortly after a checkpoint. A replay
    // could therefore lack durable records.
    if length < MAGIC.len() as u64 {
        return Err(format!(
            "{}: the segment has {length} bytes, but its header has {}: it was truncated, or its content was lost in a \
             power cut",
            path.display(),
            MAGIC.len()
        ));
    }
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut magic = [0; MAGIC.len()];
    input.read_exact(&mut magic).map_err(describe)?;
    if magic != *MAGIC {
        return Err(format!("{}: not a log segment that this version can read", path.display()));
    }
    let mut at = MAGIC.len() as u64;
    loop {
        let outcome = match record::read(&mut input, length - at) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let read = input.stream_position().map_err(describe)?;
                let unwritten = unwritten_from(input.get_mut(), at).map_err(describe)?;
                if unwritten < read { Ok(ReadOutcome::Torn) } else { Err(error) }
            }
            other => other,
        };
        match outcome.map_err(|error| format!("{}, byte {at}: {error}", path.display()))? {
            ReadOutcome::End => return Ok((at, 0)),
            ReadOutcome::Torn => return Ok((at, length - at)),
            ReadOutcome::Entry(entry, bytes) => match each(entry, bytes, at + bytes == length) {
                Ok(()) => at += bytes,
                Err(Stop::Here) => return Ok((at, length - at)),
                Err(Stop::Failed(why)) => return Err(format!("{}, byte {at}: {why}", path.display())),
            },
        }
    }
}

/// The position after `start` from which the file may never have been written. After a power cut, some file systems
/// show such bytes as zeros. These zeros begin at `start` or at the start of a sector, and extend to the end of the
/// file.
fn unwritten_from(file: &mut File, start: u64) -> io::Result<u64> {
    file.seek(SeekFrom::Start(start))?;
    let (mut position, mut written) = (start, start);
    let mut chunk = vec![0; 1 << 16];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        if let Some(last) = chunk[..read].iter().rposition(|byte| *byte != 0) {
            written = position + last as u64 + 1;
        }
        position += read as u64;
    }
    Ok(if written == start { start } else { written.next_multiple_of(SECTOR) })
}
