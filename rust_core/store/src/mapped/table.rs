//! [`MappedTable`]: finds and reads the rows of one table.

use std::sync::Arc;

use persia_kernels::Csr;
use persia_kernels::simd::{prefetch, prefetch_row};
use persia_types::Id;
use persia_types::TablesError;
use persia_types::id::hash_id;
use persia_types::tables::TableIds;

use super::file::MappedFile;
use super::format::RowFormat;
use crate::simd::{Lanes, SimdLoop};

/// The number of ids that are processed together: enough to hide memory latency, but few enough for the first-level
/// cache.
const BLOCK: usize = 32;
/// The minimum average number of rows in a bucket. The ids of a bucket share the first bits of their hash. The
/// average is less than twice this number. A table of fewer rows has one bucket.
const PER_BUCKET: usize = 4;
/// The position that stands for an id without a row.
const NO_ROW: u32 = u32::MAX;

/// The rows of one table in mapped files.
#[derive(Debug)]
pub struct MappedTable {
    dim: usize,
    format: RowFormat,
    ids: Arc<MappedFile>,
    rows: Arc<MappedFile>,
    /// The number of leading bits of a hash that select its bucket.
    bits: u32,
    /// The position of the first row of each bucket, followed by the number of rows.
    starts: Vec<u32>,
}

impl MappedTable {
    /// Create a table whose rows have `dim` weights. Reads all ids and checks their order.
    ///
    /// # Errors
    /// `Corrupt`, with the file's path, if the file sizes do not match, there are too many ids, or the ids
    /// are not in ascending order of (hash, id).
    pub fn new(
        dim: usize,
        format: RowFormat,
        ids: Arc<MappedFile>,
        rows: Arc<MappedFile>,
    ) -> Result<Self, TablesError> {
        let corrupt =
            |file: &MappedFile, what: String| TablesError::Corrupt { path: file.path().into(), what };
        let count = ids.content().len() / size_of::<Id>();
        if !ids.content().len().is_multiple_of(size_of::<Id>()) || count >= NO_ROW as usize {
            return Err(corrupt(
                &ids,
                format!(
                    "has {} bytes, expected 8 bytes per id and fewer than {NO_ROW} ids",
                    ids.content().len()
                ),
            ));
        }
        let bytes = format.row_bytes(dim).checked_mul(count);
        if bytes != Some(rows.content().len()) {
            let what = format!(
                "has {} bytes, expected {count} rows of {} bytes",
                rows.content().len(),
                format.row_bytes(dim)
            );
            return Err(corrupt(&rows, what));
        }
        let bits = (count / PER_BUCKET).max(1).ilog2();
        let starts = starts(numbers(&ids), bits)
            .ok_or_else(|| corrupt(&ids, "has ids that are not in ascending order of their hashes".into()))?;
        Ok(Self { dim, format, ids, rows, bits, starts })
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.ids.content().len() / size_of::<Id>()
    }

    /// Whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of weights of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The size of the table's files and of its bucket positions, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.ids.content().len() + self.rows.content().len() + size_of_val(&self.starts[..])
    }
}

fn numbers(file: &MappedFile) -> &[Id] {
    bytemuck::cast_slice(file.content())
}

#[inline(always)]
fn bucket(hash: u64, bits: u32) -> usize {
    // Shift in two steps, because a shift by all 64 bits would overflow.
    (hash >> 1 >> (63 - bits)) as usize
}

/// The position of the first id of each bucket, followed by the number of ids; None if the ids are not in ascending
/// order of (hash, id).
fn starts(ids: &[Id], bits: u32) -> Option<Vec<u32>> {
    let mut starts = Vec::with_capacity((1 << bits) + 1);
    let mut last = None;
    for (at, &id) in (0u32..).zip(ids) {
        let key = (hash_id(id), id);
        if last.is_some_and(|last| last >= key) {
            return None;
        }
        last = Some(key);
        let bucket = bucket(key.0, bits);
        while starts.len() <= bucket {
            starts.push(at);
        }
    }
    starts.resize((1 << bits) + 1, u32::try_from(ids.len()).ok()?);
    Some(starts)
}

/// Reads the rows for the ids of a part into `out`: one row for each id or, if samples are gathered, one for
/// each sample. An id without a row reads as zeros. Returns the number of ids that have a row.
pub(super) struct ReadRows<'a> {
    pub(super) table: &'a MappedTable,
    pub(super) part: &'a TableIds<'a>,
    pub(super) out: &'a mut [f32],
}

impl SimdLoop for ReadRows<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u64 {
        let Self { table, part, out } = self;
        let (samples, mut first, mut hits) = (part.gathered(), 0, 0);
        for ids in part.ids.ids().chunks(BLOCK) {
            hits += read_block::<L>(table, ids, first, samples, out);
            first += ids.len();
        }
        hits
    }
}

/// Find and read the rows of a block of ids. The first id is at position `first` of its part. There are three memory
/// accesses for an id: the bucket position, the ids of the bucket, and the row. Each is prefetched for all ids of the
/// block before it is made.
#[inline(always)]
fn read_block<L: Lanes>(
    table: &MappedTable,
    ids: &[Id],
    first: usize,
    samples: Option<Csr<'_>>,
    out: &mut [f32],
) -> u64 {
    let (all, rows, starts) = (numbers(&table.ids), table.rows.content(), &table.starts[..]);
    let (dim, width) = (table.dim, table.format.row_bytes(table.dim));
    let (mut buckets, mut places, mut hits) = ([0usize; BLOCK], [NO_ROW; BLOCK], 0);
    for (bucket_of, id) in buckets.iter_mut().zip(ids) {
        *bucket_of = bucket(hash_id(*id), table.bits);
        prefetch(starts, *bucket_of, 2);
    }
    for bucket in &buckets[..ids.len()] {
        prefetch(all, starts[*bucket] as usize, PER_BUCKET);
    }
    for ((place, bucket), id) in places.iter_mut().zip(buckets).zip(ids) {
        let (start, end) = (starts[bucket], starts[bucket + 1]);
        let candidates = &all[start as usize..end as usize];
        if let Some((at, _)) = (start..).zip(candidates).find(|(_, candidate)| *candidate == id) {
            *place = at;
            prefetch_row(rows.as_ptr().wrapping_add(at as usize * width), width);
        }
    }
    for (at, &place) in (first..).zip(&places[..ids.len()]) {
        let row = if place == NO_ROW { None } else { Some(&rows[place as usize * width..][..width]) };
        hits += u64::from(row.is_some());
        match samples {
            None => write::<L>(table.format, row, &mut out[at * dim..][..dim]),
            Some(csr) => {
                for sample in csr.of(at) {
                    write::<L>(table.format, row, &mut out[*sample as usize * dim..][..dim]);
                }
            }
        }
    }
    hits
}

/// Write the weights of a row, or zeros if there is no row.
#[inline(always)]
fn write<L: Lanes>(format: RowFormat, row: Option<&[u8]>, out: &mut [f32]) {
    match row {
        Some(row) => format.decode::<L>(row, out),
        None => out.fill(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bucket_has_its_ids_and_wrong_orders_are_refused() {
        for count in [0u64, 1, 2, 7, 8, 9, 1000, 5000] {
            let mut ids: Vec<Id> = (0..count).map(|i| i * 31 + 5).collect();
            ids.sort_unstable_by_key(|id| (hash_id(*id), *id));
            let bits = (ids.len() / PER_BUCKET).max(1).ilog2();
            let found = starts(&ids, bits).unwrap();
            assert_eq!(found.len(), (1 << bits) + 1);
            for (at, id) in ids.iter().enumerate() {
                let bucket = bucket(hash_id(*id), bits);
                assert!((found[bucket] as usize..found[bucket + 1] as usize).contains(&at));
            }
            if count > 1 {
                ids.swap(0, 1);
                assert_eq!(starts(&ids, bits), None);
                ids[1] = ids[0];
                assert_eq!(starts(&ids, bits), None, "an id occurs twice");
            }
        }
    }
}
