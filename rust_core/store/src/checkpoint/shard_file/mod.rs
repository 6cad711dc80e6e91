//! The file of one virtual shard.
//!
//! The file is an Arrow IPC file, which `pyarrow.ipc.open_file` can read. Each record batch holds rows of one
//! table:
//!
//! | column      | type                        |
//! |-------------|-----------------------------|
//! | `table`     | dictionary of int16 to utf8 |
//! | `id`        | uint64, ascending per table |
//! | `last_used` | uint64, a step              |
//! | `weights`   | list of float32             |
//! | `state`     | list of float32             |
//!
//! Weights are float32 regardless of their type in memory, so a checkpoint can be loaded into a table of any dtype.
//!
//! The admission counts of a table follow its rows in separate batches, in which `last_used` is the count and
//! both lists are empty.
//!
//! The schema's metadata contains `persia.format`, `persia.shard` and `persia.tables`. `persia.tables` is JSON with the
//! name, dim, state_len and rows of each table, and the number of its admission counts (`waiting`) if it has any. Equal
//! content produces equal bytes. The format is 1 without admission counts and 2 with them.

mod format;
mod read;
mod write;

pub use read::{ShardReader, read_shard};
pub use write::write_shard;
pub(crate) use write::{Values, write_shard_of};
