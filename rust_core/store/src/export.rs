//! Between a shard in memory and its rows as a checkpoint keeps them.

use std::path::Path;

use persia_types::{Schema, TablesError};

use crate::checkpoint::{ShardRows, TableRows};
use crate::shard::{Shard, no_memory};
use crate::table::{Layout, ShardTable};

/// All rows of a shard, sorted by id; tables without rows are left out.
pub(crate) fn export(number: usize, shard: &Shard, schema: &Schema) -> ShardRows {
    let tables = shard.tables.iter().zip(&schema.tables).filter(|(table, _)| table.len() > 0);
    ShardRows {
        shard: number,
        tables: tables.map(|(table, named)| export_table(table, &named.name)).collect(),
    }
}

fn export_table(table: &ShardTable, name: &str) -> TableRows {
    let Layout { dim, state_len } = table.layout();
    let mut entries: Vec<(u64, u32, u32)> =
        table.entries().map(|(slot, id, used)| (id, slot, used)).collect();
    entries.sort_unstable();
    let mut rows = TableRows {
        name: name.to_owned(),
        dim,
        state_len,
        ids: Vec::with_capacity(entries.len()),
        last_used: Vec::with_capacity(entries.len()),
        weights: Vec::with_capacity(entries.len() * dim),
        state: Vec::with_capacity(entries.len() * state_len),
    };
    for (id, slot, last_used) in entries {
        let (weights, state) = table.row(slot).split_at(dim);
        rows.ids.push(id);
        rows.last_used.push(u64::from(last_used));
        rows.weights.extend_from_slice(weights);
        rows.state.extend_from_slice(state);
    }
    rows
}

/// A shard that holds `rows`, down to its budget. `path` is where they come from, for errors.
///
/// Without optimizer (`keep_state` false) their state is dropped.
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
        import_table(&mut shard, number, table, layouts[number].state_len, corrupt)?;
    }
    shard.fit_budget();
    Ok(shard)
}

fn import_table(
    shard: &mut Shard,
    number: usize,
    table: &TableRows,
    state_len: usize,
    corrupt: impl Fn(String) -> TablesError,
) -> Result<(), TablesError> {
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
            let (weights, state) = row.split_at_mut(table.dim);
            weights.copy_from_slice(&table.weights[at * table.dim..][..table.dim]);
            state.copy_from_slice(&table.state[at * table.state_len..][..state_len]);
        };
        shard.load(number, *id, step, fill).map_err(|error| no_memory(&table.name, error))?;
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
    let Layout { dim, state_len } = layouts[number];
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
