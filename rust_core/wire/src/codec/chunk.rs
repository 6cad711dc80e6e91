//! [`Chunk`]: complete items of one part, with a checksum.

use std::ops::Range;

use bytes::Bytes;
use persia_types::TablesError;
use persia_types::id::Id;
use persia_types::limits::MAX_CHUNK_BYTES;
use tonic::Status;

use crate::proto::Chunk;

/// The maximum size of the chunks that are sent, in bytes. It is small enough for a chunk to stay in the
/// cache between copies.
pub const CHUNK_BYTES: usize = 128 * 1024;

/// The reason why a chunk, or a stream of chunks, is refused.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    /// Bits changed in transit. A retry may succeed.
    #[error("damaged in transit: {what}")]
    Damaged {
        /// The position of the chunk, and the checksums.
        what: String,
    },
    /// The stream ended early. A retry may succeed.
    #[error("cut short: {what}")]
    CutShort {
        /// What is missing.
        what: String,
    },
    /// The content is invalid, or differs from what was announced. A retry would fail as well.
    #[error("malformed: {0}")]
    Malformed(#[from] TablesError),
}

impl ChunkError {
    pub(super) fn bad_shape(what: String) -> Self {
        Self::Malformed(TablesError::BadShape { what })
    }

    pub(super) fn unknown_part(chunk: &Chunk, parts: usize) -> Self {
        Self::bad_shape(format!("a chunk has part index {}, expected one below {parts}", chunk.part))
    }

    pub(super) fn out_of_range(chunk: &Chunk, items: u64, announced: u64) -> Self {
        let Chunk { part, first, .. } = chunk;
        Self::bad_shape(format!("part {part}: {items} items from {first} on, but {announced} were announced"))
    }
}

impl From<ChunkError> for Status {
    fn from(error: ChunkError) -> Self {
        match error {
            ChunkError::Malformed(error) => crate::error::to_status(&error),
            damaged => Self::data_loss(format!("a request or reply was {damaged}")),
        }
    }
}

/// The size of an item (an id, a row or a word), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width(pub(super) usize);

impl Width {
    /// The size of an id.
    pub const ID: Self = Self(size_of::<Id>());
    /// The size of a word in the lists of samples.
    pub const WORD: Self = Self(size_of::<u32>());

    pub(super) fn new(bytes: usize) -> Self {
        Self(bytes)
    }

    /// The number of items in a chunk.
    ///
    /// # Errors
    /// [`ChunkError::Malformed`] for a chunk that has no items, has a partial item, or is larger than
    /// [`MAX_CHUNK_BYTES`], and for items of size 0.
    pub fn items(self, chunk: &Chunk) -> Result<u64, ChunkError> {
        let bytes = chunk.data.len();
        if bytes == 0 || bytes > MAX_CHUNK_BYTES || self.0 == 0 || !bytes.is_multiple_of(self.0) {
            return Err(ChunkError::bad_shape(format!(
                "part {}: a chunk of {bytes} bytes, expected whole items of {} bytes and at most {MAX_CHUNK_BYTES}",
                chunk.part, self.0
            )));
        }
        Ok((bytes / self.0) as u64)
    }

    /// The ranges of items that are sent as one chunk each.
    pub(super) fn ranges(self, items: usize) -> impl Iterator<Item = Range<usize>> {
        let step = (CHUNK_BYTES / self.0.max(1)).max(1);
        (0..items).step_by(step).map(move |first| first..items.min(first + step))
    }
}

/// A chunk of items of `part`, starting at item `first`, with the checksum of `data`.
pub(super) fn new_chunk(part: u32, first: usize, data: Bytes) -> Chunk {
    Chunk { part, first: first as u64, crc32c: crc32c::crc32c(&data), data }
}

/// Split `chunk` at `bounds`, which ascend from 0. Returns each piece, with its position relative to its lower
/// bound, and the index of that bound. Data is not copied. Checksums are recomputed only if the chunk is split.
pub(super) fn split(chunk: Chunk, width: Width, bounds: &[u64]) -> Result<Vec<(usize, Chunk)>, ChunkError> {
    let items = width.items(&chunk)?;
    let all = bounds.last().copied().unwrap_or(0);
    let Some(end) = chunk.first.checked_add(items).filter(|end| *end <= all) else {
        return Err(ChunkError::out_of_range(&chunk, items, all));
    };
    // Take the last of several equal bounds, because the ranges before it are empty.
    let owner = bounds.partition_point(|bound| *bound <= chunk.first) - 1;
    if end <= bounds[owner + 1] {
        return Ok(vec![(owner, Chunk { first: chunk.first - bounds[owner], ..chunk })]);
    }
    verify(&chunk)?;
    let mut pieces = Vec::new();
    for owner in owner..bounds.len() - 1 {
        let (low, high) = (bounds[owner].max(chunk.first), bounds[owner + 1].min(end));
        if low >= high {
            continue;
        }
        let byte = |item: u64| (item - chunk.first) as usize * width.0;
        let data = chunk.data.slice(byte(low)..byte(high));
        let crc32c = crc32c::crc32c(&data);
        pieces.push((owner, Chunk { part: chunk.part, first: low - bounds[owner], data, crc32c }));
    }
    Ok(pieces)
}

pub(super) fn verify(chunk: &Chunk) -> Result<(), ChunkError> {
    let found = crc32c::crc32c(&chunk.data);
    if found == chunk.crc32c {
        return Ok(());
    }
    let Chunk { part, first, crc32c: sent, .. } = chunk;
    Err(ChunkError::Damaged {
        what: format!("part {part}, item {first}: checksum {found:#010x}, but the sender's is {sent:#010x}"),
    })
}
