//! One look-up: ids to the servers, rows to the caller as they come, or pooled.

use std::sync::Arc;

use futures_util::Stream;
use persia_types::tables::LookupReport;
use persia_wire::chunk::ChunkError;
use persia_wire::error::to_status;
use persia_wire::parts::Split;
use persia_wire::{proto, receive};
use proto::{lookup_reply, lookup_request};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::inlets::{HeldUp, Inlets};
use super::pooled::{AllUses, Kept, of_samples};
use super::{INLET, Member, late, named, until};

type Out = mpsc::Sender<Result<proto::LookupReply, Status>>;
type ToServers = Inlets<proto::LookupRequest>;

/// See the module's documentation.
pub(super) struct Lookup {
    pub(super) members: Vec<Arc<Member>>,
    pub(super) head: proto::LookupHead,
    pub(super) split: Arc<Split>,
    pub(super) uses: AllUses,
    pub(super) deadline: Instant,
}

impl Lookup {
    /// Send rows to `out`; the first server that fails ends it.
    pub(super) async fn run(
        self,
        incoming: impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin,
        out: &Out,
    ) -> Result<LookupReport, Status> {
        // Dropped with the future: a look-up that ended leaves no call behind.
        let mut calls = JoinSet::new();
        let mut inlets = ToServers::new(self.deadline);
        let (keep, kept) = mpsc::channel(INLET);
        for server in 0..self.members.len() {
            let head = proto::LookupHead { parts: self.split.parts_of(server), ..self.head.clone() };
            let messages = inlets.open(proto::LookupRequest { part: Some(lookup_request::Part::Head(head)) });
            let (members, split) = (self.members.clone(), Arc::clone(&self.split));
            let outlet = Outlet { out: out.clone(), keep: keep.clone() };
            calls.spawn(call(members, server, split, messages, outlet, inlets.held_up(), self.deadline));
        }
        drop(keep);
        let sum = async {
            let mut sum = LookupReport::default();
            while let Some(report) = calls.join_next().await {
                sum += report.map_err(|error| Status::internal(format!("a look-up failed: {error}")))??;
            }
            Ok(sum)
        };
        let kept = Kept::all(&self.split, kept);
        let ((), kept, report) = tokio::try_join!(self.feed(incoming, inlets), kept, sum)?;
        let sent = timeout_at(self.deadline, kept.send(self.split, self.uses, out)).await;
        sent.map_err(|_| Status::deadline_exceeded("the caller did not read its samples in time"))??;
        Ok(report)
    }

    async fn feed(
        &self,
        mut incoming: impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin,
        inlets: ToServers,
    ) -> Result<(), Status> {
        while let Some(message) = receive::next(&mut incoming).await? {
            let Some(lookup_request::Part::Ids(chunk)) = message.part else {
                return Err(Status::invalid_argument(
                    "after the head and uses of a look-up only ids may come",
                ));
            };
            for (server, piece) in self.split.ids(chunk)? {
                let message = proto::LookupRequest { part: Some(lookup_request::Part::Ids(piece)) };
                inlets.send(server, message).await;
            }
        }
        Ok(())
    }
}

/// Where rows go: to the caller, or where they are pooled.
struct Outlet {
    out: Out,
    keep: mpsc::Sender<proto::Chunk>,
}

impl Outlet {
    async fn send(&self, split: &Split, chunk: proto::Chunk) -> Result<(), Status> {
        let sent = if of_samples(split, &chunk) {
            self.keep.send(chunk).await.is_ok()
        } else {
            let rows = Some(lookup_reply::Part::Rows(chunk));
            self.out.send(Ok(proto::LookupReply { part: rows })).await.is_ok()
        };
        if sent { Ok(()) } else { Err(Status::cancelled("the caller is gone")) }
    }
}

async fn call(
    members: Vec<Arc<Member>>,
    server: usize,
    split: Arc<Split>,
    messages: mpsc::Receiver<proto::LookupRequest>,
    outlet: Outlet,
    held_up: HeldUp,
    deadline: Instant,
) -> Result<LookupReport, Status> {
    let member: &Member = &members[server];
    let called = async {
        let replies = member.data().lookup(until(deadline, ReceiverStream::new(messages))).await;
        let mut replies = replies.map_err(|status| named(member, &status))?.into_inner();
        let mut report = None;
        while let Some(reply) = replies.message().await.map_err(|status| named(member, &status))? {
            match reply.part {
                Some(lookup_reply::Part::Rows(chunk)) => {
                    outlet.send(&split, split.rows(server, chunk)?).await?;
                }
                Some(lookup_reply::Part::Report(sent)) => report = Some(sent.into()),
                None => {}
            }
        }
        let cut_short = || ChunkError::CutShort { what: format!("{} sent no report", member.peer) };
        Ok(report.ok_or_else(cut_short)?)
    };
    match timeout_at(deadline, called).await {
        Ok(report) => report,
        Err(_) => Err(to_status(&late(&members[held_up.by(server)], "look-up"))),
    }
}
