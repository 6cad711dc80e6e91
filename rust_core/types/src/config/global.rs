//! `global_config.yml`: the job, its checkpoints and its capacity.

use serde::Serialize;

use super::error::ConfigErrors;
use super::reader::Reader;
use super::settings::DTYPES;
use super::tree::Node;
use super::{Parsed, later};
use crate::id::VIRTUAL_SHARDS;
use crate::limits::MAX_ROWS_PER_SLAB;
use crate::schema::Dtype;

/// The largest number of threads that write and read a checkpoint. More threads would only wait for the disk.
const MAX_WORKERS: u64 = 256;
/// The largest number of threads that execute a request. Each shard is locked by one of them.
const MAX_REQUEST_THREADS: u64 = 64;
const MAX_COPY_BYTES: u64 = i64::MAX as u64;
const MAX_CAPACITY: u64 = (VIRTUAL_SHARDS * MAX_ROWS_PER_SLAB) as u64;

const ROOT_KEYS: &[&str] = &["common_config", "embedding_worker_config", "embedding_parameter_server_config"];
const COMMON_KEYS: &[&str] = &["metrics_config", "job_type", "infer_config", "checkpointing_config"];
const METRICS_KEYS: &[&str] = &["enable_metrics", "job_name", "push_interval_sec", "push_interval_seconds"];
const WORKER_KEYS: &[&str] = &["wire_dtype", "forward_buffer_size", "buffered_data_expired_sec"];
const SERVER_KEYS: &[&str] = &[
    "capacity",
    "durability",
    "log_sync",
    "max_copy_bytes",
    "request_threads",
    "num_hashmap_internal_shards",
    "enable_incremental_update",
    "incremental_buffer_size",
    "incremental_dir",
    "incremental_channel_capacity",
    "full_amount_manager_buffer_size",
];

const NO_PUSH: &str = "metrics are not pushed: Prometheus scrapes servers and middlewares";
const NO_SERVING: &str = "only an infer job (`job_type: Infer`) serves a checkpoint";
const SERVES: &str = "an infer job changes no row of its checkpoint";
const NO_WORKER: &str = "the trainer holds the waiting batches; TrainCtx and DataLoader limit their number";
const NO_INCREMENTAL: &str = "this version does not have incremental updates yet";
const JOB_TYPE_UNUSED: &[(&str, &str)] =
    &[("job_type", "TrainCtx and eval_ctx decide whether rows are updated")];
const JOB_TYPES: &[(&str, JobType)] =
    &[("Train", JobType::Train), ("Eval", JobType::Train), ("Infer", JobType::Infer)];
const METRICS_UNUSED: &[(&str, &str)] = &[("push_interval_sec", NO_PUSH), ("push_interval_seconds", NO_PUSH)];
const INFER_UNUSED: &[(&str, &str)] = &[("servers", NO_SERVING), ("embedding_checkpoint", NO_SERVING)];
const WORKER_UNUSED: &[(&str, &str)] =
    &[("forward_buffer_size", NO_WORKER), ("buffered_data_expired_sec", NO_WORKER)];
const LOG_UNUSED: &[(&str, &str)] = &[("log_sync", "there is a log only with `durability: log`")];
const SERVES_UNUSED: &[(&str, &str)] = &[
    ("capacity", "an infer job holds all rows of its checkpoint"),
    ("durability", SERVES),
    ("log_sync", SERVES),
    ("max_copy_bytes", SERVES),
];
const SERVER_UNUSED: &[(&str, &str)] = &[
    ("num_hashmap_internal_shards", "there are always 256 virtual shards"),
    ("incremental_buffer_size", NO_INCREMENTAL),
    ("incremental_dir", NO_INCREMENTAL),
    ("incremental_channel_capacity", NO_INCREMENTAL),
    ("full_amount_manager_buffer_size", "checkpoints are written without this buffer"),
];

const DURABILITIES: &[(&str, bool)] = &[("checkpoint", false), ("log", true)];
const LOG_SYNCS: &[(&str, LogSync)] = &[("every_second", LogSync::EverySecond), ("always", LogSync::Always)];

/// The task of the servers of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JobType {
    Train,
    Infer,
}

/// An infer job: its servers load a checkpoint when they start, and refuse updates. It does not use NATS.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct InferConfig {
    /// `common_config.infer_config.servers`: the addresses of all servers, in the order of their replica
    /// index.
    pub servers: Vec<String>,
    /// `common_config.infer_config.embedding_checkpoint`: the directory of the checkpoint, on each server.
    pub checkpoint: Option<String>,
}

/// When the records of a server's log become durable, that is, survive a power cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum LogSync {
    /// Records become durable within a second.
    #[default]
    EverySecond,
    /// A record becomes durable before its request is acknowledged.
    Always,
}

/// A valid `global_config.yml`. The default value has the defaults of all keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GlobalConfig {
    /// `common_config.metrics_config.enable_metrics`: whether servers and middlewares serve metrics if no address for
    /// metrics is given.
    pub enable_metrics: bool,
    /// `common_config.metrics_config.job_name`: the job's name. Jobs with different names never share rows.
    pub job_name: String,
    /// `common_config.checkpointing_config.num_workers`: the number of threads that write and read a
    /// checkpoint.
    pub checkpoint_workers: usize,
    /// `embedding_parameter_server_config.capacity`: the number of rows that the whole job holds before it evicts
    /// rows. No memory is allocated in advance.
    pub capacity: u64,
    /// `embedding_parameter_server_config.durability` and `.log_sync`. With `log`, a killed server recovers on its own
    /// from the last checkpoint and its log. With `checkpoint` (None), the whole job restarts from the last checkpoint.
    pub log: Option<LogSync>,
    /// `embedding_parameter_server_config.max_copy_bytes`: the maximum number of bytes of changed rows that each server
    /// copies while a checkpoint is written. With None there is no limit, so the copies may become as large as all
    /// rows.
    pub max_copy_bytes: Option<u64>,
    /// `embedding_parameter_server_config.request_threads`: the number of threads that execute a large look-up or push
    /// in the process that holds the rows. None chooses it by the number of processors. The results do not depend on it.
    pub request_threads: Option<usize>,
    /// `common_config.job_type: Infer` and `.infer_config`; None for a job that trains or evaluates.
    pub infer: Option<InferConfig>,
    /// `embedding_worker_config.wire_dtype`: the type of rows and gradients between trainers, middlewares and servers.
    pub wire_dtype: Dtype,
}

impl Default for GlobalConfig {
    fn default() -> Self {
        Self {
            enable_metrics: true,
            job_name: "persia_default_jobname".into(),
            checkpoint_workers: 4,
            capacity: 1_000_000_000,
            log: None,
            max_copy_bytes: None,
            request_threads: None,
            infer: None,
            wire_dtype: Dtype::F32,
        }
    }
}

impl GlobalConfig {
    /// Read and validate the text of `file`. Unknown keys are warnings, because PersiaML ignores them.
    ///
    /// # Errors
    /// All errors of the file.
    pub fn parse(text: &str, file: &str) -> Result<Parsed<Self>, ConfigErrors> {
        Reader::read(text, file, |reader, root| {
            reader.accepts_unknown_keys = true;
            let mut config = Self::default();
            let root = reader.section(root, "", ROOT_KEYS);
            config.read_common(reader, root.get("common_config"));
            let path = "embedding_worker_config";
            let worker = reader.child(&root, path, WORKER_KEYS);
            reader.without_effect(&worker, path, WORKER_UNUSED);
            let choice = reader.choice(&worker, "embedding_worker_config.wire_dtype", DTYPES);
            config.wire_dtype = choice.unwrap_or_default();
            config.read_server(reader, root.get("embedding_parameter_server_config"));
            config
        })
    }

    fn read_common(&mut self, reader: &mut Reader, node: Option<&Node>) {
        let Some(node) = node else { return };
        let common = reader.section(node, "common_config", COMMON_KEYS);
        let path = "common_config.metrics_config";
        let metrics = reader.child(&common, path, METRICS_KEYS);
        reader.without_effect(&metrics, path, METRICS_UNUSED);
        let enabled = reader.boolean(&metrics, "common_config.metrics_config.enable_metrics");
        self.enable_metrics = enabled.unwrap_or(true);
        if let Some(name) = reader.name(&metrics, "common_config.metrics_config.job_name") {
            self.job_name = name.into();
        }
        let job_type = reader.choice(&common, "common_config.job_type", JOB_TYPES);
        let path = "common_config.infer_config";
        let infer = reader.child(&common, path, &["servers", "embedding_checkpoint"]);
        if job_type == Some(JobType::Infer) {
            let servers = reader.texts(&infer, "common_config.infer_config.servers").unwrap_or_default();
            let checkpoint = reader.text(&infer, "common_config.infer_config.embedding_checkpoint");
            self.infer = Some(InferConfig { servers, checkpoint: checkpoint.map(str::to_owned) });
        } else {
            reader.without_effect(&common, "common_config", JOB_TYPE_UNUSED);
            reader.without_effect(&infer, path, INFER_UNUSED);
        }
        let checkpoint = reader.child(&common, "common_config.checkpointing_config", &["num_workers"]);
        let path = "common_config.checkpointing_config.num_workers";
        if let Some(workers) = reader.integer(&checkpoint, path, 1..=MAX_WORKERS) {
            self.checkpoint_workers = workers as usize;
        }
    }

    fn read_server(&mut self, reader: &mut Reader, node: Option<&Node>) {
        let Some(node) = node else { return };
        let path = "embedding_parameter_server_config";
        let server = reader.section(node, path, SERVER_KEYS);
        reader.later(&server, path, later::SERVER);
        reader.without_effect(&server, path, SERVER_UNUSED);
        let path = "embedding_parameter_server_config.capacity";
        if let Some(capacity) = reader.integer(&server, path, 1..=MAX_CAPACITY) {
            self.capacity = capacity;
        }
        let path = "embedding_parameter_server_config.max_copy_bytes";
        self.max_copy_bytes = reader.integer(&server, path, 1..=MAX_COPY_BYTES);
        let path = "embedding_parameter_server_config.request_threads";
        let threads = reader.integer(&server, path, 1..=MAX_REQUEST_THREADS);
        self.request_threads = threads.map(|threads| threads as usize);
        let logs = reader.choice(&server, "embedding_parameter_server_config.durability", DURABILITIES);
        let path = "embedding_parameter_server_config.log_sync";
        let sync = reader.choice(&server, path, LOG_SYNCS);
        if self.infer.is_some() {
            reader.without_effect(&server, "embedding_parameter_server_config", SERVES_UNUSED);
        } else if logs == Some(true) {
            self.log = Some(sync.unwrap_or_default());
        } else {
            reader.without_effect(&server, "embedding_parameter_server_config", LOG_UNUSED);
        }
    }
}
