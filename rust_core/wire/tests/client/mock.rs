//! A mock of a middleware in front of two servers. The row of id `i` is `[i; dim]`. A script defines the
//! faults.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use parking_lot::Mutex;
use persia_kernels::Gradients;
use persia_types::id::{ShardedIds, server_shards, shard_of};
use persia_types::tables::{
    LookupReport, LookupRequest, Mode, PushReport, PushRequest, Run, Stats, TableGradients, TableIds,
};
use persia_types::{JobId, TablesError, Token};
use persia_wire::auth::{Guard, Role, Secret, require};
use persia_wire::bounded;
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::error::{to_failure, to_status};
use persia_wire::listen::Listener;
use persia_wire::proto::middleware_server::{Middleware, MiddlewareServer};
use persia_wire::proto::{self, lookup_reply, server_push};
use persia_wire::receive;
use persia_wire::send::row_chunks;
use persia_wire::settings::{self, Endpoint};
use tokio::runtime::Runtime;
use tonic::transport::ServerTlsConfig;
use tonic::{Request, Response, Status, Streaming};

pub(crate) const SERVERS: u32 = 2;
pub(crate) const DIM: usize = 3;
pub(crate) const JOB: &str = "job";
pub(crate) const GENERATION: u64 = 4;

/// The fault of one call. After the end of the script, calls succeed.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    Nothing,
    /// A bit of a row is flipped.
    Flip,
    /// The last rows are missing.
    DropRows,
    /// The report is missing.
    DropReport,
    /// The stream breaks after the first chunk of rows.
    Break,
    /// Some rows arrive twice.
    Twice,
    /// No response is sent.
    Hang,
    /// This error is returned, and nothing is done.
    Fail(fn() -> TablesError),
    /// These servers apply the push. The others are not reached, and the reply says so.
    Reach(&'static [u32]),
    /// These servers apply the push. The reply does not mention the others.
    Forget(&'static [u32]),
    /// All servers apply the push, but the reply is lost.
    LoseReply,
    /// Only this server begins the run, and the reply is lost.
    BeginOnly(u32),
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) calls: Vec<&'static str>,
    /// The field `only` in the head of each push.
    pub(crate) only: Vec<Vec<u32>>,
    /// The number of times that each server was asked to apply a push.
    pub(crate) asked: BTreeMap<u32, u32>,
    pub(crate) begun: Vec<proto::BeginRequest>,
    pub(crate) directories: Vec<String>,
    /// The servers that are missing in the statistics.
    pub(crate) silent: Vec<u32>,
    pub(crate) generation: u64,
    /// The only server that has begun the generation.
    begun_only: Option<u32>,
}

#[derive(Debug, Clone)]
pub(crate) struct Mock {
    script: Arc<Mutex<VecDeque<Fault>>>,
    pub(crate) seen: Arc<Mutex<Seen>>,
}

/// A running mock, which stops when it is dropped.
pub(crate) struct Running {
    pub(crate) mock: Mock,
    pub(crate) endpoint: Endpoint,
    _runtime: Runtime,
}

pub(crate) fn start(script: &[Fault]) -> Running {
    start_with(script, None, None)
}

pub(crate) fn start_with(script: &[Fault], secret: Option<Secret>, tls: Option<ServerTlsConfig>) -> Running {
    let mock = Mock { script: Arc::new(Mutex::new(script.iter().cloned().collect())), seen: Arc::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (sender, receiver) = mpsc::channel();
    let service = mock.clone();
    runtime.spawn(async move {
        let any = "127.0.0.1:0".parse().unwrap();
        let guard = Guard::new(secret, &any).unwrap();
        let listener = Listener::bind(&any).await.unwrap();
        sender.send(listener.endpoint().clone()).unwrap();
        let service = bounded!(MiddlewareServer::new(service));
        let service = tonic::service::interceptor::InterceptedService::new(service, guard);
        let server = settings::server(tls).unwrap().add_service(service);
        server.serve_with_incoming(listener.connections()).await.unwrap();
    });
    Running { mock, endpoint: receiver.recv().unwrap(), _runtime: runtime }
}

impl Running {
    pub(crate) fn options(&self) -> ClientOptions {
        ClientOptions {
            rpc_timeout: Duration::from_secs(20),
            ..ClientOptions::new(Targets::Fixed(vec![self.endpoint.clone()]))
        }
    }

    pub(crate) fn client(&self) -> WireTables {
        WireTables::connect(self.options()).unwrap()
    }

    pub(crate) fn calls(&self) -> Vec<&'static str> {
        self.mock.seen.lock().calls.clone()
    }
}

pub(crate) fn token(seq: u64) -> Token {
    Token { job: JobId::from_name(JOB), generation: GENERATION, rank: 1, seq }
}

pub(crate) fn ids(count: u64) -> ShardedIds {
    ShardedIds::group(&(1..=count).collect::<Vec<_>>()).unwrap()
}

/// Look up ids and check the rows.
pub(crate) fn lookup(client: &WireTables, ids: &ShardedIds) -> Result<LookupReport, TablesError> {
    use persia_types::Tables;
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    let tables = [TableIds { table: 7, ids, per_sample: None }];
    let request = LookupRequest { token: token(1), step: 1, mode: Mode::Train, tables: &tables };
    let report = client.lookup(&request, &mut [&mut rows])?;
    for (id, row) in ids.ids().iter().zip(rows.chunks(DIM)) {
        assert_eq!(row, [*id as f32; DIM]);
    }
    Ok(report)
}

pub(crate) fn push(client: &WireTables, ids: &ShardedIds) -> Result<PushReport, TablesError> {
    use persia_types::Tables;
    let gradients: Vec<f32> = ids.ids().iter().flat_map(|id| [-(*id as f32); DIM]).collect();
    let tables = [TableGradients { table: 7, ids, gradients: Gradients::Rows(&gradients) }];
    client.push(&PushRequest { token: token(1), step: 1, lr_factor: 0.5, tables: &tables })
}

impl Mock {
    async fn next(&self, verb: &'static str) -> Result<Fault, Status> {
        self.seen.lock().calls.push(verb);
        let fault = self.script.lock().pop_front().unwrap_or(Fault::Nothing);
        match fault {
            Fault::Hang => std::future::pending().await,
            Fault::Fail(error) => Err(to_status(&error())),
            other => Ok(other),
        }
    }

    fn apply(&self, push: &receive::ReceivedPush, server: u32) -> PushReport {
        *self.seen.lock().asked.entry(server).or_default() += 1;
        let shards = server_shards(server as usize, SERVERS as usize);
        let ids = push.ids[0].ids().iter().filter(|id| shards.contains(&shard_of(**id))).count() as u64;
        PushReport { rows_pushed: ids, rows_applied: ids, ..PushReport::default() }
    }
}

fn applied(server: u32, report: PushReport) -> proto::ServerPush {
    proto::ServerPush { server, outcome: Some(server_push::Outcome::Applied(report.into())) }
}

type Rows = Pin<Box<dyn Stream<Item = Result<proto::LookupReply, Status>> + Send>>;

#[tonic::async_trait]
impl Middleware for Mock {
    type LookupStream = Rows;

    async fn lookup(
        &self,
        request: Request<Streaming<proto::LookupRequest>>,
    ) -> Result<Response<Rows>, Status> {
        require(request.extensions(), "Lookup", &[Role::Trainer])?;
        let fault = self.next("lookup").await?;
        let lookup = receive::lookup(&mut request.into_inner()).await?;
        assert_eq!((lookup.token, lookup.mode, lookup.parts[0].table), (token(1), Mode::Train, 7));
        let ids = lookup.ids[0].ids();
        let rows: Vec<f32> = ids.iter().flat_map(|id| [*id as f32; DIM]).collect();
        let mut chunks: Vec<_> = row_chunks(0, lookup.parts[0].format, rows).collect();
        let report = LookupReport { hits: ids.len() as u64, ..LookupReport::default() };
        match fault {
            Fault::Flip => chunks[0].crc32c ^= 1,
            Fault::DropRows => drop(chunks.pop()),
            Fault::Twice => chunks.push(chunks[0].clone()),
            _ => {}
        }
        chunks.reverse();
        let rows = chunks.into_iter().map(lookup_reply::Part::Rows);
        let mut parts: Vec<_> = rows.chain([lookup_reply::Part::Report(report.into())]).collect();
        if matches!(fault, Fault::DropReport) {
            parts.pop();
        }
        let mut replies: Vec<_> =
            parts.into_iter().map(|part| Ok(proto::LookupReply { part: Some(part) })).collect();
        if matches!(fault, Fault::Break) {
            replies.truncate(1);
            replies.push(Err(Status::unavailable("broken")));
        }
        Ok(Response::new(tokio_stream::iter(replies).boxed()))
    }

    async fn push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
    ) -> Result<Response<proto::PushReply>, Status> {
        require(request.extensions(), "Push", &[Role::Trainer])?;
        let fault = self.next("push").await?;
        let mut stream = request.into_inner();
        let mut only = Vec::new();
        let mut noted = std::pin::pin!(stream.by_ref().inspect(|message| {
            if let Ok(proto::PushRequest { part: Some(proto::push_request::Part::Head(head)) }) = message {
                only = head.only.clone();
            }
        }));
        let push = receive::push(&mut noted).await?;
        assert_eq!((push.token, push.lr_factor, push.parts[0].table), (token(1), 0.5, 7));
        for (id, gradient) in push.ids[0].ids().iter().zip(push.gradients[0].chunks(DIM)) {
            assert_eq!(gradient, [-(*id as f32); DIM]);
        }
        self.seen.lock().only.push(only.clone());
        let wanted: Vec<u32> =
            (0..SERVERS).filter(|server| only.is_empty() || only.contains(server)).collect();
        let reached = |servers: &[u32]| {
            let servers = wanted.iter().filter(|server| servers.contains(server));
            servers.map(|server| applied(*server, self.apply(&push, *server))).collect::<Vec<_>>()
        };
        let servers = match fault {
            Fault::Reach(servers) => {
                let mut all = reached(servers);
                for server in wanted.iter().filter(|server| !servers.contains(server)) {
                    let peer = format!("server {server} of {SERVERS}");
                    let error = TablesError::Unreachable { peer, what: "reset".into() };
                    let outcome = Some(server_push::Outcome::Failed(to_failure(&error)));
                    all.push(proto::ServerPush { server: *server, outcome });
                }
                all
            }
            Fault::Forget(servers) => reached(servers),
            Fault::LoseReply => {
                reached(&wanted);
                return Err(Status::unavailable("reset"));
            }
            _ => reached(&wanted),
        };
        Ok(Response::new(proto::PushReply { servers }))
    }

    async fn begin(
        &self,
        request: Request<proto::BeginRequest>,
    ) -> Result<Response<proto::BeginReply>, Status> {
        require(request.extensions(), "Begin", &[])?;
        let fault = self.next("begin").await?;
        let begin = request.into_inner();
        let generation = serde_json::from_str::<Run>(&begin.run).unwrap().generation;
        let mut seen = self.seen.lock();
        if generation <= seen.generation {
            let what = format!("generation {generation} is not above {}", seen.generation);
            return Err(to_status(&TablesError::BadRun { what }));
        }
        seen.generation = generation;
        seen.begun.push(begin);
        if let Fault::BeginOnly(server) = fault {
            seen.begun_only = Some(server);
        }
        if matches!(fault, Fault::LoseReply | Fault::BeginOnly(_)) {
            return Err(Status::unavailable("reset"));
        }
        Ok(Response::new(proto::BeginReply {}))
    }

    async fn prepare_snapshot(
        &self,
        request: Request<proto::PrepareSnapshotRequest>,
    ) -> Result<Response<proto::PrepareSnapshotReply>, Status> {
        require(request.extensions(), "PrepareSnapshot", &[])?;
        self.next("prepare_snapshot").await?;
        Ok(Response::new(proto::PrepareSnapshotReply {}))
    }

    async fn abort_snapshot(
        &self,
        request: Request<proto::AbortSnapshotRequest>,
    ) -> Result<Response<proto::AbortSnapshotReply>, Status> {
        require(request.extensions(), "AbortSnapshot", &[])?;
        self.next("abort_snapshot").await?;
        Ok(Response::new(proto::AbortSnapshotReply {}))
    }

    async fn commit_snapshot(
        &self,
        request: Request<proto::CommitSnapshotRequest>,
    ) -> Result<Response<proto::CommitSnapshotReply>, Status> {
        require(request.extensions(), "CommitSnapshot", &[])?;
        self.next("commit_snapshot").await?;
        Ok(Response::new(proto::CommitSnapshotReply {}))
    }

    async fn write_snapshot(
        &self,
        request: Request<proto::WriteSnapshotRequest>,
    ) -> Result<Response<proto::WriteSnapshotReply>, Status> {
        require(request.extensions(), "WriteSnapshot", &[])?;
        self.next("write_snapshot").await?;
        self.seen.lock().directories.push(request.into_inner().directory);
        let file = proto::File { name: "shard-000.arrow".into(), bytes: 5, blake3: "00".into() };
        Ok(Response::new(proto::WriteSnapshotReply { files: vec![file], rows: vec![1, 2] }))
    }

    async fn restore(
        &self,
        request: Request<proto::RestoreRequest>,
    ) -> Result<Response<proto::RestoreReply>, Status> {
        require(request.extensions(), "Restore", &[])?;
        self.next("restore").await?;
        self.seen.lock().directories.push(request.into_inner().directory);
        Ok(Response::new(proto::RestoreReply {}))
    }

    async fn stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        require(request.extensions(), "Stats", &[Role::Trainer])?;
        let seen = self.seen.lock();
        let stats = |server: u32| {
            let rows = vec![10 * u64::from(server) + 1, 2];
            let tokens = BTreeMap::from([(0, 5 + u64::from(server)), (server, 9)]);
            let generation =
                if seen.begun_only.is_none_or(|only| only == server) { seen.generation } else { 0 };
            Stats { rows, tokens, generation, begun: generation, payload_bytes: 100, ..Stats::default() }
        };
        let answer = |server: u32| proto::ServerStats {
            server,
            address: format!("127.0.0.1:{server}"),
            stats: serde_json::to_string(&stats(server)).unwrap(),
        };
        let answered =
            (0..SERVERS).rev().filter(|server| !seen.silent.contains(server)).map(answer).collect();
        Ok(Response::new(proto::StatsReply { servers: SERVERS, answered }))
    }

    async fn clear(
        &self,
        request: Request<proto::ClearRequest>,
    ) -> Result<Response<proto::ClearReply>, Status> {
        require(request.extensions(), "Clear", &[])?;
        self.next("clear").await?;
        assert_eq!(request.into_inner().fence.unwrap().generation, GENERATION);
        Ok(Response::new(proto::ClearReply {}))
    }
}
