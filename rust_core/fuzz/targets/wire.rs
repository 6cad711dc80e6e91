//! Look-ups and pushes as they arrive over gRPC, at a server and at a middleware that divides them among servers.
//!
//! An input is a byte, followed by the messages of a stream, each preceded by its length. The lowest bit of the byte
//! selects push or look-up, the next two bits select the number of servers, and the highest bit keeps checksums
//! unchanged.

use futures_util::stream;
use persia_kernels::Gradients;
use persia_types::{Id, ShardedIds};
use persia_wire::collect::Collector;
use persia_wire::csr::{ReceivedCsr, receive_csr};
use persia_wire::parts::{Part, Split};
use persia_wire::proto::{self, Chunk, lookup_request, push_request};
use persia_wire::receive::{self, ReceivedLookup, ReceivedPush};
use persia_wire::samples::RequestKind;
use persia_wire::scatter::Scatter;
use persia_wire::send::{gradient_chunks, id_chunks, pooled_chunks, row_chunks};
use prost::Message;
use tokio::runtime::{Builder, Runtime};
use tonic::Status;

use super::memory;

mod seeds;

pub use seeds::seeds;

const PUSH: u8 = 1;
const UNSEALED: u8 = 0x80;
const SERVERS: [usize; 4] = [1, 2, 3, 16];

const FIXED_BYTES: usize = 1 << 20;
/// The memory that is allocated in advance for a part whose ids, lists or gradients have begun to arrive, and for the
/// head.
const AHEAD_BYTES: usize = 3 * (4 << 20) + (32 << 10);
const BYTES_PER_BYTE: usize = 16;
/// The maximum number of floats of vectors that this target pools.
const MOST_FLOATS: usize = 1 << 16;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
}

/// Check that a server that accepts a request also accepts it after it is encoded again, with the same
/// content. A middleware must divide the request such that the servers' parts, and their rows, add up to the
/// whole.
pub fn check(data: &[u8]) -> bool {
    let Some((&how, rest)) = data.split_first() else { return false };
    let (servers, seal) = (SERVERS[usize::from(how >> 1) % SERVERS.len()], how & UNSEALED == 0);
    if how & PUSH == 0 {
        check_lookup(&messages(rest, |message| lookup_chunk(message).filter(|_| seal)), servers, rest.len())
    } else {
        check_push(&messages(rest, |message| push_chunk(message).filter(|_| seal)), servers, rest.len())
    }
}

/// Decode the messages of a stream. The checksums of the chunks that `chunk` returns are recomputed.
fn messages<M: Message + Default>(mut bytes: &[u8], chunk: impl Fn(&mut M) -> Option<&mut Chunk>) -> Vec<M> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let Ok(mut message) = M::decode_length_delimited(&mut bytes) else { break };
        if let Some(chunk) = chunk(&mut message) {
            chunk.crc32c = crc32c::crc32c(&chunk.data);
        }
        all.push(message);
    }
    all
}

fn lookup_chunk(message: &mut proto::LookupRequest) -> Option<&mut Chunk> {
    match &mut message.part {
        Some(lookup_request::Part::Ids(chunk) | lookup_request::Part::Csr(chunk)) => Some(chunk),
        _ => None,
    }
}

fn push_chunk(message: &mut proto::PushRequest) -> Option<&mut Chunk> {
    use push_request::Part;
    match &mut message.part {
        Some(Part::Ids(chunk) | Part::Gradients(chunk) | Part::Csr(chunk)) => Some(chunk),
        _ => None,
    }
}

/// The result of `receive` for a stream of these messages. The memory is limited according to their size and number of
/// parts.
fn received<M: Clone, T>(
    messages: &[M],
    parts: usize,
    bytes: usize,
    receive: impl AsyncFnOnce(&mut Incoming<M>) -> Result<T, Status>,
) -> Option<T> {
    let all: Vec<Result<M, Status>> = messages.iter().cloned().map(Ok).collect();
    let run = || RUNTIME.with(|runtime| runtime.block_on(receive(&mut stream::iter(all))).ok());
    memory::within(FIXED_BYTES + parts * AHEAD_BYTES + bytes * BYTES_PER_BYTE, run)
}

type Incoming<M> = stream::Iter<std::vec::IntoIter<Result<M, Status>>>;

async fn lookup_by_server(stream: &mut Incoming<proto::LookupRequest>) -> Result<ReceivedLookup, Status> {
    receive::lookup(stream).await
}

async fn push_by_server(stream: &mut Incoming<proto::PushRequest>) -> Result<ReceivedPush, Status> {
    receive::push(stream).await
}

fn ids_message(chunk: Chunk) -> proto::LookupRequest {
    proto::LookupRequest { part: Some(lookup_request::Part::Ids(chunk)) }
}

fn check_lookup(messages: &[proto::LookupRequest], servers: usize, bytes: usize) -> bool {
    let Some(lookup_request::Part::Head(head)) = messages.first().and_then(|first| first.part.clone()) else {
        return received(messages, 0, bytes, lookup_by_server).is_some();
    };
    let parts = head.parts.len();
    let whole = received(messages, parts, bytes, lookup_by_server);
    if let Some(whole) = &whole {
        let protos = whole.parts.iter().map(Part::to_proto).collect();
        let again = lookup_request::Part::Head(proto::LookupHead { parts: protos, ..head.clone() });
        let head = proto::LookupRequest { part: Some(again) };
        let ids = whole.ids.iter().enumerate();
        let ids = ids.flat_map(|(part, ids)| id_chunks(part as u32, ids.ids()).map(ids_message));
        let sent: Vec<_> = [head].into_iter().chain(ids).collect();
        let again =
            received(&sent, parts, bytes, lookup_by_server).expect("what was accepted is accepted again");
        assert_eq!((&again.parts, &again.ids), (&whole.parts, &whole.ids));
    }
    let divide = async |stream: &mut Incoming<_>| divided_lookup(stream, servers).await;
    let Some((split, uses, to_servers)) = received(messages, parts, bytes * servers, divide) else {
        assert!(whole.is_none(), "a middleware refuses what a server accepts");
        return false;
    };
    let of_servers = to_servers.iter().map(|messages| received(messages, parts, bytes, lookup_by_server));
    let Some(of_servers) = of_servers.collect::<Option<Vec<ReceivedLookup>>>() else {
        assert!(whole.is_none(), "a server refuses its part of what another accepts whole");
        return false;
    };
    let ids = joined(of_servers.iter().map(|lookup| &lookup.ids), parts);
    if let Some(whole) = whole {
        assert!(ids.iter().zip(&whole.ids).all(|(ids, whole)| ids == whole.ids()));
    }
    check_rows(&split, &of_servers, &ids);
    check_pooled(&split, &uses, &ids);
    true
}

/// Divide a look-up as a middleware does. Returns the division, its lists of samples, and the messages to
/// each server.
async fn divided_lookup(
    stream: &mut Incoming<proto::LookupRequest>,
    servers: usize,
) -> Result<(Split, Vec<Option<ReceivedCsr>>, Vec<Vec<proto::LookupRequest>>), Status> {
    use lookup_request::Part as Message;
    let head = receive::lookup_head(stream).await?;
    let split = Split::new(&head.parts, servers).map_err(|error| Status::internal(error.to_string()))?;
    let of_uses = |message: proto::LookupRequest| match message.part {
        Some(Message::Csr(chunk)) => Some(chunk),
        _ => None,
    };
    let uses = receive_csr(stream, RequestKind::Lookup, split.parts(), of_uses).await?;
    let head_of = |server| {
        let head = proto::LookupHead { parts: split.parts_of(server), ..head.clone() };
        vec![proto::LookupRequest { part: Some(Message::Head(head)) }]
    };
    let mut to_servers: Vec<_> = (0..servers).map(head_of).collect();
    while let Some(message) = receive::next(stream).await? {
        let Some(Message::Ids(chunk)) = message.part else { return Err(Status::internal("no ids")) };
        for (server, piece) in split.ids(chunk)? {
            to_servers[server].push(ids_message(piece));
        }
    }
    Ok((split, uses, to_servers))
}

/// The ids of each part, server by server.
fn joined<'a>(of_servers: impl Iterator<Item = &'a Vec<ShardedIds>>, parts: usize) -> Vec<Vec<Id>> {
    let mut all = vec![Vec::new(); parts];
    for ids in of_servers {
        all.iter_mut().zip(ids).for_each(|(all, ids)| all.extend_from_slice(ids.ids()));
    }
    all
}

/// A number that is exact in every format of rows.
fn number_of(id: Id) -> f32 {
    (id % 200) as f32
}

/// Check that rows are assigned to their ids. The replies arrive from the last server first.
fn check_rows(split: &Split, of_servers: &[ReceivedLookup], ids: &[Vec<Id>]) {
    let parts: Vec<Part> = split.parts().iter().map(|part| part.clone().with_samples(None)).collect();
    let floats = parts.iter().map(|part| part.len() * part.format.dim);
    if floats.clone().sum::<usize>() > MOST_FLOATS {
        return;
    }
    let mut rows: Vec<Vec<f32>> = floats.map(|floats| vec![f32::NAN; floats]).collect();
    let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
    let uses = vec![None; parts.len()];
    let mut scatter = Scatter::new(&parts, &uses, &mut buffers).expect("buffers that fit");
    for (server, lookup) in of_servers.iter().enumerate().rev() {
        for (at, (part, ids)) in lookup.parts.iter().zip(&lookup.ids).enumerate() {
            let rows = ids.ids().iter().flat_map(|id| vec![number_of(*id); part.format.dim]).collect();
            for chunk in row_chunks(at as u32, part.format, rows) {
                scatter
                    .take(&split.rows(server, chunk).expect("rows that were asked for"))
                    .expect("each row arrives once");
            }
        }
    }
    scatter.finish().expect("every row came");
    for ((part, rows), ids) in parts.iter().zip(&rows).zip(ids) {
        let wanted = ids.iter().flat_map(|id| vec![number_of(*id); part.format.dim]);
        assert!(rows.iter().copied().eq(wanted));
    }
}

/// Check that samples are pooled, and that each is returned once.
fn check_pooled(split: &Split, uses: &[Option<ReceivedCsr>], ids: &[Vec<Id>]) {
    for (at, ((part, uses), ids)) in split.parts().iter().zip(uses).zip(ids).enumerate() {
        let Some(uses) = uses else { continue };
        let (dim, samples) = (part.format.dim, part.vectors());
        if (ids.len() + samples) * dim > MOST_FLOATS {
            continue;
        }
        let rows = vec![1.0; ids.len() * dim];
        let items = pooled_chunks(at as u32, part.format, &rows, uses.bags())
            .map(|chunk| part.format.width().items(&chunk).expect("whole vectors"));
        assert_eq!(items.sum::<u64>(), samples as u64);
    }
}

fn check_push(messages: &[proto::PushRequest], servers: usize, bytes: usize) -> bool {
    let Some(push_request::Part::Head(head)) = messages.first().and_then(|first| first.part.clone()) else {
        return received(messages, 0, bytes, push_by_server).is_some();
    };
    let parts = head.parts.len();
    let whole = received(messages, parts, bytes, push_by_server);
    if let Some(whole) = &whole {
        let again = received(&encoded(whole, &head), parts, bytes, push_by_server);
        let again = again.expect("what was accepted is accepted again");
        assert_eq!((&again.parts, &again.ids), (&whole.parts, &whole.ids));
        let (again, whole) = (again.gradients.concat(), whole.gradients.concat());
        let same = |(one, other): (&f32, &f32)| {
            one.to_bits() == other.to_bits() || !one.is_finite() && !other.is_finite()
        };
        assert!(again.len() == whole.len() && again.iter().zip(&whole).all(same));
    }
    let divide = async |stream: &mut Incoming<_>| divided_push(stream, servers).await;
    let Some(to_servers) = received(messages, parts, bytes * servers, divide) else {
        assert!(whole.is_none(), "a middleware refuses what a server accepts");
        return false;
    };
    let of_servers =
        to_servers.iter().map(|messages| received(messages, parts, usize::MAX >> 8, push_by_server));
    let Some(of_servers) = of_servers.collect::<Option<Vec<ReceivedPush>>>() else {
        assert!(whole.is_none(), "a server refuses its part of what another accepts whole");
        return false;
    };
    let Some(whole) = whole else { return true };
    let ids = joined(of_servers.iter().map(|push| &push.ids), parts);
    assert!(ids.iter().zip(&whole.ids).all(|(ids, whole)| ids == whole.ids()));
    for (at, wanted) in whole.gradients.iter().enumerate() {
        let gradients = of_servers.iter().flat_map(|push| &push.gradients[at]);
        assert!(gradients.map(|float| float.to_bits()).eq(wanted.iter().map(|float| float.to_bits())));
    }
    true
}

/// Encode a push as a rank sends it.
fn encoded(push: &ReceivedPush, head: &proto::PushHead) -> Vec<proto::PushRequest> {
    use push_request::Part as Message;
    let parts = push.parts.iter().map(Part::to_proto).collect();
    let mut all = vec![Message::Head(proto::PushHead { parts, ..head.clone() })];
    for (at, ((part, ids), rows)) in push.parts.iter().zip(&push.ids).zip(&push.gradients).enumerate() {
        all.extend(id_chunks(at as u32, ids.ids()).map(Message::Ids));
        all.extend(gradient_chunks(at as u32, part, Gradients::Rows(rows)).map(Message::Gradients));
    }
    all.into_iter().map(|part| proto::PushRequest { part: Some(part) }).collect()
}

/// Divide a push as a middleware does. Returns the messages to each server, in which the gradients of samples
/// are summed per id.
async fn divided_push(
    stream: &mut Incoming<proto::PushRequest>,
    servers: usize,
) -> Result<Vec<Vec<proto::PushRequest>>, Status> {
    use push_request::Part as Message;
    let head = receive::push_head(stream).await?;
    let split = Split::new(&head.parts, servers).map_err(|error| Status::internal(error.to_string()))?;
    let of_uses = |message: proto::PushRequest| match message.part {
        Some(Message::Csr(chunk)) => Some(chunk),
        _ => None,
    };
    let uses = receive_csr(stream, RequestKind::Push, split.parts(), of_uses).await?;
    let message = |part| proto::PushRequest { part: Some(part) };
    let head_of = |server| {
        let head = proto::PushHead { parts: split.parts_of(server), only: vec![], ..head.clone() };
        vec![message(Message::Head(head))]
    };
    let mut to_servers: Vec<_> = (0..servers).map(head_of).collect();
    let mut gradients = Collector::sample_gradients(split.parts());
    let has_samples =
        |chunk: &Chunk| split.parts().get(chunk.part as usize).is_some_and(|p| p.samples.is_some());
    while let Some(incoming) = receive::next(stream).await? {
        match incoming.part {
            Some(Message::Ids(chunk)) => split
                .ids(chunk)?
                .into_iter()
                .for_each(|(server, piece)| to_servers[server].push(message(Message::Ids(piece)))),
            Some(Message::Gradients(chunk)) if has_samples(&chunk) => gradients.take(&chunk)?,
            Some(Message::Gradients(chunk)) => split
                .gradients(chunk)?
                .into_iter()
                .for_each(|(server, piece)| to_servers[server].push(message(Message::Gradients(piece)))),
            _ => return Err(Status::internal("no ids and no gradients")),
        }
    }
    let gradients = gradients.finish()?;
    for (at, ((part, uses), rows)) in split.parts().iter().zip(&uses).zip(&gradients).enumerate() {
        let Some(uses) = uses else { continue };
        if part.len() * part.format.dim > MOST_FLOATS {
            continue;
        }
        let sum = uses.sum(rows, part.format.dim);
        sum.check(part.len()).expect("what was received can be summed");
        let part = part.clone().with_samples(None);
        for chunk in gradient_chunks(at as u32, &part, Gradients::Samples(sum)) {
            for (server, piece) in split.gradients(chunk)? {
                to_servers[server].push(message(Message::Gradients(piece)));
            }
        }
    }
    Ok(to_servers)
}
