//! `persia_core.serving`: the rows of a serving bundle, in memory-mapped files.

use std::path::PathBuf;
use std::sync::Arc;

use persia_engine::{Engine, EngineOptions};
use persia_store::mapped::{self as files, MappedTable, MappedTables, RowFormat, Target};
use persia_types::Mode;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::checkpoint::Checkpoint;
use crate::config::EmbeddingConfig;
use crate::data::Batch;
use crate::errors;
use crate::training_batch::TrainingBatch;

/// A memory-mapped file.
#[pyclass(module = "persia_core.serving", frozen)]
pub(crate) struct MappedFile(Arc<files::MappedFile>);

#[pymethods]
impl MappedFile {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let mapped = files::MappedFile::open(&path).map_err(|error| errors::tables(py, &error))?;
        Ok(Self(Arc::new(mapped)))
    }

    fn __len__(&self) -> usize {
        self.0.content().len()
    }

    /// Return a copy of the content.
    fn content<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.content())
    }

    /// Return the BLAKE3 hash of each chunk of `chunk` bytes, in hexadecimal, computed by `threads` threads.
    fn hashes(&self, py: Python<'_>, chunk: usize, threads: usize) -> Vec<String> {
        py.detach(|| self.0.hashes(chunk, threads))
    }
}

/// Return the BLAKE3 hash of some bytes, in hexadecimal.
#[pyfunction]
pub(crate) fn blake3(data: &[u8]) -> String {
    files::hash(data)
}

/// Write the rows of a checkpoint to files in `directory`, as `f32`, `f16` or `int8`. Returns, for each table of the
/// configuration, its name, the number of rows, the file of ids and the file of rows.
#[pyfunction]
pub(crate) fn write_tables(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    embedding: &EmbeddingConfig,
    directory: PathBuf,
    form: &str,
) -> PyResult<Vec<(String, u64, String, String)>> {
    let format = format_of(py, form)?;
    let (step, tables) = (checkpoint.manifest.head.step, &embedding.parsed.schema.tables);
    let names = |number: usize| (format!("table-{number:03}.ids"), format!("table-{number:03}.rows"));
    let targets: Vec<Target> = tables
        .iter()
        .enumerate()
        .map(|(number, table)| {
            let (ids, rows) = names(number);
            Target {
                name: table.name.clone(),
                dim: table.dim,
                oldest_alive: table.settings.ttl.map_or(0, |ttl| step.saturating_sub(ttl.into())),
                format,
                ids: directory.join(ids),
                rows: directory.join(rows),
            }
        })
        .collect();
    let shards = checkpoint.manifest.shards();
    let written = py.detach(|| files::write_tables(&checkpoint.directory, &shards, &targets));
    let counts = written.map_err(|error| errors::tables(py, &error))?;
    let describe = |(number, (table, count)): (usize, (&persia_types::Table, u64))| {
        let (ids, rows) = names(number);
        (table.name.clone(), count, ids, rows)
    };
    Ok(tables.iter().zip(counts).enumerate().map(describe).collect())
}

fn format_of(py: Python<'_>, name: &str) -> PyResult<RowFormat> {
    RowFormat::of_name(name)
        .ok_or_else(|| errors::raise(py, "UsageError", format!("rows={name:?}: expected f32, f16 or int8")))
}

/// The rows of a bundle. They are looked up by the same engine as in training, from any number of threads.
#[pyclass(module = "persia_core.serving", frozen)]
pub(crate) struct MappedRows {
    engine: Engine,
}

#[pymethods]
impl MappedRows {
    /// Create look-ups in mapped files. `tables` has, for each table of the configuration in its order, the file of ids
    /// and the file of rows. `step` is the step of the rows.
    #[new]
    fn new(
        py: Python<'_>,
        embedding: &EmbeddingConfig,
        step: u64,
        form: &str,
        tables: Vec<(Py<MappedFile>, Py<MappedFile>)>,
    ) -> PyResult<Self> {
        let (schema, format) = (embedding.parsed.schema.clone(), format_of(py, form)?);
        let files: Vec<_> =
            tables.iter().map(|(ids, rows)| (Arc::clone(&ids.get().0), Arc::clone(&rows.get().0))).collect();
        let mapped = py.detach(|| {
            let tables = schema.tables.iter().zip(files);
            let tables: Result<Vec<_>, _> =
                tables.map(|(table, (ids, rows))| MappedTable::new(table.dim, format, ids, rows)).collect();
            MappedTables::new(schema.clone(), tables?)
        });
        let mapped = mapped.map_err(|error| errors::tables(py, &error))?;
        let options = EngineOptions { first_seq: step + 1, ..EngineOptions::default() };
        let engine = Engine::new(Arc::new(mapped), schema, options);
        Ok(Self { engine: engine.map_err(|error| errors::engine(py, &error))? })
    }

    /// Look up a batch. Missing rows read as zeros.
    fn lookup(&self, py: Python<'_>, batch: &Batch) -> PyResult<TrainingBatch> {
        let found = py.detach(|| self.engine.lookup_now(&batch.0, Mode::Infer));
        let found = found.map_err(|error| errors::engine(py, &error))?;
        Ok(TrainingBatch::evaluated(self.engine.step(), Arc::clone(&batch.0), found))
    }

    /// Return, for each id feature of a batch, the number of its unique ids and the number of these that have no row.
    fn missing(&self, py: Python<'_>, batch: &Batch) -> PyResult<Vec<(u64, u64)>> {
        py.detach(|| self.engine.missing(&batch.0)).map_err(|error| errors::engine(py, &error))
    }
}
