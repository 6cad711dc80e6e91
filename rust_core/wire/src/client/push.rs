//! Pushes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use persia_kernels::Gradients;
use persia_types::id::server_shards;
use persia_types::tables::{PushReport, PushRequest, TableGradients};
use persia_types::trace::Stage;
use persia_types::{Dtype, TablesError};

use super::call::{CallError, Caller, with_deadline};
use super::pool::Remote;
use super::stream::{dim_of, while_sending};
use crate::csr::sum_words;
use crate::discovery::Service;
use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto::{self, push_request, server_push};
use crate::samples::{RequestKind, Samples};
use crate::send::{gradient_chunks, id_chunks, word_chunks};
use crate::trace;

impl Caller {
    /// The part for a table. It has gradients of samples if the peer is a middleware, which sums them, and if
    /// they take fewer bytes than gradients of ids.
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
                // 16-bit gradients are scaled before they are sent.
                let scale = if dtype == Dtype::F32 { sum.scale } else { 1.0 };
                Some(Samples { scale, ..Samples::of_sum(sum) })
            }
            _ => None,
        };
        let samples = samples.filter(|samples| samples.save(RequestKind::Push, ids.len(), part.format));
        Ok(part.with_samples(samples))
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
            missing: (0..servers).filter(concerned).collect(),
            only: Vec::new(),
        };
        let what = format!("push {} of step {}", request.token, request.step);
        self.call(&what, self.timeouts(), async |remote, limit| {
            self.try_push(remote, limit, request, &parts, &mut progress).await
        })
        .await?;
        let mut sum = PushReport::default();
        progress.acknowledged.into_values().for_each(|report| sum += report);
        Ok(sum)
    }

    async fn try_push(
        &self,
        remote: &Remote,
        limit: Duration,
        request: &PushRequest<'_>,
        parts: &[Part],
        progress: &mut Progress,
    ) -> Result<(), CallError> {
        let reply = while_sending(messages(request, parts, progress.only.clone()), async |messages| {
            let mut call = with_deadline(limit, messages);
            trace::inject_step(call.metadata_mut(), request.token, Stage::Push);
            remote.rpc(&self.trainer).push(call).await
        })
        .await
        .map_err(|status| CallError::of_status(remote, &status))?;
        progress.note(remote, reply)
    }
}

/// The messages of a push: the head, the lists of samples, and the ids and gradients of each part.
fn messages<'a>(
    request: &'a PushRequest<'a>,
    parts: &'a [Part],
    only: Vec<u32>,
) -> impl Iterator<Item = proto::PushRequest> + use<'a> {
    use push_request::Part as Message;
    let head = proto::PushHead {
        token: Some(request.token.into()),
        step: request.step,
        lr_factor: request.lr_factor,
        parts: parts.iter().map(Part::to_proto).collect(),
        only,
    };
    let tables = || request.tables.iter().zip(parts).zip(0..);
    let csr = tables().filter_map(|((table, part), index)| match &table.gradients {
        Gradients::Samples(sum) if part.samples.is_some() => Some(word_chunks(index, sum_words(sum))),
        _ => None,
    });
    let chunks = tables().flat_map(|((table, part), index)| {
        let ids = id_chunks(index, table.ids.ids()).map(Message::Ids);
        ids.chain(gradient_chunks(index, part, table.gradients).map(Message::Gradients))
    });
    std::iter::once(Message::Head(head))
        .chain(csr.flatten().map(Message::Csr))
        .chain(chunks)
        .map(|message| proto::PushRequest { part: Some(message) })
}

/// The servers that have acknowledged a push, and those that have not.
struct Progress {
    acknowledged: BTreeMap<u32, PushReport>,
    missing: BTreeSet<u32>,
    /// The servers to which the next attempt is sent; empty for all.
    only: Vec<u32>,
}

impl Progress {
    fn note(&mut self, remote: &Remote, reply: proto::PushReply) -> Result<(), CallError> {
        let mut last = None;
        for proto::ServerPush { server, outcome } in reply.servers {
            match outcome {
                Some(server_push::Outcome::Applied(report)) => {
                    self.missing.remove(&server);
                    // Keep the first report, because a second report of a server would count its rows twice.
                    self.acknowledged.entry(server).or_insert_with(|| report.into());
                }
                Some(server_push::Outcome::Failed(failure)) => {
                    self.missing.insert(server);
                    match CallError::of_failure(remote, &failure) {
                        CallError::Permanent(error) => return Err(CallError::Permanent(error)),
                        transient => last = Some(transient),
                    }
                }
                None => {
                    self.missing.insert(server);
                }
            }
        }
        if self.missing.is_empty() {
            return Ok(());
        }
        self.only = self.missing.iter().copied().collect();
        Err(last.unwrap_or_else(|| {
            let servers: Vec<String> = self.missing.iter().map(u32::to_string).collect();
            let noun = if servers.len() == 1 { "server" } else { "servers" };
            CallError::unreachable(
                remote,
                format!("its reply has no result for {noun} {}", servers.join(", ")),
            )
        }))
    }
}
