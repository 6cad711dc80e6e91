//! Checkpoints in an object store, below a URL such as `s3://bucket/runs/census/step-500`.
//!
//! ```text
//! <url>/.saving-8241/shard-003.arrow  1 every file is put below a random revision, which no other attempt has: Upload
//! <url>/MANIFEST.json                 2 the manifest is put if it is still the one that this save found. This is the commit
//! <url>/.saving-77/...                3 the files of other attempts are deleted
//! <url>/../LATEST                     4 a hint: publish_latest
//! ```
//!
//! Objects are never renamed, so a file stays where it was put. A reader finds it there by the revision in the manifest
//! or, in a replica that was uploaded from a folder, next to the manifest. A listing may be out of date. It is
//! therefore used only to find old checkpoints and files to delete, and never decides which files belong to a
//! checkpoint.
//!
//! * [`ObjectSaver`]: writes one checkpoint
//! * [`read`]: reads a file and checks it
//! * [`series`]: lists and deletes the checkpoints of a run

mod read;
mod saver;
pub(super) mod series;

use std::path::Path;

use persia_objects::{Patience, Place};

use super::error::Result;
pub(super) use read::{check_sizes, read};
pub use saver::ObjectSaver;

/// The place that a URL names; None for a file system path.
pub(super) fn place(path: &Path) -> Result<Option<Place>> {
    Ok(Place::find(path, Patience::Save)?)
}
