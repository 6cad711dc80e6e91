//! Reading the files of a checkpoint in an object store.

use std::io;
use std::path::Path;

use persia_objects::{Bytes, Place};
use persia_types::tables::FileEntry;

use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::names;

/// The maximum number of bytes per request. If a response breaks off, the client requests the rest.
const PIECE_BYTES: u64 = 16 << 20;

/// Read the file of an entry, pass its pieces to `each`, and check the hash. The size is compared with the entry before
/// the first piece is passed. Like a file in a folder, the object is in the staging directory with which the name may
/// begin or, in a replica, next to the manifest.
pub(in crate::checkpoint) fn read(
    dir: &Place,
    entry: &FileEntry,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<()> {
    let path = dir.url_of(&entry.name);
    let Some((staging, file)) = names::split(&entry.name) else {
        let what = format!("names a file {:?}, which is not allowed in a checkpoint", entry.name);
        return Err(CheckpointError::corrupt(Path::new(dir.url()), what));
    };
    let mut name = entry.name.clone();
    let mut first = piece(dir, &name, 0, entry)?;
    if first.is_none() && staging.is_some() {
        name = file.to_owned();
        first = piece(dir, &name, 0, entry)?;
    }
    let Some(mut part) = first else {
        return Err(CheckpointError::corrupt(&path, "is missing, but the manifest lists it"));
    };
    let mut hasher = blake3::Hasher::new();
    let mut read = 0;
    loop {
        hasher.update(&part);
        each(&part).map_err(|error| CheckpointError::io(&path, error))?;
        read += part.len() as u64;
        if read >= entry.bytes {
            break;
        }
        if part.is_empty() {
            let source =
                io::Error::new(io::ErrorKind::UnexpectedEof, "the store sent fewer bytes than it announced");
            return Err(CheckpointError::io(&path, source));
        }
        part = piece(dir, &name, read, entry)?
            .ok_or_else(|| CheckpointError::corrupt(&path, "was deleted while it was read"))?;
    }
    let found = hasher.finalize().to_hex().to_string();
    if read != entry.bytes || found != entry.blake3 {
        let what = format!("has BLAKE3 hash {found}, but the manifest says {}", entry.blake3);
        return Err(CheckpointError::corrupt(&path, what));
    }
    Ok(())
}

fn piece(dir: &Place, name: &str, start: u64, entry: &FileEntry) -> Result<Option<Bytes>> {
    if entry.bytes == 0 {
        let found = dir.sizes(&[name.to_owned()])?.first().copied().flatten();
        return found.map(|size| check_size(dir, name, size, entry).map(|()| Bytes::new())).transpose();
    }
    let most = PIECE_BYTES.min(entry.bytes - start);
    let Some((piece, size)) = dir.get_range(name, start, most)? else { return Ok(None) };
    check_size(dir, name, size, entry)?;
    Ok(Some(piece))
}

fn check_size(dir: &Place, name: &str, size: u64, entry: &FileEntry) -> Result<()> {
    if size == entry.bytes {
        return Ok(());
    }
    let what = format!("has {size} bytes, but the manifest says {}", entry.bytes);
    Err(CheckpointError::corrupt(&dir.url_of(name), what))
}

/// Find files that are missing or differ in size from their entries, without reading them.
pub(in crate::checkpoint) fn check_sizes(dir: &Place, entries: &[FileEntry]) -> Result<Vec<CheckpointError>> {
    let staged: Vec<String> = entries.iter().map(|entry| entry.name.clone()).collect();
    let mut found = dir.sizes(&staged)?;
    let plain = |at: &usize| {
        entries.get(*at).and_then(|entry| names::split(&entry.name)).map(|(_, file)| file.to_owned())
    };
    let missing: Vec<usize> = (0..found.len()).filter(|at| found[*at].is_none()).collect();
    let plain: Vec<String> = missing.iter().filter_map(plain).collect();
    for (at, size) in missing.into_iter().zip(dir.sizes(&plain)?) {
        found[at] = size;
    }
    let problem = |(entry, size): (&FileEntry, Option<u64>)| match size {
        Some(size) => check_size(dir, &entry.name, size, entry).err(),
        None => {
            Some(CheckpointError::corrupt(&dir.url_of(&entry.name), "is missing, but the manifest lists it"))
        }
    };
    Ok(entries.iter().zip(found).filter_map(problem).collect())
}
