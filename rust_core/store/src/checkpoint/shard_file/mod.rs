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
//! Weights are float32 whatever their type in memory, so that a checkpoint fits a table of any dtype.
//!
//! The admission counts of a table follow its rows, in batches of their own: `last_used` is the count, both lists are empty.
//!
//! The schema's metadata has `persia.format`, `persia.shard` and `persia.tables` (JSON: name, dim, state_len, rows and, if
//! there are any, the number of admission counts (`waiting`) of each table). Equal content gives equal bytes. A file
//! without admission counts has format 1, one with them format 2.

mod read;
mod write;

use arrow_schema::{DataType, Field, FieldRef};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

pub use read::{ShardReader, read_shard};
pub use write::write_shard;
pub(crate) use write::{Values, write_shard_of};

/// Numbers of the layout; raised when an older reader could misread a file.
const FORMATS: std::ops::RangeInclusive<u32> = 1..=2;
const FORMAT_KEY: &str = "persia.format";
const SHARD_KEY: &str = "persia.shard";
const TABLES_KEY: &str = "persia.tables";

/// A table in the file's metadata.
#[derive(Debug, Serialize, Deserialize)]
struct TableHead {
    name: String,
    dim: usize,
    state_len: usize,
    rows: usize,
    /// Ids with an admission count.
    #[serde(default, rename = "waiting", skip_serializing_if = "is_zero")]
    counted: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The columns of a file.
fn fields() -> Vec<Field> {
    let table = DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8));
    vec![
        Field::new("table", table, false),
        Field::new("id", DataType::UInt64, false),
        Field::new("last_used", DataType::UInt64, false),
        Field::new("weights", DataType::List(floats()), false),
        Field::new("state", DataType::List(floats()), false),
    ]
}

fn floats() -> FieldRef {
    Arc::new(Field::new_list_field(DataType::Float32, false))
}
