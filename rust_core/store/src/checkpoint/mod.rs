//! Checkpoints on disk: all there and verified, or not there at all.
//!
//! ```text
//! <dir>/.saving-7/          1 every file is staged here and made durable: Saver::begin, add, add_file
//! <dir>/MANIFEST.json       2 published in one step, it names them all: Saver::commit. Now it is a checkpoint
//! <dir>/shard-003.arrow     3 the files move up, over those of the checkpoint before, and .saving-7 goes
//! <dir>/../LATEST           4 a hint: publish_latest
//! ```
//!
//! A reader takes a file from the staging directory of the manifest's revision and, where that does not have it,
//! from the directory itself. So every moment shows the old checkpoint or the new one, in full; the next save
//! finishes step 3 or removes what never got to step 2.
//!
//! * [`ShardRows`]: rows of a virtual shard; [`write_shard`] and [`read_shard`]: their file
//! * [`Saver`]: one save; [`recover`]: what an interrupted one left
//! * [`Manifest`]: what is in a checkpoint, opened and verified
//! * [`list`], [`latest`], [`publish_latest`], [`prune`]: the checkpoints of a run
//! * [`probe`], [`probe_file`]: whether a directory takes any
//! * [`replace_file`]: replaces a small file durably
//!
//! A manifest and a shard's file carry format numbers of their own. A change that an older build must not ignore
//! raises them; a build reads all formats up to its own.

mod content;
mod disk;
mod error;
mod manifest;
mod names;
mod probe;
mod recover;
mod rows;
mod saver;
mod series;
mod shard;
mod shard_read;

pub use disk::{CRASH_EXIT, replace_file};
pub use error::CheckpointError;
pub use manifest::{FORMAT, Head, Manifest};
pub(crate) use names::shard_of_entry;
pub use probe::{probe, probe_file};
pub use recover::recover;
pub use rows::{ShardRows, TableRows};
pub use saver::Saver;
pub use series::{Listed, latest, list, prune, publish_latest};
pub use shard::write_shard;
pub(crate) use shard::{Values, write_shard_of};
pub use shard_read::{ShardReader, read_shard};
