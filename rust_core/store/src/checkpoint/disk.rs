//! The file system calls of the checkpoint code whose errors are reported. Each error names its path, and
//! tests can make the n-th call fail.
//!
//! Fault points, in builds with the feature `failpoints` only, set by `FAILPOINTS` or `fail::cfg`:
//! * `ckpt.io=7*off->return`: calls after the seventh fail with EIO
//! * `ckpt.short=return`: reads and writes transfer at most seven bytes at a time
//! * `ckpt.synced`: passed after each sync, for tests to count
//! * the name of each [`crash_point`]: `return` ends the process there with [`CRASH_EXIT`]

use std::ffi::OsString;
use std::fs::{self, File, FileType, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use fail::fail_point;

use super::error::{CheckpointError, Result};
use super::names::MARKER;

/// Exit status of a process that a crash point ended.
pub const CRASH_EXIT: i32 = 42;

/// A point at which a test may end the process, as `kill -9` would.
macro_rules! crash_point {
    ($name:literal) => {
        fail::fail_point!($name, |_| std::process::exit($crate::checkpoint::disk::CRASH_EXIT))
    };
}
pub(super) use crash_point;

fn call<T>(path: &Path, operation: impl FnOnce() -> io::Result<T>) -> Result<T> {
    gate().and_then(|()| operation()).map_err(|source| CheckpointError::io(path, source))
}

fn gate() -> io::Result<()> {
    fail_point!("ckpt.io", |_| Err(io::Error::from_raw_os_error(libc::EIO)));
    Ok(())
}

fn portion(bytes: usize) -> usize {
    fail_point!("ckpt.short", |_| bytes.min(7));
    bytes
}

/// A file that is being written. Its size and hash are computed from the bytes passed to the operating system. If it
/// is dropped before [`Output::finish`], the file is removed.
pub(super) struct Output {
    file: File,
    path: PathBuf,
    hasher: blake3::Hasher,
    bytes: u64,
    finished: bool,
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(&self.path); // only the error that ended the work is reported
        }
    }
}

impl Output {
    /// Create a file, which must not exist.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).custom_flags(libc::O_NOFOLLOW);
        let file = call(path, || options.open(path))?;
        Ok(Self { file, path: path.into(), hasher: blake3::Hasher::new(), bytes: 0, finished: false })
    }

    /// Sync the content. Returns its size and BLAKE3 hash.
    pub(super) fn finish(mut self) -> Result<(u64, String)> {
        sync(&self.path, &self.file)?;
        self.finished = true;
        Ok((self.bytes, self.hasher.finalize().to_hex().to_string()))
    }
}

impl Write for Output {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        gate()?;
        let written = self.file.write(&buffer[..portion(buffer.len())])?;
        self.hasher.update(&buffer[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Write a file, which must not exist, and sync it. The caller syncs the directory.
pub(super) fn write_new(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = Output::create(path)?;
    file.write_all(content).map_err(|error| CheckpointError::io(path, error))?;
    file.finish().map(drop)
}

/// Append to a temporary file, and create it if it does not exist. The file is not synced.
pub(super) fn append(path: &Path, content: &[u8]) -> Result<()> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).custom_flags(libc::O_NOFOLLOW);
    call(path, || options.open(path)?.write_all(content))
}

/// Replace the content of a file durably and atomically: after a crash the file has the old content or the new one.
///
/// The content is written to `.NAME.tmp` in the same directory and synced. Then that file is renamed over the old one
/// and the directory is synced. Only one writer at a time may replace a file.
///
/// # Errors
/// `Io`. The file then has the old content, or the new one if only the last sync failed.
pub fn replace_file(path: &Path, content: &[u8]) -> Result<()> {
    let Some(name) = path.file_name() else {
        let what = "the path ends without a file name";
        return Err(CheckpointError::io(path, io::Error::new(io::ErrorKind::InvalidInput, what)));
    };
    let mut draft = OsString::from(".");
    draft.push(name);
    draft.push(".tmp");
    let draft = path.with_file_name(draft);
    remove_file(&draft)?;
    write_new(&draft, content)?;
    crash_point!("ckpt.before_replace");
    rename_durably(&draft, path)
}

/// Mark `dir` as the staging directory of a save, durably.
pub(super) fn mark(dir: &Path) -> Result<()> {
    const TEXT: &[u8] =
        b"A save of Persia writes to this folder. If no process is saving, that save has failed; the next save removes \
          this folder.\n";
    write_new(&dir.join(MARKER), TEXT)?;
    sync_dir(dir)
}

/// A regular file, open for reading.
pub(super) struct Input {
    file: File,
    path: PathBuf,
}

impl Input {
    /// Open a regular file. Symbolic links, devices and other special files are refused.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = call(path, || options.open(path)).map_err(refuse_link)?;
        let kind = call(path, || file.metadata())?.file_type();
        if !kind.is_file() {
            return Err(CheckpointError::corrupt(path, "is not a regular file"));
        }
        Ok(Self { file, path: path.into() })
    }

    /// Advise the operating system to read the whole file ahead.
    #[allow(unsafe_code)]
    pub(super) fn expect_all(&self) {
        // SAFETY: the call only gives advice about an open file; a length of 0 means the whole file. An error
        // does no harm.
        unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_WILLNEED) };
    }

    /// The size of the file.
    pub(super) fn len(&self) -> Result<u64> {
        call(&self.path, || self.file.metadata()).map(|metadata| metadata.len())
    }

    /// Read to the end, in chunks.
    pub(super) fn read_pieces(&mut self, mut each: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            let portion = portion(buffer.len());
            match call(&self.path, || self.file.read(&mut buffer[..portion])) {
                Ok(0) => return Ok(()),
                Ok(read) => each(&buffer[..read]),
                Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sync the content, which was written through another descriptor.
    pub(super) fn sync(&self) -> Result<()> {
        sync(&self.path, &self.file)
    }
}

fn sync(path: &Path, file: &File) -> Result<()> {
    call(path, || file.sync_all())?;
    fail_point!("ckpt.synced");
    Ok(())
}

fn refuse_link(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Io { path, source } if source.raw_os_error() == Some(libc::ELOOP) => {
            CheckpointError::corrupt(&path, "is a symbolic link")
        }
        other => other,
    }
}

/// A lock that keeps other savers out of a directory until it is dropped, or until this process and those
/// forked from it have ended.
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file is not enough. A process that was forked since the lock was taken, such as a data
        // loader worker, also has the file open. Unlocking a lock that is held cannot fail.
        let _ = self.0.unlock();
    }
}

/// Lock a directory for a save. On a file system without locks, the caller must ensure that only one saver
/// runs.
pub(super) fn lock(dir: &Path) -> Result<Lock> {
    let file = call(dir, || File::open(dir))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(CheckpointError::Busy { path: dir.into() }),
        Ok(()) | Err(TryLockError::Error(_)) => Ok(Lock(file)),
    }
}

/// The file type of a path, without following a symbolic link; None if the path does not exist.
pub(super) fn kind(path: &Path) -> Result<Option<FileType>> {
    let found = call(path, || match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    })?;
    Ok(found.map(|metadata| metadata.file_type()))
}

/// The names and types of the entries of a directory, sorted by name.
pub(super) fn entries(dir: &Path) -> Result<Vec<(OsString, FileType)>> {
    call(dir, || {
        let mut found = fs::read_dir(dir)?
            .map(|entry| entry.and_then(|entry| Ok((entry.file_name(), entry.file_type()?))))
            .collect::<io::Result<Vec<_>>>()?;
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    })
}

/// Sync a directory, so that the names in it are durable.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    let file = call(dir, || File::open(dir))?;
    sync(dir, &file)
}

/// Create one directory.
pub(super) fn create_dir(path: &Path) -> Result<()> {
    call(path, || fs::create_dir(path))
}

/// Create a directory and its parents durably, if they do not exist.
pub(super) fn create_dirs(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = parent(path);
    create_dirs(&parent)?;
    match create_dir(path) {
        Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    sync_dir(&parent)
}

/// The directory that contains a path.
pub(super) fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        Some(_) => ".".into(),
        None => path.into(),
    }
}

/// Rename a file, and replace an existing file of the new name.
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    call(to, || fs::rename(from, to))
}

/// Rename a file that was synced before, and sync the directory.
pub(super) fn rename_durably(from: &Path, to: &Path) -> Result<()> {
    rename(from, to)?;
    sync_dir(&parent(to))
}

/// Remove a file or a link, if it exists.
pub(super) fn remove_file(path: &Path) -> Result<()> {
    call(path, || match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    })
}

/// Remove a directory if it is empty. Returns whether it was removed.
pub(super) fn remove_empty_dir(path: &Path) -> Result<bool> {
    call(path, || match fs::remove_dir(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
        Err(error) => Err(error),
    })
}
