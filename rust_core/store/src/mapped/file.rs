//! [`MappedFile`]: a memory-mapped file.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use persia_types::TablesError;

/// The alignment of the content of an empty file, which has no mapping.
#[repr(align(64))]
struct CacheLine;

/// A memory-mapped file, which is only read.
///
/// Its pages are those of the operating system's page cache, so processes that map the same file share them. The
/// file must not be changed or truncated while it is mapped. If it is replaced by a rename, the mapping keeps the
/// old content.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is never written, and only this value owns it.
unsafe impl Send for MappedFile {}
// SAFETY: the mapping is never written, so threads can only read it concurrently.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Map a file.
    ///
    /// # Errors
    /// `Io`.
    pub fn open(path: &Path) -> Result<Self, TablesError> {
        let failed = |source| TablesError::Io { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        let bytes = usize::try_from(file.metadata().map_err(failed)?.len())
            .map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let start = if bytes == 0 {
            NonNull::<CacheLine>::dangling().cast()
        } else {
            map(&file, bytes).map_err(failed)?
        };
        Ok(Self { path: path.into(), start, bytes })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content. It is aligned to 64 bytes or more, so the numbers in it are aligned.
    pub fn content(&self) -> &[u8] {
        // SAFETY: `bytes` bytes from `start` are mapped as long as `self` lives; for an empty file, the pointer dangles
        // and the length is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The [`hash`] of each chunk of `chunk` bytes, computed by up to `threads` threads, including the
    /// caller's.
    pub fn hashes(&self, chunk: usize, threads: usize) -> Vec<String> {
        let chunks: Vec<&[u8]> = self.content().chunks(chunk.max(1)).collect();
        let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![String::new(); chunks.len()]));
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(chunk) = chunks.get(at) else { return };
                let found = hash(chunk);
                done.lock()[at] = found;
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(chunks.len()) {
                scope.spawn(work);
            }
            work();
        });
        done.into_inner()
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: this value owns the mapping, and nothing refers to it any more.
            let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
            debug_assert_eq!(unmapped, 0);
        }
    }
}

fn map(file: &File, bytes: usize) -> std::io::Result<NonNull<u8>> {
    let (access, kind) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a new mapping at an address that the system chooses touches no existing memory.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
}

/// The BLAKE3 hash of some bytes, in hexadecimal.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_their_own_hashes_by_any_number_of_threads() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0usize, 1, 99, 100, 101, 5000] {
            let content: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8).collect();
            let path = dir.path().join(len.to_string());
            std::fs::write(&path, &content).unwrap();
            let mapped = MappedFile::open(&path).unwrap();
            assert_eq!(mapped.content(), content);
            let wanted: Vec<String> = content.chunks(100).map(hash).collect();
            for threads in [0, 1, 2, 7] {
                assert_eq!(mapped.hashes(100, threads), wanted);
            }
        }
        let missing = MappedFile::open(&dir.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("none"), "{missing}");
    }
}
