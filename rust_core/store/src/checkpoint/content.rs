//! The files of a checkpoint: located, measured, and compared with the manifest.

use std::path::{Path, PathBuf};

use persia_types::tables::FileEntry;

use super::disk::{self, Input};
use super::error::{CheckpointError, Result};
use super::names;

/// Hex digits of a blake3 hash.
const HASH_DIGITS: usize = 64;

/// Whether `text` is a blake3 hash in lower case.
pub(super) fn is_hash(text: &str) -> bool {
    text.len() == HASH_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The path of a file of a checkpoint: in the staging directory with which its name may begin or, after the staging
/// directory was removed, in the directory of the checkpoint.
pub(super) fn locate(dir: &Path, name: &str) -> Result<PathBuf> {
    let Some((staging, file)) = names::split(name) else {
        return Err(CheckpointError::corrupt(
            dir,
            format!("names a file {name:?}, which is not allowed in a checkpoint"),
        ));
    };
    if let Some(staging) = staging {
        let staging = dir.join(staging);
        // A link in place of a directory could refer to any path.
        let staged = staging.join(file);
        if disk::kind(&staging)?.is_some_and(|kind| kind.is_dir()) && disk::kind(&staged)?.is_some() {
            return Ok(staged);
        }
    }
    Ok(dir.join(file))
}

/// Check a file against its entry.
pub(super) fn verify(dir: &Path, entry: &FileEntry) -> Result<()> {
    let (path, mut input) = open(dir, entry)?;
    check(&path, &mut input, entry, |_| ())
}

/// Read a file into `content` and check it against its entry. Returns its path. Allocates no more than the file's real size.
pub(super) fn read(dir: &Path, entry: &FileEntry, content: &mut Vec<u8>) -> Result<PathBuf> {
    let (path, mut input) = open(dir, entry)?;
    content.clear();
    let size = usize::try_from(entry.bytes).unwrap_or(usize::MAX);
    if content.try_reserve_exact(size).is_err() {
        return Err(CheckpointError::io(&path, std::io::ErrorKind::OutOfMemory.into()));
    }
    check(&path, &mut input, entry, |piece| content.extend_from_slice(piece))?;
    Ok(path)
}

/// Measure a file that the caller wrote, and sync it.
pub(super) fn adopt(dir: &Path, name: &str) -> Result<FileEntry> {
    let mut input = Input::open(&dir.join(name))?;
    let (bytes, blake3) = measure(&mut input, |_| ())?;
    input.sync()?;
    Ok(FileEntry { name: name.into(), bytes, blake3 })
}

fn open(dir: &Path, entry: &FileEntry) -> Result<(PathBuf, Input)> {
    let path = locate(dir, &entry.name)?;
    let input = match Input::open(&path) {
        Err(CheckpointError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(CheckpointError::corrupt(&path, "is missing, the manifest names it"));
        }
        other => other?,
    };
    input.expect_all();
    let bytes = input.len()?;
    if bytes != entry.bytes {
        let what = format!("has {bytes} bytes, the manifest says {}", entry.bytes);
        return Err(CheckpointError::corrupt(&path, what));
    }
    Ok((path, input))
}

fn check(path: &Path, input: &mut Input, entry: &FileEntry, each: impl FnMut(&[u8])) -> Result<()> {
    let (bytes, blake3) = measure(input, each)?;
    if bytes != entry.bytes || blake3 != entry.blake3 {
        let what = format!("has blake3 {blake3}, the manifest says {}", entry.blake3);
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
