//! Look-ups and pushes: chunks out, chunks in, on the caller's thread.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::Duration;

use persia_kernels::{Bags, Gradients};
use persia_types::id::server_shards;
use persia_types::tables::{
    LookupReport, LookupRequest, PerSample, PushReport, PushRequest, TableGradients, TableIds,
};
use persia_types::{Dtype, TablesError};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::Inner;
use super::call::{Trouble, within};
use super::pool::Remote;
use crate::chunk::{ChunkError, gradient_chunks, id_chunks, word_chunks};
use crate::discovery::Service;
use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto::{self, lookup_reply, lookup_request, push_request, server_push};
use crate::samples::{Samples, Verb, bag_words, sum_words};
use crate::scatter::Scatter;

/// Messages made ahead of the connection.
const AHEAD: usize = 8;

/// Ask a peer, whichever service it offers.
macro_rules! ask {
    ($remote:expr, $credentials:expr, $verb:ident, $request:expr) => {{
        let (channel, credentials) = ($remote.channel.clone(), $credentials.clone());
        let reply = if $remote.service == $crate::discovery::Service::Server {
            use $crate::proto::embedding_server_client::EmbeddingServerClient as Client;
            $crate::bounded!(Client::with_interceptor(channel, credentials)).$verb($request).await
        } else {
            use $crate::proto::middleware_client::MiddlewareClient as Client;
            $crate::bounded!(Client::with_interceptor(channel, credentials)).$verb($request).await
        };
        reply
            .map(tonic::Response::into_inner)
            .map_err(|status| $crate::client::call::Trouble::of_status($remote, &status))
    }};
}
pub(super) use ask;

/// Wait for `talk`, keeping `feed` going beside it.
async fn while_feeding<T>(feed: impl Future<Output = ()>, talk: impl Future<Output = T>) -> T {
    let (mut feed, mut talk) = (pin!(feed), pin!(talk));
    let mut fed = false;
    loop {
        tokio::select! {
            biased;
            result = &mut talk => return result,
            () = &mut feed, if !fed => fed = true,
        }
    }
}

/// Send messages until the stream's reader is gone, which then has a reason of its own.
async fn feed<T>(sender: mpsc::Sender<T>, messages: impl Iterator<Item = T>) {
    for message in messages {
        if sender.send(message).await.is_err() {
            return;
        }
    }
}

/// The floats of one of `rows` rows, of which there are as many as of ids or of samples.
fn dim_of(table: usize, floats: usize, rows: usize) -> Result<usize, TablesError> {
    let dim = floats.checked_div(rows).unwrap_or(0);
    if floats != rows * dim || (dim == 0 && rows > 0) {
        let what = format!("table {table}: {floats} floats for {rows} rows");
        return Err(TablesError::BadShape { what });
    }
    Ok(dim)
}

impl Inner {
    /// Whether a look-up with such `bags` is to be answered with pooled samples.
    pub(super) fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        let format = RowFormat { dim, dtype: self.options.wire_dtype };
        self.options.service == Service::Middleware
            && Samples::of_bags(bags).is_some_and(|samples| samples.save(Verb::Lookup, ids, format))
    }

    fn lookup_part(&self, table: &TableIds<'_>, floats: usize) -> Result<Part, TablesError> {
        let dtype = self.options.wire_dtype;
        let format = RowFormat { dim: dim_of(table.table, floats, table.vectors())?, dtype };
        let part = Part::new(table.table, format, table.ids);
        let Some(PerSample::Pooled(bags)) = &table.per_sample else { return Ok(part) };
        bags.check(table.ids.len())?;
        let samples = Samples::of_bags(bags).filter(|_| self.options.service == Service::Middleware);
        if samples.is_none() || table.ids.is_empty() {
            let what = format!(
                "table {}: a middleware pools samples of several ids; ask Tables::pools first",
                table.table
            );
            return Err(TablesError::BadShape { what });
        }
        Ok(part.with_samples(samples))
    }

    /// Where they are fewer bytes, the gradients of samples are sent, and a middleware adds up those of ids.
    fn push_part(&self, table: &TableGradients<'_>) -> Result<Part, TablesError> {
        let (ids, dtype) = (table.ids, self.options.wire_dtype);
        let dim = match &table.gradients {
            Gradients::Rows(rows) => dim_of(table.table, rows.len(), ids.len())?,
            Gradients::Samples(sum) => sum.dim,
        };
        table.gradients.check(ids.len(), dim)?;
        let part = Part::new(table.table, RowFormat { dim, dtype }, ids);
        let samples = match &table.gradients {
            Gradients::Samples(sum) if self.options.service == Service::Middleware => {
                // Gradients of 16 bits are scaled before they are sent.
                let scale = if dtype == Dtype::F32 { sum.scale } else { 1.0 };
                Some(Samples { scale, ..Samples::of_sum(sum) })
            }
            _ => None,
        };
        let samples = samples.filter(|samples| samples.save(Verb::Push, ids.len(), part.format));
        Ok(part.with_samples(samples))
    }

    pub(super) async fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        if request.tables.len() != rows.len() {
            return Err(TablesError::BadShape {
                what: format!("{} buffers for the rows of {} tables", rows.len(), request.tables.len()),
            });
        }
        let parts: Vec<Part> = request
            .tables
            .iter()
            .zip(rows.iter())
            .map(|(table, rows)| self.lookup_part(table, rows.len()))
            .collect::<Result<_, _>>()?;
        let what = format!("look-up {} of step {}", request.token, request.step);
        self.call(&what, self.patience(), async |remote, each| {
            self.try_lookup(remote, each, request, &parts, rows).await
        })
        .await
    }

    async fn try_lookup(
        &self,
        remote: &Remote,
        each: Duration,
        request: &LookupRequest<'_>,
        parts: &[Part],
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, Trouble> {
        use lookup_request::Part as Message;
        let head = proto::LookupHead {
            token: Some(request.token.into()),
            step: request.step,
            mode: proto::Mode::from(request.mode).into(),
            parts: parts.iter().map(Part::to_proto).collect(),
        };
        let tables = || request.tables.iter().zip(0..);
        let bags = tables().filter_map(|(table, index)| match &table.per_sample {
            Some(PerSample::Pooled(bags)) => Some(word_chunks(index, bag_words(bags))),
            _ => None,
        });
        let ids = tables().flat_map(|(table, index)| id_chunks(index, table.ids.ids()));
        let messages = std::iter::once(Message::Head(head))
            .chain(bags.flatten().map(Message::Uses))
            .chain(ids.map(Message::Ids))
            .map(|message| proto::LookupRequest { part: Some(message) });
        let uses: Vec<_> = request.tables.iter().map(TableIds::gathered).collect();
        let mut scatter = Scatter::new(parts, &uses, rows).map_err(Trouble::Final)?;
        let (sender, receiver) = mpsc::channel(AHEAD);
        let talk = async {
            let mut replies =
                ask!(remote, self.trainer, lookup, within(each, ReceiverStream::new(receiver)))?;
            let mut report = None;
            while let Some(reply) =
                replies.message().await.map_err(|status| Trouble::of_status(remote, &status))?
            {
                match reply.part {
                    Some(lookup_reply::Part::Rows(chunk)) => {
                        scatter.take(&chunk).map_err(|error| Trouble::of_chunk(remote, error))?;
                    }
                    Some(lookup_reply::Part::Report(found)) => report = Some(found.into()),
                    None => return Err(Trouble::unreachable(remote, "its reply has an empty message")),
                }
            }
            scatter.finish().map_err(|error| Trouble::of_chunk(remote, error))?;
            report.ok_or_else(|| {
                let what = "no report at its end".to_owned();
                Trouble::of_chunk(remote, ChunkError::CutShort { what })
            })
        };
        while_feeding(feed(sender, messages), talk).await
    }

    pub(super) async fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let parts: Vec<Part> =
            request.tables.iter().map(|table| self.push_part(table)).collect::<Result<_, _>>()?;
        let servers = self.servers().await?;
        let concerned = |server: &u32| {
            let shards = server_shards(*server as usize, servers as usize);
            parts.iter().any(|part| part.offsets()[shards.start] < part.offsets()[shards.end])
        };
        let mut progress = Progress {
            acknowledged: BTreeMap::new(),
            open: (0..servers).filter(concerned).collect(),
            only: Vec::new(),
        };
        let what = format!("push {} of step {}", request.token, request.step);
        self.call(&what, self.patience(), async |remote, each| {
            self.try_push(remote, each, request, &parts, &mut progress).await
        })
        .await?;
        let mut sum = PushReport::default();
        progress.acknowledged.into_values().for_each(|report| sum += report);
        Ok(sum)
    }

    async fn try_push(
        &self,
        remote: &Remote,
        each: Duration,
        request: &PushRequest<'_>,
        parts: &[Part],
        progress: &mut Progress,
    ) -> Result<(), Trouble> {
        use push_request::Part as Message;
        let head = proto::PushHead {
            token: Some(request.token.into()),
            step: request.step,
            lr_factor: request.lr_factor,
            parts: parts.iter().map(Part::to_proto).collect(),
            only: progress.only.clone(),
        };
        let tables = || request.tables.iter().zip(parts).zip(0..);
        let uses = tables().filter_map(|((table, part), index)| match &table.gradients {
            Gradients::Samples(sum) if part.samples.is_some() => Some(word_chunks(index, sum_words(sum))),
            _ => None,
        });
        let chunks = tables().flat_map(|((table, part), index)| {
            let ids = id_chunks(index, table.ids.ids()).map(Message::Ids);
            ids.chain(gradient_chunks(index, part, table.gradients).map(Message::Gradients))
        });
        let messages = std::iter::once(Message::Head(head))
            .chain(uses.flatten().map(Message::Uses))
            .chain(chunks)
            .map(|message| proto::PushRequest { part: Some(message) });
        let (sender, receiver) = mpsc::channel(AHEAD);
        let talk = async { ask!(remote, self.trainer, push, within(each, ReceiverStream::new(receiver))) };
        let reply = while_feeding(feed(sender, messages), talk).await?;
        progress.note(remote, reply)
    }
}

/// Which servers have acknowledged a push.
struct Progress {
    acknowledged: BTreeMap<u32, PushReport>,
    /// Servers whose acknowledgement is missing.
    open: BTreeSet<u32>,
    /// What the next try asks for: empty for all.
    only: Vec<u32>,
}

impl Progress {
    fn note(&mut self, remote: &Remote, reply: proto::PushReply) -> Result<(), Trouble> {
        let mut trouble = None;
        for proto::ServerPush { server, outcome } in reply.servers {
            match outcome {
                Some(server_push::Outcome::Applied(report)) => {
                    self.open.remove(&server);
                    // A second report of one server would count its rows twice.
                    self.acknowledged.entry(server).or_insert_with(|| report.into());
                }
                Some(server_push::Outcome::Failed(failure)) => {
                    self.open.insert(server);
                    match Trouble::of_failure(remote, &failure) {
                        Trouble::Final(error) => return Err(Trouble::Final(error)),
                        again => trouble = Some(again),
                    }
                }
                None => {
                    self.open.insert(server);
                }
            }
        }
        if self.open.is_empty() {
            return Ok(());
        }
        self.only = self.open.iter().copied().collect();
        Err(trouble.unwrap_or_else(|| {
            Trouble::unreachable(remote, &format!("it has not reached servers {:?}", self.open))
        }))
    }
}
