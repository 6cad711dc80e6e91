//! [`Scatter`]: writes the rows of a reply to their positions.

use std::ops::Range;

use persia_kernels::{Csr, copy};
use persia_types::{Dtype, TablesError};

use super::chunk::{ChunkError, verify};
use super::floats::RowFormat;
use super::parts::Part;
use crate::proto::Chunk;

/// The ranges of items that have arrived, in ascending order, with gaps between them.
#[derive(Debug, Default)]
struct Covered(Vec<Range<u64>>);

impl Covered {
    /// Add a range. Returns false if it overlaps another one.
    fn add(&mut self, range: Range<u64>) -> bool {
        let at = self.0.partition_point(|other| other.end < range.start);
        let touches_left = self.0.get(at).is_some_and(|left| left.end == range.start);
        let right = if touches_left { at + 1 } else { at };
        if self.0.get(right).is_some_and(|right| right.start < range.end) {
            return false;
        }
        let touches_right = self.0.get(right).is_some_and(|right| right.start == range.end);
        match (touches_left, touches_right) {
            (true, true) => {
                self.0[at].end = self.0[right].end;
                self.0.remove(right);
            }
            (true, false) => self.0[at].end = range.end,
            (false, true) => self.0[at].start = range.start,
            (false, false) => self.0.insert(at, range),
        }
        true
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }
}

/// Writes each row to its position. Chunks may arrive in any order, but each row only once.
#[derive(Debug)]
pub struct Scatter<'a, 'b> {
    rows: &'a mut [&'b mut [f32]],
    csr: &'a [Option<Csr<'a>>],
    parts: Vec<(RowFormat, u64, Covered)>,
    /// The rows of a 16-bit chunk, as f32.
    widened: Vec<f32>,
}

impl<'a, 'b> Scatter<'a, 'b> {
    /// Create a writer to `rows[p]`, which has the shape `[n, parts[p].format.dim]`. n is
    /// `parts[p].vectors()` or, with `csr[p]`, the number of its indices, which are the samples that receive
    /// the row of each id.
    ///
    /// # Errors
    /// `BadShape` if a buffer has the wrong length, the numbers of buffers and parts differ, or indices are out of
    /// range.
    pub fn new(
        parts: &[Part],
        csr: &'a [Option<Csr<'a>>],
        rows: &'a mut [&'b mut [f32]],
    ) -> Result<Self, TablesError> {
        let bad = |what: String| Err(TablesError::BadShape { what });
        if parts.len() != rows.len() || parts.len() != csr.len() {
            return bad(format!(
                "the number of buffers is {}, but the number of tables is {}",
                rows.len(),
                parts.len()
            ));
        }
        for ((part, csr), rows) in parts.iter().zip(csr).zip(rows.iter()) {
            let wanted = csr.map_or(part.vectors(), |csr| csr.indices.len());
            if rows.len() != wanted * part.format.dim {
                let what = if csr.is_some() || part.samples.is_some() { "samples" } else { "ids" };
                return bad(format!(
                    "table {}: a buffer of {} floats, but dim is {} and the number of {what} is {wanted}",
                    part.table,
                    rows.len(),
                    part.format.dim
                ));
            }
            if let Some(csr) = csr {
                csr.check(part.len(), wanted)?;
            }
        }
        let of = |part: &Part| (part.format, part.vectors() as u64, Covered::default());
        Ok(Self { parts: parts.iter().map(of).collect(), csr, rows, widened: Vec::new() })
    }

    /// Write one chunk.
    ///
    /// # Errors
    /// [`ChunkError`] for a chunk that is damaged, was not requested, or has already arrived.
    pub fn take(&mut self, chunk: &Chunk) -> Result<(), ChunkError> {
        let (index, parts) = (chunk.part as usize, self.parts.len());
        let Some((format, asked, covered)) = self.parts.get_mut(index) else {
            return Err(ChunkError::unknown_part(chunk, parts));
        };
        let items = format.width().items(chunk)?;
        let Some(end) = chunk.first.checked_add(items).filter(|end| end <= asked) else {
            return Err(ChunkError::out_of_range(chunk, items, *asked));
        };
        verify(chunk)?;
        if !covered.add(chunk.first..end) {
            let Chunk { part, first, .. } = chunk;
            return Err(ChunkError::bad_shape(format!("part {part}: rows {first}..{end} arrived before")));
        }
        let (format, dim, rows) = (*format, format.dim, &mut *self.rows[index]);
        let Some(csr) = self.csr[index] else {
            format.decode(&chunk.data, &mut rows[chunk.first as usize * dim..end as usize * dim]);
            return Ok(());
        };
        if format.dtype == Dtype::F32 {
            for (unique, row) in (chunk.first as usize..).zip(chunk.data.chunks_exact(format.width().0)) {
                for sample in csr.of(unique) {
                    format.decode(row, &mut rows[*sample as usize * dim..][..dim]);
                }
            }
            return Ok(());
        }
        // Convert the row of an id to f32 once for all its samples.
        self.widened.resize(items as usize * dim, 0.0);
        format.decode(&chunk.data, &mut self.widened);
        for (unique, row) in (chunk.first as usize..).zip(self.widened.chunks_exact(dim)) {
            for sample in csr.of(unique) {
                copy(row, &mut rows[*sample as usize * dim..][..dim]);
            }
        }
        Ok(())
    }

    /// Check that every row has arrived.
    ///
    /// # Errors
    /// [`ChunkError::CutShort`] if a row is missing.
    pub fn finish(self) -> Result<(), ChunkError> {
        for (part, (_, asked, covered)) in self.parts.iter().enumerate() {
            let arrived = covered.count();
            if arrived != *asked {
                return Err(ChunkError::CutShort {
                    what: format!("part {part}: {arrived} of {asked} rows arrived"),
                });
            }
        }
        Ok(())
    }
}
