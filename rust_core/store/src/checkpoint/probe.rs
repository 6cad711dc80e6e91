//! Checks that a directory, or an object store, is writable, before hours of training depend on it.

use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use persia_objects::{Patience, Place};
use persia_types::{TablesError, is_url};

use super::error::CheckpointError;

/// Create a directory in `dir`, as a save does, let this process and `others` write into it, and remove it. In an
/// object store, each of them puts and deletes an object.
///
/// # Errors
/// `Io`, which for a directory names the current user and the directory's owner; the errors of `others`.
pub fn probe(dir: &Path, others: impl FnOnce(&Path) -> Result<(), TablesError>) -> Result<(), TablesError> {
    if is_url(dir) {
        return probe_file(dir).and_then(|()| others(dir));
    }
    let inside = fresh(dir);
    fs::create_dir(&inside).map_err(|source| explained(dir, WRITE, source))?;
    let found = probe_file(&inside).and_then(|()| others(&inside));
    let removed = fs::remove_dir(&inside).map_err(|source| explained(dir, &removal(&inside), source));
    found.and(removed)
}

/// Create a file in `dir` and remove it. In an object store, also check that it supports conditional puts.
///
/// # Errors
/// Those of [`probe`].
pub fn probe_file(dir: &Path) -> Result<(), TablesError> {
    let file = fresh(dir);
    if let Some(place) = Place::find(dir, Patience::Probe).map_err(CheckpointError::from)? {
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or(".probe").to_owned();
        return Ok(place.probe(&name).map_err(CheckpointError::from)?);
    }
    let made = OpenOptions::new().write(true).create_new(true).open(&file);
    made.map_err(|source| explained(dir, WRITE, source))?;
    fs::remove_file(&file).map_err(|source| explained(dir, &removal(&file), source))
}

/// What a save does in a folder, for messages.
const WRITE: &str = "write here";

/// Like [`WRITE`], for the removal of what was written.
fn removal(path: &Path) -> String {
    format!("remove {} from here", path.file_name().unwrap_or_default().display())
}

/// A unique path in `dir`. The process id alone is not unique: several servers may probe concurrently, and in
/// containers their process ids are equal.
fn fresh(dir: &Path) -> PathBuf {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let number = RandomState::new().hash_one(nanos);
    dir.join(format!(".probe-{}-{number:x}", process::id()))
}

/// Add the users and permissions to an error, so that the reader can fix it. `what` is what the user cannot do in `dir`.
fn explained(dir: &Path, what: &str, source: io::Error) -> TablesError {
    let own = fs::metadata("/proc/self").map_or_else(|_| "?".to_owned(), |own| own.uid().to_string());
    let found = match fs::metadata(dir) {
        Ok(found) if found.is_dir() => {
            format!(
                "the folder belongs to user {}, mode {:o}",
                found.uid(),
                found.permissions().mode() & 0o7777
            )
        }
        Ok(_) => "it is not a folder".into(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => "there is no such folder".into(),
        Err(error) => format!("its owner is unknown: {error}"),
    };
    let next = match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space there, or use another folder"
        }
        io::ErrorKind::PermissionDenied => "change its owner or its mode, or use another folder",
        _ => "correct the path, or use another folder",
    };
    let what = format!("user {own} cannot {what}: {source}; {found}; {next}");
    TablesError::Io { path: dir.to_owned(), source: io::Error::new(source.kind(), what) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test: a panic is its verdict")]
mod tests {
    use super::*;

    #[test]
    fn a_writable_directory_is_unchanged_and_others_are_explained() {
        let dir = tempfile::tempdir().unwrap();
        probe(dir.path(), probe_file).unwrap();
        let refused = |_: &Path| Err(TablesError::NotBegun);
        assert!(matches!(probe(dir.path(), refused), Err(TablesError::NotBegun)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let missing = dir.path().join("missing");
        let error = probe(&missing, probe_file).unwrap_err().to_string();
        assert!(error.contains("missing") && error.contains("no such folder"), "{error}");
        // A directory in which no user can create a file.
        let error = probe(Path::new("/proc"), probe_file).unwrap_err().to_string();
        assert!(error.contains("/proc: user ") && error.contains("belongs to user 0, mode 555"), "{error}");
    }
}
