//! The columns and metadata of the file of one virtual shard.

use std::ops::RangeInclusive;
use std::sync::Arc;

use arrow_schema::{DataType, Field, FieldRef};
use serde::{Deserialize, Serialize};

/// The format versions that this build reads. A new version is needed if an older reader could misread a
/// file.
pub(super) const FORMATS: RangeInclusive<u32> = 1..=2;
pub(super) const FORMAT_KEY: &str = "persia.format";
pub(super) const SHARD_KEY: &str = "persia.shard";
pub(super) const TABLES_KEY: &str = "persia.tables";

/// The entry of a table in the file's metadata.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TableHead {
    pub(super) name: String,
    pub(super) dim: usize,
    pub(super) state_len: usize,
    pub(super) rows: usize,
    /// The number of ids with an admission count.
    #[serde(default, rename = "waiting", skip_serializing_if = "is_zero")]
    pub(super) counted: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The columns of the file of a shard.
pub(super) fn fields() -> Vec<Field> {
    let table = DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8));
    vec![
        Field::new("table", table, false),
        Field::new("id", DataType::UInt64, false),
        Field::new("last_used", DataType::UInt64, false),
        Field::new("weights", DataType::List(floats()), false),
        Field::new("state", DataType::List(floats()), false),
    ]
}

pub(super) fn floats() -> FieldRef {
    Arc::new(Field::new_list_field(DataType::Float32, false))
}
