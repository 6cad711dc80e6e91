//! The file of one virtual shard.
//!
//! An Arrow IPC file, which `pyarrow.ipc.open_file` reads. A record batch holds rows of one table:
//!
//! | column      | type                        |
//! |-------------|-----------------------------|
//! | `table`     | dictionary of int16 to utf8 |
//! | `id`        | uint64, ascending per table |
//! | `last_used` | uint64, a step              |
//! | `weights`   | list of float32             |
//! | `state`     | list of float32             |
//!
//! Weights are float32 regardless of their type in memory, so that a checkpoint can be loaded into a table of any
//! dtype.
//!
//! The admission counts of a table follow its rows, in separate batches: `last_used` is the count, both lists are
//! empty.
//!
//! The schema's metadata has `persia.format`, `persia.shard` and `persia.tables` (JSON: name, dim, state_len, rows and, if
//! there are any, the number of admission counts (`waiting`) of each table). Equal content gives equal bytes. A file
//! without admission counts has format 1, a file with admission counts has format 2.

mod format;
mod read;
mod write;

pub use read::{ShardReader, read_shard};
pub use write::write_shard;
pub(crate) use write::{Values, write_shard_of};
