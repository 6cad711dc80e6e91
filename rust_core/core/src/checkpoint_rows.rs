//! `persia_core.checkpoint`: reads the rows of a checkpoint as arrays, and creates a checkpoint from arrays.

use std::collections::BTreeMap;
use std::path::PathBuf;

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use persia_store::checkpoint::{self as files, Duplicates, Head, TableRows};
use persia_types::Initializer;
use persia_types::schema::{Schema, Table};
use persia_types::tables::Run;
use pyo3::prelude::*;
use serde_json::value::RawValue;

use crate::checkpoint::{CURSOR, Checkpoint, raise};
use crate::errors;

/// The ids, steps of the last use, weights and optimizer state.
type PyRows<'py> = (
    Bound<'py, PyArray1<u64>>,
    Bound<'py, PyArray1<u64>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
);

/// Return the rows of `table` in a shard file of a checkpoint, in ascending order of ids, or None if the file does not
/// contain rows of the table. The size and hash of the file are checked.
#[pyfunction]
pub(crate) fn read_rows<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    file: &str,
    table: &str,
) -> PyResult<Option<PyRows<'py>>> {
    let Some(entry) = checkpoint.manifest.entry(file) else {
        let text = format!("cannot read rows: {} has no file {file:?}", checkpoint.directory.display());
        return Err(errors::raise(py, "UsageError", text));
    };
    let read = py.detach(|| {
        let rows = files::read_shard(&checkpoint.directory, &entry)?;
        Ok(rows.tables.into_iter().find(|rows| rows.name == table && !rows.ids.is_empty()))
    });
    let Some(rows) = read.map_err(|error| errors::tables(py, &error))? else { return Ok(None) };
    let TableRows { ids, last_used, weights, state, dim, state_len, .. } = rows;
    let count = ids.len();
    Ok(Some((
        PyArray1::from_vec(py, ids),
        PyArray1::from_vec(py, last_used),
        PyArray1::from_vec(py, weights).reshape([count, dim])?,
        PyArray1::from_vec(py, state).reshape([count, state_len])?,
    )))
}

/// The key, among the versions of the writer, that marks an imported checkpoint.
const ORIGIN: &str = "origin";

/// A checkpoint that is being created from rows that were not trained here.
#[pyclass(module = "persia_core.checkpoint")]
pub(crate) struct Importer {
    import: Option<files::Import>,
    tables: Vec<(String, usize)>,
}

#[pymethods]
impl Importer {
    /// Begin a checkpoint in `directory` with these tables, each given as name and dimension.
    #[new]
    fn new(py: Python<'_>, directory: PathBuf, tables: Vec<(String, usize)>) -> PyResult<Self> {
        let import = py.detach(|| files::Import::begin(&directory, &tables));
        Ok(Self { import: Some(import.map_err(|error| raise(py, &error))?), tables })
    }

    /// Add rows to a table. `row` is the number of the first of these rows, for messages.
    fn add(
        &mut self,
        py: Python<'_>,
        table: usize,
        row: u64,
        ids: PyReadonlyArray1<'_, u64>,
        weights: PyReadonlyArray2<'_, f32>,
    ) -> PyResult<()> {
        let import = self.import.as_mut().ok_or_else(|| ended(py))?;
        let (ids, weights) = (ids.as_slice()?, weights.as_slice()?);
        py.detach(|| import.add(table, row, ids, weights)).map_err(|error| raise(py, &error))
    }

    /// Publish the checkpoint. Returns the number of rows of each table.
    fn commit(&mut self, py: Python<'_>, created_at: String) -> PyResult<Vec<u64>> {
        let mut import = self.import.take().ok_or_else(|| ended(py))?;
        let staged = py.detach(|| import.stage()).map_err(|error| errors::tables(py, &error))?;
        let repeated = self.tables.iter().zip(&staged).filter(|(_, (_, duplicates))| duplicates.count > 0);
        let lines: Vec<String> =
            repeated.map(|((name, _), (_, duplicates))| describe(name, duplicates)).collect();
        if !lines.is_empty() {
            return Err(errors::raise(py, "DataError", lines.join("\n")));
        }
        let rows: Vec<u64> = staged.iter().map(|(rows, _)| *rows).collect();
        let head = head(&self.tables, &rows, created_at);
        let head = head.map_err(|error| errors::raise(py, "UsageError", error.to_string()))?;
        py.detach(|| import.commit(head)).map_err(|error| raise(py, &error))?;
        Ok(rows)
    }

    /// Remove the staged files.
    fn abort(&mut self, py: Python<'_>) {
        let import = self.import.take();
        py.detach(|| drop(import));
    }
}

fn ended(py: Python<'_>) -> PyErr {
    errors::raise(py, "UsageError", "this import has ended; start a new one")
}

fn describe(table: &str, duplicates: &Duplicates) -> String {
    let shown: Vec<String> = duplicates
        .shown
        .iter()
        .map(|found| format!("row {} has the id {} of row {}", found.again, found.id, found.first))
        .collect();
    let more = if duplicates.count > shown.len() as u64 { ", …" } else { "" };
    let rows = if duplicates.count == 1 { "row has" } else { "rows have" };
    format!(
        "table {table}: {} {rows} the id of an earlier row: {}{more}; keep one row for each id",
        duplicates.count,
        shown.join(", ")
    )
}

/// The head of a checkpoint that belongs to no run and precedes the first step.
fn head(tables: &[(String, usize)], rows: &[u64], created_at: String) -> serde_json::Result<Head> {
    let schema = Schema {
        slots: Vec::new(),
        tables: tables.iter().map(|(name, dim)| Table::new(name, *dim)).collect(),
    };
    let run = Run {
        job: String::new(),
        generation: 0,
        schema,
        seed: 0,
        optimizer: None,
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    };
    let origin = (ORIGIN.to_owned(), "import".to_owned());
    Ok(Head {
        step: 0,
        world_size: 1,
        run,
        rows: tables.iter().map(|(name, _)| name.clone()).zip(rows.iter().copied()).collect(),
        tokens: BTreeMap::from([(0, 0)]),
        cursors: BTreeMap::from([(CURSOR.to_owned(), RawValue::from_string("null".to_owned())?)]),
        build: BTreeMap::from([origin, ("persia_core".to_owned(), crate::version().to_owned())]),
        created_at,
        inputs: None,
        tables: Vec::new(),
    })
}
