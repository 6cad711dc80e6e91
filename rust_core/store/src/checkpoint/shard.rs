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
//! The schema's metadata has `persia.format`, `persia.shard` and `persia.tables` (JSON: name, dim, state_len and
//! rows of each table). Equal rows give equal bytes.

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
use super::rows::{ShardRows, TableRows};

/// Number of the layout; raised when an older reader could misread a file.
pub(super) const FORMAT: u32 = 1;
pub(super) const FORMAT_KEY: &str = "persia.format";
pub(super) const SHARD_KEY: &str = "persia.shard";
pub(super) const TABLES_KEY: &str = "persia.tables";

const MAX_BATCH_ROWS: usize = 1 << 16;
/// Keeps the copy that a record batch is made of small, whatever the dimension.
const MAX_BATCH_BYTES: usize = 8 << 20;
const WRITE_BUFFER: usize = 1 << 16;

/// A table as the file's metadata tells of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TableHead {
    pub(super) name: String,
    pub(super) dim: usize,
    pub(super) state_len: usize,
    pub(super) rows: usize,
}

/// Write the rows of a shard to a new file in `dir` and make it durable (the caller does that for `dir`).
///
/// # Errors
/// `BadShape` when [`ShardRows::check`] refuses the rows; `Io`, also when the file exists.
pub fn write_shard(dir: &Path, rows: &ShardRows) -> std::result::Result<FileEntry, TablesError> {
    let name = names::shard_file(rows.shard);
    Ok(write(&dir.join(&name), rows).map(|(bytes, blake3)| FileEntry { name, bytes, blake3 })?)
}

fn write(path: &Path, rows: &ShardRows) -> Result<(u64, String)> {
    rows.check().map_err(|what| CheckpointError::bad_save(path, what))?;
    let out = BufWriter::with_capacity(WRITE_BUFFER, Output::create(path)?);
    let out = encode(rows, out).map_err(|error| match error {
        ArrowError::IoError(_, source) => CheckpointError::io(path, source),
        other => CheckpointError::bad_save(path, other.to_string()),
    })?;
    let out = out.into_inner().map_err(|error| CheckpointError::io(path, error.into_error()))?;
    out.finish()
}

fn encode<W: Write>(rows: &ShardRows, out: W) -> std::result::Result<W, ArrowError> {
    let schema = Arc::new(schema(rows)?);
    let names: ArrayRef =
        Arc::new(StringArray::from_iter_values(rows.tables.iter().map(|table| &table.name)));
    let mut writer = FileWriter::try_new(out, &schema)?;
    for (index, table) in rows.tables.iter().enumerate() {
        let row_bytes = 4 * (table.dim + table.state_len);
        let step = (MAX_BATCH_BYTES / row_bytes).clamp(1, MAX_BATCH_ROWS);
        for start in (0..table.ids.len()).step_by(step) {
            let range = start..table.ids.len().min(start + step);
            writer.write(&batch(&schema, &names, index, table, range)?)?;
            crash_point!("ckpt.mid_shard");
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
        })
        .collect();
    let heads = serde_json::to_string(&heads).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let metadata = HashMap::from([
        (FORMAT_KEY.to_owned(), FORMAT.to_string()),
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

fn batch(
    schema: &SchemaRef,
    names: &ArrayRef,
    index: usize,
    table: &TableRows,
    rows: Range<usize>,
) -> std::result::Result<RecordBatch, ArrowError> {
    let key = i16::try_from(index).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let keys = Int16Array::from(vec![key; rows.len()]);
    let list = |values: &[f32], len: usize| {
        let values = Float32Array::from(values[rows.start * len..rows.end * len].to_vec());
        let offsets = OffsetBuffer::from_repeated_length(len, rows.len());
        ListArray::try_new(floats(), offsets, Arc::new(values), None)
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(DictionaryArray::<Int16Type>::try_new(keys, names.clone())?),
        Arc::new(UInt64Array::from(table.ids[rows.clone()].to_vec())),
        Arc::new(UInt64Array::from(table.last_used[rows.clone()].to_vec())),
        Arc::new(list(&table.weights, table.dim)?),
        Arc::new(list(&table.state, table.state_len)?),
    ];
    RecordBatch::try_new(schema.clone(), columns)
}
