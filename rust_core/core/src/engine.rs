//! `persia_core.engine`: one rank's engine, over rows in this process or on embedding servers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use persia_engine::device::Device;
use persia_engine::{Drained, Engine as RankEngine, EngineOptions};
use persia_store::checkpoint::probe;
use persia_store::{Store, StoreOptions};
use persia_types::tables::{Mode, Run};
use persia_types::{Dtype, Schema, Tables};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::config::{EmbeddingConfig, GlobalConfig};
use crate::data::Batch;
use crate::discovery::Discovery;
use crate::forward::{Open, Pipeline, TrainingBatch};
use crate::optim::{InitializerSpec, OptimizerSpec};
use crate::remote::{Remote, RemoteOptions};
use crate::{device, errors, logs, stats, wait};

/// The run in force, and the rank engine that works on it.
struct Current {
    generation: u64,
    /// `None` where another process began it.
    run: Option<Run>,
    engine: RankEngine,
}

/// Where the rows are.
enum Rows {
    Here(Arc<Store>),
    There(Remote),
}

/// Embedding rows in this process or on servers, and the look-ups and pushes on them.
#[pyclass(module = "persia_core.engine", frozen)]
pub(crate) struct Engine {
    rows: Rows,
    schema: Schema,
    job: String,
    rank: u32,
    world_size: u32,
    current: Mutex<Option<Current>>,
    /// The pipeline opened last.
    open: Mutex<Weak<Open>>,
    /// What gradients travel as.
    wire: Dtype,
    /// Where look-ups are pooled; None is the CPU.
    device: Mutex<Option<Arc<dyn Device>>>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Its threads may need the GIL: an error of a data set is Python's.
        let current = self.current.lock().take();
        Python::attach(|py| py.detach(|| drop(current)));
    }
}

#[pymethods]
impl Engine {
    /// Rows in this process: an empty store of the configured tables and capacity.
    #[new]
    fn new(py: Python<'_>, embedding: &EmbeddingConfig, general: &GlobalConfig) -> PyResult<Self> {
        logs::begin(py)?;
        let schema = embedding.parsed.schema.clone();
        let options = StoreOptions {
            capacity: general.parsed.capacity,
            snapshot_threads: general.parsed.checkpoint_workers,
            max_copy_bytes: general.parsed.max_copy_bytes.unwrap_or(u64::MAX),
            ..StoreOptions::default()
        };
        let store = Store::new(schema.clone(), options).map_err(|error| errors::tables(py, &error))?;
        let job = general.parsed.job_name.clone();
        Ok(Self::over(Rows::Here(Arc::new(store)), schema, job, (0, 1), Dtype::F32))
    }

    /// Rows on the job's servers, reached through its middlewares; both are found by `discovery`, now or later.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (
        embedding, general, discovery, *, rank, world_size, token_file, checkpoint_root, rpc_timeout_s
    ))]
    fn connect(
        py: Python<'_>,
        embedding: &EmbeddingConfig,
        general: &GlobalConfig,
        discovery: &Discovery,
        rank: u32,
        world_size: u32,
        token_file: Option<std::path::PathBuf>,
        checkpoint_root: Option<std::path::PathBuf>,
        rpc_timeout_s: f64,
    ) -> PyResult<Self> {
        let wire_dtype = general.parsed.wire_dtype;
        let options = RemoteOptions { rank, token_file, checkpoint_root, rpc_timeout_s, wire_dtype };
        let remote = Remote::connect(py, discovery, options)?;
        let schema = embedding.parsed.schema.clone();
        let job = discovery.job().to_owned();
        Ok(Self::over(Rows::There(remote), schema, job, (rank, world_size), wire_dtype))
    }

    /// Pool look-ups on a CUDA device from the next generation or loop on, and sum gradients there; vectors are `dtype`.
    #[pyo3(signature = (device_id, dtype="f32"))]
    fn use_device(&self, py: Python<'_>, device_id: i32, dtype: &str) -> PyResult<()> {
        *self.device.lock() = Some(device::open(py, device_id, vectors(py, dtype)?, self.wire)?);
        Ok(())
    }

    /// Start a generation after `after_generation` and every one before it; the next step is `step` + 1. `fresh` drops the rows
    /// that are held. Returns the generation.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (
        *, seed, optimizer, initializer, admit_probability, admit_min_count, weight_bound, after_generation, step, fresh=false
    ))]
    fn begin(
        &self,
        py: Python<'_>,
        seed: u64,
        optimizer: Option<&OptimizerSpec>,
        initializer: &InitializerSpec,
        admit_probability: f32,
        admit_min_count: u32,
        weight_bound: f32,
        after_generation: u64,
        step: u64,
        fresh: bool,
    ) -> PyResult<u64> {
        self.settle(py)?;
        let run = Run {
            job: self.job.clone(),
            generation: after_generation,
            schema: self.schema.clone(),
            seed,
            optimizer: optimizer.map(|spec| spec.0),
            initializer: initializer.0,
            admit_probability,
            admit_min_count,
            weight_bound,
            fresh,
            world_size: self.world_size,
            reproducible: false,
        };
        self.next_generation(py, run, step)
    }

    /// Start another generation of the same run, so that no token of look-ups that were left unused is met again. Returns it.
    fn renew(&self, py: Python<'_>, reproducible: bool) -> PyResult<u64> {
        self.settle(py)?;
        let (run, step) = self.running(py)?;
        self.next_generation(py, Run { fresh: false, reproducible, ..run }, step)
    }

    /// Take part in a generation that another process began; the next step is `step` + 1.
    fn join(&self, py: Python<'_>, generation: u64, step: u64) -> PyResult<()> {
        self.settle(py)?;
        self.remote(py)?.join(&self.job, generation);
        self.adopt(py, generation, None, EngineOptions { first_seq: step + 1, ..EngineOptions::default() })
    }

    /// Look up rows of a generation that another process trains; the next step is `step` + 1.
    fn observe(&self, py: Python<'_>, generation: u64, step: u64) -> PyResult<()> {
        self.settle(py)?;
        self.remote(py)?.observe(&self.job, generation);
        self.adopt(py, generation, None, EngineOptions { first_seq: step + 1, ..EngineOptions::default() })
    }

    /// Wait until every server of the job answers, at most `timeout_s`; what is missing is named.
    fn wait_ready(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        match &self.rows {
            Rows::Here(_) => Ok(()),
            Rows::There(remote) => remote.wait_ready(py, timeout_s),
        }
    }

    /// Find out whether this process and every holder of rows can write into `directory`.
    fn check_storage(&self, py: Python<'_>, directory: PathBuf) -> PyResult<()> {
        let others = |inside: &Path| match &self.rows {
            Rows::Here(_) => Ok(()),
            Rows::There(remote) => remote.check_storage(inside),
        };
        py.detach(|| probe(&directory, others)).map_err(|error| errors::tables(py, &error))
    }

    /// The highest generation that any holder of rows knows; 0 before the first.
    fn highest_generation(&self, py: Python<'_>) -> PyResult<u64> {
        match &self.rows {
            Rows::Here(_) => Ok(self.generation()),
            Rows::There(remote) => remote.highest_generation(py),
        }
    }

    /// The generation this engine works in; 0 before any.
    #[getter]
    fn generation(&self) -> u64 {
        self.current.lock().as_ref().map_or(0, |current| current.generation)
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

    /// Open a pipeline in the current generation, its first since that began: batches fed to it are looked up ahead, at most
    /// `buffer` of them waiting. Every summed gradient is multiplied by `gradient_scale`.
    fn open(
        &self,
        py: Python<'_>,
        staleness: usize,
        reproducible: bool,
        buffer: usize,
        gradient_scale: f32,
    ) -> PyResult<Pipeline> {
        self.settle(py)?;
        let (generation, run, step) = {
            let current = self.current.lock();
            let current = current.as_ref().ok_or_else(|| not_begun(py))?;
            (current.generation, current.run.clone(), current.engine.step())
        };
        let options = EngineOptions {
            staleness,
            reproducible,
            forward_buffer: buffer,
            first_seq: step + 1,
            gradient_scale,
            ..EngineOptions::default()
        };
        self.adopt(py, generation, run, options)?;
        let pipeline = self.rank_engine(py)?.pipeline().map_err(|error| errors::engine(py, &error))?;
        let pipeline = Pipeline::new(pipeline);
        *self.open.lock() = Arc::downgrade(pipeline.open());
        Ok(pipeline)
    }

    /// Look a batch up now, for evaluation: nothing is changed, missing rows are zeros. Pushes in flight are waited for.
    /// The tensors are on the engine's device, or on that of `device_id`.
    #[pyo3(signature = (batch, device_id=None))]
    fn lookup(&self, py: Python<'_>, batch: &Batch, device_id: Option<i32>) -> PyResult<TrainingBatch> {
        self.drain(py)?;
        let engine = self.rank_engine(py)?;
        let device = match device_id {
            Some(number) => Some(device::open(py, number, Dtype::F32, self.wire)?),
            None => self.device.lock().clone(),
        };
        let found = py.detach(|| engine.lookup_on(device.as_deref(), &batch.0, Mode::Eval));
        let found = found.map_err(|error| errors::engine(py, &error))?;
        let (outputs, on_device) = (found.outputs, found.on_device);
        Ok(TrainingBatch::evaluated(engine.step(), Arc::clone(&batch.0), outputs, on_device))
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

    /// Begin no look-up until `resume`, and wait until nothing is under way: the rows are of one step, and stay so.
    fn pause(&self, py: Python<'_>) -> PyResult<()> {
        self.rank_engine(py)?.pause();
        let held = self.drain(py);
        if held.is_err() {
            self.resume(py)?;
        }
        held
    }

    /// End what `pause` began.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.rank_engine(py)?.resume();
        Ok(())
    }

    /// Drop all rows.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        if self.current.lock().is_some() {
            self.drain(py)?;
        }
        let tables = self.tables();
        py.detach(|| tables.clear()).map_err(|error| errors::tables(py, &error))
    }

    /// Counters, gauges and times: rows and bytes held, look-ups, pushes, seconds per stage.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tables = self.tables();
        let held = py.detach(|| tables.stats()).map_err(|error| errors::tables(py, &error))?;
        let engine = self.current.lock().as_ref().map(|current| current.engine.stats());
        stats::describe(py, &self.schema, &held, &engine.unwrap_or_default())
    }

    /// Rows that each server holds; one number where they are in this process.
    fn server_rows(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        match &self.rows {
            Rows::Here(store) => {
                let stats = py.detach(|| store.stats()).map_err(|error| errors::tables(py, &error))?;
                Ok(vec![stats.rows.iter().sum()])
            }
            Rows::There(remote) => remote.server_rows(py),
        }
    }

    /// End the engine's threads. Rows in this process give their memory back; those on servers stay. With `abandon`
    /// nothing is waited for: gradients that are on their way may be lost.
    #[pyo3(signature = (abandon=false))]
    fn close(&self, py: Python<'_>, abandon: bool) -> PyResult<()> {
        let current = self.current.lock().take();
        let open = self.open.lock().upgrade();
        let end = move || {
            if let Some(open) = open {
                open.close();
            }
            drop(current);
        };
        if abandon {
            // A thread that waits for a server ends with its time-out, or with the process.
            let _ = std::thread::Builder::new().name("persia-abandon".into()).spawn(end);
            return Ok(());
        }
        py.detach(end);
        match &self.rows {
            Rows::Here(store) => py.detach(|| store.clear()).map_err(|error| errors::tables(py, &error)),
            Rows::There(_) => Ok(()),
        }
    }
}

impl Engine {
    fn over(rows: Rows, schema: Schema, job: String, (rank, world_size): (u32, u32), wire: Dtype) -> Self {
        let (current, open, device) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { rows, schema, job, rank, world_size, current, open, wire, device }
    }

    pub(crate) fn tables(&self) -> Arc<dyn Tables> {
        match &self.rows {
            Rows::Here(store) => Arc::clone(store) as Arc<dyn Tables>,
            Rows::There(remote) => remote.tables(),
        }
    }

    fn remote(&self, py: Python<'_>) -> PyResult<&Remote> {
        match &self.rows {
            Rows::There(remote) => Ok(remote),
            Rows::Here(_) => Err(errors::raise(py, "UsageError", "rows in this process belong to one rank")),
        }
    }

    /// The run, and the step of the last batch handed out.
    pub(crate) fn running(&self, py: Python<'_>) -> PyResult<(Run, u64)> {
        let current = self.current.lock();
        let current = current.as_ref().ok_or_else(|| not_begun(py))?;
        let run = current.run.clone().ok_or_else(|| {
            let text = format!(
                "generation {} was begun by rank 0 of the training: do this there",
                current.generation
            );
            errors::raise(py, "UsageError", text)
        })?;
        Ok((run, current.engine.step()))
    }

    /// Wait for pushes in flight, and refuse to go on inside a training loop: what follows changes the generation.
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

    /// Begin `run` as the generation after its own and every one that is known.
    fn next_generation(&self, py: Python<'_>, mut run: Run, step: u64) -> PyResult<u64> {
        run.generation = run.generation.max(self.generation()).max(self.highest_generation(py)?) + 1;
        let tables = self.tables();
        py.detach(|| tables.begin(&run)).map_err(|error| errors::tables(py, &error))?;
        let generation = run.generation;
        let options = EngineOptions { first_seq: step + 1, ..EngineOptions::default() };
        self.adopt(py, generation, Some(run), options)?;
        Ok(generation)
    }

    /// Work in `generation` from now on; the engine before ends its threads without the GIL.
    fn adopt(
        &self,
        py: Python<'_>,
        generation: u64,
        run: Option<Run>,
        options: EngineOptions,
    ) -> PyResult<()> {
        let options = EngineOptions {
            job: self.job.clone(),
            generation,
            rank: self.rank,
            world_size: self.world_size,
            ..options
        };
        let device = self.device.lock().clone();
        let engine = RankEngine::with_device(self.tables(), self.schema.clone(), options, device);
        let engine = engine.map_err(|error| errors::engine(py, &error))?;
        let before = self.current.lock().replace(Current { generation, run, engine });
        py.detach(move || drop(before));
        Ok(())
    }
}

/// What the model gets.
fn vectors(py: Python<'_>, dtype: &str) -> PyResult<Dtype> {
    match dtype {
        "f32" => Ok(Dtype::F32),
        "f16" => Ok(Dtype::F16),
        "bf16" => Ok(Dtype::Bf16),
        other => Err(errors::raise(py, "UsageError", format!("dtype={other:?}: want f32, f16 or bf16"))),
    }
}

fn not_begun(py: Python<'_>) -> PyErr {
    errors::raise(py, "UsageError", "no run has begun: enter a context first")
}
