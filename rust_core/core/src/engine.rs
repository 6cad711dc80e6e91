//! `persia_core.engine`: one engine over one in-process store.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use persia_engine::{Drained, Engine as RankEngine, EngineOptions, EngineStats, StageTime};
use persia_store::{Store, StoreOptions};
use persia_types::tables::{Mode, Run, Stats};
use persia_types::{Schema, Tables};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::config::{EmbeddingConfig, GlobalConfig};
use crate::data::Batch;
use crate::forward::{Open, Pipeline, TrainingBatch};
use crate::optim::{InitializerSpec, OptimizerSpec};
use crate::{errors, wait};

/// The run in force, and the rank engine that works on it. Each data loader gets a rank engine of its own, in a new
/// epoch, so that no token of look-ups it left unused is met again.
struct Current {
    run: Run,
    engine: RankEngine,
}

/// Embedding rows in this process, and the look-ups and pushes on them.
#[pyclass(module = "persia_core.engine", frozen)]
pub(crate) struct Engine {
    store: Arc<Store>,
    schema: Schema,
    job: String,
    current: Mutex<Option<Current>>,
    /// The pipeline opened last.
    open: Mutex<Weak<Open>>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The engine's threads drop gradients, which needs the GIL.
        let current = self.current.lock().take();
        Python::attach(|py| py.detach(|| drop(current)));
    }
}

#[pymethods]
impl Engine {
    /// An empty store of the configured tables and capacity.
    #[new]
    fn new(py: Python<'_>, embedding: &EmbeddingConfig, general: &GlobalConfig) -> PyResult<Self> {
        let schema = embedding.parsed.schema.clone();
        let options = StoreOptions {
            capacity: general.parsed.capacity,
            snapshot_threads: general.parsed.checkpoint_workers,
            ..StoreOptions::default()
        };
        let store = Store::new(schema.clone(), options).map_err(|error| errors::tables(py, &error))?;
        let job = general.parsed.job_name.clone();
        Ok(Self { store: Arc::new(store), schema, job, current: Mutex::new(None), open: Mutex::default() })
    }

    /// Start an epoch after `after_epoch` and every one before it; the next step is `step` + 1.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (*, seed, optimizer, initializer, admit_probability, weight_bound, after_epoch, step))]
    fn begin(
        &self,
        py: Python<'_>,
        seed: u64,
        optimizer: Option<&OptimizerSpec>,
        initializer: &InitializerSpec,
        admit_probability: f32,
        weight_bound: f32,
        after_epoch: u64,
        step: u64,
    ) -> PyResult<()> {
        self.settle(py)?;
        let epoch = self.current.lock().as_ref().map_or(0, |current| current.run.epoch).max(after_epoch);
        let run = Run {
            job: self.job.clone(),
            epoch,
            schema: self.schema.clone(),
            seed,
            optimizer: optimizer.map(|spec| spec.0),
            initializer: initializer.0,
            admit_probability,
            weight_bound,
            fresh: false,
            world_size: 1,
            reproducible: false,
        };
        let options = EngineOptions { first_seq: step + 1, ..EngineOptions::default() };
        let next = self.next_epoch(py, run, options)?;
        self.replace(py, next);
        Ok(())
    }

    /// Whether a data loader's training loop is under way.
    #[getter]
    fn iterating(&self) -> bool {
        self.open.lock().upgrade().is_some_and(|open| open.is_open())
    }

    /// The step of the last batch handed out for training; 0 before the first.
    #[getter]
    fn step(&self) -> u64 {
        self.current.lock().as_ref().map_or(0, |current| current.engine.step())
    }

    /// Open a pipeline: batches fed to it are looked up ahead, at most `buffer` of them waiting.
    fn pipeline(
        &self,
        py: Python<'_>,
        staleness: usize,
        reproducible: bool,
        buffer: usize,
    ) -> PyResult<Pipeline> {
        self.settle(py)?;
        let (run, step) = self.running(py)?;
        let options = EngineOptions {
            staleness,
            reproducible,
            forward_buffer: buffer,
            first_seq: step + 1,
            ..EngineOptions::default()
        };
        let next = self.next_epoch(py, run, options)?;
        let pipeline = next.engine.pipeline().map_err(|error| errors::engine(py, &error))?;
        let pipeline = Pipeline::new(pipeline);
        *self.open.lock() = Arc::downgrade(pipeline.open());
        self.replace(py, next);
        Ok(pipeline)
    }

    /// Look a batch up now, for evaluation: nothing is changed, missing rows are zeros. Pushes in flight are waited for.
    fn lookup(&self, py: Python<'_>, batch: &Batch) -> PyResult<TrainingBatch> {
        self.drain(py)?;
        let engine = self.rank_engine(py)?;
        let found = py.detach(|| engine.lookup_now(&batch.0, Mode::Eval));
        let found = found.map_err(|error| errors::engine(py, &error))?;
        Ok(TrainingBatch::evaluated(engine.step(), Arc::clone(&batch.0), found.outputs))
    }

    /// Wait until every push is applied.
    pub(crate) fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.rank_engine(py)?;
        wait::until(py, |slice| match engine.drain(slice) {
            Ok(Drained::Done) => Ok(Some(())),
            Ok(Drained::Pending(_)) => Ok(None),
            Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
        })
    }

    /// Drop all rows.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        if self.current.lock().is_some() {
            self.drain(py)?;
        }
        py.detach(|| self.store.clear()).map_err(|error| errors::tables(py, &error))
    }

    /// Counters, gauges and times: rows and bytes held, look-ups, pushes, seconds per stage.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.store.stats()).map_err(|error| errors::tables(py, &error))?;
        let engine = self.current.lock().as_ref().map(|current| current.engine.stats());
        describe(py, &self.schema, &stats, &engine.unwrap_or_default())
    }

    /// End the engine's threads and give the rows' memory back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let current = self.current.lock().take();
        let open = self.open.lock().upgrade();
        py.detach(|| {
            if let Some(open) = open {
                open.close();
            }
            drop(current);
            self.store.clear()
        })
        .map_err(|error| errors::tables(py, &error))
    }
}

impl Engine {
    pub(crate) fn store(&self) -> Arc<Store> {
        Arc::clone(&self.store)
    }

    /// The run, and the step of the last batch handed out.
    pub(crate) fn running(&self, py: Python<'_>) -> PyResult<(Run, u64)> {
        let running =
            self.current.lock().as_ref().map(|current| (current.run.clone(), current.engine.step()));
        running.ok_or_else(|| not_begun(py))
    }

    /// Wait for pushes in flight, and refuse to go on inside a training loop: what follows begins a new epoch.
    pub(crate) fn settle(&self, py: Python<'_>) -> PyResult<()> {
        if self.iterating() {
            let text = "a data loader is being iterated for training: leave its loop first";
            return Err(errors::raise(py, "UsageError", text));
        }
        let begun = self.current.lock().is_some();
        if begun { self.drain(py) } else { Ok(()) }
    }

    fn rank_engine(&self, py: Python<'_>) -> PyResult<RankEngine> {
        let engine = self.current.lock().as_ref().map(|current| current.engine.clone());
        engine.ok_or_else(|| not_begun(py))
    }

    /// Put `next` into force; the engine before it ends its threads without the GIL.
    fn replace(&self, py: Python<'_>, next: Current) {
        let before = self.current.lock().replace(next);
        py.detach(move || drop(before));
    }

    /// Begin the epoch after `run`'s, with an engine of its own.
    fn next_epoch(&self, py: Python<'_>, mut run: Run, options: EngineOptions) -> PyResult<Current> {
        run.epoch += 1;
        let options = EngineOptions { job: run.job.clone(), epoch: run.epoch, ..options };
        py.detach(|| self.store.begin(&run)).map_err(|error| errors::tables(py, &error))?;
        let tables: Arc<dyn Tables> = Arc::clone(&self.store) as Arc<dyn Tables>;
        let engine = RankEngine::new(tables, self.schema.clone(), options);
        let engine = engine.map_err(|error| errors::engine(py, &error))?;
        Ok(Current { run, engine })
    }
}

fn not_begun(py: Python<'_>) -> PyErr {
    errors::raise(py, "UsageError", "no run has begun: enter a context first")
}

fn describe<'py>(
    py: Python<'py>,
    schema: &Schema,
    stats: &Stats,
    engine: &EngineStats,
) -> PyResult<Bound<'py, PyDict>> {
    let rows = PyDict::new(py);
    for (table, count) in schema.tables.iter().zip(&stats.rows) {
        rows.set_item(&table.name, count)?;
    }
    let (found, pushed) = (&stats.lookups, &stats.pushes);
    let lookups = PyDict::new(py);
    for (name, value) in [
        ("hits", found.hits),
        ("inserted", found.inserted),
        ("missing", found.missing),
        ("evicted", found.evicted),
    ] {
        lookups.set_item(name, value)?;
    }
    let pushes = PyDict::new(py);
    for (name, value) in [
        ("rows_pushed", pushed.rows_pushed),
        ("rows_applied", pushed.rows_applied),
        ("rows_missing", pushed.rows_missing),
        ("rows_nonfinite", pushed.rows_nonfinite),
        ("rows_duplicate", pushed.rows_duplicate),
    ] {
        pushes.set_item(name, value)?;
    }
    let seconds = PyDict::new(py);
    for (name, stage) in stages(engine) {
        seconds.set_item(name, stage.total.as_secs_f64())?;
    }
    let all = PyDict::new(py);
    all.set_item("rows", rows)?;
    all.set_item("payload_bytes", stats.payload_bytes)?;
    all.set_item("memory_bytes", stats.memory_bytes)?;
    all.set_item("lookups", lookups)?;
    all.set_item("pushes", pushes)?;
    all.set_item("staleness", engine.staleness)?;
    all.set_item("max_staleness", engine.max_staleness)?;
    all.set_item("seconds", seconds)?;
    Ok(all)
}

fn stages(engine: &EngineStats) -> [(&'static str, StageTime); 7] {
    [
        ("deduplicate", engine.deduplicate),
        ("plan", engine.plan),
        ("permit_wait", engine.permit_wait),
        ("lookup", engine.lookup),
        ("pool", engine.pool),
        ("segment_sum", engine.segment_sum),
        ("push", engine.push),
    ]
}
