//! Feature ids, their hash, and ids grouped by virtual shard. The crate `persia-features` turns values of
//! columns into ids.

use crate::limits::MAX_IDS_PER_REQUEST;
use crate::tables::TablesError;

/// A feature id. All 64 bits are significant, and no value is reserved.
pub type Id = u64;

/// The number of virtual shards of a run. A shard is the unit of locking, of the index, of the row budget and
/// of checkpoint files.
pub const VIRTUAL_SHARDS: usize = 256;

/// Hash an id to 64 well-distributed bits with a folded multiply, which need not be a bijection. The top eight bits
/// are the shard. The store's index chooses the bucket by the other bits.
#[inline(always)]
pub fn hash_id(id: Id) -> u64 {
    let product = u128::from(id ^ 0x9E37_79B9_7F4A_7C15) * 0xD6E8_FEB8_6659_FD93_u128;
    (product as u64) ^ ((product >> 64) as u64)
}

/// The virtual shard of a hash computed by [`hash_id`]: its top eight bits.
#[inline(always)]
pub fn shard_of_hash(hash: u64) -> usize {
    (hash >> 56) as usize
}

/// The virtual shard of an id, which is the same for every table.
#[inline(always)]
pub fn shard_of(id: Id) -> usize {
    shard_of_hash(hash_id(id))
}

/// The virtual shards that server `index` of `servers` servers holds. The ranges of the servers are ascending and
/// cover every shard once, so the ids of a server are one slice of [`ShardedIds`].
///
/// # Panics
/// If `index` is not below `servers`, or there are more servers than shards.
pub fn server_shards(index: usize, servers: usize) -> std::ops::Range<usize> {
    assert!(index < servers && servers <= VIRTUAL_SHARDS, "server {index} of {servers}");
    VIRTUAL_SHARDS * index / servers..VIRTUAL_SHARDS * (index + 1) / servers
}

/// Ids in ascending order of their virtual shard, with the offset of each shard. The ids of a request must be unique.
/// This type does not check that.
///
/// Within a shard, the caller's order is kept. The engine orders ids by their first occurrence in the batch. Row `i`
/// of a look-up and gradient `i` of a push belong to `ids()[i]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedIds {
    ids: Vec<Id>,
    offsets: Vec<u32>,
}

impl Default for ShardedIds {
    fn default() -> Self {
        Self { ids: Vec::new(), offsets: vec![0; VIRTUAL_SHARDS + 1] }
    }
}

impl ShardedIds {
    /// Group `ids` by shard and keep their order within a shard. Duplicates are kept.
    ///
    /// # Errors
    /// [`TablesError::TooManyIds`] for more than [`MAX_IDS_PER_REQUEST`] ids.
    pub fn group(ids: &[Id]) -> Result<Self, TablesError> {
        if ids.len() > MAX_IDS_PER_REQUEST {
            return Err(TablesError::TooManyIds { ids: ids.len(), max: MAX_IDS_PER_REQUEST });
        }
        let mut offsets = vec![0u32; VIRTUAL_SHARDS + 1];
        for &id in ids {
            offsets[shard_of(id) + 1] += 1;
        }
        for shard in 0..VIRTUAL_SHARDS {
            offsets[shard + 1] += offsets[shard];
        }
        let mut next = offsets.clone();
        let mut grouped = vec![0; ids.len()];
        for &id in ids {
            let place = &mut next[shard_of(id)];
            grouped[*place as usize] = id;
            *place += 1;
        }
        Ok(Self { ids: grouped, offsets })
    }

    /// Build from ids that are already grouped, and check the grouping.
    ///
    /// # Errors
    /// [`TablesError::BadShape`] if the offsets are not `VIRTUAL_SHARDS + 1` numbers that ascend from 0 to
    /// the number of ids, or an id is in the wrong shard; [`TablesError::TooManyIds`] for more than
    /// [`MAX_IDS_PER_REQUEST`] ids.
    pub fn from_parts(ids: Vec<Id>, offsets: Vec<u32>) -> Result<Self, TablesError> {
        if ids.len() > MAX_IDS_PER_REQUEST {
            return Err(TablesError::TooManyIds { ids: ids.len(), max: MAX_IDS_PER_REQUEST });
        }
        let bad = |what: String| Err(TablesError::BadShape { what });
        if offsets.len() != VIRTUAL_SHARDS + 1 {
            return bad(format!("{} shard offsets, expected {}", offsets.len(), VIRTUAL_SHARDS + 1));
        }
        if offsets[0] != 0 || offsets[VIRTUAL_SHARDS] as usize != ids.len() {
            let (first, last) = (offsets[0], offsets[VIRTUAL_SHARDS]);
            return bad(format!("shard offsets go from {first} to {last}, expected 0 to {}", ids.len()));
        }
        for shard in 0..VIRTUAL_SHARDS {
            let (start, end) = (offsets[shard] as usize, offsets[shard + 1] as usize);
            if start > end || end > ids.len() {
                return bad(format!("offsets of shard {shard} do not ascend"));
            }
            if let Some(id) = ids[start..end].iter().find(|id| shard_of(**id) != shard) {
                return bad(format!("id {id} belongs to shard {}, not {shard}", shard_of(*id)));
            }
        }
        Ok(Self { ids, offsets })
    }

    /// All ids, shard by shard.
    pub fn ids(&self) -> &[Id] {
        &self.ids
    }

    /// The offsets of the shards in [`Self::ids`], `VIRTUAL_SHARDS + 1` in all.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The positions of the ids of one shard.
    #[inline]
    pub fn range(&self, shard: usize) -> std::ops::Range<usize> {
        self.offsets[shard] as usize..self.offsets[shard + 1] as usize
    }

    /// The number of ids.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are no ids.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Build from ids that the caller has grouped, as the engine's deduplication does. The grouping is
    /// checked only in debug builds.
    pub fn from_grouped(ids: Vec<Id>, offsets: Vec<u32>) -> Self {
        debug_assert!(Self::from_parts(ids.clone(), offsets.clone()).is_ok());
        Self { ids, offsets }
    }

    /// Return the parts, so that their memory can be reused.
    pub fn into_parts(self) -> (Vec<Id>, Vec<u32>) {
        (self.ids, self.offsets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grouping_keeps_order_inside_a_shard_and_loses_nothing() {
        let ids: Vec<Id> = (0..10_000u64).map(|i| i.wrapping_mul(0x1234_5678_9abc_def1)).collect();
        let grouped = ShardedIds::group(&ids).unwrap();
        assert_eq!(grouped.len(), ids.len());
        let mut expected: Vec<Id> = ids.clone();
        expected.sort_by_key(|id| shard_of(*id)); // stable
        assert_eq!(grouped.ids(), expected);
        let (ids, offsets) = grouped.clone().into_parts();
        assert_eq!(ShardedIds::from_parts(ids, offsets).unwrap(), grouped);
    }

    #[test]
    fn every_shard_has_one_server() {
        for servers in 1..=VIRTUAL_SHARDS {
            let ranges = (0..servers).map(|index| server_shards(index, servers));
            let covered: Vec<usize> = ranges.clone().flatten().collect();
            assert_eq!(covered, (0..VIRTUAL_SHARDS).collect::<Vec<_>>());
            assert!(ranges.into_iter().all(|range| range.len().abs_diff(VIRTUAL_SHARDS / servers) <= 1));
        }
    }

    #[test]
    fn an_id_in_the_wrong_shard_is_refused() {
        let (mut ids, offsets) = ShardedIds::group(&(0..512).collect::<Vec<_>>()).unwrap().into_parts();
        ids.reverse();
        let error = ShardedIds::from_parts(ids, offsets).unwrap_err();
        assert!(error.to_string().contains("belongs to shard"), "{error}");
    }
}
