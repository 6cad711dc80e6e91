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
use tonic::{Request, Status};

use super::pooled::{AllUses, Kept, of_samples};
use super::{INLET, Member, late, named};

type Out = mpsc::Sender<Result<proto::LookupReply, Status>>;
type Inlet = mpsc::Sender<proto::LookupRequest>;

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
        let mut inlets = Vec::with_capacity(self.members.len());
        let (keep, kept) = mpsc::channel(INLET);
        for (server, member) in self.members.iter().enumerate() {
            let (inlet, messages) = mpsc::channel(INLET);
            let head = proto::LookupHead { parts: self.split.parts_of(server), ..self.head.clone() };
            // There is room for it: the channel is new.
            let _ = inlet.try_send(proto::LookupRequest { part: Some(lookup_request::Part::Head(head)) });
            inlets.push(inlet);
            let (member, split) = (Arc::clone(member), Arc::clone(&self.split));
            let outlet = Outlet { out: out.clone(), keep: keep.clone() };
            calls.spawn(call(server, member, split, messages, outlet, self.deadline));
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
        kept.send(self.split, self.uses, out.clone()).await?;
        Ok(report)
    }

    async fn feed(
        &self,
        mut incoming: impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin,
        inlets: Vec<Inlet>,
    ) -> Result<(), Status> {
        while let Some(message) = receive::next(&mut incoming).await? {
            let Some(lookup_request::Part::Ids(chunk)) = message.part else {
                return Err(Status::invalid_argument(
                    "after the head and uses of a look-up only ids may come",
                ));
            };
            for (server, piece) in self.split.ids(chunk)? {
                let message = proto::LookupRequest { part: Some(lookup_request::Part::Ids(piece)) };
                // One that takes no more has failed: its call says why.
                let _ = inlets[server].send(message).await;
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
    server: usize,
    member: Arc<Member>,
    split: Arc<Split>,
    messages: mpsc::Receiver<proto::LookupRequest>,
    outlet: Outlet,
    deadline: Instant,
) -> Result<LookupReport, Status> {
    let called = async {
        let mut request = Request::new(ReceiverStream::new(messages));
        request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        let replies = member.data().lookup(request).await;
        let mut replies = replies.map_err(|status| named(&member, &status))?.into_inner();
        let mut report = None;
        while let Some(reply) = replies.message().await.map_err(|status| named(&member, &status))? {
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
        Err(_) => Err(to_status(&late(&member, "look-up"))),
    }
}
