//! [`Region`]: a growable array of zeros. A large region uses physical memory only where it has been written.
//!
//! Each table has regions for rows, ids, recency and its indexes in every shard, so hundreds of thousands of regions
//! may exist. A region of up to a huge page is a block of one [`BlockAllocator`]. All blocks are on huge pages, so that
//! the translation look-aside buffer covers more addresses. A larger region is a separate mapping, aligned to a huge
//! page. Its untouched part uses no physical memory, and it grows by moving page tables, not bytes. Its pages are
//! collapsed into a huge page only when all of them have been written, so that a huge page is never half empty.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::size_of;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;

use crate::shard::block_allocator::{BlockAllocator, GRAIN};

/// The size of a huge page, for which one entry of the translation look-aside buffer suffices.
const HUGE_PAGE: usize = 2 << 20;
/// The size in bytes up to which a region is a block of the allocator.
const BLOCK_MAX: usize = HUGE_PAGE;
/// The size of the mappings that the allocator divides into blocks. Only their used pages are resident.
const ARENA: usize = 32 * HUGE_PAGE;
/// The size of a page, which the operating system allocates at the first write.
const PAGE: usize = 4 << 10;

/// The alignment of every region, including an empty one.
#[repr(align(64))]
struct CacheLine;

/// The address of an empty region.
const NOWHERE: NonNull<u8> = NonNull::<CacheLine>::dangling().cast();

/// Types for which every bit pattern, including all zeros, is a valid value.
///
/// # Safety
/// Implementing types must contain no references, have no invalid bit patterns, and need no more alignment
/// than a cache line.
pub(super) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: every bit pattern is a valid float.
unsafe impl Plain for f32 {}
// SAFETY: every bit pattern is a valid integer.
unsafe impl Plain for u64 {}
// SAFETY: every bit pattern is a valid integer.
unsafe impl Plain for u32 {}

/// The error that the operating system refused memory, or that a size or number of rows exceeds its limit.
/// The region is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfMemory {
    /// The requested size, in bytes.
    pub(crate) bytes: usize,
}

/// A growable array. Dereferences to a slice over its whole capacity.
pub(super) struct Region<T: Plain> {
    start: NonNull<u8>,
    /// The size of the block or mapping; 0 before the first growth.
    bytes: usize,
    elements: PhantomData<T>,
}

// SAFETY: a region owns its memory and `T` is plain data.
unsafe impl<T: Plain> Send for Region<T> {}
// SAFETY: shared references are only used to read.
unsafe impl<T: Plain> Sync for Region<T> {}

impl<T: Plain> Region<T> {
    /// A region without elements or memory.
    pub(crate) const fn new() -> Self {
        Self { start: NOWHERE, bytes: 0, elements: PhantomData }
    }

    /// Create a region of `len` zeros, rounded up to a whole grain or page, all of which will be written. The
    /// first write to a huge page therefore allocates all of it.
    pub(crate) fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        let need = len * size_of::<T>();
        let bytes = need.next_multiple_of(if need > BLOCK_MAX { PAGE } else { GRAIN });
        let start = if bytes > BLOCK_MAX { map(bytes)? } else { allocate(bytes)? };
        if bytes > BLOCK_MAX {
            advise(start, bytes, libc::MADV_HUGEPAGE);
        }
        Ok(Self { start, bytes, elements: PhantomData })
    }

    /// Grow to at least `len` elements. New elements are zero. A block is resident as a whole, so it grows by a
    /// sixteenth to an eighth. Only the written pages of a mapping are resident, so it doubles.
    pub(crate) fn grow(&mut self, len: usize) -> Result<(), OutOfMemory> {
        let need = len.checked_mul(size_of::<T>()).ok_or(OutOfMemory { bytes: usize::MAX })?;
        if need <= self.bytes {
            return Ok(());
        }
        let doubled = need.checked_next_power_of_two().ok_or(OutOfMemory { bytes: need })?;
        if need <= BLOCK_MAX {
            let bytes = need.next_multiple_of((doubled / 16).max(GRAIN));
            *self = self.copied_into(allocate(bytes)?, bytes);
        } else if self.bytes <= BLOCK_MAX {
            // Copying fills these pages, and collapse_huge_pages is called only for pages that become full later.
            let (start, full) = (map(doubled)?, self.bytes / HUGE_PAGE * HUGE_PAGE);
            advise(start, full, libc::MADV_HUGEPAGE);
            *self = self.copied_into(start, doubled);
            // Some systems back every mapping with huge pages by default.
            advise(self.start, self.bytes, libc::MADV_NOHUGEPAGE);
        } else {
            self.start = remap(self.start, self.bytes, doubled)?;
            self.bytes = doubled;
        }
        Ok(())
    }

    /// Grow to `len` elements, all of which the caller is about to write, and use huge pages where these will be
    /// full. This is far cheaper than collapsing small pages later.
    pub(crate) fn grow_filled(&mut self, len: usize) -> Result<(), OutOfMemory> {
        self.grow(len)?;
        let full = len * size_of::<T>() / HUGE_PAGE;
        if self.bytes > BLOCK_MAX && full > 0 {
            advise(self.start, self.bytes, libc::MADV_HUGEPAGE);
            for page in 0..full {
                // Allocate the page by a write that does not change the content. A read would map the shared page of
                // zeros. SAFETY: the address is inside the mapping, which only `self` owns.
                let byte = unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(page * HUGE_PAGE)) };
                byte.fetch_or(0, Ordering::Relaxed);
            }
            advise(self.start, self.bytes, libc::MADV_NOHUGEPAGE);
        }
        Ok(())
    }

    /// The number of resident bytes if only the first `len` elements have ever been written.
    pub(crate) fn resident_bytes(&self, len: usize) -> usize {
        if self.bytes <= BLOCK_MAX { self.bytes } else { (len * size_of::<T>()).next_multiple_of(PAGE) }
    }

    /// Collapse the huge pages that became full when elements `from..to` were written for the first time.
    #[inline]
    pub(crate) fn collapse_huge_pages(&self, from: usize, to: usize) {
        let (first, end) = (from * size_of::<T>() / HUGE_PAGE, to * size_of::<T>() / HUGE_PAGE);
        if first < end && self.bytes > BLOCK_MAX {
            self.collapse(first * HUGE_PAGE, (end - first) * HUGE_PAGE);
        }
    }

    #[cold]
    fn collapse(&self, offset: usize, bytes: usize) {
        debug_assert!(offset + bytes <= self.bytes);
        advise(self.start, self.bytes, libc::MADV_HUGEPAGE);
        // SAFETY: the range is inside this mapping. The call changes page sizes but never the content.
        let collapsed =
            unsafe { libc::madvise(self.start.as_ptr().add(offset).cast(), bytes, libc::MADV_COLLAPSE) };
        // Kernels before 6.1 collapse pages only in the background, and only while the advice is set.
        if collapsed == 0 {
            advise(self.start, self.bytes, libc::MADV_NOHUGEPAGE);
        }
    }

    fn copied_into(&self, start: NonNull<u8>, bytes: usize) -> Self {
        // SAFETY: both blocks are live and distinct, and `bytes` is the larger size.
        unsafe { start.copy_from_nonoverlapping(self.start, self.bytes) };
        Self { start, bytes, elements: PhantomData }
    }
}

impl<T: Plain> Deref for Region<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `bytes` bytes from `start` are initialized (to zero at first), aligned, and owned by
        // `self`; for an empty region, the pointer dangles and the length is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<T>(), self.bytes / size_of::<T>()) }
    }
}

impl<T: Plain> DerefMut for Region<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<T>(), self.bytes / size_of::<T>())
        }
    }
}

impl<T: Plain> Drop for Region<T> {
    fn drop(&mut self) {
        if self.bytes > BLOCK_MAX {
            unmap(self.start.as_ptr(), self.bytes);
        } else if self.bytes > 0 {
            release(self.start, self.bytes);
        }
    }
}

/// The free memory for the blocks of all tables.
static BLOCKS: Mutex<BlockAllocator> = Mutex::new(BlockAllocator::new());

/// Allocate a block of zeros. `bytes` is a multiple of [`GRAIN`] and at most [`BLOCK_MAX`].
fn allocate(bytes: usize) -> Result<NonNull<u8>, OutOfMemory> {
    if bytes == 0 {
        return Ok(NOWHERE);
    }
    #[cfg(test)]
    if refusal::is_due() {
        return Err(OutOfMemory { bytes });
    }
    let taken = BLOCKS.lock().take(bytes);
    let start = match taken {
        Some(start) => start,
        None => {
            let arena = map(ARENA)?;
            advise(arena, ARENA, libc::MADV_HUGEPAGE);
            let arena = arena.as_ptr().expose_provenance();
            let mut blocks = BLOCKS.lock();
            blocks.give(arena..arena + ARENA);
            blocks.take(bytes).ok_or(OutOfMemory { bytes })?
        }
    };
    let start =
        NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(start)).ok_or(OutOfMemory { bytes })?;
    // SAFETY: these bytes are part of a live mapping, and no other region uses them.
    unsafe { start.write_bytes(0, bytes) };
    Ok(start)
}

/// Free a block. Huge pages that are now completely free are returned to the operating system.
fn release(start: NonNull<u8>, bytes: usize) {
    let start = start.as_ptr().expose_provenance();
    let mut blocks = BLOCKS.lock();
    let free = blocks.give(start..start + bytes);
    // Pages without a byte of this block have been returned before.
    let first = (start / HUGE_PAGE * HUGE_PAGE).max(free.start.next_multiple_of(HUGE_PAGE));
    let end = (start + bytes).next_multiple_of(HUGE_PAGE).min(free.end / HUGE_PAGE * HUGE_PAGE);
    if let Some(pages) = NonNull::new(std::ptr::with_exposed_provenance_mut(first)).filter(|_| first < end) {
        // The lock is still held, so no other region can have these pages.
        advise(pages, end - first, libc::MADV_DONTNEED);
    }
}

/// Map `bytes` bytes of zeros at an address that is a multiple of `HUGE_PAGE`. `bytes` is a multiple of
/// `PAGE`.
fn map(bytes: usize) -> Result<NonNull<u8>, OutOfMemory> {
    let refused = OutOfMemory { bytes };
    #[cfg(test)]
    if refusal::is_due() {
        return Err(refused);
    }
    let padded = bytes.checked_add(HUGE_PAGE).ok_or(refused)?;
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new anonymous mapping at an address that the system chooses touches no existing memory.
    let whole = unsafe { libc::mmap(std::ptr::null_mut(), padded, access, kind, -1, 0) };
    if whole == libc::MAP_FAILED {
        return Err(refused);
    }
    let whole = whole.cast::<u8>();
    let head = whole.align_offset(HUGE_PAGE);
    let start = whole.wrapping_add(head);
    unmap(whole, head);
    unmap(start.wrapping_add(bytes), HUGE_PAGE - head);
    NonNull::new(start).ok_or(refused)
}

fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: callers pass whole pages of a mapping they own and no longer use.
        let unmapped = unsafe { libc::munmap(start.cast(), bytes) };
        debug_assert_eq!(unmapped, 0);
    }
}

/// Move a mapping to a larger range with the same alignment. No byte is copied.
fn remap(old: NonNull<u8>, old_bytes: usize, bytes: usize) -> Result<NonNull<u8>, OutOfMemory> {
    let target = map(bytes)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: this module owns `old`, a mapping of that size, and `target`, another mapping, which the call
    // replaces.
    let moved =
        unsafe { libc::mremap(old.as_ptr().cast(), old_bytes, bytes, flags, target.as_ptr().cast::<u8>()) };
    if moved == libc::MAP_FAILED {
        unmap(target.as_ptr(), bytes);
        return Err(OutOfMemory { bytes });
    }
    Ok(target)
}

/// Advise the operating system about the sizes of pages, or that pages are free. An error does no harm.
fn advise(start: NonNull<u8>, bytes: usize, advice: libc::c_int) {
    // SAFETY: callers pass a mapping that this module owns, and advice that does not change content that is in use.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, advice) };
}

/// Makes allocations of the current thread fail, for tests.
#[cfg(test)]
pub(crate) mod refusal {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<u32> = const { Cell::new(u32::MAX) };
    }

    /// Grant this many further requests for memory, and refuse the next one.
    pub(crate) fn after(requests: u32) {
        LEFT.set(requests);
    }

    /// Stop refusing requests. Returns whether a request was refused.
    pub(crate) fn end() -> bool {
        LEFT.replace(u32::MAX) == u32::MAX
    }

    pub(super) fn is_due() -> bool {
        let left = LEFT.get();
        let due = left == 0;
        if left != u32::MAX {
            LEFT.set(if due { u32::MAX } else { left - 1 });
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_survives_every_growth_and_new_elements_are_zero() {
        let mut region = Region::<f32>::new();
        assert!(region.is_empty());
        let mut written = 0;
        // The region grows from a block to a mapping, which is then moved twice.
        for len in [1, 100, 5_000, 16_384, 300_000, 524_288, 600_000, 3_000_000] {
            region.grow(len).unwrap();
            assert!(region.len() >= len);
            assert_eq!(region.as_ptr().align_offset(64), 0, "not at a cache line");
            assert!(region[..written].iter().enumerate().all(|(i, value)| *value == i as f32));
            assert!(region[written..].iter().all(|value| *value == 0.0));
            for i in written..len {
                region[i] = i as f32;
            }
            region.collapse_huge_pages(written, len);
            written = len;
        }
        assert!(region.iter().take(written).enumerate().all(|(i, value)| *value == i as f32));
    }

    #[test]
    fn an_exact_region_is_zero_and_no_larger_than_asked() {
        for len in [0, 1, 16, 16_385, 524_288, 524_289, 1 << 20] {
            let region = Region::<f32>::zeroed(len).unwrap();
            assert!(region.iter().all(|value| *value == 0.0));
            assert!(region.len() >= len && region.len() * 4 < len * 4 + PAGE);
        }
    }

    #[test]
    fn a_refused_growth_leaves_the_region_unchanged() {
        let mut region = Region::<f32>::new();
        region.grow(600_000).unwrap();
        region[599_999] = 7.0;
        assert!(region.grow(usize::MAX / 8).is_err());
        assert!(region.grow(usize::MAX).is_err());
        assert_eq!(region[599_999], 7.0);
    }

    #[test]
    fn grow_filled_keeps_content_and_adds_zeros() {
        let mut region = Region::<f32>::new();
        for len in [10, 20_000, 524_289, 3_000_000, 5_000_000] {
            region.grow_filled(len).unwrap();
            assert!(region.len() >= len);
            assert!(region[1..].iter().all(|value| *value == 0.0));
            region[0] = 7.0;
        }
        assert_eq!(region[0], 7.0);
    }

    #[test]
    fn untouched_memory_is_not_counted() {
        let mut region = Region::<f32>::new();
        region.grow(1 << 28).unwrap();
        region[0] = 1.0;
        assert_eq!(region.resident_bytes(1), PAGE);
    }
}
