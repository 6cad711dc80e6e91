//! [`Index`]: a hash table from ids to row indices, in buckets of one cache line.
//!
//! A bucket holds up to five ids with their row indices. An id is in its home bucket or, if that was full, in
//! one of the following buckets. Each bucket counts the ids that *passed* it because it was full. A search
//! ends at the first bucket with a count of 0. Insertions increment the counts and removals decrement them,
//! so searches do not slow down as rows are evicted.

use persia_types::id::hash_id;

use crate::shard::region::{OutOfMemory, Plain, Region};
use crate::simd::{Lanes, Portable};

/// The value that means "no row index". A table never has this many rows.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// The number of ids in a bucket.
const WIDTH: usize = 5;
/// The minimum number of buckets of a non-empty index.
const MIN_BUCKETS: usize = 8;
/// The number of buckets from which an index grows by an eighth instead of doubling, so that an id costs at
/// most 22 bytes. On average, an id is then moved eight times. Moves are sequential and therefore cheap.
const GENTLE_FROM: usize = 256;

/// A bucket. Words 0 to 4 are ids. They are followed by five row indices of 32 bits, the number of ids (3
/// bits) and the number of ids that passed the bucket (29 bits). The bucket is one array of words, so that
/// one vector comparison covers all ids.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Bucket([u64; 8]);

// SAFETY: every bit pattern is a valid array of integers, and the alignment is that of a cache line.
#[allow(unsafe_code)]
unsafe impl Plain for Bucket {}

impl Bucket {
    /// The position of `id` among the bucket's ids, if it is one of them.
    #[inline(always)]
    fn lane<L: Lanes>(&self, id: u64) -> Option<usize> {
        let equal = L::equal(&self.0, id) & ((1 << self.count()) - 1);
        (equal != 0).then_some(equal.trailing_zeros() as usize & 7)
    }

    #[inline(always)]
    fn count(&self) -> usize {
        (self.0[7] >> 32) as usize & 7
    }

    #[inline(always)]
    fn passed(&self) -> u32 {
        (self.0[7] >> 35) as u32
    }

    fn add_count(&mut self, by: i64) {
        self.0[7] = self.0[7].wrapping_add((by << 32) as u64);
    }

    fn add_passed(&mut self, by: i64) {
        self.0[7] = self.0[7].wrapping_add((by << 35) as u64);
    }

    #[inline(always)]
    fn row_index(&self, lane: usize) -> u32 {
        (self.0[(WIDTH + lane / 2) & 7] >> (lane % 2 * 32)) as u32
    }

    fn set_row_index(&mut self, lane: usize, row_index: u32) {
        let (word, shift) = (WIDTH + lane / 2, lane % 2 * 32);
        self.0[word] = self.0[word] & !(0xFFFF_FFFF << shift) | u64::from(row_index) << shift;
    }

    fn push(&mut self, id: u64, row_index: u32) {
        let lane = self.count();
        self.0[lane] = id;
        self.set_row_index(lane, row_index);
        self.add_count(1);
    }

    fn remove(&mut self, lane: usize) {
        let last = self.count() - 1;
        self.0[lane] = self.0[last];
        self.set_row_index(lane, self.row_index(last));
        self.add_count(-1);
    }
}

/// Maps each id to a row index or another value below [`NO_ROW`]. Callers pass hashes computed by
/// [`persia_types::id::hash_id`].
pub(crate) struct Index {
    buckets: Region<Bucket>,
    len: usize,
}

impl Index {
    /// An empty index without memory.
    pub(crate) const fn new() -> Self {
        Self { buckets: Region::new(), len: 0 }
    }

    /// The number of ids.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The ids and their row indices, in no particular order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        self.buckets.iter().copied().flat_map(move |bucket| {
            (0..bucket.count()).map(move |lane| (bucket.0[lane], bucket.row_index(lane)))
        })
    }

    /// The number of bytes allocated.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buckets.resident_bytes(self.buckets.len())
    }

    /// All buckets, for prefetching [`Index::home`].
    #[inline(always)]
    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The bucket at which the search for a hash starts. It is chosen by the low bits of the hash, because
    /// the top eight bits choose the shard.
    #[inline(always)]
    pub(crate) fn home(&self, hash: u64) -> usize {
        home(hash, self.buckets.len())
    }

    /// The row index of `id`, or [`NO_ROW`].
    #[inline(always)]
    pub(crate) fn find<L: Lanes>(&self, id: u64, hash: u64) -> u32 {
        let buckets = self.buckets();
        let start = self.home(hash);
        let mut at = start;
        while let Some(bucket) = buckets.get(at) {
            if let Some(lane) = bucket.lane::<L>(id) {
                return bucket.row_index(lane);
            }
            if bucket.passed() == 0 {
                break;
            }
            at = if at + 1 == buckets.len() { 0 } else { at + 1 };
            if at == start {
                break;
            }
        }
        NO_ROW
    }

    /// Reserve space for one more id, so that the next [`Index::insert`] cannot fail.
    pub(crate) fn reserve(&mut self) -> Result<(), OutOfMemory> {
        let buckets = self.buckets.len();
        if self.len < capacity(buckets) {
            return Ok(());
        }
        self.move_to(larger(buckets))
    }

    /// Reserve space for `ids` ids in total, as [`Index::reserve`] does for one more id.
    pub(crate) fn reserve_for(&mut self, ids: usize) -> Result<(), OutOfMemory> {
        if ids <= capacity(self.buckets.len()) {
            return Ok(());
        }
        self.move_to((ids * 10).div_ceil(33).max(larger(self.buckets.len())))
    }

    fn move_to(&mut self, buckets: usize) -> Result<(), OutOfMemory> {
        let mut grown = Region::zeroed(buckets.max(MIN_BUCKETS))?;
        // Ids are moved in the order of their home buckets, so both arrays are accessed sequentially.
        for bucket in self.buckets.iter() {
            for lane in 0..bucket.count() {
                place(&mut grown, bucket.0[lane], hash_id(bucket.0[lane]), bucket.row_index(lane));
            }
        }
        self.buckets = grown;
        Ok(())
    }

    /// Add an id that is not in the index, after [`Index::reserve`].
    pub(crate) fn insert(&mut self, id: u64, hash: u64, row_index: u32) {
        place(&mut self.buckets, id, hash, row_index);
        self.len += 1;
    }

    /// Remove an id. Returns its row index, or [`NO_ROW`].
    pub(crate) fn remove(&mut self, id: u64, hash: u64) -> u32 {
        let start = self.home(hash);
        let buckets = &mut self.buckets[..];
        let mut at = start;
        let row_index = loop {
            let Some(bucket) = buckets.get_mut(at) else { return NO_ROW };
            if let Some(lane) = bucket.lane::<Portable>(id) {
                let row_index = bucket.row_index(lane);
                bucket.remove(lane);
                break row_index;
            }
            let ends = bucket.passed() == 0;
            at = if at + 1 == buckets.len() { 0 } else { at + 1 };
            if ends || at == start {
                return NO_ROW;
            }
        };
        let mut passing = start;
        while passing != at {
            buckets[passing].add_passed(-1);
            passing = if passing + 1 == buckets.len() { 0 } else { passing + 1 };
        }
        self.len -= 1;
        row_index
    }
}

/// The number of buckets to which an index of `buckets` grows. It grows by a factor, so the cost of moving is
/// constant per id.
fn larger(buckets: usize) -> usize {
    if buckets < GENTLE_FROM { buckets * 2 } else { buckets + buckets / 8 }
}

/// The number of ids that `buckets` buckets hold at a load factor of 0.66.
fn capacity(buckets: usize) -> usize {
    buckets * 33 / 10
}

#[inline(always)]
fn home(hash: u64, buckets: usize) -> usize {
    ((u64::from(hash as u32) * buckets as u64) >> 32) as usize
}

fn place(buckets: &mut [Bucket], id: u64, hash: u64, row_index: u32) {
    let mut at = home(hash, buckets.len());
    while buckets[at].count() == WIDTH {
        buckets[at].add_passed(1);
        at = if at + 1 == buckets.len() { 0 } else { at + 1 };
    }
    buckets[at].push(id, row_index);
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    use persia_types::id::hash_id;
    use proptest::prelude::*;

    use super::*;

    /// Insert (true) or remove (false) ids, comparing with a map after every step.
    fn replay(steps: &[(u64, bool)], universe: &[u64]) {
        let mut index = Index::new();
        let mut model: HashMap<u64, u32> = HashMap::new();
        for (number, &(id, insert)) in steps.iter().enumerate() {
            if !insert {
                assert_eq!(index.remove(id, hash_id(id)), model.remove(&id).unwrap_or(NO_ROW));
            } else if let Entry::Vacant(vacant) = model.entry(id) {
                index.reserve().unwrap();
                index.insert(id, hash_id(id), number as u32);
                vacant.insert(number as u32);
            }
            assert_eq!(index.len, model.len());
            for &id in universe {
                assert_eq!(
                    index.find::<Portable>(id, hash_id(id)),
                    model.get(&id).copied().unwrap_or(NO_ROW),
                    "id {id}"
                );
            }
        }
        // The counts of passed ids are exact: in an empty index, all are 0.
        for &id in model.keys() {
            index.remove(id, hash_id(id));
        }
        assert!(index.buckets.iter().all(|bucket| bucket.count() == 0 && bucket.passed() == 0));
    }

    /// Ids whose home is the last bucket, so that long runs of ids pass full buckets and wrap around the end.
    fn crowd() -> Vec<u64> {
        (0..).filter(|id| hash_id(*id) as u32 >= u32::MAX / 64 * 63).take(60).collect()
    }

    fn steps(universe: Vec<u64>) -> impl Strategy<Value = Vec<(u64, bool)>> {
        prop::collection::vec((prop::sample::select(universe), any::<bool>()), 0..800)
    }

    proptest! {
        #[test]
        fn behaves_as_a_map(steps in steps((0..150).chain(u64::MAX - 20..=u64::MAX).collect())) {
            replay(&steps, &[0, 1, 149, u64::MAX - 1, u64::MAX]);
        }

        #[test]
        fn behaves_as_a_map_when_all_ids_want_one_bucket(steps in steps(crowd())) {
            replay(&steps, &crowd());
        }
    }

    #[test]
    fn a_search_ends_when_every_bucket_was_passed() {
        let mut index = Index::new();
        index.reserve().unwrap();
        for bucket in index.buckets.iter_mut() {
            bucket.add_passed(1);
        }
        assert_eq!(index.find::<Portable>(1, 1), NO_ROW);
        assert_eq!(index.remove(1, 1), NO_ROW);
    }

    #[test]
    fn reserve_for_makes_room_for_as_many() {
        for ids in [0, 1, 26, 27, 1_000, 100_001] {
            let mut index = Index::new();
            index.reserve().unwrap();
            index.insert(0, hash_id(0), 7);
            index.reserve_for(ids).unwrap();
            let buckets = index.buckets.len();
            for id in 1..ids as u64 {
                index.reserve().unwrap();
                index.insert(id, hash_id(id), id as u32);
            }
            assert_eq!(index.buckets.len(), buckets, "{ids}");
            assert_eq!(index.find::<Portable>(0, hash_id(0)), 7);
        }
    }

    #[test]
    fn an_id_costs_at_most_22_bytes_and_a_page_once_large() {
        let mut index = Index::new();
        for id in 0..200_000u64 {
            index.reserve().unwrap();
            index.insert(id, hash_id(id), id as u32);
            assert!(id < 2_000 || index.memory_bytes() <= 22 * index.len + (4 << 10), "at {id}");
        }
    }
}
