//! Converts between a shard in memory and its rows in a checkpoint.

use std::io;
use std::path::Path;

use parking_lot::Mutex;
use persia_types::tables::FileEntry;
use persia_types::{Schema, TablesError};

use crate::checkpoint::{ShardRows, TableRows, write_shard_of};
use crate::shard::{Layout, Shard, no_memory};
use crate::simd::Portable;

/// The file of a shard, and the number of rows of each table in it; None if the shard is empty.
pub(super) type ShardFile = Option<(FileEntry, Vec<(usize, usize)>)>;

/// All content of a shard, sorted by id. Empty tables are omitted.
pub(crate) fn export(number: usize, shard: &Shard, schema: &Schema) -> ShardRows {
    let tables = shard.tables.iter().zip(&schema.tables);
    ShardRows {
        shard: number,
        tables: tables.filter_map(|(table, named)| table.export(&named.name)).collect(),
    }
}

/// Write the snapshot that a shard holds to its file in `dir`, and end the snapshot. The shard is locked for one
/// record batch at a time. Before each such lock, an error from `check` ends the writing.
///
/// # Errors
/// Those of [`write_shard`](crate::checkpoint::write_shard), and those of `check`.
pub(crate) fn write_shard_snapshot(
    dir: &Path,
    number: usize,
    shard: &Mutex<Shard>,
    schema: &Schema,
    check: &impl Fn() -> io::Result<()>,
) -> Result<ShardFile, TablesError> {
    let mut held = Vec::new();
    let mut content = ShardRows { shard: number, tables: Vec::new() };
    for (table, named) in schema.tables.iter().enumerate() {
        let list = shard.lock().tables[table].list_snapshot();
        if let Some(list) = list {
            let (rows, of_table) = list.sorted(&named.name);
            content.tables.push(of_table);
            held.push((table, rows));
        }
    }
    if held.is_empty() {
        return Ok(None);
    }
    let file = write_shard_of(dir, &content, |at, range| {
        check()?;
        let (table, rows) = &held[at];
        Ok(shard.lock().tables[*table].take_from_snapshot(&rows[range]))
    })?;
    for (table, _) in &held {
        let snapshot = shard.lock().tables[*table].end_snapshot();
        drop(snapshot); // after the lock is released, because this may take long
    }
    Ok(Some((file, held.into_iter().map(|(table, rows)| (table, rows.len())).collect())))
}

/// Create a shard from `rows`, and evict rows until its budget is met. `path` is the file of the rows, for
/// errors.
///
/// Weights are rounded to nearest in the table's dtype, which changes nothing if they were saved from the same dtype.
/// State is dropped unless `keep_state` is set. Rows without state get `initial_state`, which has one value for each
/// table.
pub(crate) fn import(
    rows: &ShardRows,
    path: &Path,
    schema: &Schema,
    layouts: &[Layout],
    initial_state: &[f32],
    keep_state: bool,
    budget: usize,
) -> Result<Shard, TablesError> {
    let corrupt = |what| TablesError::Corrupt { path: path.to_owned(), what };
    rows.check().map_err(corrupt)?;
    let mut shard = Shard::new(layouts, budget);
    for table in &rows.tables {
        let number = table_number(table, path, schema, layouts, keep_state)?;
        import_table(&mut shard, number, table, (layouts[number], initial_state[number]), corrupt)?;
    }
    shard.fit_budget();
    Ok(shard)
}

fn import_table(
    shard: &mut Shard,
    number: usize,
    table: &TableRows,
    (layout, initial_state): (Layout, f32),
    corrupt: impl Fn(String) -> TablesError,
) -> Result<(), TablesError> {
    shard.reserve(number, table.ids.len()).map_err(|error| no_memory(&table.name, error))?;
    for (at, (id, last_used)) in table.ids.iter().zip(&table.last_used).enumerate() {
        let step = u32::try_from(*last_used).ok().filter(|step| *step > 0);
        let Some(step) = step else {
            return Err(corrupt(format!(
                "table {}: id {id} was last used at step {last_used}, expected 1 to {}",
                table.name,
                u32::MAX
            )));
        };
        let weights = &table.weights[at * table.dim..][..table.dim];
        let state = match table.state_len {
            0 => None,
            len => Some(&table.state[at * len..][..layout.state_len]),
        };
        if !(all_finite(weights) && state.is_none_or(all_finite)) {
            return Err(corrupt(format!(
                "table {}: id {id} has NaN or infinity in its weights or optimizer state; load an older checkpoint",
                table.name
            )));
        }
        let fill = |row: &mut [f32]| {
            layout.write::<Portable>(row, weights, None);
            let place = &mut row[layout.weight_words()..];
            match state {
                Some(state) => place.copy_from_slice(state),
                None => place.fill(initial_state),
            }
        };
        shard.load(number, *id, step, fill).map_err(|error| no_memory(&table.name, error))?;
    }
    for (id, count) in &table.admission_counts {
        shard.load_count(number, *id, *count).map_err(|error| no_memory(&table.name, error))?;
    }
    Ok(())
}

fn all_finite(numbers: &[f32]) -> bool {
    // There is no branch for each number, so that this is compiled to vector instructions.
    numbers.iter().fold(true, |finite, number| finite & number.is_finite())
}

/// The number of the table to which `rows` belong.
fn table_number(
    rows: &TableRows,
    path: &Path,
    schema: &Schema,
    layouts: &[Layout],
    keep_state: bool,
) -> Result<usize, TablesError> {
    let foreign = |what| Err(TablesError::Foreign { path: path.to_owned(), what });
    let Some(number) = schema.tables.iter().position(|table| table.name == rows.name) else {
        let known: Vec<&str> = schema.tables.iter().map(|table| table.name.as_str()).collect();
        let known = known.join(", ");
        return foreign(format!("it has a table {}, but the configured tables are {known}", rows.name));
    };
    let Layout { dim, state_len, .. } = layouts[number];
    if rows.dim != dim {
        return foreign(format!("its table {} has dim {}, but dim {dim} is configured", rows.name, rows.dim));
    }
    if keep_state && rows.state_len > 0 && rows.state_len != state_len {
        return foreign(format!(
            "its table {} has optimizer state of size {} per row, but the configured optimizer needs size {state_len}",
            rows.name, rows.state_len
        ));
    }
    Ok(number)
}
