//! [`Arena`]: which parts of the chunks that all tables share are free.
//!
//! A buddy system: a free block has a power of two of [`GRAIN`]s, starts at a multiple of its size, and is joined with
//! its neighbour of the same size as soon as that is free too. All shards of a table grow at much the same time, so
//! what one leaves the next one needs, and little lies idle. It knows nothing of the system's memory: chunks are given
//! to it and taken back.

use std::collections::BTreeSet;
use std::ptr::NonNull;

/// The smallest block, and what sizes are multiples of.
pub(crate) const GRAIN: usize = 1 << 10;
/// The largest block: a huge page, at a multiple of its size.
pub(crate) const CHUNK: usize = GRAIN << LARGEST;
const LARGEST: usize = 11;

/// See the module's documentation.
pub(crate) struct Arena {
    /// By the power of two; the lowest address is used first, so that the highest chunks become free.
    free: [BTreeSet<NonNull<u8>>; LARGEST + 1],
}

// SAFETY: the addresses are of memory that belongs to the arena until it gives it away; it never reads or writes there.
#[allow(unsafe_code)]
unsafe impl Send for Arena {}

impl Arena {
    /// No chunk.
    pub(crate) const fn new() -> Self {
        Self { free: [const { BTreeSet::new() }; LARGEST + 1] }
    }

    /// A block of `bytes`, a multiple of [`GRAIN`] and at most [`CHUNK`]; `None` when another chunk is needed.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let fitting = (bytes / GRAIN).next_power_of_two().trailing_zeros() as usize;
        let larger = self.free.get_mut(fitting..)?.iter_mut().enumerate();
        let (above, start) =
            larger.into_iter().find_map(|(above, blocks)| Some((above, blocks.pop_first()?)))?;
        self.give(moved(start, bytes), (GRAIN << (fitting + above)) - bytes);
        Some(start)
    }

    /// Take back `bytes` from `start` on, both multiples of [`GRAIN`]: a chunk, a block or a part of one.
    pub(crate) fn give(&mut self, mut start: NonNull<u8>, mut bytes: usize) {
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

    /// A chunk that is free as a whole, when there is another.
    pub(crate) fn spare_chunk(&mut self) -> Option<NonNull<u8>> {
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

    /// Addresses of no memory: the arena must not touch it.
    fn chunk(number: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut((number + 1) * CHUNK)).unwrap()
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_chunks_become_whole_again(
            steps in prop::collection::vec((1usize..80, any::<prop::sample::Index>(), any::<bool>()), 1..400)
        ) {
            let (mut arena, mut chunks) = (Arena::new(), 0);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (grains, which, take) in steps {
                let bytes = grains * GRAIN;
                if !take && !taken.is_empty() {
                    let (start, bytes) = taken.swap_remove(which.index(taken.len()));
                    arena.give(NonNull::new(std::ptr::without_provenance_mut(start)).unwrap(), bytes);
                    continue;
                }
                let found = arena.take(bytes).unwrap_or_else(|| {
                    arena.give(chunk(chunks), CHUNK);
                    chunks += 1;
                    arena.take(bytes).unwrap()
                });
                let start = found.addr().get();
                let end = start + bytes;
                prop_assert!(start >= CHUNK && end <= (chunks + 1) * CHUNK && start / CHUNK == (end - 1) / CHUNK);
                prop_assert!(start.is_multiple_of(GRAIN));
                prop_assert!(taken.iter().all(|(other, bytes)| end <= *other || other + bytes <= start));
                taken.push((start, bytes));
            }
            for (start, bytes) in taken {
                arena.give(NonNull::new(std::ptr::without_provenance_mut(start)).unwrap(), bytes);
            }
            prop_assert_eq!(arena.free[LARGEST].len(), chunks);
            prop_assert!(arena.free[..LARGEST].iter().all(BTreeSet::is_empty));
            prop_assert_eq!(std::iter::from_fn(|| arena.spare_chunk()).count(), chunks.saturating_sub(1));
        }
    }
}
