//! Aligned float buffers that are reused.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::memory::FreeList;

/// The alignment of buffers, in bytes: the size of a cache line and of the widest vector register.
const ALIGNMENT: usize = 64;
const LANES: usize = ALIGNMENT / size_of::<f32>();

/// Floats that start at a 64-byte boundary. When the buffer is dropped, its memory is returned to its engine.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<f32>,
    start: usize,
    len: usize,
    home: Weak<BufferPool>,
}

impl Buffer {
    /// The number of floats.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no floats.
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

/// The free buffers of one engine.
#[derive(Debug)]
pub(crate) struct BufferPool {
    free: Mutex<FreeList<f32>>,
}

impl BufferPool {
    pub(crate) fn new(max_free: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(FreeList::new(max_free)) })
    }

    /// Copy these floats into a buffer.
    pub(crate) fn collect(self: &Arc<Self>, values: impl ExactSizeIterator<Item = f32>) -> Buffer {
        let mut buffer = self.take(values.len());
        buffer.as_mut().iter_mut().zip(values).for_each(|(place, value)| *place = value);
        buffer
    }

    /// Take a buffer of `len` floats with unspecified values.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let memory = self.free.lock().take(len + LANES - 1);
        // Moving the vector does not move its memory on the heap.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(LANES - 1);
        Buffer { memory, start, len, home: Arc::downgrade(self) }
    }

    fn put(&self, memory: Vec<f32>) {
        self.free.lock().put(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_come_back() {
        let pool = BufferPool::new(2);
        let mut first = pool.take(5000);
        assert_eq!(first.as_ref().as_ptr() as usize % ALIGNMENT, 0);
        first.as_mut().fill(3.0);
        let place = first.as_ref().as_ptr();
        drop(first);
        let again = pool.take(4990);
        assert_eq!(again.as_ref().as_ptr(), place);
        assert_eq!(again.len(), 4990);
        assert_ne!(pool.take(5000).as_ref().as_ptr(), place);
        assert_eq!(pool.take(0).as_ref(), &[] as &[f32]);
    }

    #[test]
    fn the_pool_keeps_no_more_than_its_bound_and_outlives_nothing() {
        let pool = BufferPool::new(2);
        let buffers: Vec<Buffer> = (1..6).map(|n| pool.take(n * 2000)).collect();
        drop(buffers);
        assert_eq!(pool.free.lock().count(), 2);
        let orphan = pool.take(5);
        drop(pool);
        drop(orphan);
    }
}
