//! [`Collector`]: collects the values of a request from chunks in ascending order. Memory grows as chunks
//! arrive.

use persia_types::id::Id;

use super::chunk::{ChunkError, Width, verify};
use super::floats::RowFormat;
use super::parts::Part;
use super::samples::RequestKind;
use crate::proto::Chunk;

/// The number of bytes by which the memory of a part grows before its announced values arrive. Once more bytes than
/// this have arrived, the memory doubles instead.
const ALLOCATE_AHEAD: usize = 4 << 20;

/// A value that is read from chunks: an id, a word, or a float of a gradient.
pub trait Value: Copy {
    /// Append the values of complete items, at any alignment.
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

/// Collects the values of all parts of a request. The chunks of each part must arrive in ascending order
/// without a gap.
#[derive(Debug)]
pub struct Collector<T> {
    parts: Vec<Announced<T>>,
}

/// The announced values of a part, and those that have arrived.
#[derive(Debug)]
struct Announced<T> {
    width: Width,
    /// The number of values per item.
    values_each: usize,
    items: usize,
    format: RowFormat,
    values: Vec<T>,
}

impl Collector<Id> {
    /// Collect the ids of `parts`.
    pub fn ids(parts: &[Part]) -> Self {
        Self::new(parts, |part| (Width::ID, 1, part.len()))
    }
}

impl Collector<f32> {
    /// Collect the gradients of `parts`.
    pub fn gradients(parts: &[Part]) -> Self {
        Self::new(parts, |part| (part.format.width(), part.format.dim, part.len()))
    }

    /// Collect the gradients of samples of those `parts` that have samples.
    pub fn sample_gradients(parts: &[Part]) -> Self {
        let samples = |part: &Part| part.samples.map_or(0, |head| head.samples);
        Self::new(parts, |part| (part.format.width(), part.format.dim, samples(part)))
    }
}

impl Collector<u32> {
    /// Collect the lists of samples of those `parts` that have samples.
    pub fn csr(parts: &[Part], kind: RequestKind) -> Self {
        let words = |part: &Part| part.samples.map_or(0, |head| head.words(kind, part.len()));
        Self::new(parts, |part| (Width::WORD, 1, words(part)))
    }
}

impl<T: Value> Collector<T> {
    /// `shape` returns the width of a part's items, the number of values per item, and the number of items.
    fn new(parts: &[Part], shape: impl Fn(&Part) -> (Width, usize, usize)) -> Self {
        let of = |part: &Part| {
            let (width, values_each, items) = shape(part);
            Announced { width, values_each, items, format: part.format, values: Vec::new() }
        };
        Self { parts: parts.iter().map(of).collect() }
    }

    /// Whether all announced values have arrived.
    pub fn is_complete(&self) -> bool {
        self.parts.iter().all(|part| part.values.len() == part.items * part.values_each)
    }

    /// Take one chunk.
    ///
    /// # Errors
    /// [`ChunkError`] for a chunk that is damaged, was not announced, or is not the next of its part.
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
                "part {part}: a chunk starts at item {first}, expected {next}"
            )));
        }
        if items > *announced as u64 - next {
            return Err(ChunkError::out_of_range(chunk, items, *announced as u64));
        }
        verify(chunk)?;
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
    /// [`ChunkError::CutShort`] if fewer values have arrived than were announced.
    pub fn finish(self) -> Result<Vec<Vec<T>>, ChunkError> {
        for (number, part) in self.parts.iter().enumerate() {
            let (arrived, all) = (part.values.len(), part.items * part.values_each);
            if arrived != all {
                return Err(ChunkError::CutShort {
                    what: format!("part {number}: {arrived} of {all} values arrived"),
                });
            }
        }
        Ok(self.parts.into_iter().map(|part| part.values).collect())
    }
}

#[cfg(test)]
mod tests {
    use persia_types::id::ShardedIds;

    use super::*;
    use crate::send::row_chunks;

    #[test]
    fn an_announcement_allocates_little_before_bytes_arrive() {
        let ids = ShardedIds::group(&(0..1_000_000).collect::<Vec<Id>>()).unwrap();
        let parts = [Part::new(0, RowFormat::f32(64), &ids)];
        let mut collect = Collector::gradients(&parts);
        collect.take(&row_chunks(0, RowFormat::f32(64), vec![0.0; 64]).next().unwrap()).unwrap();
        assert!(collect.parts[0].values.capacity() * 4 <= ALLOCATE_AHEAD);
    }
}
