//! [`Segment`]: the file that records are appended to; [`read`]: the records of one file, up to the last whole one.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use persia_types::TablesError;

use super::record::{self, ReadOutcome, ReplayOp, WalRecord};

/// The first bytes of a segment.
pub(super) const MAGIC: &[u8] = b"persia journal 3";
/// A disk writes this many bytes atomically.
const SECTOR: u64 = 512;

/// A segment, open for appending.
pub(super) struct Segment {
    pub(super) number: u64,
    /// Length of its whole records, MAGIC included.
    pub(super) bytes: u64,
    path: PathBuf,
    file: Arc<File>,
}

impl Segment {
    /// Create an empty segment. Its content is durable; its name is once the directory is synced.
    pub(super) fn create(path: PathBuf, number: u64) -> io::Result<Self> {
        let mut file = File::create(&path)?;
        file.write_all(MAGIC)?;
        file.sync_all()?;
        Ok(Self { number, bytes: MAGIC.len() as u64, path, file: Arc::new(file) })
    }

    /// Open a segment whose first `bytes` are whole records, and truncate the rest.
    pub(super) fn reopen(path: PathBuf, number: u64, bytes: u64) -> io::Result<Self> {
        let file = Arc::new(File::options().write(true).open(&path)?);
        let segment = Self { number, bytes, path, file };
        segment.truncate()?;
        Ok(segment)
    }

    /// Append a record. After an error the file may end in a part of it: [`Self::truncate`].
    pub(super) fn append(&mut self, record: &WalRecord) -> Result<u64, TablesError> {
        let io = |source| TablesError::Io { path: self.path.clone(), source };
        let bytes = record.bytes().map_err(io)?;
        (&*self.file).write_all(bytes).map_err(io)?;
        self.bytes += bytes.len() as u64;
        Ok(bytes.len() as u64)
    }

    /// Truncate the file after the last whole record.
    pub(super) fn truncate(&self) -> io::Result<()> {
        self.file.set_len(self.bytes)?;
        (&*self.file).seek(SeekFrom::Start(self.bytes)).map(drop)
    }

    /// The file, to sync.
    pub(super) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }
}

/// Whether a segment was never started: a crash or power cut came before MAGIC was written.
pub(super) fn is_headless(path: &Path) -> io::Result<bool> {
    Ok(path.metadata()?.len() < MAGIC.len() as u64)
}

/// Give every record to `each`. Returns the length of the whole records, and of what follows them.
pub(super) fn read(
    path: &Path,
    each: &mut impl FnMut(ReplayOp) -> Result<(), String>,
) -> Result<(u64, u64), String> {
    let describe = |error: io::Error| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(describe)?;
    let length = file.metadata().map_err(describe)?.len();
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut magic = [0; MAGIC.len()];
    input.read_exact(&mut magic).map_err(describe)?;
    if magic != *MAGIC {
        return Err(format!("{}: it is no segment of a log of this version", path.display()));
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
            ReadOutcome::Op(op, bytes) => {
                each(op).map_err(|why| format!("{}, byte {at}: {why}", path.display()))?;
                at += bytes;
            }
        }
    }
}

/// The position after `start` from which on the file may never have been written. After a power cut some file systems
/// show zeros for such bytes: zeros up to the end of the file that begin at `start` or with a sector.
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
