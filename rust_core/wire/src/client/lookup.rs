//! Look-ups.

use std::time::Duration;

use persia_kernels::Bags;
use persia_types::TablesError;
use persia_types::tables::{LookupReport, LookupRequest, Mode, PerSample, TableIds};
use persia_types::trace::Stage;
use tonic::Status;

use super::call::{CallError, Caller, with_deadline};
use super::pool::Remote;
use super::stream::{dim_of, while_sending};
use crate::chunk::ChunkError;
use crate::csr::bag_words;
use crate::discovery::Service;
use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto::{self, lookup_reply, lookup_request};
use crate::samples::{RequestKind, Samples};
use crate::scatter::Scatter;
use crate::send::{id_chunks, word_chunks};
use crate::trace;

impl Caller {
    /// Whether a middleware pools `bags`: see [`persia_types::Tables::pools`].
    pub(super) fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        let format = RowFormat { dim, dtype: self.options.wire_dtype };
        self.options.service == Service::Middleware
            && Samples::of_bags(bags).is_some_and(|samples| samples.save(RequestKind::Lookup, ids, format))
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
                "table {}: only a middleware can pool samples, and only samples of several ids",
                table.table
            );
            return Err(TablesError::BadShape { what });
        }
        Ok(part.with_samples(samples))
    }

    pub(super) async fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        if request.tables.len() != rows.len() {
            return Err(TablesError::BadShape {
                what: format!(
                    "the number of buffers is {}, but the number of tables is {}",
                    rows.len(),
                    request.tables.len()
                ),
            });
        }
        let parts: Vec<Part> = request
            .tables
            .iter()
            .zip(rows.iter())
            .map(|(table, rows)| self.lookup_part(table, rows.len()))
            .collect::<Result<_, _>>()?;
        let what = format!("look-up {} of step {}", request.token, request.step);
        self.call(&what, self.timeouts(), async |remote, limit| {
            self.try_lookup(remote, limit, request, &parts, rows).await
        })
        .await
    }

    async fn try_lookup(
        &self,
        remote: &Remote,
        limit: Duration,
        request: &LookupRequest<'_>,
        parts: &[Part],
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, CallError> {
        let gathered: Vec<_> = request.tables.iter().map(TableIds::gathered).collect();
        let mut scatter = Scatter::new(parts, &gathered, rows).map_err(CallError::Permanent)?;
        let failed = |status: Status| CallError::of_status(remote, &status);
        let invalid = |error: ChunkError| CallError::of_chunk(remote, error);
        while_sending(messages(request, parts), async |messages| {
            let mut call = with_deadline(limit, messages);
            if request.mode == Mode::Train {
                trace::inject_step(call.metadata_mut(), request.token, Stage::LookUp);
            }
            let mut replies = remote.rpc(&self.trainer).lookup(call).await.map_err(failed)?;
            let mut report = None;
            while let Some(reply) = replies.message().await.map_err(failed)? {
                match reply.part {
                    Some(lookup_reply::Part::Rows(chunk)) => scatter.take(&chunk).map_err(invalid)?,
                    Some(lookup_reply::Part::Report(found)) => report = Some(found.into()),
                    None => return Err(CallError::unreachable(remote, "its reply has an empty message")),
                }
            }
            scatter.finish().map_err(invalid)?;
            report.ok_or_else(|| invalid(ChunkError::CutShort { what: "it has no report".to_owned() }))
        })
        .await
    }
}

/// The messages of a look-up: the head, the lists of pooled samples, and the ids.
fn messages<'a>(
    request: &'a LookupRequest<'a>,
    parts: &[Part],
) -> impl Iterator<Item = proto::LookupRequest> + use<'a> {
    use lookup_request::Part as Message;
    let head = proto::LookupHead {
        token: Some(request.token.into()),
        step: request.step,
        mode: proto::Mode::from(request.mode).into(),
        parts: parts.iter().map(Part::to_proto).collect(),
    };
    let tables = || request.tables.iter().zip(0..);
    let csr = tables().filter_map(|(table, index)| match &table.per_sample {
        Some(PerSample::Pooled(bags)) => Some(word_chunks(index, bag_words(bags))),
        _ => None,
    });
    let ids = tables().flat_map(|(table, index)| id_chunks(index, table.ids.ids()));
    std::iter::once(Message::Head(head))
        .chain(csr.flatten().map(Message::Csr))
        .chain(ids.map(Message::Ids))
        .map(|message| proto::LookupRequest { part: Some(message) })
}
