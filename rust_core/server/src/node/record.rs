//! What a journal holds: requests that change rows, as bytes and back.
//!
//! ```text
//! record  = length of the payload, u32 | crc32c of that, u32 | crc32c of the payload, u32 | payload
//! payload = kind, u8, then
//!   look-up  token, step, tables: table, number of ids, ids
//!   push     token, step, learning-rate factor, tables: as above, number of gradients, gradients
//!   begin    the run as JSON
//!   cut      its number, u64
//!   uncut    the same
//! and a last byte, END
//! ```
//!
//! All numbers are little-endian: job, generation, seq, step and ids of 8 bytes, the others of 4.

use std::io::{self, Read};

use persia_kernels::Gradients;
use persia_types::tables::{LookupRequest, PushRequest, Run};
use persia_types::{Id, JobId, ShardedIds, Token};

/// Length and checksums. The length has its own, so that a damaged one is not taken for a record that was cut short.
const FRAME_BYTES: usize = 12;
const LOOKUP: u8 = 1;
const PUSH: u8 = 2;
const BEGIN: u8 = 3;
const CUT: u8 = 4;
const UNCUT: u8 = 5;
/// Not 0: where a disk shows zeros at the end of a record, they were never written.
const END: u8 = 0xE5;

/// A record, ready to be written.
pub(super) struct Record(Vec<u8>);

impl Record {
    /// A training look-up.
    pub(super) fn lookup(request: &LookupRequest<'_>) -> Self {
        Self::framed(LOOKUP, |out| {
            put_head(out, request.token, request.step);
            put_count(out, request.tables.len());
            for part in request.tables {
                put_ids(out, part.table, part.ids);
            }
        })
    }

    /// A push.
    pub(super) fn push(request: &PushRequest<'_>) -> Self {
        Self::framed(PUSH, |out| {
            put_head(out, request.token, request.step);
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

    /// A run that keeps the rows there are.
    pub(super) fn begin(run: &Run) -> io::Result<Self> {
        let run = serde_json::to_vec(run)?;
        Ok(Self::framed(BEGIN, |out| out.extend_from_slice(&run)))
    }

    /// A cut.
    pub(super) fn cut(cut: u64) -> Self {
        Self::framed(CUT, |out| out.extend_from_slice(&cut.to_le_bytes()))
    }

    /// The end of a cut that nobody wants any more.
    pub(super) fn uncut(cut: u64) -> Self {
        Self::framed(UNCUT, |out| out.extend_from_slice(&cut.to_le_bytes()))
    }

    /// The bytes to write.
    ///
    /// # Errors
    /// For a payload of 4 GiB or more, which no request has.
    pub(super) fn bytes(&self) -> io::Result<&[u8]> {
        if u32::try_from(self.0.len() - FRAME_BYTES).is_ok() {
            Ok(&self.0)
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "a request of 4 GiB or more"))
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

fn put_head(out: &mut Vec<u8>, token: Token, step: u64) {
    out.extend_from_slice(&token.job.0.to_le_bytes());
    out.extend_from_slice(&token.generation.to_le_bytes());
    out.extend_from_slice(&token.rank.to_le_bytes());
    out.extend_from_slice(&token.seq.to_le_bytes());
    out.extend_from_slice(&step.to_le_bytes());
}

/// Of what there are fewer than 2^32: [`Record::bytes`] refuses what is longer.
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

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    Lookup { token: Token, step: u64, tables: Vec<(usize, ShardedIds)> },
    Push { token: Token, step: u64, lr_factor: f32, tables: Vec<(usize, ShardedIds, Vec<f32>)> },
    Begin(Box<Run>),
    Cut(u64),
    Uncut(u64),
}

/// What stands at a place of a journal.
#[derive(Debug)]
pub(super) enum Found {
    /// A record, and its bytes with the frame.
    Entry(Entry, u64),
    /// The end.
    End,
    /// The beginning of a record whose rest was not written.
    Torn,
}

/// Read the record that `input` stands at; `left` bytes are left of its file.
///
/// # Errors
/// `InvalidData` for one that is damaged, and what reading says.
pub(super) fn read(input: &mut impl Read, left: u64) -> io::Result<Found> {
    if left == 0 {
        return Ok(Found::End);
    }
    if left < FRAME_BYTES as u64 {
        return Ok(Found::Torn);
    }
    let mut frame = [[0; 4]; FRAME_BYTES / 4];
    input.read_exact(frame.as_flattened_mut())?;
    let [length, of_length, of_payload] = frame;
    if crc32c::crc32c(&length) != u32::from_le_bytes(of_length) {
        return Err(damaged("a record whose length is wrong"));
    }
    let length = u64::from(u32::from_le_bytes(length));
    let bytes = FRAME_BYTES as u64 + length;
    if bytes > left {
        return Ok(Found::Torn);
    }
    let mut payload = vec![0; length as usize];
    input.read_exact(&mut payload)?;
    if crc32c::crc32c(&payload) != u32::from_le_bytes(of_payload) {
        return Err(damaged("a record whose checksum is wrong"));
    }
    Ok(Found::Entry(entry(&payload)?, bytes))
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn entry(payload: &[u8]) -> io::Result<Entry> {
    let Some(payload) = payload.strip_suffix(&[END]) else { return Err(damaged("a record without end")) };
    let mut rest = Rest(payload);
    let entry = match rest.array::<1>()? {
        [LOOKUP] => {
            let (token, step) = (rest.token()?, rest.u64()?);
            let tables = (0..rest.u32()?).map(|_| rest.ids()).collect::<io::Result<_>>()?;
            Entry::Lookup { token, step, tables }
        }
        [PUSH] => {
            let (token, step) = (rest.token()?, rest.u64()?);
            let lr_factor = f32::from_le_bytes(rest.array()?);
            let tables = (0..rest.u32()?)
                .map(|_| {
                    let (table, ids) = rest.ids()?;
                    Ok((table, ids, rest.floats()?))
                })
                .collect::<io::Result<_>>()?;
            Entry::Push { token, step, lr_factor, tables }
        }
        [BEGIN] => Entry::Begin(serde_json::from_slice(std::mem::take(&mut rest.0))?),
        [CUT] => Entry::Cut(rest.u64()?),
        [UNCUT] => Entry::Uncut(rest.u64()?),
        [_] => return Err(damaged("a record of an unknown kind")),
    };
    if rest.0.is_empty() { Ok(entry) } else { Err(damaged("a record that is too long")) }
}

/// What is left of a payload.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn bytes(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let (bytes, rest) =
            self.0.split_at_checked(count).ok_or_else(|| damaged("a record that is too short"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn token(&mut self) -> io::Result<Token> {
        let (job, generation) = (JobId(self.u64()?), self.u64()?);
        Ok(Token { job, generation, rank: self.u32()?, seq: self.u64()? })
    }

    /// Items of `N` bytes.
    fn items<const N: usize, T>(&mut self, of: impl Fn([u8; N]) -> T) -> io::Result<Vec<T>> {
        let count = self.u32()? as usize;
        let bytes = self.bytes(count.saturating_mul(N))?;
        let (items, _) = bytes.as_chunks::<N>();
        Ok(items.iter().copied().map(of).collect())
    }

    fn ids(&mut self) -> io::Result<(usize, ShardedIds)> {
        let table = self.u32()? as usize;
        let ids: Vec<Id> = self.items(u64::from_le_bytes)?;
        // Stable: ids of a shard keep their order.
        let ids = ShardedIds::group(&ids).map_err(|error| damaged(&error.to_string()))?;
        Ok((table, ids))
    }

    fn floats(&mut self) -> io::Result<Vec<f32>> {
        self.items(f32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use persia_types::Mode;
    use persia_types::tables::{TableGradients, TableIds};

    use super::*;

    const TOKEN: Token = Token { job: JobId(7), generation: 3, rank: 2, seq: 9 };

    fn push() -> (Record, Entry) {
        let ids = ShardedIds::group(&[5, 900, 6]).unwrap();
        let gradients = [0.5, -1.0, f32::INFINITY, 0.0, 2.0, 3.0];
        let tables = [TableGradients { table: 1, ids: &ids, gradients: Gradients::Rows(&gradients) }];
        let request = PushRequest { token: TOKEN, step: 11, lr_factor: 0.25, tables: &tables };
        let tables = vec![(1, ids.clone(), gradients.to_vec())];
        (Record::push(&request), Entry::Push { token: TOKEN, step: 11, lr_factor: 0.25, tables })
    }

    fn found(mut bytes: &[u8]) -> io::Result<Found> {
        let left = bytes.len() as u64;
        read(&mut bytes, left)
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let ids = ShardedIds::group(&[1, 2, 3, u64::MAX]).unwrap();
        let tables = [TableIds { table: 0, ids: &ids, per_sample: None }];
        let lookup = LookupRequest { token: TOKEN, step: 4, mode: Mode::Train, tables: &tables };
        let expected = Entry::Lookup { token: TOKEN, step: 4, tables: vec![(0, ids.clone())] };
        for (record, expected) in
            [(Record::lookup(&lookup), expected), push(), (Record::cut(7), Entry::Cut(7))]
        {
            let bytes = record.bytes().unwrap();
            let Found::Entry(entry, length) = found(bytes).unwrap() else { panic!("no entry") };
            assert_eq!((entry, length), (expected, bytes.len() as u64));
        }
    }

    #[test]
    fn a_record_that_is_cut_short_is_torn_and_one_that_is_changed_is_damaged() {
        let (record, _) = push();
        let bytes = record.bytes().unwrap();
        assert!(matches!(found(&[]).unwrap(), Found::End));
        for length in 1..bytes.len() {
            assert!(matches!(found(&bytes[..length]).unwrap(), Found::Torn), "{length} bytes");
        }
        for (at, bit) in (0..bytes.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1 << bit;
            assert!(found(&changed).is_err(), "bit {bit} of byte {at}");
        }
    }
}
