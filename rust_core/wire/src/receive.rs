//! A whole look-up or push out of a stream, everything in it checked.

use std::time::Duration;

use futures_util::{Stream, StreamExt};
use persia_kernels::Gradients;
use persia_types::id::ShardedIds;
use persia_types::tables::{LookupRequest, PushRequest, TableGradients, TableIds};
use persia_types::{Mode, Token};
use tonic::Status;

use crate::chunk::{ChunkError, Collect};
use crate::convert;
use crate::parts::{Part, check_parts};
use crate::proto;

/// How long a sender may be silent in the middle of a request.
const SILENCE: Duration = Duration::from_secs(60);

/// A look-up as its sender meant it.
#[derive(Debug)]
pub struct Lookup {
    /// Who asks.
    pub token: Token,
    /// The global step.
    pub step: u64,
    /// What for.
    pub mode: Mode,
    /// Tables and dimensions, in the order of `ids`.
    pub parts: Vec<Part>,
    /// Ids of every part, each in its own shard.
    pub ids: Vec<ShardedIds>,
}

impl Lookup {
    /// For [`Self::request`].
    pub fn tables(&self) -> Vec<TableIds<'_>> {
        self.parts
            .iter()
            .zip(&self.ids)
            .map(|(part, ids)| TableIds { table: part.table, ids, per_sample: None })
            .collect()
    }

    /// As the holder of rows takes it.
    pub fn request<'a>(&self, tables: &'a [TableIds<'a>]) -> LookupRequest<'a> {
        LookupRequest { token: self.token, step: self.step, mode: self.mode, tables }
    }

    /// A buffer of the right size for the rows of every part.
    pub fn buffers(&self) -> Vec<Vec<f32>> {
        self.parts.iter().map(|part| vec![0.0; part.len() * part.format.dim]).collect()
    }
}

/// A push as its sender meant it.
#[derive(Debug)]
pub struct Push {
    /// Who pushes.
    pub token: Token,
    /// The global step.
    pub step: u64,
    /// Multiplies the learning rate.
    pub lr_factor: f32,
    /// Tables and dimensions, in the order of `ids`.
    pub parts: Vec<Part>,
    /// Ids of every part, each in its own shard.
    pub ids: Vec<ShardedIds>,
    /// Gradients of every part's ids.
    pub gradients: Vec<Vec<f32>>,
}

impl Push {
    /// For [`Self::request`].
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

    /// As the holder of rows takes it.
    pub fn request<'a>(&self, tables: &'a [TableGradients<'a>]) -> PushRequest<'a> {
        PushRequest { token: self.token, step: self.step, lr_factor: self.lr_factor, tables }
    }
}

/// The next message of a stream, which may not take long.
///
/// # Errors
/// The stream's own, and `DeadlineExceeded` after a minute of silence.
pub async fn next<T>(
    stream: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
) -> Result<Option<T>, Status> {
    match tokio::time::timeout(SILENCE, stream.next()).await {
        Ok(message) => message.transpose(),
        Err(_) => Err(Status::deadline_exceeded(format!(
            "the sender was silent for {} s in the middle of a request",
            SILENCE.as_secs()
        ))),
    }
}

fn no_head() -> Status {
    Status::invalid_argument("the first message of a stream is its head")
}

fn two_heads() -> Status {
    Status::invalid_argument("a second head, or an empty message, in one stream")
}

/// The head a stream of look-up messages begins with.
///
/// # Errors
/// `InvalidArgument` when it does not.
pub async fn lookup_head(
    stream: &mut (impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin),
) -> Result<proto::LookupHead, Status> {
    match next(stream).await?.and_then(|message| message.part) {
        Some(proto::lookup_request::Part::Head(head)) => Ok(head),
        _ => Err(no_head()),
    }
}

/// The head a stream of push messages begins with.
///
/// # Errors
/// `InvalidArgument` when it does not.
pub async fn push_head(
    stream: &mut (impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin),
) -> Result<proto::PushHead, Status> {
    match next(stream).await?.and_then(|message| message.part) {
        Some(proto::push_request::Part::Head(head)) => Ok(head),
        _ => Err(no_head()),
    }
}

/// The parts of a head, all of which are to be rows of ids.
fn parts_of_rows(head: &[proto::TablePart]) -> Result<Vec<Part>, ChunkError> {
    let parts = check_parts(head)?;
    match parts.iter().find(|part| part.samples.is_some()) {
        None => Ok(parts),
        Some(part) => Err(ChunkError::bad_shape(format!(
            "table {}: samples are pooled by a middleware, an embedding server takes rows of ids",
            part.table
        ))),
    }
}

/// Collect a look-up, as an embedding server takes it.
///
/// # Errors
/// A status that says what is wrong with it.
pub async fn lookup(
    stream: &mut (impl Stream<Item = Result<proto::LookupRequest, Status>> + Unpin),
) -> Result<Lookup, Status> {
    use proto::lookup_request::Part as Message;
    let head = lookup_head(stream).await?;
    let parts = parts_of_rows(&head.parts)?;
    let token = convert::token(head.token).map_err(ChunkError::from)?;
    let mode = convert::mode(head.mode).map_err(ChunkError::from)?;
    let mut ids = Collect::ids(&parts);
    while let Some(message) = next(stream).await? {
        match message.part {
            Some(Message::Ids(chunk)) => ids.take(&chunk)?,
            _ => return Err(two_heads()),
        }
    }
    let ids = grouped(&parts, ids.finish()?)?;
    Ok(Lookup { token, step: head.step, mode, parts, ids })
}

/// Collect a push, as an embedding server takes it.
///
/// # Errors
/// A status that says what is wrong with it.
pub async fn push(
    stream: &mut (impl Stream<Item = Result<proto::PushRequest, Status>> + Unpin),
) -> Result<Push, Status> {
    use proto::push_request::Part as Message;
    let head = push_head(stream).await?;
    let parts = parts_of_rows(&head.parts)?;
    let token = convert::token(head.token).map_err(ChunkError::from)?;
    let (mut ids, mut gradients) = (Collect::ids(&parts), Collect::gradients(&parts));
    while let Some(message) = next(stream).await? {
        match message.part {
            Some(Message::Ids(chunk)) => ids.take(&chunk)?,
            Some(Message::Gradients(chunk)) => gradients.take(&chunk)?,
            _ => return Err(two_heads()),
        }
    }
    let ids = grouped(&parts, ids.finish()?)?;
    let gradients = gradients.finish()?;
    Ok(Push { token, step: head.step, lr_factor: head.lr_factor, parts, ids, gradients })
}

fn grouped(parts: &[Part], ids: Vec<Vec<u64>>) -> Result<Vec<ShardedIds>, ChunkError> {
    parts.iter().zip(ids).map(|(part, ids)| part.ids(ids).map_err(ChunkError::from)).collect()
}

#[cfg(test)]
#[path = "receive_tests.rs"]
mod tests;
