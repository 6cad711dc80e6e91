//! Checkpoints on disk: complete and verified, or absent.
//!
//! ```text
//! <dir>/.saving-7/          1 every file is staged here and synced: Saver::begin, add, add_file, add_content
//! <dir>/MANIFEST.json       2 the manifest, which names them, is renamed into place: Saver::commit. This is the commit
//! <dir>/shard-003.arrow     3 the files are moved here, over those of the previous checkpoint, and .saving-7 is removed
//! <dir>/../LATEST           4 a hint: publish_latest
//! ```
//!
//! A reader takes each file from the staging directory of the manifest's revision or, if the file is not there, from
//! the directory itself. At any time it therefore finds either the complete old checkpoint or the complete new one. The
//! next save finishes step 3, or removes files that were staged without a commit.
//!
//! A URL such as `s3://bucket/run/step-500` may be given wherever a directory is expected; see [`object`].
//!
//! * [`ShardRows`]: the content of a virtual shard; [`write_shard`] and [`read_shard`]: its file
//! * [`Destination`]: one save, into a directory ([`Saver`]) or an object store ([`ObjectSaver`])
//! * [`recover`]: finishes or undoes an interrupted save; [`Import`]: a save of rows in any order
//! * [`Manifest`]: the content of a checkpoint
//! * [`list`], [`latest`], [`publish_latest`], [`prune`], [`remove_object`]: the checkpoints of a run
//! * [`probe`], [`probe_file`]: whether a directory, or an object store, is writable
//! * [`replace_file`]: replaces a small file durably
//!
//! Manifests and shard files have separate format versions. A change that an older build must not ignore
//! increments the version. A build reads all versions up to its own.

mod content;
mod destination;
mod disk;
mod error;
mod import;
mod manifest;
mod names;
mod object;
mod probe;
mod recover;
mod rows;
mod saver;
mod series;
mod shard_file;
mod sink;

pub use destination::Destination;
pub use disk::{CRASH_EXIT, replace_file};
pub use error::CheckpointError;
pub use import::{Duplicate, Duplicates, Import};
pub use manifest::{FORMAT, Head, Manifest};
pub(crate) use names::shard_of_entry;
pub(crate) use names::without_staging;
pub use object::ObjectSaver;
pub use probe::{probe, probe_file};
pub use recover::recover;
pub use rows::{ShardRows, TableRows};
pub use saver::Saver;
pub use series::{Listed, latest, list, prune, publish_latest, remove_object};
pub use shard_file::{ShardReader, read_shard, write_shard};
pub(crate) use shard_file::{Values, write_shard_of};
pub(crate) use sink::{discard, sync_names};
