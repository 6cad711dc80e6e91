//! Aligned float buffers that are used again.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Buffers start at a multiple of this many bytes: a cache line, and the widest vector register.
const ALIGNMENT: usize = 64;
const LANES: usize = ALIGNMENT / size_of::<f32>();

/// Floats at a 64-byte boundary. Dropped, its memory goes back to the engine it came from.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<f32>,
    start: usize,
    len: usize,
    home: Weak<BufferPool>,
}

impl Buffer {
    /// Number of floats.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl AsRef<[f32]> for Buffer {
    fn as_ref(&self) -> &[f32] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl AsMut<[f32]> for Buffer {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            home.put(std::mem::take(&mut self.memory));
        }
    }
}

/// Free memory of one engine, by size. What it keeps is bounded by what was in use at one time.
#[derive(Debug)]
pub(crate) struct BufferPool {
    free: Mutex<BTreeMap<usize, Vec<Vec<f32>>>>,
    max_free: usize,
}

impl BufferPool {
    pub(crate) fn new(max_free: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), max_free })
    }

    /// A buffer of `len` floats with whatever was in it before.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let memory = self.reuse(len).unwrap_or_else(|| vec![0.0; len + LANES - 1]);
        // The heap does not move when its owner does, so this stays right.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(LANES - 1);
        Buffer { memory, start, len, home: Arc::downgrade(self) }
    }

    /// The smallest free memory that fits, unless it is more than twice as large.
    fn reuse(&self, len: usize) -> Option<Vec<f32>> {
        let wanted = len + LANES - 1;
        let mut free = self.free.lock();
        let (&size, list) = free.range_mut(wanted..=wanted * 2).next()?;
        let memory = list.pop();
        if list.is_empty() {
            free.remove(&size);
        }
        memory
    }

    fn put(&self, memory: Vec<f32>) {
        let mut free = self.free.lock();
        if free.values().map(Vec::len).sum::<usize>() < self.max_free {
            free.entry(memory.len()).or_default().push(memory);
            return;
        }
        // Full: let the smallest go for a larger one, so that buffers of an old batch size do not stay for ever.
        let Some(mut smallest) = free.first_entry() else { return };
        if *smallest.key() >= memory.len() {
            return;
        }
        smallest.get_mut().pop();
        if smallest.get().is_empty() {
            smallest.remove();
        }
        free.entry(memory.len()).or_default().push(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_come_back() {
        let pool = BufferPool::new(2);
        let mut first = pool.take(100);
        assert_eq!(first.as_ref().as_ptr() as usize % ALIGNMENT, 0);
        first.as_mut().fill(3.0);
        let place = first.as_ref().as_ptr();
        drop(first);
        let again = pool.take(90);
        assert_eq!(again.as_ref().as_ptr(), place);
        assert_eq!(again.len(), 90);
        assert_ne!(pool.take(90).as_ref().as_ptr(), place);
        assert_eq!(pool.take(0).as_ref(), &[] as &[f32]);
    }

    #[test]
    fn much_larger_memory_is_not_wasted_on_a_small_buffer() {
        let pool = BufferPool::new(4);
        drop(pool.take(10_000));
        assert!(pool.take(100).memory.len() < 1000);
    }

    #[test]
    fn the_pool_keeps_no_more_than_its_bound_and_outlives_nothing() {
        let pool = BufferPool::new(2);
        let buffers: Vec<Buffer> = (1..6).map(|n| pool.take(n * 100)).collect();
        drop(buffers);
        assert_eq!(pool.free.lock().values().map(Vec::len).sum::<usize>(), 2);
        let orphan = pool.take(5);
        drop(pool);
        drop(orphan);
    }
}
