//! [`CheckpointError`].

use std::io;
use std::path::{Path, PathBuf};

use persia_objects::Failure;
use persia_types::TablesError;

use super::names;

/// The result type of this module's functions.
pub(super) type Result<T> = std::result::Result<T, CheckpointError>;

/// The reason why a checkpoint could not be written, found or used. Each error names the path; the path of a
/// staged file omits the staging directory.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The directory has no manifest.
    #[error("{path}: no checkpoint here: {found}")]
    Missing {
        /// The directory.
        path: PathBuf,
        /// What the directory contains.
        found: String,
    },
    /// A file differs from what its writer wrote.
    #[error("{path}: {what}; use another checkpoint, or a replica of this one")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// The checkpoint was written by a newer version.
    #[error("{path}: has format {found}, but this build reads formats up to {known}; install a newer Persia")]
    Future {
        /// The manifest.
        path: PathBuf,
        /// The format number of the checkpoint.
        found: u32,
        /// The highest format number that this build reads.
        known: u32,
    },
    /// Another process is saving into the same directory, or has saved below the same URL.
    #[error(
        "{path}: another process is saving, or has just saved, here; stop it, or save to a different folder"
    )]
    Busy {
        /// The checkpoint's directory.
        path: PathBuf,
    },
    /// A file that belongs to no checkpoint occupies the name of a file of the new checkpoint.
    #[error("{path}: exists and is not part of a checkpoint; move it, or save to a different folder")]
    Occupied {
        /// The existing file.
        path: PathBuf,
    },
    /// The caller requested an invalid save.
    #[error("cannot save {path}: {what}")]
    BadSave {
        /// The path to be written.
        path: PathBuf,
        /// What is wrong, and what was expected.
        what: String,
    },
    /// The operating system returned an error.
    #[error("{path}: {source}")]
    Io {
        /// The path of the file or directory.
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
        Self::Corrupt { path: names::without_staging(path), what: what.into() }
    }

    pub(super) fn bad_save(path: &Path, what: impl Into<String>) -> Self {
        Self::BadSave { path: names::without_staging(path), what: what.into() }
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
            E::Corrupt { path, what } => Self::Corrupt { path, what },
            E::Missing { path, found } => {
                Self::Corrupt { path, what: format!("no checkpoint here: {found}") }
            }
            E::Future { path, found, known } => Self::Corrupt {
                path,
                what: format!(
                    "has format {found}, but this build reads formats up to {known}; install a newer Persia"
                ),
            },
            E::BadSave { path, what } => Self::BadShape { what: format!("{}: {what}", path.display()) },
            E::Busy { path } => Self::Io { path, source: io::ErrorKind::ResourceBusy.into() },
            E::Occupied { path } => Self::Io { path, source: io::ErrorKind::AlreadyExists.into() },
            E::Io { path, source } => Self::Io { path, source },
        }
    }
}
