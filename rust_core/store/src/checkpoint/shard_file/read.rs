//! Reading the file of one virtual shard.
//!
//! A checkpoint is not trusted: a hash only proves that the writer of the manifest intended these bytes. A general
//! Arrow reader trusts the lengths in a file, and panics or allocates accordingly. This module therefore parses record
//! batches itself and compares each length with the bytes that exist.

use std::path::Path;

use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::read_footer_length;
use arrow_ipc::{
    Block, Endianness, Footer, MetadataVersion, RecordBatch, Schema, root_as_footer, root_as_message,
};
use persia_types::TablesError;
use persia_types::limits::MAX_MIN_COUNT;
use persia_types::tables::FileEntry;

use super::format::{FORMAT_KEY, FORMATS, SHARD_KEY, TABLES_KEY, TableHead, fields};
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::rows::{ShardRows, TableRows, check_counted, check_sizes};
use crate::checkpoint::{content, names};

const MAGIC: &[u8; 6] = b"ARROW1";
/// The size of the continuation marker and the length that precede a message.
const MESSAGE_PREFIX: usize = 8;
/// The sections of a file, for messages.
const FOOTER: &str = "footer";
const DICTIONARY: &str = "dictionary";
const ID: &str = "column `id`";
const LAST_USED: &str = "column `last_used`";
const WEIGHTS: &str = "column `weights`";
const STATE: &str = "column `state`";
/// The size of a row without its floats: dictionary key, id, last_used and two list offsets.
const ROW_OVERHEAD: usize = 2 + 8 + 8 + 4 + 4;

/// Read the rows of a shard. Checks the size and hash before it parses anything, and then the whole
/// structure.
///
/// # Errors
/// `Corrupt` with the file's path; `Io`.
pub fn read_shard(dir: &Path, entry: &FileEntry) -> std::result::Result<ShardRows, TablesError> {
    let mut reader = ShardReader::default();
    reader.read(dir, entry)?;
    Ok(reader.rows)
}

/// Reads the files of many shards, one after another, into the same buffers.
#[derive(Debug, Default)]
pub struct ShardReader {
    file: Vec<u8>,
    rows: ShardRows,
}

impl ShardReader {
    /// Like [`read_shard`], but uses the buffers of this reader.
    ///
    /// # Errors
    /// Those of [`read_shard`].
    pub fn read(&mut self, dir: &Path, entry: &FileEntry) -> std::result::Result<&ShardRows, TablesError> {
        read(dir, entry, &mut self.file, &mut self.rows)?;
        Ok(&self.rows)
    }
}

fn read(dir: &Path, entry: &FileEntry, file: &mut Vec<u8>, rows: &mut ShardRows) -> Result<()> {
    let path = content::read(dir, entry, file)?;
    decode(file, rows).map_err(|what| CheckpointError::corrupt(&path, what))?;
    let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if names::shard_of_file(file_name) != Some(rows.shard) {
        let what = format!("has the rows of shard {}, but the name of another shard", rows.shard);
        return Err(CheckpointError::corrupt(&path, what));
    }
    Ok(())
}

fn decode(file: &[u8], into: &mut ShardRows) -> std::result::Result<(), String> {
    let footer = footer(file)?;
    let (shard, heads) = head(footer.schema().ok_or("has no schema")?)?;
    check_heads(&heads, file.len())?;
    into.shard = shard;
    into.tables.resize_with(heads.len(), TableRows::default);
    let tables = &mut into.tables;
    tables.iter_mut().zip(&heads).for_each(|(table, head)| prepare(table, head));
    if heads.iter().any(|head| head.rows + head.counted > 0) {
        check_dictionary(file, &footer, &heads)?;
    }
    let mut current = 0;
    for block in footer.recordBatches().ok_or("has no record batches")? {
        let columns = Columns::of(file, block)?;
        let key = columns.table()?;
        if key < current {
            return Err("has record batches out of order".into());
        }
        current = key;
        let (table, head) = tables.get_mut(key).zip(heads.get(key)).ok_or("has rows of an unknown table")?;
        // Check this before rows are copied, because overlapping blocks could claim more rows than the file has
        // bytes for.
        let (rows, counts) = (head.rows - table.ids.len(), head.counted - table.admission_counts.len());
        if columns.rows > if rows > 0 { rows } else { counts } {
            return Err(format!(
                "has more than the {} rows and {} admission counts that it states for table {:?}",
                head.rows, head.counted, head.name
            ));
        }
        if rows > 0 { columns.append_rows(table)? } else { columns.append_counts(table)? }
    }
    for (table, head) in tables.iter().zip(&heads) {
        for (what, found, claimed) in [
            ("rows", table.ids.len(), head.rows),
            ("admission counts", table.admission_counts.len(), head.counted),
        ] {
            if found != claimed {
                return Err(format!("has {found} of {claimed} {what} of table {:?}", head.name));
            }
        }
    }
    into.check()
}

fn footer(file: &[u8]) -> std::result::Result<Footer<'_>, String> {
    let (rest, tail) = file.split_last_chunk::<10>().ok_or("is not an Arrow file: too short")?;
    let length = read_footer_length(*tail).map_err(|error| error.to_string())?;
    let start =
        rest.len().checked_sub(length).ok_or("is not an Arrow file: its footer is longer than the file")?;
    if !file.starts_with(MAGIC) {
        return Err("is not an Arrow file".into());
    }
    let footer = root_as_footer(&rest[start..]).map_err(|error| format!("has a damaged footer: {error}"))?;
    if footer.version() != MetadataVersion::V5 {
        return Err(format!("has Arrow metadata version {:?}, expected V5", footer.version()));
    }
    Ok(footer)
}

/// The shard number and the tables in the schema, which must be the one that this module writes.
fn head(schema: Schema<'_>) -> std::result::Result<(usize, Vec<TableHead>), String> {
    if schema.endianness() != Endianness::Little {
        return Err("is big-endian, expected little-endian".into());
    }
    let schema = try_fb_to_schema(schema).map_err(|error| format!("has a damaged schema: {error}"))?;
    let text = |key| schema.metadata().get(key).ok_or(format!("has no {key} in its metadata"));
    check_format(text(FORMAT_KEY)?)?;
    if !schema.fields().iter().map(AsRef::as_ref).eq(&fields()) {
        return Err(format!("does not have the columns of a shard: {:?}", schema.fields()));
    }
    let shard = text(SHARD_KEY)?;
    let shard = shard.parse().map_err(|_| format!("has no number as {SHARD_KEY} in its metadata"))?;
    let tables = serde_json::from_str(text(TABLES_KEY)?)
        .map_err(|error| format!("has a damaged {TABLES_KEY} in its metadata: {error}"))?;
    Ok((shard, tables))
}

/// Check the format version of a file. A build reads all versions up to its own.
fn check_format(text: &str) -> std::result::Result<(), String> {
    let (first, newest) = (FORMATS.start(), FORMATS.end());
    match text.parse::<u32>() {
        Ok(format) if FORMATS.contains(&format) => Ok(()),
        Ok(format) if format > *newest => Err(format!(
            "has format {format}, but this build reads formats up to {newest}; install a newer Persia"
        )),
        Ok(format) => {
            Err(format!("has format {format}, which no version has written: the first format is {first}"))
        }
        Err(_) => Err(format!("has no number as {FORMAT_KEY} in its metadata")),
    }
}

/// Check the sizes in the metadata against the limits and the size of the file.
fn check_heads(heads: &[TableHead], file_len: usize) -> std::result::Result<(), String> {
    let mut bytes = 0usize;
    for TableHead { name, dim, state_len, rows, counted } in heads {
        check_sizes(name, *dim, *state_len, *rows)?;
        check_counted(name, *counted)?;
        bytes = rows
            .checked_mul(ROW_OVERHEAD + 4 * (dim + state_len))
            .and_then(|more| bytes.checked_add(more)?.checked_add(counted * ROW_OVERHEAD))
            .filter(|sum| *sum <= file_len)
            .ok_or(format!(
                "claims {rows} rows and {counted} admission counts of table {name:?}, more than its size \
                 allows"
            ))?;
    }
    Ok(())
}

/// Give `table` the name and sizes of `head`, empty it, and reserve capacity for its rows.
fn prepare(table: &mut TableRows, head: &TableHead) {
    let TableHead { name, dim, state_len, rows, counted } = head;
    table.name.clone_from(name);
    (table.dim, table.state_len) = (*dim, *state_len);
    reserve(&mut table.ids, *rows);
    reserve(&mut table.last_used, *rows);
    reserve(&mut table.weights, rows * dim);
    reserve(&mut table.state, rows * state_len);
    reserve(&mut table.admission_counts, *counted);
}

fn reserve<T>(list: &mut Vec<T>, len: usize) {
    list.clear();
    list.reserve_exact(len);
}

/// Check that the names in the dictionary, which other readers show, are those in the metadata.
fn check_dictionary(
    file: &[u8],
    footer: &Footer<'_>,
    heads: &[TableHead],
) -> std::result::Result<(), String> {
    let blocks = footer.dictionaries().filter(|blocks| blocks.len() == 1);
    let blocks = blocks.ok_or("does not have exactly one dictionary")?;
    let (message, body) = message(file, blocks.get(0))?;
    let data = root_as_message(message)
        .map_err(|error| format!("has a damaged dictionary: {error}"))?
        .header_as_dictionary_batch()
        .and_then(|batch| batch.data())
        .ok_or("has no dictionary at the position in its footer")?;
    let buffers = buffers(data, body, DICTIONARY)?;
    let [_, offsets, text] = buffers[..] else { return Err("has a dictionary of a different type".into()) };
    let mut offsets = numbers(offsets, heads.len() + 1, DICTIONARY, i32::from_le_bytes)?;
    let mut start = offsets.next().unwrap_or_default();
    for (head, end) in heads.iter().zip(offsets) {
        let name = slice(text, start.into(), i64::from(end) - i64::from(start), DICTIONARY)?;
        if name != head.name.as_bytes() {
            return Err(format!("has a dictionary that does not name table {:?}", head.name));
        }
        start = end;
    }
    Ok(())
}

/// The columns of a record batch. Their lengths have been checked, but not their content.
struct Columns<'a> {
    rows: usize,
    keys: &'a [u8],
    ids: &'a [u8],
    last_used: &'a [u8],
    weights: (&'a [u8], &'a [u8]),
    state: (&'a [u8], &'a [u8]),
}

impl<'a> Columns<'a> {
    fn of(file: &'a [u8], block: &Block) -> std::result::Result<Self, String> {
        let (message, body) = message(file, block)?;
        let batch = root_as_message(message)
            .map_err(|error| format!("has a damaged record batch: {error}"))?
            .header_as_record_batch()
            .ok_or("has no record batch at the position in its footer")?;
        let rows = usize::try_from(batch.length()).map_err(|_| "has a record batch of negative length")?;
        let buffers = buffers(batch, body, "record batch")?;
        // The buffers are in the order of `fields`. The first buffer of each column, and of the values of each list,
        // is the null bitmap.
        let [_, keys, _, ids, _, last_used, _, w_offsets, _, weights, _, s_offsets, _, state] = buffers[..]
        else {
            return Err(format!("has a record batch of {} buffers, expected 14", buffers.len()));
        };
        Ok(Self { rows, keys, ids, last_used, weights: (w_offsets, weights), state: (s_offsets, state) })
    }

    /// The index of the table to which all rows belong.
    fn table(&self) -> std::result::Result<usize, String> {
        let mut keys = numbers(self.keys, self.rows, "column `table`", i16::from_le_bytes)?;
        let first = keys.next().ok_or("has an empty record batch")?;
        if keys.any(|key| key != first) {
            return Err("has a record batch with rows of two tables".into());
        }
        usize::try_from(first).map_err(|_| "has rows of an unknown table".into())
    }

    fn append_rows(&self, table: &mut TableRows) -> std::result::Result<(), String> {
        table.ids.extend(numbers(self.ids, self.rows, ID, u64::from_le_bytes)?);
        table.last_used.extend(numbers(self.last_used, self.rows, LAST_USED, u64::from_le_bytes)?);
        table.weights.extend(list(self.weights, self.rows, table.dim, WEIGHTS)?);
        table.state.extend(list(self.state, self.rows, table.state_len, STATE)?);
        Ok(())
    }

    fn append_counts(&self, table: &mut TableRows) -> std::result::Result<(), String> {
        let ids = numbers(self.ids, self.rows, ID, u64::from_le_bytes)?;
        let counts = numbers(self.last_used, self.rows, LAST_USED, u64::from_le_bytes)?;
        for (id, count) in ids.zip(counts) {
            let count = u32::try_from(count)
                .ok()
                .filter(|count| *count <= MAX_MIN_COUNT)
                .ok_or(format!("has admission count {count} of id {id}, but the limit is {MAX_MIN_COUNT}"))?;
            table.admission_counts.push((id, count));
        }
        list(self.weights, self.rows, 0, WEIGHTS).and(list(self.state, self.rows, 0, STATE)).map(drop)
    }
}

/// The message and the body of a block.
fn message<'a>(file: &'a [u8], block: &Block) -> std::result::Result<(&'a [u8], &'a [u8]), String> {
    let head = i64::from(block.metaDataLength());
    let body = block.offset().checked_add(head).ok_or("has a block beyond its end")?;
    let head = slice(file, block.offset(), head, FOOTER)?;
    let message = head.get(MESSAGE_PREFIX..).ok_or("has a block without a message")?;
    Ok((message, slice(file, body, block.bodyLength(), FOOTER)?))
}

fn buffers<'a>(
    batch: RecordBatch<'_>,
    body: &'a [u8],
    section: &'static str,
) -> std::result::Result<Vec<&'a [u8]>, String> {
    if batch.compression().is_some() {
        return Err("is compressed, but shard files are not".into());
    }
    let buffers = batch.buffers().ok_or("has a record batch without buffers")?;
    buffers.iter().map(|buffer| slice(body, buffer.offset(), buffer.length(), section)).collect()
}

/// The `length` bytes at `start`, a range that is stated in `section` of the file.
fn slice<'a>(
    bytes: &'a [u8],
    start: i64,
    length: i64,
    section: &'static str,
) -> std::result::Result<&'a [u8], String> {
    let range = || {
        let start = usize::try_from(start).ok()?;
        Some(start..start.checked_add(usize::try_from(length).ok()?)?)
    };
    range().and_then(|range| bytes.get(range)).ok_or_else(|| {
        format!(
            "has a damaged {section}: it refers to {length} bytes from byte {start}, but only {} bytes exist",
            bytes.len()
        )
    })
}

fn numbers<const N: usize, T>(
    bytes: &[u8],
    count: usize,
    section: &'static str,
    number: impl Fn([u8; N]) -> T,
) -> std::result::Result<impl ExactSizeIterator<Item = T>, String> {
    let numbers = bytes.as_chunks::<N>().0;
    let numbers = numbers
        .get(..count)
        .ok_or_else(|| format!("has a damaged {section}: it has {} of {count} numbers", numbers.len()))?;
    Ok(numbers.iter().map(move |bytes| number(*bytes)))
}

/// The values of a list column in which all lists have the given length.
fn list<'a>(
    (offsets, values): (&'a [u8], &'a [u8]),
    rows: usize,
    length: usize,
    section: &'static str,
) -> std::result::Result<impl ExactSizeIterator<Item = f32> + 'a, String> {
    let mut offsets = numbers(offsets, rows + 1, section, i32::from_le_bytes)?.enumerate();
    if let Some((row, offset)) =
        offsets.find(|(row, offset)| row.checked_mul(length) != usize::try_from(*offset).ok())
    {
        return Err(format!(
            "has a damaged {section}: it has a list whose length is not {length}, because the offset at index {row} is \
             {offset}"
        ));
    }
    numbers(values, rows * length, section, f32::from_le_bytes)
}
