//! [`MiddlewareService`]: divides every request among the servers and merges their responses.
//!
//! If the caller asks for pooled samples, the middleware pools them. It uses the same kernels as a caller that pools.
//!
//! A middleware keeps no state of the job between calls and tries each call once, because only the caller knows
//! whether to retry. Every server gets every request, even if it has none of the ids, so that each server sees all
//! requests of the job. Only a push may name the servers that get it.
//!
//! * [`lookup`], [`push`], [`admin`]: requests
//! * [`pooled`]: pools the rows of samples, and sums the gradients of samples
//! * [`fanout`]: the queues of one request to the servers
//! * [`server_pool`]: the known servers

mod admin;
mod fanout;
mod lookup;
mod pooled;
mod push;
mod server_pool;

use std::sync::Arc;
use std::time::Duration;

use persia_types::{TablesError, Token};
use persia_wire::auth::{Role, require};
use persia_wire::chunk::ChunkError;
use persia_wire::csr::receive_csr;
use persia_wire::error::{FORGOTTEN, from_status, to_status};
use persia_wire::parts::Split;
use persia_wire::proto::middleware_server::Middleware;
use persia_wire::samples::RequestKind;
use persia_wire::trace::RequestSpan;
use persia_wire::{proto, receive};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

pub use server_pool::{Link, ServerClient, ServerPool};

use crate::metrics::Timer;
use crate::request_memory::MemoryBudget;

/// The capacity of the queue to each server and of the queue to the caller, in messages.
const SERVER_QUEUE: usize = 8;
const CALLER_QUEUE: usize = 16;

/// Serves the middleware's methods.
#[derive(Clone)]
pub struct MiddlewareService {
    servers: Arc<ServerPool>,
    /// The timeout of a request whose caller sets none.
    timeout: Duration,
    peer: String,
    memory: MemoryBudget,
}

impl MiddlewareService {
    /// Create a middleware for `servers`. `peer` is its name in messages.
    pub fn new(servers: Arc<ServerPool>, timeout: Duration, peer: String) -> Self {
        let memory = MemoryBudget::new(&peer, "start more middlewares");
        Self { servers, timeout, peer, memory }
    }

    async fn serve_lookup(
        &self,
        request: Request<Streaming<proto::LookupRequest>>,
    ) -> Result<ReceiverStream<Result<proto::LookupReply, Status>>, Status> {
        let timer = Timer::start("lookup");
        let mut span = RequestSpan::of(request.metadata(), "lookup");
        let started = async {
            require(request.extensions(), "Lookup", &[Role::Trainer])?;
            let deadline = deadline(request.metadata(), self.timeout);
            let servers = self.servers.all().await.map_err(|error| to_status(&error))?;
            let mut incoming = request.into_inner();
            let head = receive::lookup_head(&mut incoming).await?;
            span.set_token(head.token);
            let split = Split::new(&head.parts, servers.len()).map_err(|error| to_status(&error))?;
            let chunk = |message: proto::LookupRequest| match message.part {
                Some(proto::lookup_request::Part::Csr(chunk)) => Some(chunk),
                _ => None,
            };
            let memory =
                self.memory.take(pooled::kept_bytes(split.parts(), RequestKind::Lookup), deadline).await?;
            let csr = receive_csr(&mut incoming, RequestKind::Lookup, split.parts(), chunk);
            let late =
                |_| Status::deadline_exceeded("the look-up did not arrive completely before its deadline");
            let csr = timeout_at(deadline, csr).await.map_err(late)??;
            let (split, peer) = (Arc::new(split), self.peer.clone());
            Ok((lookup::Lookup { servers, head, split, csr, deadline, peer }, incoming, memory))
        };
        let (lookup, incoming, memory) = match started.await {
            Ok(started) => started,
            Err(status) => return timer.end(span.end(Err(status))),
        };
        tracing::debug!(
            token = shown(lookup.head.token),
            servers = lookup.servers.len(),
            "look-up forwarded"
        );
        let (out, replies) = mpsc::channel(CALLER_QUEUE);
        let servers = Arc::clone(&self.servers);
        let deadline = lookup.deadline;
        tokio::spawn(async move {
            let result = tokio::select! {
                result = lookup.run(incoming, &out, &span) => timer.end(span.end(result)),
                () = out.closed() => return,
            };
            refresh_after(&servers, result.as_ref().err());
            let last = result.map(|report| proto::LookupReply {
                part: Some(proto::lookup_reply::Part::Report(report.into())),
            });
            drop(memory);
            // A failure to send is ignored: the caller has disconnected or does not read.
            let _ = timeout_at(deadline, out.send(last)).await;
        });
        Ok(ReceiverStream::new(replies))
    }

    async fn serve_push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
        span: &mut RequestSpan,
    ) -> Result<proto::PushReply, Status> {
        require(request.extensions(), "Push", &[Role::Trainer])?;
        let deadline = deadline(request.metadata(), self.timeout);
        let servers = self.servers.all().await.map_err(|error| to_status(&error))?;
        let mut incoming = request.into_inner();
        let head = receive::push_head(&mut incoming).await?;
        span.set_token(head.token);
        let split = Split::new(&head.parts, servers.len()).map_err(|error| to_status(&error))?;
        let chunk = |message: proto::PushRequest| match message.part {
            Some(proto::push_request::Part::Csr(chunk)) => Some(chunk),
            _ => None,
        };
        let _memory =
            self.memory.take(pooled::kept_bytes(split.parts(), RequestKind::Push), deadline).await?;
        let csr = receive_csr(&mut incoming, RequestKind::Push, split.parts(), chunk);
        let csr = timeout_at(deadline, csr).await.map_err(push::late_caller)??;
        tracing::debug!(token = shown(head.token), servers = servers.len(), "push forwarded");
        let (split, peer) = (Arc::new(split), self.peer.clone());
        let push = push::Push { servers, head, split, csr, deadline, peer };
        let reply = push.run(incoming, span).await?;
        if push::first_failure(&reply).is_some() {
            self.servers.refresh();
        }
        Ok(reply)
    }
}

/// Format the token of a request for logs. The result is empty if there is no token.
fn shown(token: Option<proto::Token>) -> String {
    token.map(|token| Token::from(token).to_string()).unwrap_or_default()
}

/// Read the announcements again if a server could not be reached.
fn refresh_after(servers: &ServerPool, status: Option<&Status>) {
    if status.is_some_and(|status| status.code() == tonic::Code::Unavailable) {
        servers.refresh();
    }
}

/// Convert the error of a server to a status for the caller that names the server.
fn named(server: &ServerClient, status: &Status) -> Status {
    to_status(&error_of(server, status))
}

fn error_of(server: &ServerClient, status: &Status) -> TablesError {
    match from_status(&server.peer, status) {
        TablesError::BadRun { what } => TablesError::BadRun { what: format!("{}: {what}", server.peer) },
        TablesError::NotBegun => TablesError::Lost { peer: server.peer.clone(), what: FORGOTTEN.into() },
        TablesError::Recovering { done, total, .. } => {
            TablesError::Recovering { peer: server.peer.clone(), done, total }
        }
        other => other,
    }
}

/// The error for an invalid chunk in the reply of a server.
fn bad_reply(peer: &str, error: ChunkError) -> Status {
    let what = match error {
        // The text of `BadShape` says that a request is malformed, so only `what` is used.
        ChunkError::Malformed(TablesError::BadShape { what }) => what,
        ChunkError::Malformed(error) => error.to_string(),
        damaged => return damaged.into(),
    };
    to_status(&TablesError::Incompatible { peer: peer.into(), what: format!("its reply is invalid: {what}") })
}

/// The error for a server that did not respond to a call before the deadline.
fn late(server: &ServerClient, what: &str) -> TablesError {
    TablesError::Unreachable {
        peer: server.peer.clone(),
        what: format!("no response to the {what} before its deadline"),
    }
}

/// Create a request that the server cancels shortly after `deadline`.
fn until<T>(deadline: Instant, message: T) -> Request<T> {
    let left = deadline.saturating_duration_since(Instant::now());
    let mut request = Request::new(message);
    // The timeout is slightly longer than the wait of this middleware, whose error names the server. Tonic's error
    // does not name it.
    request.set_timeout(left + left / 20 + Duration::from_millis(100));
    request
}

/// The deadline of all waits of a request. It is 80 % of the caller's timeout from now, or `default` if the caller
/// sets no timeout. In the remaining time, an error that states the reason can reach the caller.
pub(crate) fn deadline(metadata: &MetadataMap, default: Duration) -> Instant {
    Instant::now() + grpc_timeout(metadata).map_or(default, |left| left.mul_f32(0.8))
}

/// The timeout of the caller in the gRPC header, which has up to eight digits and a unit; None if it is missing or
/// invalid.
fn grpc_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok().filter(|_| number.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[tonic::async_trait]
impl Middleware for MiddlewareService {
    type LookupStream = ReceiverStream<Result<proto::LookupReply, Status>>;

    async fn begin(
        &self,
        request: Request<proto::BeginRequest>,
    ) -> Result<Response<proto::BeginReply>, Status> {
        Timer::start("begin").end(self.serve_begin(request).await).map(Response::new)
    }

    async fn lookup(
        &self,
        request: Request<Streaming<proto::LookupRequest>>,
    ) -> Result<Response<Self::LookupStream>, Status> {
        self.serve_lookup(request).await.map(Response::new)
    }

    async fn push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
    ) -> Result<Response<proto::PushReply>, Status> {
        let timer = Timer::start("push");
        let mut span = RequestSpan::of(request.metadata(), "push");
        let reply = self.serve_push(request, &mut span).await;
        span.note(&reply);
        let reply = match reply.as_ref().ok().and_then(push::first_failure) {
            Some(error) => {
                timer.end_partly_failed(to_status(&error).code());
                reply
            }
            None => timer.end(reply),
        };
        reply.map(Response::new)
    }

    async fn prepare_snapshot(
        &self,
        request: Request<proto::PrepareSnapshotRequest>,
    ) -> Result<Response<proto::PrepareSnapshotReply>, Status> {
        Timer::start("prepare_snapshot").end(self.forward(request).await).map(Response::new)
    }

    async fn abort_snapshot(
        &self,
        request: Request<proto::AbortSnapshotRequest>,
    ) -> Result<Response<proto::AbortSnapshotReply>, Status> {
        Timer::start("abort_snapshot").end(self.forward(request).await).map(Response::new)
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
        Timer::start("commit_snapshot").end(self.forward(request).await).map(Response::new)
    }

    async fn restore(
        &self,
        request: Request<proto::RestoreRequest>,
    ) -> Result<Response<proto::RestoreReply>, Status> {
        Timer::start("restore").end(self.serve_restore(request).await).map(Response::new)
    }

    async fn stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        Timer::start("stats").end(self.serve_stats(request).await).map(Response::new)
    }

    async fn clear(
        &self,
        request: Request<proto::ClearRequest>,
    ) -> Result<Response<proto::ClearReply>, Status> {
        Timer::start("clear").end(self.forward(request).await).map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callers_deadline_is_read() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            grpc_timeout(&metadata)
        };
        assert_eq!(read("30S"), Some(Duration::from_secs(30)));
        assert_eq!(read("99999999u"), Some(Duration::from_micros(99_999_999)));
        for bad in ["", "S", "1", "1x", "999999999S", "-1S"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
