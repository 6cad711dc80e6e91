//! [`CheckpointError`].

use std::io;
use std::path::{Path, PathBuf};

use persia_objects::Failure;
use persia_types::TablesError;

use super::names;

/// The result type of this module's functions.
pub(super) type Result<T> = std::result::Result<T, CheckpointError>;

/// The text of [`CheckpointError::Busy`], with the advice to the user.
const BUSY: &str = "another process is saving, or has just saved, here; stop that process, wait until it ends, or save \
                    to a different folder or URL";
/// The text of [`CheckpointError::Occupied`], with the advice to the user.
const OCCUPIED: &str =
    "exists and is not part of a checkpoint; move it, or save to a different folder or URL";
/// The advice to a user who reads a damaged file.
const READ_ANOTHER: &str = "use another checkpoint, or a replica of this one";

/// The reason why a checkpoint could not be written, found or used. Each error names the path. The path of a
/// staged file omits the staging directory.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The directory, or the URL, has no manifest.
    #[error("{path}: no checkpoint here: {found}")]
    Missing {
        /// The directory.
        path: PathBuf,
        /// What is there instead, or why the directory cannot be listed.
        found: String,
    },
    /// A file is missing, differs from what its writer wrote, or is not allowed in a checkpoint.
    #[error("{path}: {what}; {next}")]
    Corrupt {
        /// The file or directory.
        path: PathBuf,
        /// The problem.
        what: String,
        /// The advice to the user.
        next: &'static str,
    },
    /// The checkpoint was written by a newer version of Persia.
    #[error("{path}: has format {found}, but this build reads formats up to {known}; install a newer Persia")]
    Future {
        /// The path of the manifest.
        path: PathBuf,
        /// The format number of the checkpoint.
        found: u32,
        /// The highest format number that this build reads.
        known: u32,
    },
    /// Another process is saving into the same directory, or has saved below the same URL.
    #[error("{path}: {}", BUSY)]
    Busy {
        /// The directory or URL of the checkpoint.
        path: PathBuf,
    },
    /// A file that belongs to no checkpoint occupies the name of a file of the new checkpoint, or of
    /// `LATEST`.
    #[error("{path}: {}", OCCUPIED)]
    Occupied {
        /// The existing file.
        path: PathBuf,
    },
    /// The caller requested an invalid save, or another invalid change of a checkpoint.
    #[error("cannot {action} {path}: {what}")]
    BadSave {
        /// The requested change, such as `save`.
        action: &'static str,
        /// The path to be changed.
        path: PathBuf,
        /// What is wrong, and what was expected.
        what: String,
    },
    /// The operating system or the object store returned an error.
    #[error("{path}: {source}")]
    Io {
        /// The path or URL of the file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl CheckpointError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: names::without_staging(path), source }
    }

    pub(super) fn corrupt(path: &Path, what: impl Into<String>) -> Self {
        Self::Corrupt { path: names::without_staging(path), what: what.into(), next: READ_ANOTHER }
    }

    pub(super) fn bad_save(path: &Path, what: impl Into<String>) -> Self {
        Self::cannot("save", path, what)
    }

    /// The error for a change that is not possible. `action` is its verb, such as `save`.
    pub(super) fn cannot(action: &'static str, path: &Path, what: impl Into<String>) -> Self {
        Self::BadSave { action, path: names::without_staging(path), what: what.into() }
    }

    /// Replace the advice for reading a checkpoint by the advice for the change that the caller makes.
    pub(super) fn with_next(self, next: &'static str) -> Self {
        match self {
            Self::Corrupt { path, what, .. } => Self::Corrupt { path, what, next },
            other => other,
        }
    }
}

impl From<Failure> for CheckpointError {
    fn from(Failure { url, source }: Failure) -> Self {
        match source.kind() {
            io::ErrorKind::InvalidData => Self::corrupt(&url, source.to_string()),
            _ => Self::io(&url, source),
        }
    }
}

impl From<CheckpointError> for TablesError {
    fn from(error: CheckpointError) -> Self {
        use CheckpointError as E;
        match error {
            E::Corrupt { path, what, next } => Self::Corrupt { path, what: format!("{what}; {next}") },
            E::Missing { path, found } => {
                Self::Corrupt { path, what: format!("no checkpoint here: {found}") }
            }
            E::Future { path, found, known } => Self::Corrupt {
                path,
                what: format!(
                    "has format {found}, but this build reads formats up to {known}; install a newer Persia"
                ),
            },
            E::BadSave { action, path, what } => {
                Self::BadShape { what: format!("cannot {action} {}: {what}", path.display()) }
            }
            E::Busy { path } => Self::Io { path, source: io::Error::new(io::ErrorKind::ResourceBusy, BUSY) },
            E::Occupied { path } => {
                Self::Io { path, source: io::Error::new(io::ErrorKind::AlreadyExists, OCCUPIED) }
            }
            E::Io { path, source } => Self::Io { path, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_tables_says_what_the_error_of_the_checkpoint_says() {
        let path = || PathBuf::from("/runs/step-7/dense.pt");
        let errors = [
            (CheckpointError::Busy { path: path() }, "another process is saving"),
            (CheckpointError::Occupied { path: path() }, "exists and is not part of a checkpoint"),
            (
                CheckpointError::bad_save(&path(), "it was added before"),
                "cannot save /runs/step-7/dense.pt: it was",
            ),
            (
                CheckpointError::corrupt(&path(), "is not a regular file"),
                "dense.pt: is not a regular file; use another checkpoint, or a replica of this one",
            ),
            (
                CheckpointError::corrupt(&path(), "has changed").with_next("save to a different folder"),
                "dense.pt: has changed; save to a different folder",
            ),
        ];
        for (error, expected) in errors {
            let own = error.to_string();
            let of_tables = TablesError::from(error).to_string();
            assert!(own.contains(expected), "{own}");
            assert!(of_tables.contains(expected) && of_tables.contains("dense.pt"), "{of_tables}");
        }
    }

    #[test]
    fn the_next_step_is_that_of_the_caller() {
        let read = CheckpointError::corrupt(Path::new("/runs/MANIFEST.json"), "has changed");
        assert_eq!(read.to_string(), format!("/runs/MANIFEST.json: has changed; {READ_ANOTHER}"));
        let saved = read.with_next("save to a different folder");
        assert_eq!(saved.to_string(), "/runs/MANIFEST.json: has changed; save to a different folder");
        let removed = CheckpointError::cannot("delete", Path::new("/runs"), "it is a folder");
        assert_eq!(removed.to_string(), "cannot delete /runs: it is a folder");
    }
}
