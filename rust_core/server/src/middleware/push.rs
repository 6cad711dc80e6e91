//! [`Push`]: sends the gradients of one push to the servers, and returns the outcome on each server. Gradients of
//! samples are first summed for each id.

use std::sync::Arc;

use futures_util::Stream;
use persia_types::TablesError;
use persia_wire::collect::Collector;
use persia_wire::error::{from_failure, to_failure};
use persia_wire::parts::Split;
use persia_wire::trace::RequestSpan;
use persia_wire::{proto, receive};
use proto::{push_request, server_push};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::fanout::{Fanout, SlowestServer};
use super::pooled::{AllCsr, of_samples, send_sums};
use super::{ServerClient, error_of, late, shown, until};
use crate::service::task_failed;

type ToServers = Fanout<proto::PushRequest>;

/// One push.
pub(super) struct Push {
    pub(super) servers: Vec<Arc<ServerClient>>,
    pub(super) head: proto::PushHead,
    pub(super) split: Arc<Split>,
    pub(super) csr: AllCsr,
    pub(super) deadline: Instant,
    /// The name of this middleware.
    pub(super) peer: String,
}

impl Push {
    /// Run the push. If one server fails, the others still apply their parts. If the caller disconnects
    /// before it has sent everything, no server applies its part.
    pub(super) async fn run(
        mut self,
        incoming: impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin,
        span: &RequestSpan,
    ) -> Result<proto::PushReply, Status> {
        let csr = std::mem::take(&mut self.csr);
        let called = |server: usize| self.head.only.is_empty() || self.head.only.contains(&(server as u32));
        // The calls are dropped together with the future. This cancels calls that have not ended. A server
        // whose messages are incomplete applies nothing.
        let mut calls = JoinSet::new();
        let mut fanout = ToServers::new(self.deadline);
        for server in 0..self.servers.len() {
            if !called(server) {
                fanout.skip();
                continue;
            }
            let parts = self.split.parts_of(server);
            let head = proto::PushHead { parts, only: Vec::new(), ..self.head.clone() };
            let messages = fanout.open(proto::PushRequest { part: Some(push_request::Part::Head(head)) });
            let (servers, slowest, deadline) = (self.servers.clone(), fanout.slowest(), self.deadline);
            let called = span.call("push of a server", server);
            calls.spawn(async move {
                (server, call(&servers, server, messages, &slowest, deadline, called).await)
            });
        }
        let outcomes = async {
            let mut servers = Vec::with_capacity(calls.len());
            while let Some(done) = calls.join_next().await {
                let (server, outcome) = done.map_err(|error| task_failed(&self.peer, &error))?;
                let outcome = Some(match outcome {
                    Ok(report) => server_push::Outcome::Applied(report),
                    Err(error) => {
                        tracing::warn!(
                            server,
                            token = shown(self.head.token),
                            "push not acknowledged: {error}"
                        );
                        server_push::Outcome::Failed(to_failure(&error))
                    }
                });
                servers.push(proto::ServerPush { server: server as u32, outcome });
            }
            servers.sort_unstable_by_key(|server| server.server);
            Ok(servers)
        };
        let feed = async {
            let gradients = self.feed(incoming, &fanout).await?;
            // Dropping the queues lets the calls end.
            send_sums(&self.split, csr, gradients, fanout, &self.peer).await
        };
        let ((), servers) = tokio::try_join!(feed, outcomes)?;
        Ok(proto::PushReply { servers })
    }

    /// Forward the messages to the servers, except the gradients of samples, which are returned. The result is empty if
    /// the push ended early.
    async fn feed(
        &self,
        mut incoming: impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin,
        fanout: &ToServers,
    ) -> Result<Vec<Vec<f32>>, Status> {
        let mut gradients = Collector::sample_gradients(self.split.parts());
        loop {
            if fanout.all_closed() {
                return Ok(Vec::new());
            }
            let message = match timeout_at(self.deadline, receive::next(&mut incoming)).await {
                Ok(message) => message?,
                // A server has ended its call, so the caller did not cause the delay. The calls to the servers report
                // the reason.
                Err(_) if fanout.any_closed() => return Ok(Vec::new()),
                Err(late) => return Err(late_caller(late)),
            };
            let Some(message) = message else { return Ok(gradients.finish()?) };
            let pieces: Vec<_> = match message.part {
                Some(push_request::Part::Ids(chunk)) => {
                    let pieces = self.split.ids(chunk)?.into_iter();
                    pieces.map(|(server, piece)| (server, push_request::Part::Ids(piece))).collect()
                }
                Some(push_request::Part::Gradients(chunk)) if of_samples(&self.split, &chunk) => {
                    gradients.take(&chunk)?;
                    continue;
                }
                Some(push_request::Part::Gradients(chunk)) => {
                    let pieces = self.split.gradients(chunk)?.into_iter();
                    pieces.map(|(server, piece)| (server, push_request::Part::Gradients(piece))).collect()
                }
                _ => {
                    let what = "unexpected message: after the head and the lists of samples, a push has only \
                                ids and gradients";
                    return Err(Status::invalid_argument(what));
                }
            };
            for (server, piece) in pieces {
                fanout.send(server, proto::PushRequest { part: Some(piece) }).await;
            }
        }
    }
}

/// The error for a push that the caller did not complete before its deadline.
pub(super) fn late_caller(_: Elapsed) -> Status {
    Status::deadline_exceeded("the push did not arrive completely before its deadline")
}

/// The error of the first server that did not apply its part, if any.
pub(super) fn first_failure(reply: &proto::PushReply) -> Option<TablesError> {
    reply.servers.iter().find_map(|server| match &server.outcome {
        Some(server_push::Outcome::Failed(failure)) => Some(from_failure("a server", failure)),
        _ => None,
    })
}

async fn call(
    servers: &[Arc<ServerClient>],
    index: usize,
    messages: mpsc::Receiver<proto::PushRequest>,
    slowest: &SlowestServer,
    deadline: Instant,
    span: RequestSpan,
) -> Result<proto::PushReport, TablesError> {
    let server: &ServerClient = &servers[index];
    let mut request = until(deadline, ReceiverStream::new(messages));
    span.inject(request.metadata_mut());
    let mut rpc = server.data();
    let reply = match timeout_at(deadline, rpc.push(request)).await {
        Ok(reply) => reply.map_err(|status| error_of(server, &status)),
        Err(_) => Err(late(&servers[slowest.or(index)], "push")),
    };
    let reply = span.end(reply)?;
    match reply.servers.into_iter().next().and_then(|server| server.outcome) {
        Some(server_push::Outcome::Applied(report)) => Ok(report),
        Some(server_push::Outcome::Failed(failure)) => Err(from_failure(&server.peer, &failure)),
        None => Err(TablesError::Incompatible {
            peer: server.peer.clone(),
            what: "it replied to a push without stating the outcome".into(),
        }),
    }
}
