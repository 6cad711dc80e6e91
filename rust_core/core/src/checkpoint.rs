//! `persia_core.checkpoint`: saves, loads and inspects checkpoints.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use persia_store::checkpoint::{self as files, CheckpointError, Head, Manifest};
use persia_types::{Optimizer, Tables, TablesError, is_url};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use serde_json::value::RawValue;

use crate::engine::Engine;
use crate::errors;

/// The key of the data loader's position in a manifest.
pub(crate) const CURSOR: &str = "loader";

/// A save in progress. It saves the rows as they were when it was created.
#[pyclass(module = "persia_core.checkpoint")]
pub(crate) struct Saver {
    saver: Option<files::Destination>,
    tables: Arc<dyn Tables>,
    /// The number of the snapshot.
    number: u64,
    /// Whether the rows of the snapshot are held.
    held: bool,
    directory: PathBuf,
    head: Head,
}

#[pymethods]
impl Saver {
    /// Wait for the engine's pushes in flight, and then hold the rows for `write_rows`, which writes them below
    /// `directory`. Training may continue. `step` is the last step that was trained.
    #[new]
    fn new(py: Python<'_>, engine: &Engine, directory: PathBuf, step: u64) -> PyResult<Self> {
        engine.drain(py)?;
        let (run, _) = engine.running(py)?;
        let tables = engine.tables();
        let begun = py.detach(|| -> Result<_, TablesError> {
            let saver = files::Destination::begin(&directory)?;
            let number = next_number();
            if let Err(error) = tables.prepare_snapshot(number) {
                // Some servers may hold the rows. A server that this call does not reach releases them at the next
                // snapshot.
                let _ = tables.abort_snapshot(number);
                return Err(error);
            }
            // The statistics are informative only. Without them, the checkpoint is still complete.
            let vocabulary = tables.stats().map(|stats| stats.tables).unwrap_or_default();
            Ok((saver, number, vocabulary))
        });
        let (saver, number, vocabulary) = begun.map_err(|error| errors::tables(py, &error))?;
        let head = Head {
            step,
            world_size: run.world_size,
            rows: BTreeMap::new(),
            tokens: (0..run.world_size).map(|rank| (rank, step)).collect(),
            cursors: BTreeMap::new(),
            build: BTreeMap::from([("persia_core".to_owned(), crate::version().to_owned())]),
            created_at: String::new(),
            inputs: None,
            tables: vocabulary,
            run,
        };
        Ok(Self { saver: Some(saver), tables, number, held: true, directory, head })
    }

    /// Write the held rows. Only one save writes at a time. Meanwhile, creating another `Saver` waits or, with
    /// servers, raises a `StorageError` after a second.
    fn write_rows(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(mut saver) = self.saver.take() else { return Err(ended(py)) };
        self.held = false;
        let (tables, number) = (&self.tables, self.number);
        let written = py.detach(|| -> Result<_, TablesError> {
            let snapshot = match tables.write_snapshot(saver.staging(), Some(number)) {
                // A server that sent no reply may still be writing, even if another server refused.
                Err(
                    error @ (TablesError::Unable { .. }
                    | TablesError::Unreachable { .. }
                    | TablesError::Lost { .. }
                    | TablesError::Recovering { .. }
                    | TablesError::Timeout { .. }),
                ) => {
                    let _ = tables.abort_snapshot(number);
                    saver.abandon();
                    return Err(error);
                }
                other => other?,
            };
            for entry in snapshot.files {
                saver.add(entry)?;
            }
            Ok((saver, snapshot.rows))
        });
        let (saver, rows) = written.map_err(|error| errors::tables(py, &error))?;
        let names = self.head.run.schema.tables.iter().map(|table| table.name.clone());
        self.head.rows = names.zip(rows).collect();
        self.saver = Some(saver);
        Ok(())
    }

    /// Check that `add_content` accepts a file of this name.
    fn check_name(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let saver = self.saver.as_ref().ok_or_else(|| ended(py))?;
        saver.check_name(name).map_err(|error| raise(py, &error))
    }

    /// Write the file `name` and add it to the checkpoint.
    fn add_content(&mut self, py: Python<'_>, name: &str, content: &[u8]) -> PyResult<()> {
        let Some(saver) = self.saver.as_mut() else { return Err(ended(py)) };
        py.detach(|| saver.add_content(name, content)).map_err(|error| raise(py, &error))
    }

    /// Publish the manifest. From then on, `directory` contains this checkpoint. Returns the error, if any, of servers
    /// that could not be notified afterwards. The logs of these servers then still start at the previous checkpoint.
    /// `cursor` is the position of the data loader, and `inputs` are the names of the model's inputs, both as JSON.
    #[pyo3(signature = (cursor, created_at, inputs=None))]
    fn commit(
        &mut self,
        py: Python<'_>,
        cursor: String,
        created_at: String,
        inputs: Option<String>,
    ) -> PyResult<Option<String>> {
        let saver = self.saver.take().ok_or_else(|| ended(py))?;
        let json = |what: &str, text: String| {
            RawValue::from_string(text)
                .map_err(|error| errors::raise(py, "UsageError", format!("{what} is not JSON: {error}")))
        };
        let mut head = self.head.clone();
        head.cursors.insert(CURSOR.into(), json("the position of the data loader", cursor)?);
        head.inputs = inputs.map(|text| json("the list of the model's inputs", text)).transpose()?;
        head.created_at = created_at;
        let (tables, number, directory) = (&self.tables, self.number, &self.directory);
        let committed = py.detach(|| {
            let shards = saver.commit(head)?.shards();
            Ok(tables.commit_snapshot(number, directory, &shards).err())
        });
        committed
            .map(|of_servers| of_servers.map(|error| error.to_string()))
            .map_err(|error| raise(py, &error))
    }

    /// Remove the staged files and release the held rows.
    fn abort(&mut self, py: Python<'_>) {
        let Self { saver, tables, number, held, .. } = self;
        py.detach(|| {
            *saver = None;
            if std::mem::take(held) {
                // A server that is not reached releases the rows at the next snapshot.
                let _ = tables.abort_snapshot(*number);
            }
        });
    }
}

/// The number of the next snapshot. The numbers of a run's snapshots ascend, because one process creates them.
fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

fn ended(py: Python<'_>) -> PyErr {
    errors::raise(py, "UsageError", "this save has ended; start a new one")
}

/// A folder, or the URL of an object store, which a `pathlib.Path` cannot represent.
#[derive(IntoPyObject)]
pub(crate) enum Place {
    Folder(PathBuf),
    Url(String),
}

impl From<PathBuf> for Place {
    fn from(path: PathBuf) -> Self {
        match path.to_str() {
            Some(url) if is_url(&path) => Self::Url(url.to_owned()),
            _ => Self::Folder(path),
        }
    }
}

/// A checkpoint in a folder or an object store.
#[pyclass(module = "persia_core.checkpoint", frozen)]
pub(crate) struct Checkpoint {
    pub(crate) directory: PathBuf,
    pub(crate) manifest: Manifest,
}

#[pymethods]
impl Checkpoint {
    /// Read the manifest in `directory`. To check the files, call `verify`.
    #[new]
    fn new(py: Python<'_>, directory: PathBuf) -> PyResult<Self> {
        let manifest = py.detach(|| Manifest::open(&directory)).map_err(|error| raise(py, &error))?;
        Ok(Self { directory, manifest })
    }

    /// Check the size and hash of every file. The error names all files that differ or cannot be read. It is a
    /// `StorageError` if a file cannot be read, because the checkpoint may be intact.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.manifest.verify(&self.directory)).map_err(|problems| {
            let lines: Vec<_> = problems.iter().map(ToString::to_string).collect();
            let class = if problems.iter().any(is_unread) { "StorageError" } else { "CheckpointError" };
            errors::raise(py, class, lines.join("\n"))
        })
    }

    /// Return the path of the file `name`, or its URL in an object store.
    fn path_of(&self, py: Python<'_>, name: &str) -> PyResult<PathBuf> {
        self.manifest.locate(&self.directory, name).map_err(|error| raise(py, &error))
    }

    /// Read and check the file `name`.
    fn read<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let content = py.detach(|| self.manifest.read(&self.directory, name));
        content.map(|content| PyBytes::new(py, &content)).map_err(|error| raise(py, &error))
    }

    /// Replace the engine's rows by those of the checkpoint. Raises an error within a training loop, and if the
    /// optimizer or the slots of the run do not fit the rows.
    fn restore(&self, py: Python<'_>, engine: &Engine) -> PyResult<()> {
        engine.settle(py)?;
        let run = &self.manifest.head.run;
        let (now, _) = engine.running(py)?;
        for current in &now.schema.tables {
            let Some(saved) = run.schema.tables.iter().find(|table| table.name == current.name) else {
                continue;
            };
            if let (Some(before), Some(after)) = (run.optimizer_of(saved), now.optimizer_of(current))
                && kind(&before) != kind(&after)
            {
                return Err(errors::raise(
                    py,
                    "ForeignCheckpointError",
                    format!(
                        "{} does not fit this run: rows of table {} were saved with optimizer {}, but this run has \
                         {}; use the same embedding optimizer",
                        self.directory.display(),
                        current.name,
                        kind(&before),
                        kind(&after),
                    ),
                ));
            }
        }
        self.check_slots(py, &now)?;
        let (tables, shards) = (engine.tables(), self.manifest.shards());
        py.detach(|| tables.restore(&self.directory, &shards)).map_err(|error| errors::tables(py, &error))
    }

    /// The last step that the checkpoint contains.
    #[getter]
    fn step(&self) -> u64 {
        self.manifest.head.step
    }

    /// The run's generation.
    #[getter]
    fn generation(&self) -> u64 {
        self.manifest.head.run.generation
    }

    /// The run's seed.
    #[getter]
    fn seed(&self) -> u64 {
        self.manifest.head.run.seed
    }

    /// The position of the data loader, as JSON; `null` if there is none.
    #[getter]
    fn cursor(&self) -> &str {
        self.manifest.head.cursors.get(CURSOR).map_or("null", |raw| raw.get())
    }

    /// The name, size and hash of every file.
    #[getter]
    fn files<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for file in &self.manifest.files {
            let entry = PyDict::new(py);
            entry.set_item("name", &file.name)?;
            entry.set_item("bytes", file.bytes)?;
            entry.set_item("blake3", &file.blake3)?;
            list.append(entry)?;
        }
        Ok(list)
    }

    /// The manifest as JSON.
    #[getter]
    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        serde_json::to_string_pretty(&self.manifest).map_err(|error| {
            errors::raise(py, "CheckpointError", format!("cannot encode the manifest: {error}"))
        })
    }
}

/// The kind of state that an optimizer keeps in a row.
fn kind(optimizer: &Optimizer) -> &'static str {
    match optimizer {
        Optimizer::Sgd { momentum, .. } if *momentum == 0.0 => "SGD",
        Optimizer::Sgd { .. } => "SGD with momentum",
        Optimizer::Adagrad { vectorwise_shared: true, .. } => "Adagrad(vectorwise_shared=True)",
        Optimizer::Adagrad { .. } => "Adagrad",
        Optimizer::Adam { .. } => "Adam",
    }
}

/// List the checkpoints below a folder, or only the folder if it is a checkpoint. The newest checkpoint comes first.
/// Checkpoints whose manifest cannot be used, and unfinished saves, come last. A checkpoint that is damaged or cannot
/// be read has a `problem`. A checkpoint that cannot be read, or that has a newer format, is also `unread`. Without
/// `verify`, only manifests are read.
#[pyfunction]
#[pyo3(signature = (parent, verify=true))]
pub(crate) fn listing<'py>(py: Python<'py>, parent: PathBuf, verify: bool) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    let own = py.detach(|| Manifest::open(&parent));
    if own.is_ok() {
        list.append(describe(py, &parent, &own, verify)?)?;
        return Ok(list);
    }
    let is_checkpoint = match &own {
        Err(CheckpointError::Missing { .. }) => false,
        // At a URL, `files::list` fails for the same reason.
        Err(CheckpointError::Io { .. }) => !is_url(&parent),
        _ => true,
    };
    let below = match py.detach(|| files::list(&parent)) {
        Ok(below) => below,
        Err(_) if is_checkpoint => Vec::new(), // the folder itself is listed, with its problem
        Err(error) => return Err(raise(py, &error)),
    };
    for found in below {
        list.append(describe(py, &found.path, &found.manifest, verify)?)?;
    }
    if is_checkpoint {
        list.append(describe(py, &parent, &own, verify)?)?;
    }
    Ok(list)
}

/// Return the newest checkpoint below a folder, or None. Raises an error if the newest one cannot be used, because it
/// is never skipped.
#[pyfunction]
pub(crate) fn latest(py: Python<'_>, parent: PathBuf) -> PyResult<Option<Place>> {
    match py.detach(|| files::latest(&parent)) {
        Ok((path, _)) => Ok(Some(path.into())),
        Err(CheckpointError::Missing { .. }) => Ok(None),
        Err(CheckpointError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(raise(py, &error)),
    }
}

/// Write the name of the checkpoint in `directory` to the file `LATEST` next to it.
#[pyfunction]
pub(crate) fn publish_latest(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    py.detach(|| files::publish_latest(&directory)).map_err(|error| raise(py, &error))
}

/// Delete all but the newest `keep_last` checkpoints below a folder, and the files of abandoned saves. The
/// newest complete checkpoint and checkpoints that cannot be read are never deleted. Returns the deleted
/// checkpoints.
#[pyfunction]
pub(crate) fn prune(py: Python<'_>, parent: PathBuf, keep_last: NonZeroUsize) -> PyResult<Vec<Place>> {
    let removed = py.detach(|| files::prune(&parent, keep_last)).map_err(|error| raise(py, &error))?;
    Ok(removed.into_iter().map(Place::from).collect())
}

/// Check that checkpoints can be saved in a folder or below a URL, by writing and deleting a small file or object.
#[pyfunction]
pub(crate) fn probe(py: Python<'_>, place: PathBuf) -> PyResult<()> {
    py.detach(|| files::probe_file(&place)).map_err(|error| errors::tables(py, &error))
}

/// Delete the checkpoint at the URL of an object store.
#[pyfunction]
pub(crate) fn remove_object(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    py.detach(|| files::remove_object(&directory)).map_err(|error| raise(py, &error))
}

fn describe<'py>(
    py: Python<'py>,
    path: &Path,
    manifest: &Result<Manifest, CheckpointError>,
    verify: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("path", Place::from(path.to_owned()))?;
    let (problem, unread) = match manifest {
        // A checkpoint in a newer format is not read, but may be intact.
        Err(error) => {
            (Some(error.to_string()), is_unread(error) || matches!(error, CheckpointError::Future { .. }))
        }
        Ok(manifest) => {
            entry.set_item("step", manifest.head.step)?;
            entry.set_item("generation", manifest.head.run.generation)?;
            entry.set_item("rows", manifest.head.rows.values().sum::<u64>())?;
            entry.set_item("bytes", manifest.bytes())?;
            entry.set_item("created_at", &manifest.head.created_at)?;
            let problems = if verify { py.detach(|| manifest.verify(path)).err() } else { None };
            let unread = problems.iter().flatten().any(is_unread);
            let text = |all: Vec<CheckpointError>| {
                all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
            };
            (problems.map(text), unread)
        }
    };
    entry.set_item("problem", problem)?;
    entry.set_item("unread", unread)?;
    Ok(entry)
}

/// Whether a file could not be read, so that the checkpoint may be intact.
fn is_unread(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::Io { .. })
}

pub(crate) fn raise(py: Python<'_>, error: &CheckpointError) -> PyErr {
    let message = error.to_string();
    match error {
        CheckpointError::Missing { .. } | CheckpointError::Corrupt { .. } => {
            errors::raise(py, "CheckpointError", message)
        }
        CheckpointError::Future { .. } => errors::raise_without_hint(py, "CheckpointError", message),
        CheckpointError::Busy { .. } | CheckpointError::Occupied { .. } => {
            errors::raise_without_hint(py, "StorageError", message)
        }
        CheckpointError::Io { path, source } => errors::storage(py, path, source, message),
        CheckpointError::BadSave { .. } => errors::raise(py, "UsageError", message),
    }
}
