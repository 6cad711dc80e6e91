//! [`WalRecord`]: an encoded record of the log. [`ReplayOp`]: a decoded request, which a recovery repeats.
//!
//! ```text
//! record  = length of the payload, u32 | crc32c of that, u32 | crc32c of the payload, u32 | payload
//! payload = kind, u8, then
//!   look-up  token
//!   push     token, step, learning-rate factor, tables: table, number of ids, ids, number of gradients, gradients
//!   begin    the run as JSON
//!   prepare  number of the snapshot, u64
//!   abort    number of the snapshot, u64
//!   follows  length of the segment before, u64: the first record of each segment but the first
//!   durable  number of a segment, u64: those before it are durable
//! and a last byte, END
//! ```
//!
//! All numbers are little-endian. Where no size is stated, job, generation, seq, step and ids have 8 bytes,
//! and all others have 4.

use std::io::{self, Read};

use bytes::{Buf, TryGetError};
use persia_kernels::Gradients;
use persia_types::tables::{PushRequest, Run};
use persia_types::{Id, JobId, ShardedIds, Token};

/// The size of the frame: the length and the checksums. The length has a separate checksum, because a damaged length
/// must not look like a torn record.
const FRAME_BYTES: usize = 12;
const LOOKUP: u8 = 1;
const PUSH: u8 = 2;
const BEGIN: u8 = 3;
const PREPARE_SNAPSHOT: u8 = 4;
const ABORT_SNAPSHOT: u8 = 5;
const FOLLOWS: u8 = 6;
const DURABLE: u8 = 7;
/// The last byte of a record. It is not 0, because zeros at the end of a record mean that it was not written
/// completely.
const END: u8 = 0xE5;

/// A request, or information about segments, encoded for the log.
pub(crate) struct WalRecord(Vec<u8>);

impl WalRecord {
    /// The record of a training look-up that had a turn.
    pub(crate) fn lookup(token: Token) -> Self {
        Self::framed(LOOKUP, |out| put_token(out, token))
    }

    /// The record of a push.
    pub(crate) fn push(request: &PushRequest<'_>) -> Self {
        Self::framed(PUSH, |out| {
            put_token(out, request.token);
            out.extend_from_slice(&request.step.to_le_bytes());
            out.extend_from_slice(&request.lr_factor.to_le_bytes());
            put_count(out, request.tables.len());
            for part in request.tables {
                put_ids(out, part.table, part.ids);
                match &part.gradients {
                    Gradients::Rows(rows) => put_floats(out, rows),
                    Gradients::Samples(sum) => {
                        let mut rows = vec![0.0; part.ids.len() * sum.dim];
                        rows.chunks_exact_mut(sum.dim).enumerate().for_each(|(at, row)| sum.write(at, row));
                        put_floats(out, &rows);
                    }
                }
            }
        })
    }

    /// The record of a run that continues with the current rows.
    pub(crate) fn begin(run: &Run) -> io::Result<Self> {
        let run = serde_json::to_vec(run)?;
        Ok(Self::framed(BEGIN, |out| out.extend_from_slice(&run)))
    }

    /// The record of the cut of a snapshot.
    pub(crate) fn prepare_snapshot(number: u64) -> Self {
        Self::framed(PREPARE_SNAPSHOT, |out| out.extend_from_slice(&number.to_le_bytes()))
    }

    /// The record of an aborted snapshot.
    pub(crate) fn abort_snapshot(number: u64) -> Self {
        Self::framed(ABORT_SNAPSHOT, |out| out.extend_from_slice(&number.to_le_bytes()))
    }

    /// The record of the length of the previous segment.
    pub(super) fn follows(bytes: u64) -> Self {
        Self::framed(FOLLOWS, |out| out.extend_from_slice(&bytes.to_le_bytes()))
    }

    /// The record that states that the segments before this number are durable.
    pub(super) fn durable(number: u64) -> Self {
        Self::framed(DURABLE, |out| out.extend_from_slice(&number.to_le_bytes()))
    }

    /// The encoded bytes.
    ///
    /// # Errors
    /// `InvalidInput` for a payload of 4 GiB or more. No valid request is that large.
    pub(super) fn bytes(&self) -> io::Result<&[u8]> {
        if u32::try_from(self.0.len() - FRAME_BYTES).is_ok() {
            Ok(&self.0)
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "cannot log a request of 4 GiB or more"))
        }
    }

    fn framed(kind: u8, fill: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut bytes = vec![0; FRAME_BYTES];
        bytes.push(kind);
        fill(&mut bytes);
        bytes.push(END);
        let length = ((bytes.len() - FRAME_BYTES) as u32).to_le_bytes();
        let checksum = crc32c::crc32c(&bytes[FRAME_BYTES..]);
        bytes[..4].copy_from_slice(&length);
        bytes[4..8].copy_from_slice(&crc32c::crc32c(&length).to_le_bytes());
        bytes[8..FRAME_BYTES].copy_from_slice(&checksum.to_le_bytes());
        Self(bytes)
    }
}

fn put_token(out: &mut Vec<u8>, token: Token) {
    out.extend_from_slice(&token.job.0.to_le_bytes());
    out.extend_from_slice(&token.generation.to_le_bytes());
    out.extend_from_slice(&token.rank.to_le_bytes());
    out.extend_from_slice(&token.seq.to_le_bytes());
}

/// Append a count, which is below 2^32 because [`WalRecord::bytes`] refuses larger payloads.
fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&(count as u32).to_le_bytes());
}

fn put_ids(out: &mut Vec<u8>, table: usize, ids: &ShardedIds) {
    put_count(out, table);
    put_count(out, ids.len());
    out.extend_from_slice(bytemuck::cast_slice(ids.ids()));
}

fn put_floats(out: &mut Vec<u8>, floats: &[f32]) {
    put_count(out, floats.len());
    out.extend_from_slice(bytemuck::cast_slice(floats));
}

/// A decoded request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ReplayOp {
    Lookup(Token),
    Push { token: Token, step: u64, lr_factor: f32, tables: Vec<(usize, ShardedIds, Vec<f32>)> },
    Begin(Box<Run>),
    PrepareSnapshot(u64),
    AbortSnapshot(u64),
}

/// A request, or information about segments.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    Op(ReplayOp),
    /// The length of the previous segment.
    Follows(u64),
    /// The segments before this number are durable.
    Durable(u64),
}

/// What was found at a position of a segment.
#[derive(Debug)]
pub(super) enum ReadOutcome {
    /// A complete record, and its length including the frame.
    Entry(Entry, u64),
    /// The end of the segment.
    End,
    /// The beginning of a record, the rest of which was not written.
    Torn,
}

/// Read the next record of `input`, which is a file with `left` more bytes.
///
/// # Errors
/// `InvalidData` for a damaged record; those of reading.
pub(super) fn read(input: &mut impl Read, left: u64) -> io::Result<ReadOutcome> {
    if left == 0 {
        return Ok(ReadOutcome::End);
    }
    if left < FRAME_BYTES as u64 {
        return Ok(ReadOutcome::Torn);
    }
    let mut frame = [[0; 4]; FRAME_BYTES / 4];
    input.read_exact(frame.as_flattened_mut())?;
    let [length, of_length, of_payload] = frame;
    if crc32c::crc32c(&length) != u32::from_le_bytes(of_length) {
        return Err(damaged("the length of a record is damaged"));
    }
    let length = u64::from(u32::from_le_bytes(length));
    let bytes = FRAME_BYTES as u64 + length;
    if bytes > left {
        return Ok(ReadOutcome::Torn);
    }
    let mut payload = vec![0; length as usize];
    input.read_exact(&mut payload)?;
    if crc32c::crc32c(&payload) != u32::from_le_bytes(of_payload) {
        return Err(damaged("the checksum of a record does not match"));
    }
    Ok(ReadOutcome::Entry(decode(&payload).map_err(damaged)?, bytes))
}

fn damaged(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The reason why a payload with a valid checksum is not a record.
#[derive(Debug, thiserror::Error)]
enum Malformed {
    #[error("a record is too short")]
    Short(#[from] TryGetError),
    #[error("a record is too long")]
    Long,
    #[error("a record has no end marker")]
    Unterminated,
    #[error("a record has the unknown kind {0}")]
    UnknownKind(u8),
    #[error("a record has an invalid run: {0}")]
    Run(#[from] serde_json::Error),
    #[error("a record has invalid ids: {0}")]
    Ids(String),
}

fn decode(payload: &[u8]) -> Result<Entry, Malformed> {
    let mut rest = payload.strip_suffix(&[END]).ok_or(Malformed::Unterminated)?;
    let rest = &mut rest;
    let op = match rest.try_get_u8()? {
        LOOKUP => ReplayOp::Lookup(get_token(rest)?),
        PUSH => {
            let (token, step) = (get_token(rest)?, rest.try_get_u64_le()?);
            let lr_factor = rest.try_get_f32_le()?;
            let tables = (0..rest.try_get_u32_le()?)
                .map(|_| {
                    let (table, ids) = get_ids(rest)?;
                    Ok((table, ids, get_items(rest, f32::from_le_bytes)?))
                })
                .collect::<Result<_, Malformed>>()?;
            ReplayOp::Push { token, step, lr_factor, tables }
        }
        BEGIN => ReplayOp::Begin(serde_json::from_slice(std::mem::take(rest))?),
        PREPARE_SNAPSHOT => ReplayOp::PrepareSnapshot(rest.try_get_u64_le()?),
        ABORT_SNAPSHOT => ReplayOp::AbortSnapshot(rest.try_get_u64_le()?),
        FOLLOWS => return whole(rest.try_get_u64_le().map(Entry::Follows)?, rest),
        DURABLE => return whole(rest.try_get_u64_le().map(Entry::Durable)?, rest),
        kind => return Err(Malformed::UnknownKind(kind)),
    };
    whole(Entry::Op(op), rest)
}

fn whole(entry: Entry, rest: &[u8]) -> Result<Entry, Malformed> {
    if rest.is_empty() { Ok(entry) } else { Err(Malformed::Long) }
}

fn get_token(rest: &mut &[u8]) -> Result<Token, Malformed> {
    let (job, generation) = (JobId(rest.try_get_u64_le()?), rest.try_get_u64_le()?);
    Ok(Token { job, generation, rank: rest.try_get_u32_le()?, seq: rest.try_get_u64_le()? })
}

/// Read a count, followed by items of `N` bytes each.
fn get_items<const N: usize, T>(rest: &mut &[u8], item: impl Fn([u8; N]) -> T) -> Result<Vec<T>, Malformed> {
    let requested = (rest.try_get_u32_le()? as usize).saturating_mul(N);
    let available = rest.len();
    let bytes = rest.split_off(..requested).ok_or(TryGetError { requested, available })?;
    Ok(bytes.as_chunks::<N>().0.iter().copied().map(item).collect())
}

fn get_ids(rest: &mut &[u8]) -> Result<(usize, ShardedIds), Malformed> {
    let table = rest.try_get_u32_le()? as usize;
    let ids: Vec<Id> = get_items(rest, u64::from_le_bytes)?;
    // Grouping is stable, so the ids of a shard keep their order.
    let ids = ShardedIds::group(&ids).map_err(|error| Malformed::Ids(error.to_string()))?;
    Ok((table, ids))
}

#[cfg(test)]
mod tests {
    use persia_types::tables::TableGradients;

    use super::*;

    const TOKEN: Token = Token { job: JobId(7), generation: 3, rank: 2, seq: 9 };

    fn push() -> (WalRecord, ReplayOp) {
        let ids = ShardedIds::group(&[5, 900, 6]).unwrap();
        let gradients = [0.5, -1.0, f32::INFINITY, 0.0, 2.0, 3.0];
        let tables = [TableGradients { table: 1, ids: &ids, gradients: Gradients::Rows(&gradients) }];
        let request = PushRequest { token: TOKEN, step: 11, lr_factor: 0.25, tables: &tables };
        let tables = vec![(1, ids.clone(), gradients.to_vec())];
        (WalRecord::push(&request), ReplayOp::Push { token: TOKEN, step: 11, lr_factor: 0.25, tables })
    }

    fn read_bytes(mut bytes: &[u8]) -> io::Result<ReadOutcome> {
        let left = bytes.len() as u64;
        read(&mut bytes, left)
    }

    #[test]
    fn a_record_is_decoded_as_it_was_encoded() {
        for (record, expected) in [
            (WalRecord::lookup(TOKEN), ReplayOp::Lookup(TOKEN)),
            push(),
            (WalRecord::prepare_snapshot(7), ReplayOp::PrepareSnapshot(7)),
        ] {
            let bytes = record.bytes().unwrap();
            let read = read_bytes(bytes).unwrap();
            let ReadOutcome::Entry(Entry::Op(op), length) = read else { panic!("{read:?}") };
            assert_eq!((op, length), (expected, bytes.len() as u64));
        }
    }

    #[test]
    fn a_truncated_record_is_torn_and_a_changed_one_is_damaged() {
        let (record, _) = push();
        let bytes = record.bytes().unwrap();
        assert!(matches!(read_bytes(&[]).unwrap(), ReadOutcome::End));
        for length in 1..bytes.len() {
            assert!(matches!(read_bytes(&bytes[..length]).unwrap(), ReadOutcome::Torn), "{length} bytes");
        }
        for (at, bit) in (0..bytes.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1 << bit;
            assert!(read_bytes(&changed).is_err(), "bit {bit} of byte {at}");
        }
    }
}
