//! [`MiddlewareService`]: divides every request among the servers and puts their answers together.
//!
//! Where a caller wants samples pooled it does the caller's arithmetic besides, with the caller's kernels.
//!
//! It holds nothing between two calls and tries each once: only the caller knows whether a retry makes sense. Every
//! server gets every request, also one without ids for it, so that each knows what was asked of the job.

mod admin;
mod fleet;
mod inlets;
mod lookup;
mod pooled;
mod push;

use std::sync::Arc;
use std::time::Duration;

use persia_types::TablesError;
use persia_wire::auth::{Role, require};
use persia_wire::error::{FORGOTTEN, from_status, to_status};
use persia_wire::parts::Split;
use persia_wire::proto::middleware_server::Middleware;
use persia_wire::samples::{Verb, receive_uses};
use persia_wire::{proto, receive};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

pub use fleet::{Client, Link, Member, Servers};

use crate::metrics::Timer;

/// Messages under way to one server, and to the caller.
const INLET: usize = 8;
const OUTLET: usize = 16;

/// See the module's documentation.
#[derive(Clone)]
pub struct MiddlewareService {
    servers: Arc<Servers>,
    /// What a request may take whose caller does not say.
    timeout: Duration,
    peer: String,
    room: pooled::Room,
}

impl MiddlewareService {
    /// Serve what `servers` hold; `peer` is what messages call it.
    pub fn new(servers: Arc<Servers>, timeout: Duration, peer: String) -> Self {
        Self { servers, timeout, peer, room: pooled::Room::new() }
    }

    async fn start_lookup(
        &self,
        request: Request<Streaming<proto::LookupRequest>>,
    ) -> Result<ReceiverStream<Result<proto::LookupReply, Status>>, Status> {
        let timer = Timer::start("lookup");
        let started = async {
            require(request.extensions(), "Lookup", &[Role::Trainer])?;
            let deadline = deadline(request.metadata(), self.timeout);
            let members = self.servers.all().await.map_err(|error| to_status(&error))?;
            let mut incoming = request.into_inner();
            let head = receive::lookup_head(&mut incoming).await?;
            let split = Split::new(&head.parts, members.len()).map_err(|error| to_status(&error))?;
            let chunk = |message: proto::LookupRequest| match message.part {
                Some(proto::lookup_request::Part::Uses(chunk)) => Some(chunk),
                _ => None,
            };
            let room = self.room.take(split.parts(), Verb::Lookup, deadline).await?;
            let uses = receive_uses(&mut incoming, Verb::Lookup, split.parts(), chunk);
            let late = |_| Status::deadline_exceeded("the look-up did not come whole before its deadline");
            let uses = timeout_at(deadline, uses).await.map_err(late)??;
            Ok((lookup::Lookup { members, head, split: Arc::new(split), uses, deadline }, incoming, room))
        };
        let (lookup, incoming, room) = match started.await {
            Ok(started) => started,
            Err(status) => return timer.end(Err(status)),
        };
        let (out, replies) = mpsc::channel(OUTLET);
        let servers = Arc::clone(&self.servers);
        let deadline = lookup.deadline;
        tokio::spawn(async move {
            let result = tokio::select! {
                result = lookup.run(incoming, &out) => timer.end(result),
                () = out.closed() => return,
            };
            look_again_after(&servers, result.as_ref().err());
            let last = result.map(|report| proto::LookupReply {
                part: Some(proto::lookup_reply::Part::Report(report.into())),
            });
            drop(room);
            // A caller that is gone, or does not read, needs no report.
            let _ = timeout_at(deadline, out.send(last)).await;
        });
        Ok(ReceiverStream::new(replies))
    }

    async fn serve_push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
    ) -> Result<proto::PushReply, Status> {
        require(request.extensions(), "Push", &[Role::Trainer])?;
        let deadline = deadline(request.metadata(), self.timeout);
        let members = self.servers.all().await.map_err(|error| to_status(&error))?;
        let mut incoming = request.into_inner();
        let head = receive::push_head(&mut incoming).await?;
        let split = Split::new(&head.parts, members.len()).map_err(|error| to_status(&error))?;
        let chunk = |message: proto::PushRequest| match message.part {
            Some(proto::push_request::Part::Uses(chunk)) => Some(chunk),
            _ => None,
        };
        let _room = self.room.take(split.parts(), Verb::Push, deadline).await?;
        let uses = receive_uses(&mut incoming, Verb::Push, split.parts(), chunk);
        let uses = timeout_at(deadline, uses).await.map_err(push::late_caller)??;
        let push = push::Push { members, head, split: Arc::new(split), uses, deadline };
        let reply = push.run(incoming).await?;
        if push::first_failure(&reply).is_some() {
            self.servers.look_again();
        }
        Ok(reply)
    }
}

/// The announcements are worth reading when a server was not reached.
fn look_again_after(servers: &Servers, status: Option<&Status>) {
    if status.is_some_and(|status| status.code() == tonic::Code::Unavailable) {
        servers.look_again();
    }
}

/// The error of a server's answer, with the server's name, as a status for the caller.
fn named(member: &Member, status: &Status) -> Status {
    to_status(&error_of(member, status))
}

fn error_of(member: &Member, status: &Status) -> TablesError {
    match from_status(&member.peer, status) {
        TablesError::BadRun { what } => TablesError::BadRun { what: format!("{}: {what}", member.peer) },
        TablesError::NotBegun => TablesError::Lost { peer: member.peer.clone(), what: FORGOTTEN.into() },
        other => other,
    }
}

/// A server did not end a call in time.
fn late(member: &Member, what: &str) -> TablesError {
    TablesError::Unreachable {
        peer: member.peer.clone(),
        what: format!("no answer to a {what} before its deadline"),
    }
}

/// A message that a server serves before `deadline`, or gives up.
fn until<T>(deadline: Instant, message: T) -> Request<T> {
    let left = deadline.saturating_duration_since(Instant::now());
    let mut request = Request::new(message);
    // A little more, because tonic's own end of a call does not say who was waited for.
    request.set_timeout(left + left / 20 + Duration::from_millis(100));
    request
}

/// When servers must have answered: the caller's time, or `otherwise`. A fifth of the caller's time is kept, so that the
/// name of a server that is silent still reaches it.
fn deadline(metadata: &MetadataMap, otherwise: Duration) -> Instant {
    Instant::now() + grpc_timeout(metadata).map_or(otherwise, |left| left.mul_f32(0.8))
}

/// The time a caller leaves, by gRPC's header: up to eight digits and a unit.
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
        self.start_lookup(request).await.map(Response::new)
    }

    async fn push(
        &self,
        request: Request<Streaming<proto::PushRequest>>,
    ) -> Result<Response<proto::PushReply>, Status> {
        let timer = Timer::start("push");
        let reply = self.serve_push(request).await;
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
        request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        Timer::start("stats").end(self.serve_stats(request).await).map(Response::new)
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
