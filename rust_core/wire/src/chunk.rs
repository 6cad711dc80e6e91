//! Ids, rows and gradients as streams of checked chunks.
//!
//! A sender cuts at whole items ([`id_chunks`], [`row_chunks`], [`gradient_chunks`]); a receiver of a request collects
//! items in ascending order, taking memory as they come ([`Collect`]); a receiver of rows writes them straight to
//! where they belong, in any order ([`Scatter`](crate::scatter::Scatter)).

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use persia_kernels::{Bags, Gradients, Pool, SegmentSum};
use persia_types::id::Id;
use persia_types::limits::MAX_CHUNK_BYTES;
use persia_types::{Dtype, TablesError};
use tonic::Status;

use crate::floats::RowFormat;
use crate::parts::Part;
use crate::proto::Chunk;
use crate::samples::Verb;

/// Bytes of data in the chunks we send: small enough to stay in the cache between copies.
pub const CHUNK_BYTES: usize = 128 * 1024;
/// What a receiver allocates at once, at most, for items that were announced and have not come yet.
const ALLOCATE_AHEAD: usize = 4 << 20;

/// Why a chunk, or a stream of them, was not taken.
#[derive(Debug, thiserror::Error)]
pub enum ChunkError {
    /// Bits changed on the way: sending again helps.
    #[error("damaged on the way: {what}")]
    Damaged {
        /// Which chunk, and both checksums.
        what: String,
    },
    /// The stream ended early: sending again helps.
    #[error("cut short: {what}")]
    CutShort {
        /// What came and what was announced.
        what: String,
    },
    /// What came is not what was announced: sending it again does not help.
    #[error("malformed: {0}")]
    Malformed(#[from] TablesError),
}

impl ChunkError {
    pub(crate) fn bad_shape(what: String) -> Self {
        Self::Malformed(TablesError::BadShape { what })
    }

    pub(crate) fn unknown_part(chunk: &Chunk, parts: usize) -> Self {
        Self::bad_shape(format!("a chunk of part {}, the head has {parts}", chunk.part))
    }

    pub(crate) fn out_of_range(chunk: &Chunk, items: u64, announced: u64) -> Self {
        let Chunk { part, first, .. } = chunk;
        Self::bad_shape(format!("part {part}: {items} items from {first} on, {announced} were announced"))
    }
}

impl From<ChunkError> for Status {
    fn from(error: ChunkError) -> Self {
        match error {
            ChunkError::Malformed(error) => crate::error::to_status(&error),
            damaged => Self::data_loss(damaged.to_string()),
        }
    }
}

/// Bytes of one item of a stream: of an id, or of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width(pub(crate) usize);

impl Width {
    /// An id.
    pub const ID: Self = Self(size_of::<Id>());
    /// What uses of samples are made of.
    pub const WORD: Self = Self(size_of::<u32>());

    pub(crate) fn new(bytes: usize) -> Self {
        Self(bytes)
    }

    /// Number of items in a chunk, its size being checked.
    ///
    /// # Errors
    /// [`ChunkError::Malformed`] for no items, cut ones, or more than [`MAX_CHUNK_BYTES`].
    pub fn items(self, chunk: &Chunk) -> Result<u64, ChunkError> {
        let bytes = chunk.data.len();
        if bytes == 0 || bytes > MAX_CHUNK_BYTES || self.0 == 0 || !bytes.is_multiple_of(self.0) {
            return Err(ChunkError::bad_shape(format!(
                "part {}: a chunk of {bytes} bytes, want whole items of {} bytes and at most {MAX_CHUNK_BYTES}",
                chunk.part, self.0
            )));
        }
        Ok((bytes / self.0) as u64)
    }

    /// Item ranges of the chunks that `items` are sent in.
    fn ranges(self, items: usize) -> impl Iterator<Item = Range<usize>> {
        let step = (CHUNK_BYTES / self.0.max(1)).max(1);
        (0..items).step_by(step).map(move |first| first..items.min(first + step))
    }
}

fn chunk(part: u32, first: usize, data: Bytes) -> Chunk {
    Chunk { part, first: first as u64, crc32c: crc32c::crc32c(&data), data }
}

/// `ids` of part `part`, each chunk made when it is asked for.
pub fn id_chunks(part: u32, ids: &[Id]) -> impl Iterator<Item = Chunk> + '_ {
    Width::ID
        .ranges(ids.len())
        .map(move |range| chunk(part, range.start, Bytes::copy_from_slice(bytemuck::cast_slice(&ids[range]))))
}

/// The gradients of part number `index`, made chunk after chunk as they are asked for: those of ids summed, or those of
/// samples as they are. Of 16 bits, the latter are scaled, to have the range of what is summed. Lengths were checked.
pub fn gradient_chunks<'a>(
    index: u32,
    part: &'a Part,
    gradients: Gradients<'a>,
) -> impl Iterator<Item = Chunk> + 'a {
    let format = part.format;
    format.width().ranges(part.vectors()).map(move |range| {
        let data = match (&gradients, part.samples) {
            (Gradients::Samples(sum), Some(_)) => sample_gradients(format, range.clone(), sum),
            _ => match gradients.rows(range.clone(), format.dim) {
                Cow::Borrowed(rows) => format.encode_copy(rows),
                Cow::Owned(rows) => format.encode(rows),
            },
        };
        chunk(index, range.start, data)
    })
}

fn sample_gradients(format: RowFormat, samples: Range<usize>, sum: &SegmentSum<'_>) -> Bytes {
    let rows = &sum.gradients[samples.start * sum.dim..samples.end * sum.dim];
    if format.dtype == Dtype::F32 {
        return format.encode_copy(rows);
    }
    let mut scaled = rows.to_vec();
    persia_kernels::scale(&mut scaled, sum.scale);
    format.encode(scaled)
}

/// The pooled samples of part number `index`, made chunk after chunk as they are asked for. `bags` were checked.
pub fn pooled_chunks<'a>(
    index: u32,
    format: RowFormat,
    rows: &'a [f32],
    bags: Bags<'a>,
) -> impl Iterator<Item = Chunk> + 'a {
    format.width().ranges(bags.samples()).map(move |range| {
        let (first, mut pooled) = (range.start, vec![0.0; range.len() * format.dim]);
        persia_kernels::pool(&Pool { rows, dim: format.dim, bags: bags.of(range) }, &mut pooled);
        chunk(index, first, format.encode(pooled))
    })
}

/// The uses of part `part`: several lists of words, one behind the other.
pub fn word_chunks(part: u32, lists: [&[u32]; 4]) -> impl Iterator<Item = Chunk> + '_ {
    let mut next = 0;
    lists.into_iter().flat_map(move |words| {
        let first = next;
        next += words.len();
        Width::WORD.ranges(words.len()).map(move |range| {
            let data = Bytes::copy_from_slice(bytemuck::cast_slice(&words[range.clone()]));
            chunk(part, first + range.start, data)
        })
    })
}

/// `[n, dim]` rows of part `part`, which are given away: those of f32 are not copied.
pub fn row_chunks(part: u32, format: RowFormat, rows: Vec<f32>) -> impl Iterator<Item = Chunk> + Send {
    let (width, dim) = (format.width(), format.dim);
    let items = rows.len().checked_div(dim).unwrap_or(0);
    let rows = if format.dtype == Dtype::F32 { Err(format.encode(rows)) } else { Ok(rows) };
    width.ranges(items).map(move |range| {
        let data = match &rows {
            Ok(floats) => format.encode_copy(&floats[range.start * dim..range.end * dim]),
            Err(bytes) => bytes.slice(range.start * width.0..range.end * width.0),
        };
        chunk(part, range.start, data)
    })
}

/// `chunk` as pieces that lie between two neighbours of `bounds`, which ascend from 0: (index of the lower bound,
/// piece with its position counted from there). Not copied; the checksum is made anew only where it is cut.
pub(crate) fn cut(chunk: Chunk, width: Width, bounds: &[u64]) -> Result<Vec<(usize, Chunk)>, ChunkError> {
    let items = width.items(&chunk)?;
    let all = bounds.last().copied().unwrap_or(0);
    let Some(end) = chunk.first.checked_add(items).filter(|end| *end <= all) else {
        return Err(ChunkError::out_of_range(&chunk, items, all));
    };
    // The last of equal bounds: the ranges before it are empty.
    let owner = bounds.partition_point(|bound| *bound <= chunk.first) - 1;
    if end <= bounds[owner + 1] {
        return Ok(vec![(owner, Chunk { first: chunk.first - bounds[owner], ..chunk })]);
    }
    check_sum(&chunk)?;
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

pub(crate) fn check_sum(chunk: &Chunk) -> Result<(), ChunkError> {
    let found = crc32c::crc32c(&chunk.data);
    if found == chunk.crc32c {
        return Ok(());
    }
    let Chunk { part, first, crc32c: sent, .. } = chunk;
    Err(ChunkError::Damaged {
        what: format!("part {part}, item {first}: checksum {found:#010x}, sent was {sent:#010x}"),
    })
}

/// Something that ids, uses or gradients are read from.
pub trait Value: Copy {
    /// Append what `bytes` stand for: whole items, at any alignment.
    fn extend(values: &mut Vec<Self>, bytes: &[u8], format: RowFormat);
}

impl Value for Id {
    fn extend(values: &mut Vec<Self>, bytes: &[u8], _: RowFormat) {
        let (words, _) = bytes.as_chunks::<8>();
        values.extend(words.iter().map(|word| Self::from_le_bytes(*word)));
    }
}

impl Value for u32 {
    fn extend(values: &mut Vec<Self>, bytes: &[u8], _: RowFormat) {
        let (words, _) = bytes.as_chunks::<4>();
        values.extend(words.iter().map(|word| Self::from_le_bytes(*word)));
    }
}

impl Value for f32 {
    fn extend(values: &mut Vec<Self>, bytes: &[u8], format: RowFormat) {
        let (from, more) = (values.len(), bytes.len() / format.width().0 * format.dim);
        values.resize(from + more, 0.0);
        format.decode(bytes, &mut values[from..]);
    }
}

/// Collects the values of all parts of a request. Chunks of a part come in ascending order without a gap.
#[derive(Debug)]
pub struct Collect<T> {
    parts: Vec<Announced<T>>,
}

/// What is to come of one part, and what came.
#[derive(Debug)]
struct Announced<T> {
    width: Width,
    /// Values of an item.
    values_each: usize,
    items: usize,
    format: RowFormat,
    values: Vec<T>,
}

impl Collect<Id> {
    /// The ids of `parts`.
    pub fn ids(parts: &[Part]) -> Self {
        Self::new(parts, |part| (Width::ID, 1, part.len()))
    }
}

impl Collect<f32> {
    /// The gradients of `parts`.
    pub fn gradients(parts: &[Part]) -> Self {
        Self::new(parts, |part| (part.format.width(), part.format.dim, part.len()))
    }

    /// The gradients of those of `parts` that have samples.
    pub fn sample_gradients(parts: &[Part]) -> Self {
        let samples = |part: &Part| part.samples.map_or(0, |head| head.samples);
        Self::new(parts, |part| (part.format.width(), part.format.dim, samples(part)))
    }
}

impl Collect<u32> {
    /// The uses of those of `parts` that have samples.
    pub fn uses(parts: &[Part], verb: Verb) -> Self {
        let words = |part: &Part| part.samples.map_or(0, |head| head.words(verb, part.len()));
        Self::new(parts, |part| (Width::WORD, 1, words(part)))
    }
}

impl<T: Value> Collect<T> {
    /// `shape` is the width of a part's items, the values in each, and their number.
    fn new(parts: &[Part], shape: impl Fn(&Part) -> (Width, usize, usize)) -> Self {
        let of = |part: &Part| {
            let (width, values_each, items) = shape(part);
            Announced { width, values_each, items, format: part.format, values: Vec::new() }
        };
        Self { parts: parts.iter().map(of).collect() }
    }

    /// Whether everything that was announced has come.
    pub fn is_complete(&self) -> bool {
        self.parts.iter().all(|part| part.values.len() == part.items * part.values_each)
    }

    /// Take one chunk.
    ///
    /// # Errors
    /// [`ChunkError`] for one that is damaged, was not announced, or is not the next of its part.
    pub fn take(&mut self, chunk: &Chunk) -> Result<(), ChunkError> {
        let parts = self.parts.len();
        let Some(part) = self.parts.get_mut(chunk.part as usize) else {
            return Err(ChunkError::unknown_part(chunk, parts));
        };
        let Announced { width, values_each, items: announced, format, values } = part;
        let items = width.items(chunk)?;
        let next = (values.len() / *values_each) as u64;
        if chunk.first != next {
            let Chunk { part, first, .. } = chunk;
            return Err(ChunkError::bad_shape(format!(
                "part {part}: a chunk from item {first} on, the next one is {next}"
            )));
        }
        if items > *announced as u64 - next {
            return Err(ChunkError::out_of_range(chunk, items, *announced as u64));
        }
        check_sum(chunk)?;
        let more = items as usize * *values_each;
        if values.capacity() - values.len() < more {
            let all = *announced * *values_each;
            let ahead = values.len().max(ALLOCATE_AHEAD / size_of::<T>()).max(more);
            values.reserve_exact(ahead.min(all - values.len()));
        }
        T::extend(values, &chunk.data, *format);
        Ok(())
    }

    /// The values of every part.
    ///
    /// # Errors
    /// [`ChunkError::CutShort`] when fewer came than were announced.
    pub fn finish(self) -> Result<Vec<Vec<T>>, ChunkError> {
        for (number, part) in self.parts.iter().enumerate() {
            let (came, all) = (part.values.len(), part.items * part.values_each);
            if came != all {
                return Err(ChunkError::CutShort { what: format!("part {number}: {came} of {all} values") });
            }
        }
        Ok(self.parts.into_iter().map(|part| part.values).collect())
    }
}

#[cfg(test)]
#[path = "chunk_tests.rs"]
mod tests;
