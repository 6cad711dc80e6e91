//! Deduplication: turns occurrences of ids into unique ids, in the order of (shard, first occurrence).
//!
//! Occurrences are first partitioned by virtual shard. The hash table is then small enough for the first-level cache at
//! usual batch sizes, and the result is in the order that the store uses.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use persia_types::id::{Id, ShardedIds, VIRTUAL_SHARDS, hash_id, shard_of_hash};

use crate::batch::occurrences::{Occurrences, group};
use crate::memory::FeatureMemory;

/// The result of [`Deduplicator::unique`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unique {
    pub(crate) ids: ShardedIds,
    /// For each occurrence, the index of its id in `ids`.
    pub(crate) inverse: Vec<u32>,
    pub(crate) occurrences: Occurrences,
}

#[derive(Clone, Copy, Default)]
struct Occurrence {
    id: Id,
    position: u32,
    sample: u32,
}

/// One bucket of the hash table. It counts as empty unless its `generation` is the deduplicator's, so the
/// table need not be cleared.
#[derive(Clone, Copy, Default)]
struct Bucket {
    id: Id,
    unique: u32,
    generation: u32,
}

/// Deduplicates ids, with memory that is reused for every batch.
#[derive(Default)]
pub(crate) struct Deduplicator {
    table: Vec<Bucket>,
    generation: u32,
    partition: Vec<Occurrence>,
    /// The unique ids; the first `count` are those of the current feature or merge.
    unique: Vec<Id>,
    count: usize,
    /// The unique id of each occurrence, in the order of the partition.
    local: Vec<u32>,
    /// The start of the samples of each unique id.
    starts: Vec<u32>,
    /// The pool of vectors for results. A feature returns its vectors when it is dropped.
    memory: Arc<FeatureMemory>,
}

/// The number of occurrences up to which shards are deduplicated together: enough for long loops, but few
/// enough for the first-level cache. A larger shard is deduplicated alone.
const CLUSTER: u32 = 512;

thread_local! {
    static DEDUPLICATOR: RefCell<Deduplicator> = RefCell::default();
}

/// Run `work` with this thread's deduplicator.
pub(crate) fn with<T>(work: impl FnOnce(&mut Deduplicator) -> T) -> T {
    DEDUPLICATOR.with_borrow_mut(work)
}

impl Deduplicator {
    /// The memory to which features return their vectors.
    pub(crate) fn memory(&self) -> Weak<FeatureMemory> {
        Arc::downgrade(&self.memory)
    }

    /// Deduplicate `ids`. `offsets` has the start of each sample; None means one id per sample.
    ///
    /// The caller has checked that `offsets` ascend from 0 to `ids.len()`, and that `ids.len()` fits into a `u32`.
    pub(crate) fn unique(&mut self, ids: &[Id], offsets: Option<&[u32]>) -> Unique {
        let starts = self.partition(ids, offsets);
        let mut inverse = self.memory.places(ids.len());
        let mut samples = self.memory.places(ids.len());
        self.starts.clear();
        self.starts.resize(ids.len() + 1, 0);
        let mut shard_offsets = Vec::with_capacity(VIRTUAL_SHARDS + 1);
        shard_offsets.push(0);
        self.reset_unique(ids.len());
        let mut shard = 0;
        while shard < VIRTUAL_SHARDS {
            let first = starts[shard];
            let more =
                starts[shard + 1..VIRTUAL_SHARDS].iter().take_while(|end| **end - first < CLUSTER).count();
            let cluster = &starts[shard..=shard + more + 1];
            self.cluster(cluster, &mut inverse, &mut samples, &mut shard_offsets);
            shard += more + 1;
        }
        let starts = self.memory.copy_places(&self.starts[..=self.count]);
        let ids = self.memory.copy_ids(&self.unique[..self.count]);
        let ids = ShardedIds::from_grouped(ids, shard_offsets);
        Unique { ids, inverse, occurrences: Occurrences::new(starts, samples) }
    }

    /// Merge lists of unique ids into one list. Within a shard, ids are in the order of their first
    /// occurrence in the lists. Also returns the new index of each id.
    pub(crate) fn merge(&mut self, lists: &[&ShardedIds]) -> (ShardedIds, Vec<Vec<u32>>) {
        let mut maps: Vec<Vec<u32>> = lists.iter().map(|list| Vec::with_capacity(list.len())).collect();
        let mut shard_offsets = Vec::with_capacity(VIRTUAL_SHARDS + 1);
        shard_offsets.push(0);
        self.reset_unique(lists.iter().map(|list| list.len()).sum());
        for shard in 0..VIRTUAL_SHARDS {
            let mask = self.reset_table(lists.iter().map(|list| list.range(shard).len()).sum());
            for (list, map) in lists.iter().zip(&mut maps) {
                for &id in &list.ids()[list.range(shard)] {
                    let unique = find_or_insert(
                        &mut self.table,
                        self.generation,
                        mask,
                        &mut self.unique,
                        &mut self.count,
                        id,
                    );
                    map.push(unique);
                }
            }
            shard_offsets.push(self.count as u32);
        }
        (ShardedIds::from_grouped(self.unique[..self.count].to_vec(), shard_offsets), maps)
    }

    /// Sort occurrences by shard, with a counting sort that keeps batch order within a shard. Returns the starts of
    /// the shards.
    fn partition(&mut self, ids: &[Id], offsets: Option<&[u32]>) -> [u32; VIRTUAL_SHARDS + 1] {
        let mut starts = [0u32; VIRTUAL_SHARDS + 1];
        for &id in ids {
            starts[shard_of_hash(hash_id(id)) + 1] += 1;
        }
        for shard in 0..VIRTUAL_SHARDS {
            starts[shard + 1] += starts[shard];
        }
        if self.partition.len() < ids.len() {
            self.partition.resize(ids.len(), Occurrence::default());
            self.local.resize(ids.len(), 0);
        }
        let partition = &mut self.partition[..ids.len()];
        let mut next = starts;
        let mut place = |id: Id, position: u32, sample: u32| {
            let next = &mut next[shard_of_hash(hash_id(id))];
            partition[*next as usize] = Occurrence { id, position, sample };
            *next += 1;
        };
        match offsets {
            None => {
                for (position, &id) in ids.iter().enumerate() {
                    place(id, position as u32, position as u32);
                }
            }
            Some(offsets) => {
                for (sample, bounds) in offsets.windows(2).enumerate() {
                    let (start, end) = (bounds[0] as usize, bounds[1] as usize);
                    for (position, &id) in ids[start..end].iter().enumerate() {
                        place(id, (start + position) as u32, sample as u32);
                    }
                }
            }
        }
        starts
    }

    /// Deduplicate consecutive shards together. `shards` has their starts, followed by the end of the last one.
    ///
    /// The occurrences of a shard fill the same range of the partition and of `samples`, because unique ids are numbered
    /// shard by shard.
    fn cluster(
        &mut self,
        shards: &[u32],
        inverse: &mut [u32],
        samples: &mut [u32],
        shard_offsets: &mut Vec<u32>,
    ) {
        let (start, end) = (shards[0] as usize, shards[shards.len() - 1] as usize);
        let mask = self.reset_table(end - start);
        let first = self.count;
        for shard in shards.windows(2) {
            let range = shard[0] as usize..shard[1] as usize;
            for (occurrence, place) in self.partition[range.clone()].iter().zip(&mut self.local[range]) {
                let (unique, count) = (&mut self.unique, &mut self.count);
                let unique =
                    find_or_insert(&mut self.table, self.generation, mask, unique, count, occurrence.id);
                inverse[occurrence.position as usize] = unique;
                self.starts[unique as usize + 1] += 1;
                *place = unique;
            }
            shard_offsets.push(self.count as u32);
        }
        let in_order = self.partition[start..end].iter().map(|occurrence| occurrence.sample);
        let ends = &mut self.starts[first + 1..=self.count];
        group(first as u32, &self.local[start..end], in_order, ends, start as u32, samples);
    }

    /// Clear the unique ids, and reserve memory for `ids` ids and one more, which is written but not counted.
    fn reset_unique(&mut self, ids: usize) {
        self.count = 0;
        if self.unique.len() <= ids {
            self.unique.resize(ids + 1, 0);
        }
    }

    /// Empty the hash table and reserve memory for `ids` ids. Returns the mask for bucket indices.
    fn reset_table(&mut self, ids: usize) -> usize {
        let places = (ids * 4).next_power_of_two().max(16);
        if self.table.len() < places {
            self.table.resize(places, Bucket::default());
        }
        if self.generation == u32::MAX {
            self.table.fill(Bucket::default());
            self.generation = 0;
        }
        self.generation += 1;
        places - 1
    }
}

/// Find the number of `id`, or give a new id the next number. The hash table is at most a quarter full.
///
/// A branch on whether an id is new would be mispredicted half the time, so both outcomes write the same memory. There
/// is a branch only for collisions.
#[inline(always)]
fn find_or_insert(
    table: &mut [Bucket],
    generation: u32,
    mask: usize,
    unique: &mut [Id],
    count: &mut usize,
    id: Id,
) -> u32 {
    let mut place = hash_id(id) as usize & mask;
    loop {
        let bucket = &mut table[place];
        let new = bucket.generation != generation;
        if new | (bucket.id == id) {
            let number = if new { *count as u32 } else { bucket.unique };
            *bucket = Bucket { id, unique: number, generation };
            unique[*count] = id; // overwritten by the next new id if this id is not new
            *count += usize::from(new);
            return number;
        }
        place = (place + 1) & mask;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use persia_types::id::shard_of;
    use proptest::prelude::*;

    use super::*;

    /// Compute the result of [`Deduplicator::unique`] with a sort and a hash map.
    fn naive(ids: &[Id], offsets: Option<&[u32]>) -> (Vec<Id>, Vec<u32>, Vec<Vec<u32>>) {
        let mut unique: Vec<Id> = Vec::new();
        for &id in ids {
            if !unique.contains(&id) {
                unique.push(id);
            }
        }
        unique.sort_by_key(|id| shard_of(*id)); // a stable sort, which keeps the order of first occurrences
        let numbers: HashMap<Id, usize> = unique.iter().enumerate().map(|(n, id)| (*id, n)).collect();
        let inverse: Vec<u32> = ids.iter().map(|id| numbers[id] as u32).collect();
        let mut samples = vec![Vec::new(); unique.len()];
        for (position, &number) in inverse.iter().enumerate() {
            let sample = match offsets {
                None => position,
                Some(offsets) => offsets.partition_point(|start| *start as usize <= position) - 1,
            };
            samples[number as usize].push(sample as u32);
        }
        (unique, inverse, samples)
    }

    fn check(deduplicator: &mut Deduplicator, ids: &[Id], offsets: Option<&[u32]>) {
        let (unique, inverse, samples) = naive(ids, offsets);
        let found = deduplicator.unique(ids, offsets);
        assert_eq!(found.ids.ids(), unique);
        assert_eq!(found.inverse, inverse);
        let starts = found.occurrences.starts();
        let grouped: Vec<Vec<u32>> = starts
            .windows(2)
            .map(|w| found.occurrences.samples()[w[0] as usize..w[1] as usize].to_vec())
            .collect();
        assert_eq!(grouped, samples);
        let (ids, offsets) = found.ids.into_parts();
        assert!(ShardedIds::from_parts(ids, offsets).is_ok());
    }

    proptest! {
        #[test]
        fn equals_the_naive_model(
            lists in prop::collection::vec(prop::collection::vec(prop_oneof![0u64..40, any::<u64>()], 0..12), 0..60)
        ) {
            let ids: Vec<Id> = lists.concat();
            let mut offsets = vec![0u32];
            for list in &lists {
                offsets.push(offsets[offsets.len() - 1] + list.len() as u32);
            }
            let mut deduplicator = Deduplicator::default();
            check(&mut deduplicator, &ids, Some(&offsets));
            check(&mut deduplicator, &ids, None); // the same memory is used again
        }

        #[test]
        fn merging_equals_deduplicating_the_lists_together(
            lists in prop::collection::vec(prop::collection::vec(0u64..200, 0..80), 1..5)
        ) {
            let mut deduplicator = Deduplicator::default();
            let unique: Vec<ShardedIds> =
                lists.iter().map(|ids| deduplicator.unique(ids, None).ids).collect();
            let (merged, maps) = deduplicator.merge(&unique.iter().collect::<Vec<_>>());
            let together: Vec<Id> = unique.iter().flat_map(|list| list.ids().to_vec()).collect();
            prop_assert_eq!(&merged, &deduplicator.unique(&together, None).ids);
            for (list, map) in unique.iter().zip(maps) {
                let mapped: Vec<Id> = map.iter().map(|n| merged.ids()[*n as usize]).collect();
                prop_assert_eq!(list.ids(), mapped);
            }
        }
    }

    #[test]
    fn the_generation_may_wrap() {
        let mut deduplicator = Deduplicator { generation: u32::MAX - 10, ..Default::default() };
        let ids: Vec<Id> = (0..5000).map(|i| i % 700).collect();
        for _ in 0..3 {
            check(&mut deduplicator, &ids, None);
        }
        assert!(deduplicator.generation < 100);
    }

    #[test]
    fn more_than_65535_samples_and_ids_in_one_sample_do_not_wrap() {
        let ids: Vec<Id> = (0..70_000).collect();
        let found = Deduplicator::default().unique(&ids, None);
        assert_eq!(found.ids.len(), 70_000);
        let place = found.inverse[69_999] as usize;
        assert_eq!(found.ids.ids()[place], 69_999);
        let start = found.occurrences.starts()[place] as usize;
        assert_eq!(found.occurrences.samples()[start], 69_999);

        let one_sample = Deduplicator::default().unique(&vec![7; 70_000], Some(&[0, 70_000]));
        assert_eq!(one_sample.ids.ids(), [7]);
        assert_eq!(one_sample.occurrences.samples(), vec![0; 70_000]);
    }
}
