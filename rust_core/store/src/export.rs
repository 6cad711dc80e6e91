//! Between a shard in memory and its rows as a checkpoint keeps them.

use std::path::Path;

use parking_lot::Mutex;
use persia_types::{Schema, TablesError};

use crate::checkpoint::{ShardRows, TableRows, write_shard_of};
use crate::row::Layout;
use crate::shard::{Shard, no_memory};
use crate::simd::Portable;
use crate::snapshot::Written;

/// All that a shard holds, sorted by id; tables without rows and counted ids are left out.
pub(crate) fn export(number: usize, shard: &Shard, schema: &Schema) -> ShardRows {
    let tables = shard.tables.iter().zip(&schema.tables);
    ShardRows {
        shard: number,
        tables: tables.filter_map(|(table, named)| table.export(&named.name)).collect(),
    }
}

/// Write what the shard held at a cut, which ends with this, to its file in `dir`; how many rows that were of each table,
/// and None without any. The shard is locked for some rows at a time.
///
/// # Errors
/// As [`write_shard`](crate::checkpoint::write_shard).
pub(crate) fn write_frozen(
    dir: &Path,
    number: usize,
    shard: &Mutex<Shard>,
    schema: &Schema,
) -> Result<Written, TablesError> {
    let mut cut = Vec::new();
    let mut rows = ShardRows { shard: number, tables: Vec::new() };
    for (table, named) in schema.tables.iter().enumerate() {
        let frozen = shard.lock().tables[table].frozen_entries();
        if let Some(frozen) = frozen {
            let (entries, of_table) = frozen.sorted(&named.name);
            rows.tables.push(of_table);
            cut.push((table, entries));
        }
    }
    if cut.is_empty() {
        return Ok(None);
    }
    let file = write_shard_of(dir, &rows, |at, range| {
        let (table, entries) = &cut[at];
        shard.lock().tables[*table].take_frozen(&entries[range])
    })?;
    for (table, _) in &cut {
        let kept = shard.lock().tables[*table].thaw();
        drop(kept); // whoever waits for the shard does not wait for this
    }
    Ok(Some((file, cut.into_iter().map(|(table, entries)| (table, entries.len())).collect())))
}

/// A shard that holds `rows`, down to its budget. `path` is where they come from, for errors.
///
/// Weights are rounded to the table's dtype, to the nearest: those of a table of the same dtype come back as they were.
/// Without optimizer (`keep_state` false) state is dropped.
pub(crate) fn import(
    rows: &ShardRows,
    path: &Path,
    schema: &Schema,
    layouts: &[Layout],
    keep_state: bool,
    budget: usize,
) -> Result<Shard, TablesError> {
    let corrupt = |what| TablesError::Corrupt { path: path.to_owned(), what };
    rows.check().map_err(corrupt)?;
    let mut shard = Shard::new(layouts, budget);
    for table in &rows.tables {
        let number = fitting_table(table, path, schema, layouts, keep_state)?;
        import_table(&mut shard, number, table, layouts[number], corrupt)?;
    }
    shard.fit_budget().map_err(|error| no_memory("(all)", error))?;
    Ok(shard)
}

fn import_table(
    shard: &mut Shard,
    number: usize,
    table: &TableRows,
    layout: Layout,
    corrupt: impl Fn(String) -> TablesError,
) -> Result<(), TablesError> {
    shard.reserve(number, table.ids.len()).map_err(|error| no_memory(&table.name, error))?;
    for (at, (id, last_used)) in table.ids.iter().zip(&table.last_used).enumerate() {
        let step = u32::try_from(*last_used).ok().filter(|step| *step > 0);
        let Some(step) = step else {
            return Err(corrupt(format!(
                "table {}: id {id} was last used at step {last_used}, not from 1 to {}",
                table.name,
                u32::MAX
            )));
        };
        let fill = |row: &mut [f32]| {
            layout.write::<Portable>(row, &table.weights[at * table.dim..][..table.dim], None);
            let state = &table.state[at * table.state_len..][..layout.state_len];
            row[layout.weight_words()..].copy_from_slice(state);
        };
        shard.load(number, *id, step, fill).map_err(|error| no_memory(&table.name, error))?;
    }
    for (id, count) in &table.waiting {
        shard.load_waiting(number, *id, *count).map_err(|error| no_memory(&table.name, error))?;
    }
    Ok(())
}

/// The schema's table that `rows` are of.
fn fitting_table(
    rows: &TableRows,
    path: &Path,
    schema: &Schema,
    layouts: &[Layout],
    keep_state: bool,
) -> Result<usize, TablesError> {
    let foreign = |what| Err(TablesError::Foreign { path: path.to_owned(), what });
    let Some(number) = schema.tables.iter().position(|table| table.name == rows.name) else {
        let known: Vec<&str> = schema.tables.iter().map(|table| table.name.as_str()).collect();
        return foreign(format!("it has a table {}, configured are {}", rows.name, known.join(", ")));
    };
    let Layout { dim, state_len, .. } = layouts[number];
    if rows.dim != dim {
        return foreign(format!("table {} is of dim {} there, {dim} is configured", rows.name, rows.dim));
    }
    if keep_state && rows.state_len != state_len {
        return foreign(format!(
            "table {} has {} floats of optimizer state a row there, the configured optimizer has {state_len}",
            rows.name, rows.state_len
        ));
    }
    Ok(number)
}
