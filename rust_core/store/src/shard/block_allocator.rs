//! [`BlockAllocator`]: the free memory that all tables share.
//!
//! A block is the start of a free range, and a freed block merges with the free ranges beside it. Of the ranges that
//! are long enough, that with a low address is used, so that the memory at high addresses becomes free. All shards of
//! a table grow at about the same time, so one shard reuses the memory that others have freed. The allocator never
//! accesses or requests memory itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The unit of addresses and sizes, in bytes.
pub(super) const GRAIN: usize = 1 << 10;
/// The number of classes of ranges. Class `k` has the ranges of `2^k` to `2^(k + 1)` grains.
const CLASSES: usize = usize::BITS as usize;
/// The number of ranges of a block's own class that are tried. The others are not all long enough.
const TRIES: usize = 64;

/// The free ranges of addresses.
pub(super) struct BlockAllocator {
    /// The end of each range, by its start. Ranges do not touch.
    free: BTreeMap<usize, usize>,
    /// The starts of the ranges of each class.
    classes: [BTreeSet<usize>; CLASSES],
}

impl BlockAllocator {
    /// An allocator without memory.
    pub(super) const fn new() -> Self {
        Self { free: BTreeMap::new(), classes: [const { BTreeSet::new() }; CLASSES] }
    }

    /// Take a block of `bytes`, a multiple of [`GRAIN`] that is not 0. Returns its address. None means that the owner
    /// must add memory first.
    pub(super) fn take(&mut self, bytes: usize) -> Option<usize> {
        let own = class(bytes);
        let fits = |start: &&usize| self.free.get(start).is_some_and(|end| end - **start >= bytes);
        let tried = self.classes[own].iter().take(TRIES).find(fits);
        let longer = self.classes[own + 1..].iter().filter_map(BTreeSet::first);
        let start = *longer.chain(tried).min()?;
        let end = self.remove(start)?;
        self.insert(start + bytes..end);
        Some(start)
    }

    /// Add the memory at `added`, multiples of [`GRAIN`], to the free memory. Returns the whole free range that
    /// contains it.
    pub(super) fn give(&mut self, added: Range<usize>) -> Range<usize> {
        let Range { mut start, mut end } = added;
        if let Some((before, _)) = self.free.range(..start).next_back().filter(|(_, end)| **end == start) {
            start = *before;
            self.remove(start);
        }
        if let Some(after) = self.remove(end) {
            end = after;
        }
        self.insert(start..end);
        start..end
    }

    /// Remove the free range at `start`, if there is one. Returns its end.
    fn remove(&mut self, start: usize) -> Option<usize> {
        let end = self.free.remove(&start)?;
        self.classes[class(end - start)].remove(&start);
        Some(end)
    }

    fn insert(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.free.insert(range.start, range.end);
            self.classes[class(range.len())].insert(range.start);
        }
    }
}

/// The class of a range of `bytes`.
fn class(bytes: usize) -> usize {
    (bytes / GRAIN).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ARENA: usize = 100 * GRAIN;

    proptest! {
        #[test]
        fn blocks_never_overlap_and_freed_memory_is_whole_again(
            steps in prop::collection::vec((1usize..80, any::<prop::sample::Index>(), any::<bool>()), 1..400)
        ) {
            let (mut blocks, mut arenas) = (BlockAllocator::new(), 0);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for (grains, which, take) in steps {
                let bytes = grains * GRAIN;
                if !take && !taken.is_empty() {
                    let freed = taken.swap_remove(which.index(taken.len()));
                    let whole = blocks.give(freed.clone());
                    prop_assert!(whole.start <= freed.start && freed.end <= whole.end);
                    prop_assert!(taken.iter().all(|other| other.end <= whole.start || whole.end <= other.start));
                    continue;
                }
                let start = blocks.take(bytes).unwrap_or_else(|| {
                    arenas += 1;
                    blocks.give(arenas * ARENA..(arenas + 1) * ARENA);
                    blocks.take(bytes).unwrap()
                });
                let end = start + bytes;
                prop_assert!(start >= ARENA && end <= (arenas + 1) * ARENA && start.is_multiple_of(GRAIN));
                prop_assert!(taken.iter().all(|other| end <= other.start || other.end <= start));
                taken.push(start..end);
            }
            for block in taken {
                blocks.give(block);
            }
            let all = (arenas > 0).then_some((ARENA, (arenas + 1) * ARENA));
            prop_assert_eq!(blocks.free.into_iter().collect::<Vec<_>>(), all.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(blocks.classes.iter().map(BTreeSet::len).sum::<usize>(), usize::from(arenas > 0));
        }
    }

    #[test]
    fn a_range_of_the_own_class_is_used_if_it_is_long_enough() {
        let mut blocks = BlockAllocator::new();
        for (start, grains) in [(100, 5), (200, 6), (300, 40)] {
            blocks.give(start * GRAIN..(start + grains) * GRAIN);
        }
        assert_eq!(blocks.take(6 * GRAIN), Some(200 * GRAIN));
        assert_eq!(blocks.take(6 * GRAIN), Some(300 * GRAIN));
        assert_eq!(blocks.take(5 * GRAIN), Some(100 * GRAIN));
        assert_eq!(blocks.take(35 * GRAIN), None);
        assert_eq!(blocks.take(34 * GRAIN), Some(306 * GRAIN));
        assert_eq!(blocks.take(GRAIN), None);
    }
}
