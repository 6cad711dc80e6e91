//! The file of one virtual shard: its layout, and how it is written.
//!
//! An Arrow IPC file that `pyarrow.ipc.open_file` reads as it is. A record batch holds rows of one table:
//!
//! | column      | type                        |
//! |-------------|-----------------------------|
//! | `table`     | dictionary of int16 to utf8 |
//! | `id`        | uint64, ascending per table |
//! | `last_used` | uint64, a step              |
//! | `weights`   | list of float32             |
//! | `state`     | list of float32             |
//!
//! Weights are float32 whatever they are stored as in memory, so that a checkpoint fits a table of any dtype.
//!
//! Ids that are counted and have no row yet follow the rows of their table, in batches of their own: their
//! `last_used` is the count, and both lists are empty.
//!
//! The schema's metadata has `persia.format`, `persia.shard` and `persia.tables` (JSON: name, dim, state_len, rows
//! and, where there are any, waiting ids of each table). Equal content gives equal bytes. A file without waiting ids
//! is of format 1, one with them of format 2.

use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow_array::types::Int16Type;
use arrow_array::{
    ArrayRef, DictionaryArray, Float32Array, Int16Array, ListArray, RecordBatch, StringArray, UInt64Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema, SchemaRef};
use persia_types::TablesError;
use persia_types::tables::FileEntry;
use serde::{Deserialize, Serialize};

use super::disk::{Output, crash_point};
use super::error::{CheckpointError, Result};
use super::names;
use super::rows::ShardRows;

/// Numbers of the layout; raised when an older reader could misread a file.
pub(super) const FORMATS: std::ops::RangeInclusive<u32> = 1..=2;
pub(super) const FORMAT_KEY: &str = "persia.format";
pub(super) const SHARD_KEY: &str = "persia.shard";
pub(super) const TABLES_KEY: &str = "persia.tables";

const MAX_BATCH_ROWS: usize = 1 << 16;
/// A batch is copied, framed, hashed and given to the system while it is in a processor's caches: every pass over
/// memory that a save does is one less for training.
const MAX_BATCH_BYTES: usize = 1 << 20;
const WRITE_BUFFER: usize = 1 << 16;

/// A table as the file's metadata tells of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TableHead {
    pub(super) name: String,
    pub(super) dim: usize,
    pub(super) state_len: usize,
    pub(super) rows: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) waiting: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// Write the rows of a shard to a new file in `dir` and make it durable (the caller does that for `dir`).
///
/// # Errors
/// `BadShape` when [`ShardRows::check`] refuses the rows; `Io`, also when the file exists.
pub fn write_shard(dir: &Path, rows: &ShardRows) -> std::result::Result<FileEntry, TablesError> {
    let path = dir.join(names::shard_file(rows.shard));
    rows.check().map_err(|what| CheckpointError::bad_save(&path, what))?;
    write_shard_of(dir, rows, |at, range| {
        let table = &rows.tables[at];
        let list = |values: &[f32], len: usize| values[range.start * len..range.end * len].to_vec();
        Values { weights: list(&table.weights, table.dim), state: list(&table.state, table.state_len) }
    })
}

/// What rows of one table hold, one after the other.
pub(crate) struct Values {
    pub(crate) weights: Vec<f32>,
    pub(crate) state: Vec<f32>,
}

/// As [`write_shard`], where `rows` has no weights and no state: `values` returns those of some rows of the table of a number,
/// each row's once, in their order.
pub(crate) fn write_shard_of(
    dir: &Path,
    rows: &ShardRows,
    values: impl FnMut(usize, Range<usize>) -> Values,
) -> std::result::Result<FileEntry, TablesError> {
    let name = names::shard_file(rows.shard);
    Ok(write(&dir.join(&name), rows, values).map(|(bytes, blake3)| FileEntry { name, bytes, blake3 })?)
}

fn write(
    path: &Path,
    rows: &ShardRows,
    values: impl FnMut(usize, Range<usize>) -> Values,
) -> Result<(u64, String)> {
    rows.check_ids().map_err(|what| CheckpointError::bad_save(path, what))?;
    let out = BufWriter::with_capacity(WRITE_BUFFER, Output::create(path)?);
    let out = encode(rows, values, out).map_err(|error| match error {
        ArrowError::IoError(_, source) => CheckpointError::io(path, source),
        other => CheckpointError::bad_save(path, other.to_string()),
    })?;
    let out = out.into_inner().map_err(|error| CheckpointError::io(path, error.into_error()))?;
    out.finish()
}

fn encode<W: Write>(
    rows: &ShardRows,
    mut values: impl FnMut(usize, Range<usize>) -> Values,
    out: W,
) -> std::result::Result<W, ArrowError> {
    let schema = Arc::new(schema(rows)?);
    let names: ArrayRef =
        Arc::new(StringArray::from_iter_values(rows.tables.iter().map(|table| &table.name)));
    let mut writer = FileWriter::try_new(out, &schema)?;
    for (index, table) in rows.tables.iter().enumerate() {
        let row_bytes = 4 * (table.dim + table.state_len);
        let step = (MAX_BATCH_BYTES / row_bytes).clamp(1, MAX_BATCH_ROWS);
        for start in (0..table.ids.len()).step_by(step) {
            let range = start..table.ids.len().min(start + step);
            let Values { weights, state } = values(index, range.clone());
            let part = Part {
                ids: table.ids[range.clone()].to_vec(),
                last_used: table.last_used[range].to_vec(),
                weights: (weights, table.dim),
                state: (state, table.state_len),
            };
            writer.write(&batch(&schema, &names, index, part)?)?;
            crash_point!("ckpt.mid_shard");
        }
        for part in table.waiting.chunks(MAX_BATCH_ROWS) {
            writer.write(&batch(&schema, &names, index, Part::of_waiting(part))?)?;
        }
    }
    writer.into_inner()
}

fn schema(rows: &ShardRows) -> std::result::Result<Schema, ArrowError> {
    let heads: Vec<TableHead> = rows
        .tables
        .iter()
        .map(|table| TableHead {
            name: table.name.clone(),
            dim: table.dim,
            state_len: table.state_len,
            rows: table.ids.len(),
            waiting: table.waiting.len(),
        })
        .collect();
    let heads = serde_json::to_string(&heads).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let format = if rows.tables.iter().all(|table| table.waiting.is_empty()) { 1 } else { 2 };
    let metadata = HashMap::from([
        (FORMAT_KEY.to_owned(), format.to_string()),
        (SHARD_KEY.to_owned(), rows.shard.to_string()),
        (TABLES_KEY.to_owned(), heads),
    ]);
    Ok(Schema::new_with_metadata(fields(), metadata))
}

/// The columns of a file.
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

fn floats() -> FieldRef {
    Arc::new(Field::new_list_field(DataType::Float32, false))
}

/// What one record batch holds.
struct Part {
    ids: Vec<u64>,
    last_used: Vec<u64>,
    /// Values, and how many of them a list has.
    weights: (Vec<f32>, usize),
    state: (Vec<f32>, usize),
}

impl Part {
    fn of_waiting(waiting: &[(u64, u32)]) -> Self {
        let (ids, last_used) = waiting.iter().map(|(id, count)| (*id, u64::from(*count))).unzip();
        Self { ids, last_used, weights: (Vec::new(), 0), state: (Vec::new(), 0) }
    }
}

fn batch(
    schema: &SchemaRef,
    names: &ArrayRef,
    index: usize,
    part: Part,
) -> std::result::Result<RecordBatch, ArrowError> {
    let key = i16::try_from(index).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let rows = part.ids.len();
    let list = |(values, len): (Vec<f32>, usize)| {
        let offsets = OffsetBuffer::from_repeated_length(len, rows);
        ListArray::try_new(floats(), offsets, Arc::new(Float32Array::from(values)), None)
    };
    let keys = Int16Array::from(vec![key; rows]);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(DictionaryArray::<Int16Type>::try_new(keys, names.clone())?),
        Arc::new(UInt64Array::from(part.ids)),
        Arc::new(UInt64Array::from(part.last_used)),
        Arc::new(list(part.weights)?),
        Arc::new(list(part.state)?),
    ];
    RecordBatch::try_new(schema.clone(), columns)
}
