//! [`BuddyAllocator`]: the free blocks of the chunks that all tables share.
//!
//! The size of a free block is a power of two, in units of [`GRAIN`], and its address is a multiple of its
//! size. A block merges with its neighbor of the same size when both are free. All shards of a table grow at
//! about the same time, so one shard reuses the blocks that another has freed, and little memory stays
//! unused. The allocator never requests memory itself: its owner adds chunks, and removes chunks that are
//! completely free.

use std::collections::BTreeSet;
use std::ptr::NonNull;

/// The size of the smallest block, in bytes. All sizes are multiples of it.
pub(super) const GRAIN: usize = 1 << 10;
/// The size of the largest block, in bytes: a huge page, aligned to its size.
pub(super) const CHUNK: usize = GRAIN << LARGEST;
const LARGEST: usize = 11;

/// The free blocks, by size.
pub(super) struct BuddyAllocator {
    /// The free blocks of each size, indexed by the power of two. The block with the lowest address is used first,
    /// so that chunks with high addresses become free.
    free: [BTreeSet<NonNull<u8>>; LARGEST + 1],
}

// SAFETY: the allocator owns the memory at these addresses until it returns a block, and never reads or writes it.
#[allow(unsafe_code)]
unsafe impl Send for BuddyAllocator {}

impl BuddyAllocator {
    /// An allocator without memory.
    pub(super) const fn new() -> Self {
        Self { free: [const { BTreeSet::new() }; LARGEST + 1] }
    }

    /// Take a block of `bytes`, which is a multiple of [`GRAIN`] and at most [`CHUNK`]. None means that the
    /// owner must add a chunk first.
    pub(super) fn take(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let fitting = (bytes / GRAIN).next_power_of_two().trailing_zeros() as usize;
        let larger = self.free.get_mut(fitting..)?.iter_mut().enumerate();
        let (above, start) =
            larger.into_iter().find_map(|(above, blocks)| Some((above, blocks.pop_first()?)))?;
        self.give(moved(start, bytes), (GRAIN << (fitting + above)) - bytes);
        Some(start)
    }

    /// Add `bytes` at `start`, both multiples of [`GRAIN`], to the free memory: a new chunk, a block, or a
    /// part of a block.
    pub(super) fn give(&mut self, mut start: NonNull<u8>, mut bytes: usize) {
        while bytes > 0 {
            let aligned = (start.addr().get() / GRAIN).trailing_zeros() as usize;
            let power = aligned.min((bytes / GRAIN).ilog2() as usize).min(LARGEST);
            self.give_block(start, power);
            start = moved(start, GRAIN << power);
            bytes -= GRAIN << power;
        }
    }

    fn give_block(&mut self, mut start: NonNull<u8>, mut power: usize) {
        while power < LARGEST {
            let size = GRAIN << power;
            let other_half = start.addr().get() ^ size;
            let lower = start.addr().get() & !size;
            let buddy = start.as_ptr().with_addr(other_half);
            if !NonNull::new(buddy).is_some_and(|buddy| self.free[power].remove(&buddy)) {
                break;
            }
            start = NonNull::new(start.as_ptr().with_addr(lower)).unwrap_or(start);
            power += 1;
        }
        self.free[power].insert(start);
    }

    /// Remove a chunk that is completely free, if there is another such chunk.
    pub(super) fn spare_chunk(&mut self) -> Option<NonNull<u8>> {
        let whole = &mut self.free[LARGEST];
        if whole.len() > 1 { whole.pop_last() } else { None }
    }
}

fn moved(start: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    NonNull::new(start.as_ptr().wrapping_add(bytes)).unwrap_or(start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An address at which there is no memory, because the allocator must not access it.
    fn chunk(number: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut((number + 1) * CHUNK)).unwrap()
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_freed_chunks_are_whole_again(
            steps in prop::collection::vec((1usize..80, any::<prop::sample::Index>(), any::<bool>()), 1..400)
        ) {
            let (mut blocks, mut chunks) = (BuddyAllocator::new(), 0);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (grains, which, take) in steps {
                let bytes = grains * GRAIN;
                if !take && !taken.is_empty() {
                    let (start, bytes) = taken.swap_remove(which.index(taken.len()));
                    blocks.give(NonNull::new(std::ptr::without_provenance_mut(start)).unwrap(), bytes);
                    continue;
                }
                let found = blocks.take(bytes).unwrap_or_else(|| {
                    blocks.give(chunk(chunks), CHUNK);
                    chunks += 1;
                    blocks.take(bytes).unwrap()
                });
                let start = found.addr().get();
                let end = start + bytes;
                prop_assert!(start >= CHUNK && end <= (chunks + 1) * CHUNK && start / CHUNK == (end - 1) / CHUNK);
                prop_assert!(start.is_multiple_of(GRAIN));
                prop_assert!(taken.iter().all(|(other, bytes)| end <= *other || other + bytes <= start));
                taken.push((start, bytes));
            }
            for (start, bytes) in taken {
                blocks.give(NonNull::new(std::ptr::without_provenance_mut(start)).unwrap(), bytes);
            }
            prop_assert_eq!(blocks.free[LARGEST].len(), chunks);
            prop_assert!(blocks.free[..LARGEST].iter().all(BTreeSet::is_empty));
            prop_assert_eq!(std::iter::from_fn(|| blocks.spare_chunk()).count(), chunks.saturating_sub(1));
        }
    }
}
