//! Receives and checks a complete look-up or push from a stream.

use std::time::Duration;

use futures_util::{Stream, StreamExt};
use persia_kernels::Gradients;
use persia_types::id::ShardedIds;
use persia_types::tables::{LookupRequest, PushRequest, TableGradients, TableIds};
use persia_types::{Mode, Token};
use tonic::Status;

use super::chunk::ChunkError;
use super::collect::Collector;
use super::parts::{Part, check_parts};
use crate::{convert, proto};

/// The maximum time that a sender may be silent within a request.
const SILENCE: Duration = Duration::from_secs(60);

/// A received look-up.
#[derive(Debug)]
pub struct ReceivedLookup {
    /// The token of the look-up.
    pub token: Token,
    /// The global step.
    pub step: u64,
    /// The mode of the look-up.
    pub mode: Mode,
    /// The tables and dimensions, in the order of `ids`.
    pub parts: Vec<Part>,
    /// The ids of each part, by shard.
    pub ids: Vec<ShardedIds>,
}

impl ReceivedLookup {
    /// The tables of [`Self::request`].
    pub fn tables(&self) -> Vec<TableIds<'_>> {
        self.parts
            .iter()
            .zip(&self.ids)
            .map(|(part, ids)| TableIds { table: part.table, ids, per_sample: None })
            .collect()
    }

    /// The request for the holder of the rows.
    pub fn request<'a>(&self, tables: &'a [TableIds<'a>]) -> LookupRequest<'a> {
        LookupRequest { token: self.token, step: self.step, mode: self.mode, tables }
    }

    /// Create buffers for the rows of all parts.
    pub fn buffers(&self) -> Vec<Vec<f32>> {
        self.parts.iter().map(|part| vec![0.0; part.len() * part.format.dim]).collect()
    }
}

/// A received push.
#[derive(Debug)]
pub struct ReceivedPush {
    /// The token of the push.
    pub token: Token,
    /// The global step.
    pub step: u64,
    /// The factor of the learning rate.
    pub lr_factor: f32,
    /// The tables and dimensions, in the order of `ids`.
    pub parts: Vec<Part>,
    /// The ids of each part, by shard.
    pub ids: Vec<ShardedIds>,
    /// The gradients for the ids of each part.
    pub gradients: Vec<Vec<f32>>,
}

impl ReceivedPush {
    /// The tables of [`Self::request`].
    pub fn tables(&self) -> Vec<TableGradients<'_>> {
        let parts = self.parts.iter().zip(&self.ids).zip(&self.gradients);
        parts
            .map(|((part, ids), gradients)| TableGradients {
                table: part.table,
                ids,
                gradients: Gradients::Rows(gradients),
            })
            .collect()
    }

    /// The request for the holder of the rows.
    pub fn request<'a>(&self, tables: &'a [TableGradients<'a>]) -> PushRequest<'a> {
        PushRequest { token: self.token, step: self.step, lr_factor: self.lr_factor, tables }
    }
}

/// The next message of a stream; None at its end.
///
/// # Errors
/// The error of the stream; `DeadlineExceeded` after a minute of silence.
pub async fn next<T>(
    stream: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
) -> Result<Option<T>, Status> {
    match tokio::time::timeout(SILENCE, stream.next()).await {
        Ok(message) => message.transpose(),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "the sender was silent for {} s within a request",
            SILENCE.as_secs()
        ))),
    }
}

fn no_head() -> Status {
    Status::invalid_argument("the first message of a stream must be its head")
}

fn unexpected() -> Status {
    Status::invalid_argument("unexpected message after the head: expected ids or, in a push, gradients")
}

/// Receive the head of a stream of look-up messages.
///
/// # Errors
/// Those of [`next`]; `InvalidArgument` if there is no message, or the first one is not a head.
pub async fn lookup_head(
    stream: &mut (impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin),
) -> Result<proto::LookupHead, Status> {
    match next(stream).await?.and_then(|message| message.part) {
        Some(proto::lookup_request::Part::Head(head)) => Ok(head),
        _ => Err(no_head()),
    }
}

/// Receive the head of a stream of push messages.
///
/// # Errors
/// Those of [`next`]; `InvalidArgument` if there is no message, or the first one is not a head.
pub async fn push_head(
    stream: &mut (impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin),
) -> Result<proto::PushHead, Status> {
    match next(stream).await?.and_then(|message| message.part) {
        Some(proto::push_request::Part::Head(head)) => Ok(head),
        _ => Err(no_head()),
    }
}

/// Check the parts of a head, which must have rows of ids only.
///
/// # Errors
/// `Malformed` for invalid parts, and for parts with samples.
pub fn parts_of_rows(head: &[proto::TablePart]) -> Result<Vec<Part>, ChunkError> {
    let parts = check_parts(head)?;
    match parts.iter().find(|part| part.samples.is_some()) {
        None => Ok(parts),
        Some(part) => Err(ChunkError::bad_shape(format!(
            "table {}: samples are pooled by a middleware; an embedding server accepts only rows of ids",
            part.table
        ))),
    }
}

/// Receive a look-up that is sent to an embedding server.
///
/// # Errors
/// A status that states the problem.
pub async fn lookup(
    stream: &mut (impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin),
) -> Result<ReceivedLookup, Status> {
    let head = lookup_head(stream).await?;
    let parts = parts_of_rows(&head.parts)?;
    lookup_after(head, parts, stream).await
}

/// Receive a look-up after its head, whose [parts](parts_of_rows) have been checked.
///
/// # Errors
/// A status that states the problem.
pub async fn lookup_after(
    head: proto::LookupHead,
    parts: Vec<Part>,
    stream: &mut (impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin),
) -> Result<ReceivedLookup, Status> {
    use proto::lookup_request::Part as Message;
    let token = convert::token(head.token).map_err(ChunkError::from)?;
    let mode = convert::mode(head.mode).map_err(ChunkError::from)?;
    let mut ids = Collector::ids(&parts);
    while let Some(message) = next(stream).await? {
        match message.part {
            Some(Message::Ids(chunk)) => ids.take(&chunk)?,
            _ => return Err(unexpected()),
        }
    }
    let ids = grouped(&parts, ids.finish()?)?;
    Ok(ReceivedLookup { token, step: head.step, mode, parts, ids })
}

/// Receive a push that is sent to an embedding server.
///
/// # Errors
/// A status that states the problem.
pub async fn push(
    stream: &mut (impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin),
) -> Result<ReceivedPush, Status> {
    let head = push_head(stream).await?;
    let parts = parts_of_rows(&head.parts)?;
    push_after(head, parts, stream).await
}

/// Receive a push after its head, whose [parts](parts_of_rows) have been checked.
///
/// # Errors
/// A status that states the problem.
pub async fn push_after(
    head: proto::PushHead,
    parts: Vec<Part>,
    stream: &mut (impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin),
) -> Result<ReceivedPush, Status> {
    use proto::push_request::Part as Message;
    let token = convert::token(head.token).map_err(ChunkError::from)?;
    let (mut ids, mut gradients) = (Collector::ids(&parts), Collector::gradients(&parts));
    while let Some(message) = next(stream).await? {
        match message.part {
            Some(Message::Ids(chunk)) => ids.take(&chunk)?,
            Some(Message::Gradients(chunk)) => gradients.take(&chunk)?,
            _ => return Err(unexpected()),
        }
    }
    let ids = grouped(&parts, ids.finish()?)?;
    let gradients = gradients.finish()?;
    Ok(ReceivedPush { token, step: head.step, lr_factor: head.lr_factor, parts, ids, gradients })
}

fn grouped(parts: &[Part], ids: Vec<Vec<u64>>) -> Result<Vec<ShardedIds>, ChunkError> {
    parts.iter().zip(ids).map(|(part, ids)| part.ids(ids).map_err(ChunkError::from)).collect()
}
