//! [`EmbeddingService`]: serves a [`Node`] over gRPC, once the node has read its rows.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures_util::Stream;
use persia_types::tables::{FileEntry, Run};
use persia_types::{JobId, Mode, TablesError};
use persia_wire::auth::{Role, require};
use persia_wire::chunk::ChunkError;
use persia_wire::error::to_status;
use persia_wire::parts::Part;
use persia_wire::proto::embedding_server_server::EmbeddingServer;
use persia_wire::proto::{self, lookup_reply, server_push};
use persia_wire::send::row_chunks;
use persia_wire::trace::RequestSpan;
use persia_wire::{PROTOCOL, VERSION, convert, receive};
use tokio::task::JoinError;
use tonic::metadata::MetadataMap;
use tonic::{Code, Extensions, Request, Response, Status, Streaming};

use crate::metrics::{self, Timer};
use crate::middleware::deadline;
use crate::node::{Fence, Node, NodeOptions, Phase, RecoveryProgress};
use crate::request_memory::{MemoryBudget, RequestMemory};

const MEMORY_ADVICE: &str = "use smaller batches, a smaller staleness, or more servers";
/// The names of the spans for the waits of a traced request.
const MEMORY_WAIT: &str = "memory wait";
const RECEIVE: &str = "receive";
const TURN_WAIT: &str = "turn wait";

/// A node that may not have read its rows yet, from its log or from the checkpoint that it serves.
pub struct StartingNode {
    peer: String,
    progress: RecoveryProgress,
    node: OnceLock<Arc<Node>>,
}

impl StartingNode {
    /// Describe a node with these options, which is about to read its rows.
    pub fn new(options: &NodeOptions) -> Self {
        Self { peer: options.peer(), progress: RecoveryProgress::default(), node: OnceLock::new() }
    }

    /// The progress of reading the rows.
    pub fn progress(&self) -> &RecoveryProgress {
        &self.progress
    }

    /// Record that the node has read its rows.
    pub fn resumed(&self, node: Arc<Node>) {
        let _ = self.node.set(node); // this is called only once
    }

    /// The node.
    ///
    /// # Errors
    /// `Recovering` until the node has read its rows.
    pub fn node(&self) -> Result<&Arc<Node>, TablesError> {
        let recovering = || {
            let (done, total) = self.progress.bytes();
            TablesError::Recovering { peer: self.peer.clone(), done, total }
        };
        self.node.get().ok_or_else(recovering)
    }
}

/// Serves one node.
#[derive(Clone)]
pub struct EmbeddingService {
    node: Arc<StartingNode>,
    memory: MemoryBudget,
}

/// The rows in chunks, followed by the report.
pub type LookupStream = Pin<Box<dyn Stream<Item = Result<proto::LookupReply, Status>> + Send>>;

/// Refuse a caller of another protocol or version, because its messages could be misread.
pub(crate) fn check_version(peer: &str, request: &proto::BeginRequest) -> Result<(), Status> {
    let differs = |what: String| Err(to_status(&TablesError::Incompatible { peer: peer.into(), what }));
    if request.protocol != PROTOCOL {
        return differs(format!("it uses protocol {PROTOCOL}, but the caller uses {}", request.protocol));
    }
    if request.version != VERSION {
        return differs(format!("it has version {VERSION}, but the caller has {}", request.version));
    }
    Ok(())
}

/// The status of a request whose task has panicked, or was cancelled because the process stops. `peer` is the name of
/// this process. The details tell the caller that this process failed. A caller treats an `Internal` without details
/// as a broken connection.
pub(crate) fn task_failed(peer: &str, error: &JoinError) -> Status {
    let what = if error.is_panic() {
        format!("it failed with a panic, which is a bug: {error}; see its log, and report the bug")
    } else {
        "it is stopping".to_owned()
    };
    let status = to_status(&TablesError::Unable { peer: peer.to_owned(), what });
    Status::with_details(Code::Internal, status.message(), Bytes::copy_from_slice(status.details()))
}

fn admin(extensions: &Extensions, verb: &str) -> Result<(), Status> {
    require(extensions, verb, &[Role::Admin])
}

/// The run that a request names.
fn fence(fence: Option<proto::Fence>) -> Result<Fence, Status> {
    let proto::Fence { job, generation } = fence.ok_or_else(|| to_status(&TablesError::NotBegun))?;
    Ok(Fence { job: JobId(job), generation })
}

impl EmbeddingService {
    /// Serve `node`.
    pub fn new(node: Arc<Node>) -> Self {
        let starting = StartingNode::new(node.options());
        starting.resumed(node);
        Self::starting(Arc::new(starting))
    }

    /// Refuse requests with `Recovering` until `node` has read its rows, and then serve it.
    pub fn starting(node: Arc<StartingNode>) -> Self {
        let memory = MemoryBudget::new(&node.peer, MEMORY_ADVICE);
        Self { node, memory }
    }

    /// Limit the memory for requests in flight to `mib` mebibytes.
    pub fn with_memory(self, mib: u32) -> Self {
        let memory = MemoryBudget::of(mib, &self.node.peer, MEMORY_ADVICE);
        Self { memory, ..self }
    }

    /// Wait for the memory of a request before it is received. A training request stops waiting when its turn comes,
    /// because the requests that hold the memory may wait for this one.
    async fn reserve(
        &self,
        node: &Node,
        metadata: &MetadataMap,
        parts: &[Part],
        training: Option<(Option<proto::Token>, Phase)>,
    ) -> Result<RequestMemory, Status> {
        let deadline = deadline(metadata, node.options().turn_timeout);
        let bytes = parts.iter().map(Part::bytes).sum();
        let Some((token, phase)) = training else { return self.memory.take(bytes, deadline).await };
        let token = convert::token(token).map_err(ChunkError::from)?;
        self.memory.take_at_turn(bytes, deadline, node.turn_comes(token, phase)).await
    }

    /// Run work that computes or waits for a disk on a separate thread, so that it blocks no other request. After a
    /// panic, only this request fails.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, TablesError> + Send + 'static,
    ) -> Result<T, Status> {
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result.map_err(|error| to_status(&error)),
            Err(error) => Err(task_failed(&self.node.peer, &error)),
        }
    }

    fn node(&self) -> Result<Arc<Node>, Status> {
        self.node.node().map(Arc::clone).map_err(|error| to_status(&error))
    }

    async fn serve_lookup(
        &self,
        request: Request<Streaming<proto::LookupRequest>>,
        span: &mut RequestSpan,
    ) -> Result<LookupStream, Status> {
        require(request.extensions(), "Lookup", &[Role::Trainer, Role::Middleware])?;
        let node = self.node()?;
        let (metadata, _, mut stream) = request.into_parts();
        let head = receive::lookup_head(&mut stream).await?;
        span.set_token(head.token);
        let parts = receive::parts_of_rows(&head.parts)?;
        let trains = head.mode == i32::from(proto::Mode::Train);
        let training = trains.then_some((head.token, Phase::Lookup));
        let memory = span.part(MEMORY_WAIT).around(self.reserve(&node, &metadata, &parts, training)).await?;
        let lookup = span.part(RECEIVE).around(receive::lookup_after(head, parts, &mut stream)).await?;
        let turn = match lookup.mode {
            Mode::Train => {
                let admitted = span.part(TURN_WAIT).around(node.admit(lookup.token, Phase::Lookup)).await;
                admitted.map_err(|error| to_status(&error))?
            }
            Mode::Eval | Mode::Infer => None,
        };
        let counts = lookup.mode == Mode::Train || node.serves();
        let read = self.blocking(move || {
            let mut rows = lookup.buffers();
            let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
            let report = node.lookup(turn, &lookup.request(&lookup.tables()), &mut buffers)?;
            Ok((lookup, rows, report))
        });
        let (lookup, rows, report) = span.part("read rows").around(read).await?;
        if counts {
            metrics::looked_up(&report);
        }
        let (token, mode) = (lookup.token, lookup.mode);
        tracing::debug!(%token, step = token.seq, rank = token.rank, ?mode, hits = report.hits, "look-up served");
        let parts = lookup.parts.into_iter().zip(rows).enumerate();
        let chunks = parts.flat_map(|(at, (part, rows))| row_chunks(at as u32, part.format, rows));
        let messages =
            chunks.map(lookup_reply::Part::Rows).chain([lookup_reply::Part::Report(report.into())]);
        let replies = messages.map(move |part| {
            let _until_sent = &memory;
            Ok(proto::LookupReply { part: Some(part) })
        });
        Ok(Box::pin(tokio_stream::iter(replies)))
    }

    async fn serve_push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
        span: &mut RequestSpan,
    ) -> Result<proto::PushReply, Status> {
        require(request.extensions(), "Push", &[Role::Trainer, Role::Middleware])?;
        let node = self.node()?;
        let server = node.options().index;
        let (metadata, _, mut stream) = request.into_parts();
        let head = receive::push_head(&mut stream).await?;
        span.set_token(head.token);
        let parts = receive::parts_of_rows(&head.parts)?;
        let training = Some((head.token, Phase::Push));
        let reserve = self.reserve(&node, &metadata, &parts, training);
        let _memory = span.part(MEMORY_WAIT).around(reserve).await?;
        let push = span.part(RECEIVE).around(receive::push_after(head, parts, &mut stream)).await?;
        let admitted = span.part(TURN_WAIT).around(node.admit(push.token, Phase::Push)).await;
        let turn = admitted.map_err(|error| to_status(&error))?;
        let token = push.token;
        let apply = self.blocking(move || node.push(turn, &push.request(&push.tables())));
        let report = span.part("apply").around(apply).await?;
        metrics::pushed(&report);
        tracing::debug!(%token, step = token.seq, rank = token.rank, rows = report.rows_applied, "push applied");
        let outcome = Some(server_push::Outcome::Applied(report.into()));
        Ok(proto::PushReply { servers: vec![proto::ServerPush { server, outcome }] })
    }

    async fn serve_begin(&self, request: Request<proto::BeginRequest>) -> Result<proto::BeginReply, Status> {
        admin(request.extensions(), "Begin")?;
        let request = request.into_inner();
        let node = self.node()?;
        check_version(node.peer(), &request)?;
        let run: Run = serde_json::from_str(&request.run).map_err(|error| {
            to_status(&TablesError::BadRun { what: format!("the run in the request is invalid: {error}") })
        })?;
        self.blocking(move || node.begin(request.servers, &run, request.check_only)).await?;
        Ok(proto::BeginReply {})
    }

    async fn serve_prepare_snapshot(
        &self,
        request: Request<proto::PrepareSnapshotRequest>,
    ) -> Result<proto::PrepareSnapshotReply, Status> {
        admin(request.extensions(), "PrepareSnapshot")?;
        let proto::PrepareSnapshotRequest { fence: of, number } = request.into_inner();
        let fence = fence(of)?;
        let node = self.node()?;
        self.blocking(move || node.prepare_snapshot(fence, number)).await?;
        Ok(proto::PrepareSnapshotReply {})
    }

    async fn serve_abort_snapshot(
        &self,
        request: Request<proto::AbortSnapshotRequest>,
    ) -> Result<proto::AbortSnapshotReply, Status> {
        admin(request.extensions(), "AbortSnapshot")?;
        let proto::AbortSnapshotRequest { fence: of, number } = request.into_inner();
        let fence = fence(of)?;
        let node = self.node()?;
        self.blocking(move || node.abort_snapshot(fence, number)).await?;
        Ok(proto::AbortSnapshotReply {})
    }

    async fn serve_write_snapshot(
        &self,
        request: Request<proto::WriteSnapshotRequest>,
    ) -> Result<proto::WriteSnapshotReply, Status> {
        admin(request.extensions(), "WriteSnapshot")?;
        let request = request.into_inner();
        let fence = fence(request.fence)?;
        let node = self.node()?;
        if request.check_only {
            self.blocking(move || node.check_storage(fence, &request.directory)).await?;
            return Ok(proto::WriteSnapshotReply::default());
        }
        Ok(self
            .blocking(move || node.write_snapshot(fence, &request.directory, request.number))
            .await?
            .into())
    }

    async fn serve_commit_snapshot(
        &self,
        request: Request<proto::CommitSnapshotRequest>,
    ) -> Result<proto::CommitSnapshotReply, Status> {
        admin(request.extensions(), "CommitSnapshot")?;
        let request = request.into_inner();
        let fence = fence(request.fence)?;
        let node = self.node()?;
        let files: Vec<FileEntry> = request.files.into_iter().map(FileEntry::from).collect();
        self.blocking(move || node.commit_snapshot(fence, request.number, &request.directory, &files))
            .await?;
        Ok(proto::CommitSnapshotReply {})
    }

    async fn serve_restore(
        &self,
        request: Request<proto::RestoreRequest>,
    ) -> Result<proto::RestoreReply, Status> {
        admin(request.extensions(), "Restore")?;
        let request = request.into_inner();
        let fence = fence(request.fence)?;
        let node = self.node()?;
        let files: Vec<FileEntry> = request.files.into_iter().map(FileEntry::from).collect();
        self.blocking(move || node.restore(fence, &request.directory, &files, request.check_only)).await?;
        Ok(proto::RestoreReply {})
    }

    async fn serve_stats(&self) -> Result<proto::StatsReply, Status> {
        let node = self.node()?;
        let asked = Arc::clone(&node);
        let stats = self.blocking(move || asked.stats()).await?;
        let stats = serde_json::to_string(&stats).map_err(|error| Status::internal(error.to_string()))?;
        let options = node.options();
        let answered =
            vec![proto::ServerStats { server: options.index, address: options.address.clone(), stats }];
        Ok(proto::StatsReply { servers: options.servers, answered })
    }

    async fn serve_clear(&self, request: Request<proto::ClearRequest>) -> Result<proto::ClearReply, Status> {
        admin(request.extensions(), "Clear")?;
        let fence = fence(request.into_inner().fence)?;
        let node = self.node()?;
        self.blocking(move || node.clear(fence)).await?;
        Ok(proto::ClearReply {})
    }
}

#[tonic::async_trait]
impl EmbeddingServer for EmbeddingService {
    type LookupStream = LookupStream;

    async fn begin(
        &self,
        request: Request<proto::BeginRequest>,
    ) -> Result<Response<proto::BeginReply>, Status> {
        Timer::start("begin").end(self.serve_begin(request).await).map(Response::new)
    }

    async fn lookup(
        &self,
        request: Request<Streaming<proto::LookupRequest>>,
    ) -> Result<Response<LookupStream>, Status> {
        let timer = Timer::start("lookup");
        let mut span = RequestSpan::of(request.metadata(), "lookup");
        let rows = self.serve_lookup(request, &mut span).await;
        timer.end(span.end(rows)).map(Response::new)
    }

    async fn push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
    ) -> Result<Response<proto::PushReply>, Status> {
        let timer = Timer::start("push");
        let mut span = RequestSpan::of(request.metadata(), "push");
        let reply = self.serve_push(request, &mut span).await;
        timer.end(span.end(reply)).map(Response::new)
    }

    async fn prepare_snapshot(
        &self,
        request: Request<proto::PrepareSnapshotRequest>,
    ) -> Result<Response<proto::PrepareSnapshotReply>, Status> {
        Timer::start("prepare_snapshot").end(self.serve_prepare_snapshot(request).await).map(Response::new)
    }

    async fn abort_snapshot(
        &self,
        request: Request<proto::AbortSnapshotRequest>,
    ) -> Result<Response<proto::AbortSnapshotReply>, Status> {
        Timer::start("abort_snapshot").end(self.serve_abort_snapshot(request).await).map(Response::new)
    }

    async fn write_snapshot(
        &self,
        request: Request<proto::WriteSnapshotRequest>,
    ) -> Result<Response<proto::WriteSnapshotReply>, Status> {
        Timer::start("write_snapshot").end(self.serve_write_snapshot(request).await).map(Response::new)
    }

    async fn commit_snapshot(
        &self,
        request: Request<proto::CommitSnapshotRequest>,
    ) -> Result<Response<proto::CommitSnapshotReply>, Status> {
        Timer::start("commit_snapshot").end(self.serve_commit_snapshot(request).await).map(Response::new)
    }

    async fn restore(
        &self,
        request: Request<proto::RestoreRequest>,
    ) -> Result<Response<proto::RestoreReply>, Status> {
        Timer::start("restore").end(self.serve_restore(request).await).map(Response::new)
    }

    async fn stats(
        &self,
        _request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        Timer::start("stats").end(self.serve_stats().await).map(Response::new)
    }

    async fn clear(
        &self,
        request: Request<proto::ClearRequest>,
    ) -> Result<Response<proto::ClearReply>, Status> {
        Timer::start("clear").end(self.serve_clear(request).await).map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use persia_wire::error::{from_status, is_transient};

    use super::*;

    #[tokio::test]
    async fn a_request_that_panicked_names_the_process_and_its_log() {
        let ended: Result<(), JoinError> =
            tokio::task::spawn_blocking(|| panic!("an index out of range")).await;
        let status = task_failed("server 0 of 1 (here)", &ended.unwrap_err());
        assert_eq!(status.code(), Code::Internal);
        assert!(is_transient(&status), "the caller retries");
        let error = from_status("middleware at host:7777", &status);
        let text = error.to_string();
        let start = "server 0 of 1 (here) cannot serve the request: it failed with a panic, which is a bug: ";
        assert!(text.starts_with(start) && text.ends_with("; see its log, and report the bug"), "{text}");
        assert!(text.contains("an index out of range"), "{text}");
        let cancelled = tokio::spawn(std::future::pending::<()>());
        cancelled.abort();
        let status = task_failed("server 0 of 1 (here)", &cancelled.await.unwrap_err());
        assert!(status.message().ends_with("it is stopping"), "{status}");
    }
}
