//! Runs servers and a middleware in this process, with short functions for requests.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use persia_kernels::{Bags, Gradients};
use persia_server::middleware::{Link, MiddlewareService, ServerPool};
use persia_server::node::{
    CheckpointRoot, GenerationFile, Node, NodeOptions, RecoveryProgress, ServableCheckpoint,
};
use persia_server::serve::{Health, Host, serve};
use persia_server::service::{EmbeddingService, StartingNode};
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats, TableGradients,
    TableIds,
};
use persia_types::{
    Id, Initializer, JobId, Mode, Optimizer, Schema, ShardedIds, Table, Tables, TablesError, Token,
};
use persia_wire::auth::{Guard, Secret};
use persia_wire::bounded;
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::discovery::Service;
use persia_wire::listen::Listener;
use persia_wire::proto::embedding_server_server::EmbeddingServerServer;
use persia_wire::proto::middleware_server::MiddlewareServer;
use persia_wire::settings::Endpoint;
use persia_wire::tls::TlsFiles;
use tokio::runtime::Runtime;

pub(crate) const JOB: &str = "test";

/// The settings of a stack.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) job: String,
    pub(crate) schema: Schema,
    pub(crate) servers: u32,
    pub(crate) middleware: bool,
    pub(crate) unix: bool,
    pub(crate) capacity: u64,
    pub(crate) secret: Option<Secret>,
    pub(crate) tls: TlsFiles,
    pub(crate) turn_timeout: Duration,
    /// The memory limit of requests in flight for each server, in mebibytes.
    pub(crate) request_memory: u32,
    /// Whether the servers have not recovered from their logs yet: see [`Stack::starting`].
    pub(crate) starting: bool,
    /// For an infer job, the checkpoint that the servers serve.
    pub(crate) serves: Option<PathBuf>,
}

impl Plan {
    pub(crate) fn new(servers: u32) -> Self {
        Self {
            job: JOB.into(),
            schema: schema(&[4]),
            servers,
            middleware: true,
            unix: false,
            capacity: 1_000_000,
            secret: None,
            tls: TlsFiles::default(),
            turn_timeout: Duration::from_secs(20),
            request_memory: 4 << 10,
            starting: false,
            serves: None,
        }
    }
}

/// The servers and the middleware of a [`Plan`]. They run until this is dropped.
pub(crate) struct Stack {
    pub(crate) plan: Plan,
    pub(crate) servers: Vec<Endpoint>,
    pub(crate) front: Endpoint,
    /// Each server, before and after it has recovered.
    pub(crate) starting: Vec<(Arc<StartingNode>, Arc<Node>)>,
    /// The runtime; None while the stack is being dropped.
    runtime: Option<Runtime>,
    dir: tempfile::TempDir,
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

impl Stack {
    pub(crate) fn start(plan: Plan) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut starting = Vec::new();
        let start = |index| runtime.block_on(start_server(&plan, index, dir.path(), &mut starting));
        let servers: Vec<Endpoint> = (0..plan.servers).map(start).collect();
        let front = if plan.middleware {
            runtime.block_on(start_middleware(&plan, &servers, dir.path()))
        } else {
            servers[0].clone()
        };
        Self { plan, servers, front, starting, runtime: Some(runtime), dir }
    }

    /// The options of a client of rank 0 with the role admin.
    pub(crate) fn options(&self) -> ClientOptions {
        let mut options = ClientOptions::new(Targets::Fixed(vec![self.front.clone()]));
        options.service = if self.plan.middleware { Service::Middleware } else { Service::Server };
        options.secret.clone_from(&self.plan.secret);
        options.tls = self.plan.tls.client().unwrap();
        // The cases of the contract choose their directories themselves.
        options.checkpoint_root = Some(std::env::temp_dir());
        options
    }

    pub(crate) fn client(&self) -> WireTables {
        WireTables::connect(self.options()).unwrap()
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.as_ref().unwrap().block_on(future)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

async fn bind(plan: &Plan, name: &str, dir: &Path) -> Listener {
    let endpoint = if plan.unix {
        Endpoint::Unix(dir.join(name))
    } else {
        Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }
    };
    Listener::bind(&endpoint).await.unwrap()
}

async fn host(plan: &Plan, listener: &Listener) -> (Host, persia_server::serve::HealthService) {
    let (health, service) = Health::new("test").await;
    let guard = Guard::new(plan.secret.clone(), listener.endpoint()).unwrap();
    let tls = plan.tls.server().unwrap();
    (Host { guard, tls, grace: Duration::from_secs(1), health }, service)
}

async fn start_server(
    plan: &Plan,
    index: u32,
    dir: &Path,
    starting: &mut Vec<(Arc<StartingNode>, Arc<Node>)>,
) -> Endpoint {
    let listener = bind(plan, &format!("server-{index}"), dir).await;
    let endpoint = listener.endpoint().clone();
    let options = NodeOptions {
        job: plan.job.clone(),
        index,
        servers: plan.servers,
        schema: plan.schema.clone(),
        capacity: plan.capacity,
        request_threads: 2,
        snapshot_threads: 2,
        max_copy_bytes: u64::MAX,
        checkpoints: CheckpointRoot::new(Some(std::env::temp_dir())),
        turn_timeout: plan.turn_timeout,
        address: endpoint.to_string(),
        log: None,
    };
    let data = dir.join(format!("data-{index}"));
    let node = match &plan.serves {
        None => Node::new(options, GenerationFile::open(Some(&data)).unwrap()).unwrap(),
        Some(dir) => {
            let checkpoint = ServableCheckpoint::open(dir, Some(plan.schema.clone())).unwrap();
            Node::serving(options, &checkpoint, &RecoveryProgress::default()).unwrap()
        }
    };
    let node = Arc::new(node);
    let (host, health) = host(plan, &listener).await;
    let before = Arc::new(StartingNode::new(node.options()));
    if !plan.starting {
        before.resumed(Arc::clone(&node));
    }
    starting.push((Arc::clone(&before), node));
    let service = EmbeddingService::starting(before).with_memory(plan.request_memory);
    let service = bounded!(EmbeddingServerServer::new(service));
    tokio::spawn(async { serve(listener, service, host, health, pending(), pending()).await.unwrap() });
    endpoint
}

pub(crate) async fn start_middleware(plan: &Plan, servers: &[Endpoint], dir: &Path) -> Endpoint {
    let listener = bind(plan, "middleware", dir).await;
    let endpoint = listener.endpoint().clone();
    let link = Link { secret: plan.secret.clone(), tls: plan.tls.client().unwrap() };
    let servers = Arc::new(ServerPool::fixed(servers, &link).unwrap());
    let (host, health) = host(plan, &listener).await;
    let service = MiddlewareService::new(servers, Duration::from_secs(30), "the middleware".into());
    let service = bounded!(MiddlewareServer::new(service));
    tokio::spawn(async { serve(listener, service, host, health, pending(), pending()).await.unwrap() });
    endpoint
}

/// The tables, and the processes that serve them.
pub(crate) struct Held<T> {
    pub(crate) tables: WireTables,
    /// The owner of the processes. It is dropped last.
    pub(crate) _below: T,
}

impl<T: Send + Sync> Tables for Held<T> {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        self.tables.begin(run)
    }

    fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        self.tables.pools(dim, ids, bags)
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        self.tables.lookup(request, rows)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.tables.push(request)
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.tables.prepare_snapshot(number)
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.tables.abort_snapshot(number)
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        self.tables.write_snapshot(dir, number)
    }

    fn commit_snapshot(&self, number: u64, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.tables.commit_snapshot(number, dir, files)
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.tables.restore(dir, files)
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        self.tables.stats()
    }

    fn clear(&self) -> Result<(), TablesError> {
        self.tables.clear()
    }
}

pub(crate) fn schema(dims: &[usize]) -> Schema {
    let tables = dims.iter().enumerate().map(|(i, dim)| Table::new(format!("table_{i}"), *dim));
    Schema { slots: vec![], tables: tables.collect() }
}

pub(crate) fn run_of(plan: &Plan) -> Run {
    Run {
        job: plan.job.clone(),
        generation: 1,
        schema: plan.schema.clone(),
        seed: 7,
        optimizer: Some(Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 }),
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    }
}

pub(crate) fn token(rank: u32, seq: u64) -> Token {
    Token { job: JobId::from_name(JOB), generation: 1, rank, seq }
}

/// Look up ids of some tables. The rows of each table are in the order of its grouped ids.
pub(crate) fn lookup(
    tables: &dyn Tables,
    token: Token,
    mode: Mode,
    dims: &[usize],
    ids: &[Vec<Id>],
) -> Result<(LookupReport, Vec<Vec<f32>>), TablesError> {
    let grouped: Vec<ShardedIds> = ids.iter().map(|ids| ShardedIds::group(ids).unwrap()).collect();
    let parts: Vec<TableIds<'_>> =
        grouped.iter().enumerate().map(|(table, ids)| TableIds { table, ids, per_sample: None }).collect();
    let mut rows: Vec<Vec<f32>> =
        grouped.iter().zip(dims).map(|(ids, dim)| vec![-77.0; ids.len() * dim]).collect();
    let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
    let report =
        tables.lookup(&LookupRequest { token, step: token.seq, mode, tables: &parts }, &mut buffers)?;
    Ok((report, rows))
}

/// Push gradients that depend on the id and the step.
pub(crate) fn push(
    tables: &dyn Tables,
    token: Token,
    dims: &[usize],
    ids: &[Vec<Id>],
) -> Result<PushReport, TablesError> {
    push_as(tables, token, dims, ids, |gradient| gradient)
}

/// Like [`push`], but a function changes each float.
pub(crate) fn push_as(
    tables: &dyn Tables,
    token: Token,
    dims: &[usize],
    ids: &[Vec<Id>],
    change: impl Fn(f32) -> f32,
) -> Result<PushReport, TablesError> {
    let grouped: Vec<ShardedIds> = ids.iter().map(|ids| ShardedIds::group(ids).unwrap()).collect();
    let gradients: Vec<Vec<f32>> = grouped
        .iter()
        .zip(dims)
        .map(|(ids, dim)| {
            let of =
                |id: &Id| change(((*id % 97) as f32 + token.seq as f32 + token.rank as f32 * 0.5) * 0.01);
            ids.ids().iter().flat_map(|id| std::iter::repeat_n(of(id), *dim)).collect()
        })
        .collect();
    let parts: Vec<TableGradients<'_>> = grouped
        .iter()
        .zip(&gradients)
        .enumerate()
        .map(|(table, (ids, gradients))| TableGradients { table, ids, gradients: Gradients::Rows(gradients) })
        .collect();
    tables.push(&PushRequest { token, step: token.seq, lr_factor: 1.0, tables: &parts })
}
