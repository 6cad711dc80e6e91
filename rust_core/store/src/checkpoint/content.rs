//! Locates the files of a checkpoint, measures them, and compares them with the manifest.

use std::io;
use std::path::{Path, PathBuf};

use persia_types::tables::FileEntry;

use super::disk::{self, Input};
use super::error::{CheckpointError, Result};
use super::{names, object};

/// Hex digits of a blake3 hash.
const HASH_DIGITS: usize = 64;

/// Whether `text` is a blake3 hash in lower case.
pub(super) fn is_hash(text: &str) -> bool {
    text.len() == HASH_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The path of a checkpoint file. If the name begins with a staging directory and the file is still there,
/// this is the path in the staging directory. Otherwise it is the path in the checkpoint's directory.
pub(super) fn locate(dir: &Path, name: &str) -> Result<PathBuf> {
    let Some((staging, file)) = names::split(name) else {
        return Err(CheckpointError::corrupt(
            dir,
            format!("names a file {name:?}, which is not allowed in a checkpoint"),
        ));
    };
    if let Some(staging) = staging {
        let staging = dir.join(staging);
        // Only a real directory is used: a symbolic link in its place could point anywhere.
        let staged = staging.join(file);
        if disk::kind(&staging)?.is_some_and(|kind| kind.is_dir()) && disk::kind(&staged)?.is_some() {
            return Ok(staged);
        }
    }
    Ok(dir.join(file))
}

/// Check the size and hash of a file against its manifest entry.
pub(super) fn verify(dir: &Path, entry: &FileEntry) -> Result<()> {
    if let Some(place) = object::place(dir)? {
        return object::read(&place, entry, |_| Ok(()));
    }
    let (path, mut input) = open(dir, entry)?;
    check(&path, &mut input, entry, |_| ())
}

/// Read a file into `content` and check it against its manifest entry. Returns the file's path, or its URL
/// without the staging directory. Allocates no more than the file's actual size.
pub(super) fn read(dir: &Path, entry: &FileEntry, content: &mut Vec<u8>) -> Result<PathBuf> {
    content.clear();
    let size = usize::try_from(entry.bytes).unwrap_or(usize::MAX);
    if let Some(place) = object::place(dir)? {
        object::read(&place, entry, |piece| {
            if content.is_empty() && content.try_reserve_exact(size).is_err() {
                return Err(no_memory(entry));
            }
            content.extend_from_slice(piece);
            Ok(())
        })?;
        return Ok(names::without_staging(&dir.join(&entry.name)));
    }
    let (path, mut input) = open(dir, entry)?;
    if content.try_reserve_exact(size).is_err() {
        return Err(CheckpointError::io(&path, no_memory(entry)));
    }
    check(&path, &mut input, entry, |piece| content.extend_from_slice(piece))?;
    Ok(path)
}

/// The error for a file that does not fit into memory.
fn no_memory(entry: &FileEntry) -> io::Error {
    let what = format!("there is no memory for its {} bytes", entry.bytes);
    io::Error::new(io::ErrorKind::OutOfMemory, what)
}

/// Compute the size and hash of a file that the caller wrote, and sync it.
pub(super) fn adopt(dir: &Path, name: &str) -> Result<FileEntry> {
    let mut input = Input::open(&dir.join(name))?;
    let (bytes, blake3) = measure(&mut input, |_| ())?;
    input.sync()?;
    Ok(FileEntry { name: name.into(), bytes, blake3 })
}

fn open(dir: &Path, entry: &FileEntry) -> Result<(PathBuf, Input)> {
    let path = locate(dir, &entry.name)?;
    let input = match Input::open(&path) {
        Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(CheckpointError::corrupt(&path, "is missing, but the manifest lists it"));
        }
        other => other?,
    };
    input.expect_all();
    let bytes = input.len()?;
    if bytes != entry.bytes {
        let what = format!("has {bytes} bytes, but the manifest says {}", entry.bytes);
        return Err(CheckpointError::corrupt(&path, what));
    }
    Ok((path, input))
}

fn check(path: &Path, input: &mut Input, entry: &FileEntry, each: impl FnMut(&[u8])) -> Result<()> {
    let (bytes, blake3) = measure(input, each)?;
    if bytes != entry.bytes || blake3 != entry.blake3 {
        let what = format!("has BLAKE3 hash {blake3}, but the manifest says {}", entry.blake3);
        return Err(CheckpointError::corrupt(path, what));
    }
    Ok(())
}

fn measure(input: &mut Input, mut each: impl FnMut(&[u8])) -> Result<(u64, String)> {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = 0;
    input.read_pieces(|piece| {
        hasher.update(piece);
        bytes += piece.len() as u64;
        each(piece);
    })?;
    Ok((bytes, hasher.finalize().to_hex().to_string()))
}
