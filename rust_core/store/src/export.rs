//! Between a shard in memory and its rows as a checkpoint keeps them.

use std::path::Path;

use persia_types::{Schema, TablesError};

use crate::checkpoint::{ShardRows, TableRows};
use crate::row::Layout;
use crate::shard::{Shard, no_memory};
use crate::simd::Portable;
use crate::table::ShardTable;

/// All that a shard holds, sorted by id; tables without rows and counted ids are left out.
pub(crate) fn export(number: usize, shard: &Shard, schema: &Schema) -> ShardRows {
    let tables = shard.tables.iter().zip(&schema.tables);
    let tables = tables.filter(|(table, _)| table.len() + table.waiting.len() > 0);
    ShardRows {
        shard: number,
        tables: tables.map(|(table, named)| export_table(table, &named.name)).collect(),
    }
}

fn export_table(table: &ShardTable, name: &str) -> TableRows {
    let layout = table.layout();
    let Layout { dim, state_len, .. } = layout;
    let mut entries: Vec<(u64, u32, u32)> =
        table.entries().map(|(slot, id, used)| (id, slot, used)).collect();
    entries.sort_unstable();
    let mut rows = TableRows {
        name: name.to_owned(),
        dim,
        state_len,
        ids: Vec::with_capacity(entries.len()),
        last_used: Vec::with_capacity(entries.len()),
        weights: vec![0.0; entries.len() * dim],
        state: Vec::with_capacity(entries.len() * state_len),
        waiting: table.waiting.entries().collect(),
    };
    rows.waiting.sort_unstable();
    for ((id, slot, last_used), weights) in entries.into_iter().zip(rows.weights.chunks_exact_mut(dim)) {
        let row = table.row(slot);
        rows.ids.push(id);
        rows.last_used.push(u64::from(last_used));
        layout.read::<Portable>(row, weights);
        rows.state.extend_from_slice(&row[layout.weight_words()..]);
    }
    rows
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
