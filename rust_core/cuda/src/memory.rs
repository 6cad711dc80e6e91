//! Device memory, from a memory pool of the driver.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute, CUresult};
use parking_lot::Mutex;

use crate::driver::{Context, Event, Stream};
use crate::error::CudaError;

/// The alignment of the parts of a block, in bytes.
pub(crate) const ALIGNMENT: usize = 256;

/// The number of blocks in a window, after which a pool may reduce the memory that it keeps.
const WINDOW: u32 = 1024;
/// The multiple of the peak use up to which free memory is kept. It is above 1 because freed blocks leave gaps,
/// and because a block that the device still uses cannot be reused yet.
const SLACK: u64 = 2;

/// The use of device memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// The size of the blocks that steps hold.
    pub held: u64,
    /// The size of the memory that is allocated on the device, including `held`.
    pub reserved: u64,
}

/// A pool of device memory whose allocations are ordered by streams.
#[derive(Debug)]
pub(crate) struct DevicePool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: sys::CUmemoryPool,
    /// The stream on which blocks are freed, after all work that used them.
    releases: Stream,
    /// The engine's streams on which a block may be in use.
    ours: [sys::CUstream; 2],
    /// The event that orders two streams. It is recorded and waited for under its lock.
    order: Mutex<Event>,
    threshold: Mutex<Threshold>,
    context: Arc<Context>,
}

/// How much free memory a pool keeps.
///
/// At each synchronization, the driver returns memory above the threshold to the device, and allocating it again
/// is slow. The threshold is therefore derived from the peak use in this window and the previous one, so that it
/// is above the need of all steps in flight. The threshold grows immediately, and shrinks after two windows
/// without large batches. Driver 580 nevertheless kept the memory of a large block in which it then placed
/// smaller ones.
#[derive(Debug, Default)]
struct Threshold {
    bytes: u64,
    /// The peak use in the previous window.
    before: u64,
    /// The number of blocks in this window.
    blocks: u32,
}

impl Threshold {
    /// Count a block. `used` is the peak use since the window began. Returns the new threshold, if it changes,
    /// and whether a new window starts.
    fn count(&mut self, used: u64) -> (Option<u64>, bool) {
        let needed = used.max(self.before).saturating_mul(SLACK);
        self.blocks += 1;
        let ends = self.blocks >= WINDOW;
        if ends {
            (self.blocks, self.before) = (0, used);
        }
        let changes = needed > self.bytes || (ends && needed < self.bytes);
        if changes {
            self.bytes = needed;
        }
        (changes.then_some(needed), ends)
    }
}

// SAFETY: the driver accepts calls for a pool and for streams from any thread.
unsafe impl Send for Inner {}
// SAFETY: the driver also accepts concurrent calls for a pool and for streams.
unsafe impl Sync for Inner {}

impl DevicePool {
    pub(crate) fn new(context: &Arc<Context>, ours: [sys::CUstream; 2]) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: zeros are the defaults of this structure; the pool is created from a local variable.
        unsafe {
            let mut properties: sys::CUmemPoolProps = std::mem::zeroed();
            properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            properties.location.id = context.ordinal();
            context.check("cuMemPoolCreate", sys::cuMemPoolCreate(&mut handle, &properties))?;
        }
        let inner = Inner {
            handle,
            releases: Stream::new(context)?,
            ours,
            order: Mutex::new(Event::new(context)?),
            threshold: Mutex::default(),
            context: Arc::clone(context),
        };
        // A look-up must not wait for the model, so it must not get memory that another stream still uses.
        inner.set(Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &mut 0i32)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Take `bytes` of device memory, for work that is queued on `stream` from then on.
    pub(crate) fn take(&self, bytes: usize, what: &'static str, stream: &Stream) -> Result<Block, CudaError> {
        let inner = &self.inner;
        let mut address = 0;
        // SAFETY: pool and stream are alive; the driver returns memory or an error.
        let code = unsafe {
            sys::cuMemAllocFromPoolAsync(&mut address, bytes.max(1), inner.handle, stream.handle())
        };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (ordinal, free_and_total) = (inner.context.ordinal(), inner.context.free_and_total());
            return Err(CudaError::OutOfMemory { ordinal, what, bytes, free_and_total });
        }
        inner.context.check("cuMemAllocFromPoolAsync", code)?;
        let block = Block { address, pool: Arc::clone(inner) };
        inner.adjust()?;
        Ok(block)
    }

    pub(crate) fn used(&self) -> Result<PoolUse, CudaError> {
        let _current = self.inner.context.enter()?;
        Ok(PoolUse {
            held: self.inner.get(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            reserved: self.inner.get(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        })
    }

    pub(crate) fn trim(&self) -> Result<(), CudaError> {
        let inner = &self.inner;
        let _current = inner.context.enter()?;
        *inner.threshold.lock() = Threshold::default();
        inner.set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, &mut 0u64)?;
        // SAFETY: the pool and the stream are alive.
        unsafe {
            inner.context.check("cuStreamSynchronize", sys::cuStreamSynchronize(inner.releases.handle()))?;
            inner.context.check("cuMemPoolTrimTo", sys::cuMemPoolTrimTo(inner.handle, 0))
        }
    }
}

impl Inner {
    fn set<T>(&self, attribute: Attribute, value: &mut T) -> Result<(), CudaError> {
        let value: *mut T = value;
        // SAFETY: the callers ensure that the attribute's value has the type `T`.
        let code = unsafe { sys::cuMemPoolSetAttribute(self.handle, attribute, value.cast::<c_void>()) };
        self.context.check("cuMemPoolSetAttribute", code)
    }

    fn get(&self, attribute: Attribute) -> Result<u64, CudaError> {
        let mut value = 0u64;
        let place: *mut u64 = &mut value;
        // SAFETY: the values of the queried attributes have 64 bits.
        let code = unsafe { sys::cuMemPoolGetAttribute(self.handle, attribute, place.cast::<c_void>()) };
        self.context.check("cuMemPoolGetAttribute", code)?;
        Ok(value)
    }

    /// Adjust the threshold after a block was taken.
    fn adjust(&self) -> Result<(), CudaError> {
        let mut threshold = self.threshold.lock();
        let (changed, starts) = threshold.count(self.get(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?);
        if let Some(mut bytes) = changed {
            self.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &mut bytes)?;
        }
        if starts {
            self.set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, &mut 0u64)?;
        }
        Ok(())
    }

    /// Let blocks be freed only after all work queued on `stream` so far.
    fn release_after(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let event = self.order.lock();
        event.record(stream)?;
        self.releases.wait(&event)
    }
}

/// Device memory. When it is dropped, it returns to the pool after all work that may still use it.
#[derive(Debug)]
pub(crate) struct Block {
    address: u64,
    pool: Arc<Inner>,
}

impl Block {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Queue the zeroing of a part of the block.
    pub(crate) fn clear(&self, part: Range<usize>, stream: &Stream) -> Result<(), CudaError> {
        if part.is_empty() {
            return Ok(());
        }
        let start = self.address + part.start as u64;
        // SAFETY: the part is inside the block, because callers take it from the block's layout.
        let code = unsafe { sys::cuMemsetD8Async(start, 0, part.len(), stream.handle()) };
        self.pool.context.check("cuMemsetD8Async", code)
    }

    /// Queue a copy of the first `bytes` of another block.
    #[cfg(feature = "by_hand")]
    pub(crate) fn copy_from(&self, from: &Self, bytes: usize, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the callers ensure that both blocks have as many bytes.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(self.address, from.address, bytes, stream.handle()) };
        self.pool.context.check("cuMemcpyDtoDAsync", code)
    }

    /// Record that the work so far on `stream`, a stream of another library, uses the block. Call this after
    /// the last use.
    pub(crate) fn used_on(&self, stream: usize) {
        let Ok(_current) = self.pool.context.enter() else { return };
        if self.pool.release_after(stream as sys::CUstream).is_err() {
            // The stream was destroyed, so wait for all work. SAFETY: a context is current.
            let _ = unsafe { sys::cuCtxSynchronize() };
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Ok(_current) = self.pool.context.enter() else { return };
        let ordered = self.pool.ours.iter().try_for_each(|stream| self.pool.release_after(*stream));
        if ordered.is_ok() {
            // SAFETY: `take` allocated the block; it is freed once, after all its uses. On failure, the block
            // is leaked.
            let _ = unsafe { sys::cuMemFreeAsync(self.address, self.pool.releases.handle()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thresholds that are set while `blocks` blocks are taken, with a peak of `used` bytes.
    fn thresholds(threshold: &mut Threshold, blocks: u32, used: u64) -> Vec<u64> {
        (0..blocks).filter_map(|_| threshold.count(used).0).collect()
    }

    #[test]
    fn twice_the_most_in_use_is_kept() {
        let mut threshold = Threshold::default();
        assert_eq!(thresholds(&mut threshold, 1, 10), [20]);
        assert_eq!(thresholds(&mut threshold, 1, 35), [70], "it grows at once");
        assert_eq!(thresholds(&mut threshold, 10 * WINDOW, 35), [], "a threshold that fits is left alone");
    }

    #[test]
    fn what_a_large_batch_took_goes_back_after_two_windows() {
        let mut threshold = Threshold::default();
        assert_eq!(thresholds(&mut threshold, WINDOW - 1, 10), [20]);
        // This block ends a window, and is in use when the next window starts.
        assert_eq!(threshold.count(500), (Some(1000), true));
        assert_eq!(thresholds(&mut threshold, WINDOW, 10), []);
        assert_eq!(thresholds(&mut threshold, WINDOW - 1, 10), []);
        assert_eq!(threshold.count(10), (Some(20), true));
    }
}
