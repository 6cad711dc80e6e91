//! The checked tables of a request, and their split among servers.

use persia_types::id::{Id, ShardedIds, VIRTUAL_SHARDS, server_shards};
use persia_types::limits::{MAX_DIM, MAX_IDS_PER_REQUEST, MAX_REQUEST_BYTES, MAX_SERVERS, MAX_SLOTS};
use persia_types::{Dtype, TablesError};

use super::chunk::{self, ChunkError, Width};
use super::floats::RowFormat;
use super::samples::Samples;
use crate::proto::{self, Chunk, TablePart};

/// The part of a request that concerns one table. The values in a received part have been checked against
/// their limits.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// The index into the schema's tables. The process that holds the rows checks it.
    pub table: usize,
    /// The format of rows and gradients. The dimension is 0 only if there are no ids.
    pub format: RowFormat,
    /// The samples, if vectors or gradients of samples are sent instead of rows or gradients of ids.
    pub samples: Option<Samples>,
    offsets: Vec<u32>,
}

impl Part {
    /// The size of the ids and of their rows or gradients as f32, in bytes.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * (8 + 4 * self.format.dim as u64)
    }

    /// A part with rows or gradients of `table` for `ids`.
    pub fn new(table: usize, format: RowFormat, ids: &ShardedIds) -> Self {
        Self { table, format, samples: None, offsets: ids.offsets().to_vec() }
    }

    /// Replace `samples`. With None, the part has rows of ids.
    pub fn with_samples(self, samples: Option<Samples>) -> Self {
        Self { samples, ..self }
    }

    /// The number of vectors: one for each sample, or one for each id.
    pub fn vectors(&self) -> usize {
        self.samples.map_or(self.len(), |head| head.samples)
    }

    /// The number of ids.
    pub fn len(&self) -> usize {
        self.offsets[VIRTUAL_SHARDS] as usize
    }

    /// Whether the part has no ids.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The offset of each virtual shard's ids, followed by the number of ids.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Group the received `ids` by shard.
    ///
    /// # Errors
    /// `BadShape` for an id in the wrong shard, or a number of ids other than [`Self::len`].
    pub fn ids(&self, ids: Vec<Id>) -> Result<ShardedIds, TablesError> {
        ShardedIds::from_parts(ids, self.offsets.clone())
    }

    /// Convert to a message.
    pub fn to_proto(&self) -> TablePart {
        let samples = self.samples.map(Samples::to_proto);
        TablePart { samples, ..self.counts_within(0..VIRTUAL_SHARDS) }
    }

    /// The message for the ids of a range of shards, without samples.
    fn counts_within(&self, shards: std::ops::Range<usize>) -> TablePart {
        let count = |shard: usize| {
            if shards.contains(&shard) { self.offsets[shard + 1] - self.offsets[shard] } else { 0 }
        };
        TablePart {
            table: self.table as u32,
            dim: self.format.dim as u32,
            dtype: proto::Dtype::from(self.format.dtype).into(),
            shard_counts: (0..VIRTUAL_SHARDS).map(count).collect(),
            samples: None,
        }
    }
}

/// Check the parts of a head. This is done before memory is allocated for their values.
///
/// # Errors
/// `TooManyIds`; `BadShape` for a number of tables or shards, a dimension, a type of floats, or a size that
/// is invalid.
pub fn check_parts(parts: &[TablePart]) -> Result<Vec<Part>, TablesError> {
    let bad = |what: String| Err(TablesError::BadShape { what });
    if parts.len() > MAX_SLOTS {
        return bad(format!("{} tables in one request, but the limit is {MAX_SLOTS}", parts.len()));
    }
    let (mut all_ids, mut all_bytes, mut sample_bytes) = (0u64, 0u64, 0u64);
    let mut checked = Vec::with_capacity(parts.len());
    for part in parts {
        let TablePart { table, dim, dtype, shard_counts, samples } = part;
        if shard_counts.len() != VIRTUAL_SHARDS {
            return bad(format!(
                "table {table}: counts of {} shards, expected {VIRTUAL_SHARDS}",
                shard_counts.len()
            ));
        }
        let ids: u64 = shard_counts.iter().map(|count| u64::from(*count)).sum();
        if *dim as usize > MAX_DIM || (*dim == 0 && ids > 0) {
            return bad(format!("table {table}: dim {dim}, expected 1 to {MAX_DIM}"));
        }
        all_ids += ids;
        all_bytes += ids * u64::from(*dim) * 4;
        if all_ids > MAX_IDS_PER_REQUEST as u64 {
            return Err(TablesError::TooManyIds { ids: all_ids as usize, max: MAX_IDS_PER_REQUEST });
        }
        if all_bytes > MAX_REQUEST_BYTES {
            return bad(format!(
                "{all_bytes} bytes of rows in one request, but the limit is {MAX_REQUEST_BYTES}: use smaller batches"
            ));
        }
        let samples = match samples {
            None => None,
            Some(sent) => {
                let (samples, bytes) = Samples::check(sent, ids as usize, *dim as usize)
                    .map_err(|what| TablesError::BadShape { what: format!("table {table}: {what}") })?;
                sample_bytes += bytes;
                Some(samples)
            }
        };
        if sample_bytes > MAX_REQUEST_BYTES {
            return bad(format!(
                "{sample_bytes} bytes of samples and their indices in one request, but the limit is \
                 {MAX_REQUEST_BYTES}: use smaller batches"
            ));
        }
        let mut offsets = Vec::with_capacity(VIRTUAL_SHARDS + 1);
        let mut offset = 0;
        offsets.push(0);
        for count in shard_counts {
            offset += count;
            offsets.push(offset);
        }
        let format = RowFormat { dim: *dim as usize, dtype: dtype_of(*table, *dtype)? };
        checked.push(Part { table: *table as usize, format, samples, offsets });
    }
    Ok(checked)
}

fn dtype_of(table: u32, dtype: i32) -> Result<Dtype, TablesError> {
    match proto::Dtype::try_from(dtype) {
        Ok(proto::Dtype::F32) => Ok(Dtype::F32),
        Ok(proto::Dtype::F16) => Ok(Dtype::F16),
        Ok(proto::Dtype::Bf16) => Ok(Dtype::Bf16),
        Err(_) => Err(TablesError::BadShape { what: format!("table {table}: dtype {dtype} is unknown") }),
    }
}

impl From<Dtype> for proto::Dtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// Splits a request among the servers of a job, and merges their replies.
///
/// Part `p` of a server's request has those ids of part `p` that are in the server's shards. A chunk within the range
/// of one server is forwarded with only its position changed.
#[derive(Debug, Clone)]
pub struct Split {
    parts: Vec<Part>,
    /// For each part, the position of each server's first id, followed by the number of ids.
    bounds: Vec<Vec<u64>>,
    servers: usize,
}

impl Split {
    /// Split `parts` among `servers`.
    ///
    /// # Errors
    /// Those of [`check_parts`]; `BadShape` for no servers or more than [`MAX_SERVERS`].
    pub fn new(parts: &[TablePart], servers: usize) -> Result<Self, TablesError> {
        if servers == 0 || servers > MAX_SERVERS {
            return Err(TablesError::BadShape {
                what: format!("{servers} servers, expected 1 to {MAX_SERVERS}"),
            });
        }
        let parts = check_parts(parts)?;
        let first = |part: &Part, server: usize| {
            let shard = if server == servers { VIRTUAL_SHARDS } else { server_shards(server, servers).start };
            u64::from(part.offsets[shard])
        };
        let bounds =
            parts.iter().map(|part| (0..=servers).map(|server| first(part, server)).collect()).collect();
        Ok(Self { parts, bounds, servers })
    }

    /// The parts of the whole request.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The parts of the head for one server. They are for rows of ids, even if the request has samples.
    pub fn parts_of(&self, server: usize) -> Vec<TablePart> {
        let shards = server_shards(server, self.servers);
        self.parts.iter().map(|part| part.counts_within(shards.clone())).collect()
    }

    /// The number of a server's ids in all parts.
    pub fn ids_of(&self, server: usize) -> u64 {
        self.bounds.iter().map(|bounds| bounds[server + 1] - bounds[server]).sum()
    }

    /// Split a chunk of ids into chunks for the servers that hold them, in ascending order.
    ///
    /// # Errors
    /// [`ChunkError`] for a chunk that does not belong to this request, or that is damaged and must be split.
    pub fn ids(&self, chunk: Chunk) -> Result<Vec<(usize, Chunk)>, ChunkError> {
        self.split(chunk, |_| Width::ID)
    }

    /// Split a chunk of gradients as [`Self::ids`] does.
    ///
    /// # Errors
    /// Those of [`Self::ids`].
    pub fn gradients(&self, chunk: Chunk) -> Result<Vec<(usize, Chunk)>, ChunkError> {
        self.split(chunk, |part| part.format.width())
    }

    /// Convert a chunk of rows from `server` into a chunk of the whole reply.
    ///
    /// # Errors
    /// [`ChunkError`] for a chunk that does not belong to this request.
    pub fn rows(&self, server: usize, mut chunk: Chunk) -> Result<Chunk, ChunkError> {
        let (part, bounds) = self.part(&chunk)?;
        let count = part.format.width().items(&chunk)?;
        let (start, end) = (bounds[server], bounds[server + 1]);
        match chunk.first.checked_add(count) {
            Some(last) if last <= end - start => chunk.first += start,
            _ => return Err(ChunkError::out_of_range(&chunk, count, end - start)),
        }
        Ok(chunk)
    }

    fn part(&self, chunk: &Chunk) -> Result<(&Part, &[u64]), ChunkError> {
        let index = chunk.part as usize;
        match (self.parts.get(index), self.bounds.get(index)) {
            (Some(part), Some(bounds)) => Ok((part, bounds)),
            _ => Err(ChunkError::unknown_part(chunk, self.parts.len())),
        }
    }

    fn split(&self, chunk: Chunk, width: impl Fn(&Part) -> Width) -> Result<Vec<(usize, Chunk)>, ChunkError> {
        let (part, bounds) = self.part(&chunk)?;
        chunk::split(chunk, width(part), bounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::send::{id_chunks, row_chunks};

    fn sharded(count: u64) -> ShardedIds {
        ShardedIds::group(&(0..count).map(|id| id * 7 + 1).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn heads_of_all_servers_have_every_id_once() {
        let ids = sharded(1000);
        let part = Part::new(3, RowFormat::f32(8), &ids);
        for servers in [1, 2, 3, 7, 256] {
            let split = Split::new(&[part.to_proto()], servers).unwrap();
            let mut total = vec![0; VIRTUAL_SHARDS];
            for server in 0..servers {
                let parts = split.parts_of(server);
                let counts = &parts[0].shard_counts;
                for (shard, count) in counts.iter().enumerate() {
                    assert!(*count == 0 || server_shards(server, servers).contains(&shard));
                    total[shard] += count;
                }
                assert_eq!(split.ids_of(server), counts.iter().map(|count| u64::from(*count)).sum::<u64>());
            }
            assert_eq!(total, part.to_proto().shard_counts);
        }
    }

    #[test]
    fn chunks_are_split_among_servers_and_merged_again() {
        let ids = sharded(40_000);
        let dim = 5;
        let rows: Vec<f32> = (0..ids.len() * dim).map(|value| value as f32).collect();
        let part = Part::new(0, RowFormat::f32(dim), &ids);
        for servers in [1, 2, 3, 200] {
            let split = Split::new(&[part.to_proto()], servers).unwrap();
            let mut got = vec![Vec::new(); servers];
            for chunk in id_chunks(0, ids.ids()) {
                for (server, piece) in split.ids(chunk).unwrap() {
                    assert_eq!(piece.first as usize, got[server].len());
                    assert_eq!(piece.crc32c, crc32c::crc32c(&piece.data));
                    got[server].extend(
                        piece.data.chunks_exact(8).map(|id| u64::from_le_bytes(id.try_into().unwrap())),
                    );
                }
            }
            assert_eq!(got.concat(), ids.ids());
            for chunk in row_chunks(0, RowFormat::f32(dim), rows.clone()) {
                let (first, data) = (chunk.first, chunk.data.clone());
                let pieces = split.gradients(chunk).unwrap();
                let back: Vec<Chunk> =
                    pieces.into_iter().map(|(server, piece)| split.rows(server, piece).unwrap()).collect();
                assert_eq!(back[0].first, first);
                assert_eq!(back.iter().flat_map(|piece| piece.data.to_vec()).collect::<Vec<_>>(), data);
            }
        }
    }

    #[test]
    fn sizes_beyond_the_limits_are_refused_before_anything_is_allocated() {
        let part = |dim, count| TablePart {
            table: 0,
            dim,
            dtype: 0,
            shard_counts: std::iter::once(count).chain([0; VIRTUAL_SHARDS - 1]).collect(),
            samples: None,
        };
        let refused = |parts: &[TablePart]| check_parts(parts).unwrap_err();
        assert!(matches!(refused(&[part(4, u32::MAX)]), TablesError::TooManyIds { .. }));
        assert!(matches!(refused(&[part(1, 1_500_000), part(1, 600_000)]), TablesError::TooManyIds { .. }));
        for bad in [part(0, 1), part(MAX_DIM as u32 + 1, 1), part(4096, 1_000_000)] {
            assert!(matches!(refused(&[bad]), TablesError::BadShape { .. }));
        }
        let short = TablePart { shard_counts: vec![1], ..part(1, 1) };
        assert!(matches!(refused(&[short]), TablesError::BadShape { .. }));
        let unknown = TablePart { dtype: 3, ..part(4, 10) };
        assert!(matches!(refused(&[unknown]), TablesError::BadShape { what } if what.contains("dtype 3")));
        check_parts(&[part(0, 0), part(4, 10)]).unwrap();
        let pooled = |samples, indices, count| {
            let samples =
                proto::Samples { samples, indices, per_sample_weights: true, factors: true, scale: 1.0 };
            TablePart { samples: Some(samples), ..part(4, count) }
        };
        check_parts(&[pooled(1000, 5000, 10)]).unwrap();
        for (bad, named) in [
            (pooled(1, 1, 0), "1 samples use no ids"),
            (pooled(1 << 25, 1, 10), "the limit is 16777216"),
            (pooled(1, u32::MAX, 10), "the limit is 4294967294"),
            (pooled(1, 1 << 28, 10), "bytes of samples and their indices"),
        ] {
            let error = refused(&[bad]);
            assert!(matches!(&error, TablesError::BadShape { what } if what.contains(named)), "{error}");
        }
        let half = pooled(1, 1 << 26, 10);
        assert!(matches!(refused(&[half.clone(), half]), TablesError::BadShape { .. }));
    }

    #[test]
    fn rows_beyond_a_servers_share_are_refused() {
        let ids = sharded(100);
        let split = Split::new(&[Part::new(0, RowFormat::f32(2), &ids).to_proto()], 2).unwrap();
        let share = split.ids_of(0);
        let rows = vec![0.0; 2 * (share as usize + 1)];
        let chunk = row_chunks(0, RowFormat::f32(2), rows.clone()).next().unwrap();
        assert!(split.rows(0, chunk.clone()).is_err());
        assert!(split.rows(0, Chunk { first: u64::MAX, ..chunk.clone() }).is_err());
        assert!(split.rows(0, Chunk { part: 1, ..chunk }).is_err());
    }
}
