//! `persia_core.engine`: a rank's engine, over rows in this process or on embedding servers.
//!
//! `generation.rs` changes the generation of an engine.

mod generation;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use persia_engine::device::Device;
use persia_engine::{DrainOutcome, EngineOptions};
use persia_store::checkpoint::probe;
use persia_store::{Store, StoreOptions, default_request_threads};
use persia_types::tables::{Mode, Run, ServedCheckpoint};
use persia_types::{Dtype, Schema, Tables};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::backend::Backend;
use crate::config::{EmbeddingConfig, GlobalConfig, dtype_of};
use crate::data::Batch;
use crate::discovery::Discovery;
use crate::optim::{InitializerSpec, OptimizerSpec};
use crate::pipeline::{OpenPipeline, Pipeline};
use crate::remote::{Remote, RemoteOptions};
use crate::training_batch::TrainingBatch;
use crate::{device, errors, logs, stats, wait};

use self::generation::{Current, not_begun};

/// Looks up and pushes embedding rows, which are in this process or on servers.
#[pyclass(module = "persia_core.engine", frozen)]
pub(crate) struct Engine {
    backend: Backend,
    schema: Schema,
    job: String,
    rank: u32,
    world_size: u32,
    current: Mutex<Option<Current>>,
    /// The pipeline that was last opened.
    open: Mutex<Weak<OpenPipeline>>,
    /// The format of gradients on the wire.
    wire: Dtype,
    /// The device that pools rows and sums gradients; None means the CPU.
    device: Mutex<Option<Arc<dyn Device>>>,
    /// The checkpoint of an infer job; None for any other job.
    served: Option<ServedCheckpoint>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The threads of the engine may need the GIL, because a dataset's error is a Python object.
        let current = self.current.lock().take();
        Python::attach(|py| py.detach(|| drop(current)));
    }
}

#[pymethods]
impl Engine {
    /// Create an engine in embedded mode: the rows are in this process, in an empty store with the configured tables
    /// and capacity.
    #[new]
    fn new(py: Python<'_>, embedding: &EmbeddingConfig, general: &GlobalConfig) -> PyResult<Self> {
        logs::begin(py)?;
        let schema = embedding.parsed.schema.clone();
        let options = StoreOptions {
            capacity: general.parsed.capacity,
            request_threads: general.parsed.request_threads.unwrap_or_else(default_request_threads),
            snapshot_threads: general.parsed.checkpoint_workers,
            max_copy_bytes: general.parsed.max_copy_bytes.unwrap_or(u64::MAX),
            ..StoreOptions::default()
        };
        let store = Store::new(schema.clone(), options).map_err(|error| errors::tables(py, &error))?;
        let job = general.parsed.job_name.clone();
        Ok(Self::over(Backend::Embedded(Arc::new(store)), schema, job, (0, 1), Dtype::F32))
    }

    /// Create an engine for rows on the job's servers, which are reached through the job's middlewares. `discovery`
    /// finds the middlewares when they are needed.
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
        token_file: Option<PathBuf>,
        checkpoint_root: Option<PathBuf>,
        rpc_timeout_s: f64,
    ) -> PyResult<Self> {
        let wire_dtype = general.parsed.wire_dtype;
        let options = RemoteOptions { rank, token_file, checkpoint_root, rpc_timeout_s, wire_dtype };
        let remote = Remote::connect(py, discovery, options)?;
        let schema = embedding.parsed.schema.clone();
        let job = discovery.job().to_owned();
        Ok(Self::over(Backend::Remote(remote), schema, job, (rank, world_size), wire_dtype))
    }

    /// Create an engine for the rows of an infer job, which are reached through the middlewares at `addresses`. The
    /// slots and tables are those of the checkpoint that the servers serve. Waits at most `start_timeout_s` for servers
    /// that make no progress.
    #[staticmethod]
    #[pyo3(signature = (addresses, *, token_file, rpc_timeout_s, start_timeout_s))]
    fn serving(
        py: Python<'_>,
        addresses: Vec<String>,
        token_file: Option<PathBuf>,
        rpc_timeout_s: f64,
        start_timeout_s: f64,
    ) -> PyResult<Self> {
        logs::begin(py)?;
        // A client prefers the middleware of its rank. With the process id as the rank, several processes use
        // different middlewares.
        let rank = std::process::id();
        let (wire_dtype, checkpoint_root) = (Dtype::F32, None);
        let options = RemoteOptions { rank, token_file, checkpoint_root, rpc_timeout_s, wire_dtype };
        let remote = Remote::listed(py, &addresses, options)?;
        remote.wait_ready(py, start_timeout_s)?;
        let (generation, served) = remote.served(py)?;
        let (schema, job, step) = (served.schema.clone(), served.job.clone(), served.step);
        let backend = Backend::Remote(remote);
        let mut engine = Self::over(backend, schema, job, (0, 1), wire_dtype);
        engine.served = Some(served);
        engine.observe(py, generation, step)?;
        Ok(engine)
    }

    /// Return the path of the checkpoint that an infer job serves, its step, and the names of the model's inputs as
    /// JSON, if it contains them. Returns None for any other job.
    #[getter]
    fn served(&self) -> Option<(String, u64, Option<String>)> {
        self.served.as_ref().map(|served| (served.path.clone(), served.step, served.inputs.clone()))
    }

    /// Return the slots and tables of the engine.
    #[getter]
    fn configuration(&self) -> EmbeddingConfig {
        let schema = self.schema.clone();
        let parsed = persia_types::config::EmbeddingConfig { feature_index_prefix_bit: 0, schema };
        EmbeddingConfig { parsed, warnings: Vec::new() }
    }

    /// Pool look-ups and sum gradients on a CUDA device, starting with the next generation or loop. Vectors have the
    /// type `dtype`.
    #[pyo3(signature = (device_id, dtype="f32"))]
    fn use_device(&self, py: Python<'_>, device_id: i32, dtype: &str) -> PyResult<()> {
        *self.device.lock() = Some(device::open(py, device_id, dtype_of(py, dtype)?, self.wire)?);
        Ok(())
    }

    /// Begin a generation above `after_generation` and all known ones. Returns the generation. The next step is the
    /// one after `step`. With `fresh`, all rows are dropped.
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
            continues: 0,
            world_size: self.world_size,
            reproducible: false,
        };
        self.next_generation(py, run, step)
    }

    /// Begin a new generation of the same run, so that the tokens of unused look-ups are not used twice. Returns the
    /// generation.
    fn renew(&self, py: Python<'_>, reproducible: bool) -> PyResult<u64> {
        self.settle(py)?;
        let (run, step) = self.running(py)?;
        self.next_generation(py, Run { fresh: false, reproducible, ..run }, step)
    }

    /// Join a generation that another process began. The next step is `step` + 1.
    fn join(&self, py: Python<'_>, generation: u64, step: u64) -> PyResult<()> {
        self.settle(py)?;
        self.backend.remote(py)?.join(&self.job, generation);
        self.adopt(py, generation, None, EngineOptions { first_seq: step + 1, ..EngineOptions::default() })
    }

    /// Look up rows of a generation that another process trains. The next step is `step` + 1.
    fn observe(&self, py: Python<'_>, generation: u64, step: u64) -> PyResult<()> {
        self.settle(py)?;
        self.backend.remote(py)?.observe(&self.job, generation);
        self.adopt(py, generation, None, EngineOptions { first_seq: step + 1, ..EngineOptions::default() })
    }

    /// Wait at most `timeout_s` until every server of the job responds. The error lists the servers that did not
    /// respond. The time limit starts again whenever a server has read more of its rows from disk.
    fn wait_ready(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        self.backend.wait_ready(py, timeout_s)
    }

    /// Check that this process and every server can write into `directory`.
    fn check_storage(&self, py: Python<'_>, directory: PathBuf) -> PyResult<()> {
        let on_servers = |inside: &Path| self.backend.check_storage(inside);
        py.detach(|| probe(&directory, on_servers)).map_err(|error| errors::tables(py, &error))
    }

    /// The highest generation of any server or, in embedded mode, of this engine; 0 before the first generation.
    fn highest_generation(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.backend.highest_generation(py)?.unwrap_or_else(|| self.generation()))
    }

    /// The engine's generation; 0 before the first one.
    #[getter]
    fn generation(&self) -> u64 {
        self.current.lock().as_ref().map_or(0, |current| current.generation)
    }

    /// Whether the training loop of a data loader is running.
    #[getter]
    fn iterating(&self) -> bool {
        self.open.lock().upgrade().is_some_and(|open| open.is_open())
    }

    /// The step of the last batch that was taken for training; 0 before the first one.
    #[getter]
    fn step(&self) -> u64 {
        self.current.lock().as_ref().map_or(0, |current| current.engine.step())
    }

    /// Open the pipeline of the current generation, which looks up batches in advance. At most `buffer`
    /// batches wait for their look-up. Every summed gradient is multiplied by `gradient_scale`.
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

    /// Look up a batch for evaluation, after all pushes in flight. No row changes, and missing rows read as zeros.
    /// The tensors are on CUDA device `device_id`, by default on the engine's device.
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
        Ok(TrainingBatch::evaluated(engine.step(), Arc::clone(&batch.0), found))
    }

    /// Return, for each id feature of a batch, the number of its unique ids and the number of these that have no row.
    /// Each feature is looked up separately.
    fn missing(&self, py: Python<'_>, batch: &Batch) -> PyResult<Vec<(u64, u64)>> {
        let engine = self.rank_engine(py)?;
        py.detach(|| engine.missing(&batch.0)).map_err(|error| errors::engine(py, &error))
    }

    /// Wait until every push is applied.
    pub(crate) fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.rank_engine(py)?;
        wait::until(py, |slice| match engine.drain(slice) {
            Ok(DrainOutcome::Done) => Ok(Some(())),
            Ok(DrainOutcome::Pending(_)) => Ok(None),
            Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
        })
    }

    /// Start no look-up until `resume`, and wait for pushes in flight. All rows are then those of the same step.
    fn pause(&self, py: Python<'_>) -> PyResult<()> {
        self.rank_engine(py)?.pause();
        let drained = self.drain(py);
        if drained.is_err() {
            self.resume(py)?;
        }
        drained
    }

    /// Resume look-ups after `pause`.
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

    /// Return counters, gauges and times: rows and bytes, look-ups, pushes, and the seconds of each stage. Without
    /// `tables`, returns only those of the engine in this process, and calls no server.
    #[pyo3(signature = (tables=true))]
    fn stats<'py>(&self, py: Python<'py>, tables: bool) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.current.lock().as_ref().map(|current| current.engine.stats()).unwrap_or_default();
        if !tables {
            return stats::of_engine(py, &self.schema, &engine);
        }
        let tables = self.tables();
        let held = py.detach(|| tables.stats()).map_err(|error| errors::tables(py, &error))?;
        stats::describe(py, &self.schema, &held, &engine)
    }

    /// Return the number of rows of each server; one value in embedded mode.
    fn server_rows(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.backend.server_rows(py)
    }

    /// End the engine's threads and, in embedded mode, free the rows. With `abandon`, this does not wait,
    /// frees no rows, and may lose gradients in flight.
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
            // A thread that waits for a server ends at its timeout or with the process.
            let _ = std::thread::Builder::new().name("persia-abandon".into()).spawn(end);
            return Ok(());
        }
        py.detach(end);
        self.backend.release(py)
    }
}

impl Engine {
    fn over(
        backend: Backend,
        schema: Schema,
        job: String,
        (rank, world_size): (u32, u32),
        wire: Dtype,
    ) -> Self {
        let (current, open, device) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { backend, schema, job, rank, world_size, current, open, wire, device, served: None }
    }

    pub(crate) fn tables(&self) -> Arc<dyn Tables> {
        self.backend.tables()
    }
}
