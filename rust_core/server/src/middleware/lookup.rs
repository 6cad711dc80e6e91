//! [`Lookup`]: sends the ids of one look-up to the servers, and sends the rows, pooled if the caller asks for
//! it, to the caller.

use std::sync::Arc;

use futures_util::Stream;
use persia_types::tables::LookupReport;
use persia_wire::chunk::ChunkError;
use persia_wire::error::to_status;
use persia_wire::parts::Split;
use persia_wire::trace::RequestSpan;
use persia_wire::{proto, receive};
use proto::{lookup_reply, lookup_request};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::fanout::{Fanout, SlowestServer};
use super::pooled::{AllCsr, CollectedRows, of_samples};
use super::{SERVER_QUEUE, ServerClient, bad_reply, late, named, until};
use crate::service::task_failed;

type Out = mpsc::Sender<Result<proto::LookupReply, Status>>;
type ToServers = Fanout<proto::LookupRequest>;

/// One look-up.
pub(super) struct Lookup {
    pub(super) servers: Vec<Arc<ServerClient>>,
    pub(super) head: proto::LookupHead,
    pub(super) split: Arc<Split>,
    pub(super) csr: AllCsr,
    pub(super) deadline: Instant,
    /// The name of this middleware.
    pub(super) peer: String,
}

impl Lookup {
    /// Run the look-up and send the rows to `out`. The first server that fails ends the look-up.
    pub(super) async fn run(
        self,
        incoming: impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin,
        out: &Out,
        span: &RequestSpan,
    ) -> Result<LookupReport, Status> {
        // The calls are dropped together with the future, so they end with the look-up.
        let mut calls = JoinSet::new();
        let mut fanout = ToServers::new(self.deadline);
        let (keep, kept) = mpsc::channel(SERVER_QUEUE);
        for server in 0..self.servers.len() {
            let head = proto::LookupHead { parts: self.split.parts_of(server), ..self.head.clone() };
            let messages = fanout.open(proto::LookupRequest { part: Some(lookup_request::Part::Head(head)) });
            let (servers, split) = (self.servers.clone(), Arc::clone(&self.split));
            let sink = RowSink { out: out.clone(), keep: keep.clone() };
            let request = Call { servers, index: server, span: span.call("lookup of a server", server) };
            calls.spawn(request.run(split, messages, sink, fanout.slowest(), self.deadline));
        }
        drop(keep);
        let sum = async {
            let mut sum = LookupReport::default();
            while let Some(report) = calls.join_next().await {
                sum += report.map_err(|error| task_failed(&self.peer, &error))??;
            }
            Ok(sum)
        };
        let kept = CollectedRows::receive(&self.split, kept);
        let ((), kept, report) = tokio::try_join!(self.feed(incoming, fanout), kept, sum)?;
        let sent = timeout_at(self.deadline, kept.send(self.split, self.csr, out, &self.peer)).await;
        sent.map_err(|_| {
            Status::deadline_exceeded("the caller did not read its samples before the deadline")
        })??;
        Ok(report)
    }

    async fn feed(
        &self,
        mut incoming: impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin,
        fanout: ToServers,
    ) -> Result<(), Status> {
        while let Some(message) = receive::next(&mut incoming).await? {
            let Some(lookup_request::Part::Ids(chunk)) = message.part else {
                return Err(Status::invalid_argument(
                    "unexpected message: after the head and the lists of samples, a look-up has only ids",
                ));
            };
            for (server, piece) in self.split.ids(chunk)? {
                let message = proto::LookupRequest { part: Some(lookup_request::Part::Ids(piece)) };
                fanout.send(server, message).await;
            }
        }
        Ok(())
    }
}

/// Sends rows to the caller, or collects them for pooling.
struct RowSink {
    out: Out,
    keep: mpsc::Sender<proto::Chunk>,
}

impl RowSink {
    async fn send(&self, split: &Split, chunk: proto::Chunk) -> Result<(), Status> {
        let sent = if of_samples(split, &chunk) {
            self.keep.send(chunk).await.is_ok()
        } else {
            let rows = Some(lookup_reply::Part::Rows(chunk));
            self.out.send(Ok(proto::LookupReply { part: rows })).await.is_ok()
        };
        if sent { Ok(()) } else { Err(Status::cancelled("the caller disconnected")) }
    }
}

/// The call to one server.
struct Call {
    servers: Vec<Arc<ServerClient>>,
    index: usize,
    span: RequestSpan,
}

impl Call {
    async fn run(
        self,
        split: Arc<Split>,
        messages: mpsc::Receiver<proto::LookupRequest>,
        sink: RowSink,
        slowest: SlowestServer,
        deadline: Instant,
    ) -> Result<LookupReport, Status> {
        let Self { servers, index, span } = self;
        let server: &ServerClient = &servers[index];
        let mut request = until(deadline, ReceiverStream::new(messages));
        span.inject(request.metadata_mut());
        let called = async {
            let replies = server.data().lookup(request).await;
            let mut replies = replies.map_err(|status| named(server, &status))?;
            let mut report = None;
            while let Some(reply) = replies.message().await.map_err(|status| named(server, &status))? {
                match reply.part {
                    Some(lookup_reply::Part::Rows(chunk)) => {
                        let rows =
                            split.rows(index, chunk).map_err(|error| bad_reply(&server.peer, error))?;
                        sink.send(&split, rows).await?;
                    }
                    Some(lookup_reply::Part::Report(sent)) => report = Some(sent.into()),
                    None => {}
                }
            }
            let incomplete = || ChunkError::CutShort { what: format!("{} sent no report", server.peer) };
            Ok(report.ok_or_else(incomplete)?)
        };
        span.end(match timeout_at(deadline, called).await {
            Ok(report) => report,
            Err(_) => Err(to_status(&late(&servers[slowest.or(index)], "look-up"))),
        })
    }
}
