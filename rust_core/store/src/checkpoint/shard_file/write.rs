//! Writing the file of one virtual shard.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow_array::types::Int16Type;
use arrow_array::{
    ArrayRef, DictionaryArray, Float32Array, Int16Array, ListArray, RecordBatch, StringArray, UInt64Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, Schema, SchemaRef};
use persia_types::TablesError;
use persia_types::tables::FileEntry;

use super::format::{FORMAT_KEY, SHARD_KEY, TABLES_KEY, TableHead, fields, floats};
use crate::checkpoint::disk::crash_point;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::names;
use crate::checkpoint::rows::ShardRows;
use crate::checkpoint::sink::Sink;

const MAX_BATCH_ROWS: usize = 1 << 16;
/// The maximum size of the weights and state of a batch of more than one row. It is small enough for a batch
/// to be copied, framed, hashed and written while it is in the processor's cache, because passes over memory
/// would slow down training.
const MAX_BATCH_BYTES: usize = 1 << 20;
const WRITE_BUFFER: usize = 1 << 16;

/// Write the rows of a shard to a new file in `dir`, a directory or a URL, and sync it. If `dir` is a
/// directory, the caller syncs it.
///
/// # Errors
/// `BadShape` if [`ShardRows::check`] refuses the rows; `Io`, including if the file exists in a directory. At
/// a URL, an existing object is replaced.
pub fn write_shard(dir: &Path, rows: &ShardRows) -> std::result::Result<FileEntry, TablesError> {
    let path = dir.join(names::shard_file(rows.shard));
    rows.check().map_err(|what| CheckpointError::bad_save(&path, what))?;
    write_shard_of(dir, rows, |at, range| {
        let table = &rows.tables[at];
        let list = |values: &[f32], len: usize| values[range.start * len..range.end * len].to_vec();
        Ok(Values { weights: list(&table.weights, table.dim), state: list(&table.state, table.state_len) })
    })
}

/// The weights and state of a range of rows of one table.
pub(crate) struct Values {
    pub(crate) weights: Vec<f32>,
    pub(crate) state: Vec<f32>,
}

/// Like [`write_shard`], for `rows` without weights and state. `values` returns the weights and state of a
/// range of rows of a table. The ranges are consecutive and cover each row once. If `values` returns an
/// error, writing ends and the file is removed.
pub(crate) fn write_shard_of(
    dir: &Path,
    rows: &ShardRows,
    values: impl FnMut(usize, Range<usize>) -> io::Result<Values>,
) -> std::result::Result<FileEntry, TablesError> {
    let name = names::shard_file(rows.shard);
    Ok(write(&dir.join(&name), rows, values).map(|(bytes, blake3)| FileEntry { name, bytes, blake3 })?)
}

fn write(
    path: &Path,
    rows: &ShardRows,
    values: impl FnMut(usize, Range<usize>) -> io::Result<Values>,
) -> Result<(u64, String)> {
    rows.check_ids().map_err(|what| CheckpointError::bad_save(path, what))?;
    let out = BufWriter::with_capacity(WRITE_BUFFER, Sink::create(path)?);
    let out = encode(rows, values, out).map_err(|error| match error {
        ArrowError::IoError(_, source) => CheckpointError::io(path, source),
        other => CheckpointError::bad_save(path, other.to_string()),
    })?;
    let out = out.into_inner().map_err(|error| CheckpointError::io(path, error.into_error()))?;
    out.finish()
}

fn encode<W: Write>(
    rows: &ShardRows,
    mut values: impl FnMut(usize, Range<usize>) -> io::Result<Values>,
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
            let Values { weights, state } = values(index, range.clone())?;
            let rows = BatchRows {
                ids: table.ids[range.clone()].to_vec(),
                last_used: table.last_used[range].to_vec(),
                weights: (weights, table.dim),
                state: (state, table.state_len),
            };
            writer.write(&batch(&schema, &names, index, rows)?)?;
            crash_point!("ckpt.mid_shard");
        }
        for counts in table.admission_counts.chunks(MAX_BATCH_ROWS) {
            writer.write(&batch(&schema, &names, index, BatchRows::of_counts(counts))?)?;
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
            counted: table.admission_counts.len(),
        })
        .collect();
    let heads = serde_json::to_string(&heads).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let format = if rows.tables.iter().all(|table| table.admission_counts.is_empty()) { 1 } else { 2 };
    let metadata = HashMap::from([
        (FORMAT_KEY.to_owned(), format.to_string()),
        (SHARD_KEY.to_owned(), rows.shard.to_string()),
        (TABLES_KEY.to_owned(), heads),
    ]);
    Ok(Schema::new_with_metadata(fields(), metadata))
}

/// The columns of one record batch.
struct BatchRows {
    ids: Vec<u64>,
    last_used: Vec<u64>,
    /// The values, and the length of each list.
    weights: (Vec<f32>, usize),
    state: (Vec<f32>, usize),
}

impl BatchRows {
    fn of_counts(counts: &[(u64, u32)]) -> Self {
        let (ids, last_used) = counts.iter().map(|(id, count)| (*id, u64::from(*count))).unzip();
        Self { ids, last_used, weights: (Vec::new(), 0), state: (Vec::new(), 0) }
    }
}

fn batch(
    schema: &SchemaRef,
    names: &ArrayRef,
    index: usize,
    rows: BatchRows,
) -> std::result::Result<RecordBatch, ArrowError> {
    let key = i16::try_from(index).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let len = rows.ids.len();
    let list = |(values, length): (Vec<f32>, usize)| {
        let offsets = OffsetBuffer::from_repeated_length(length, len);
        ListArray::try_new(floats(), offsets, Arc::new(Float32Array::from(values)), None)
    };
    let keys = Int16Array::from(vec![key; len]);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(DictionaryArray::<Int16Type>::try_new(keys, names.clone())?),
        Arc::new(UInt64Array::from(rows.ids)),
        Arc::new(UInt64Array::from(rows.last_used)),
        Arc::new(list(rows.weights)?),
        Arc::new(list(rows.state)?),
    ];
    RecordBatch::try_new(schema.clone(), columns)
}
