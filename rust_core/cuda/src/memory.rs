//! Memory that is used again: of the device, by the driver's own pool, and page-locked, by a list of free blocks.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute, CUresult};
use parking_lot::Mutex;

use crate::driver::{Context, Event, Stream, describe};
use crate::error::CudaError;

/// Parts of a block start at multiples of this many bytes.
pub(crate) const ALIGNMENT: usize = 256;

/// Page-locked blocks are made in multiples of this many bytes.
const PINNED_STEP: usize = 1 << 16;
/// Free page-locked blocks that are kept; a look-up and a push of each of a few steps hold one.
const MAX_FREE: usize = 16;
/// What is kept of device memory is this many times the most that one block has asked for.
const KEPT_BLOCKS: u64 = 8;

/// Bytes of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// In blocks that steps hold.
    pub held: u64,
    /// Taken from the device, `held` included.
    pub reserved: u64,
}

/// Device memory in the order of streams.
#[derive(Debug)]
pub(crate) struct DevicePool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: sys::CUmemoryPool,
    /// Where blocks are given back, behind everything that used them. Nothing else waits there.
    releases: Stream,
    /// Streams of ours that a block may be in use on.
    ours: [sys::CUstream; 2],
    /// For the order between two streams; used under its lock.
    order: Mutex<Event>,
    largest: Mutex<u64>,
    context: Arc<Context>,
}

// SAFETY: the driver takes calls on a pool and on streams from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl DevicePool {
    pub(crate) fn new(context: &Arc<Context>, ours: [sys::CUstream; 2]) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: zeros are this structure's defaults; the pool is made from a structure of this function.
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
            largest: Mutex::new(0),
            context: Arc::clone(context),
        };
        // A look-up must not wait for the model: memory that is still in use elsewhere is not given to it.
        inner.set(Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &mut 0i32)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// `bytes` of device memory, for what is queued on `stream` from now on.
    pub(crate) fn take(&self, bytes: usize, what: &'static str, stream: &Stream) -> Result<Block, CudaError> {
        let inner = &self.inner;
        inner.keep_for(bytes as u64)?;
        let mut address = 0;
        // SAFETY: pool and stream are alive; the driver gives bytes or an error.
        let code = unsafe {
            sys::cuMemAllocFromPoolAsync(&mut address, bytes.max(1), inner.handle, stream.handle())
        };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = inner.context.free_and_total();
            let ordinal = inner.context.ordinal();
            return Err(CudaError::OutOfMemory { ordinal, what, bytes, free, total });
        }
        inner.context.check("cuMemAllocFromPoolAsync", code)?;
        Ok(Block { address, pool: Arc::clone(inner) })
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
        *inner.largest.lock() = 0;
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
        // SAFETY: the attribute is of type `T`, as the callers know.
        let code = unsafe { sys::cuMemPoolSetAttribute(self.handle, attribute, value.cast::<c_void>()) };
        self.context.check("cuMemPoolSetAttribute", code)
    }

    fn get(&self, attribute: Attribute) -> Result<u64, CudaError> {
        let mut value = 0u64;
        let place: *mut u64 = &mut value;
        // SAFETY: the attributes asked for have 64 bits.
        let code = unsafe { sys::cuMemPoolGetAttribute(self.handle, attribute, place.cast::<c_void>()) };
        self.context.check("cuMemPoolGetAttribute", code)?;
        Ok(value)
    }

    /// Keep memory for some blocks of this size when they are free; more goes back to the device.
    fn keep_for(&self, bytes: u64) -> Result<(), CudaError> {
        let mut largest = self.largest.lock();
        if bytes <= *largest {
            return Ok(());
        }
        *largest = bytes;
        let mut kept = bytes * KEPT_BLOCKS;
        self.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &mut kept)
    }

    /// Let blocks be given back only behind what is queued on `stream` so far.
    fn release_behind(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let event = self.order.lock();
        event.record(stream)?;
        self.releases.wait(&event)
    }
}

/// A piece of device memory. Dropped, it goes back to the pool behind everything that may use it.
#[derive(Debug)]
pub(crate) struct Block {
    address: u64,
    pool: Arc<Inner>,
}

impl Block {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Queue zeros for a part of it.
    pub(crate) fn clear(&self, part: Range<usize>, stream: &Stream) -> Result<(), CudaError> {
        let start = self.address + part.start as u64;
        // SAFETY: the part is inside of the block, as the callers have laid it out.
        let code = unsafe { sys::cuMemsetD8Async(start, 0, part.len(), stream.handle()) };
        self.pool.context.check("cuMemsetD8Async", code)
    }

    /// Queue a copy of another block's first `bytes`.
    pub(crate) fn copy_from(&self, from: &Self, bytes: usize, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both blocks have as many bytes, as the callers know.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(self.address, from.address, bytes, stream.handle()) };
        self.pool.context.check("cuMemcpyDtoDAsync", code)
    }

    /// Note that what is queued on `stream` so far uses the block: somebody else's, at its last use.
    pub(crate) fn used_on(&self, stream: usize) {
        let Ok(_current) = self.pool.context.enter() else { return };
        if self.pool.release_behind(stream as sys::CUstream).is_err() {
            // The stream is gone: wait for whatever it had.
            // SAFETY: a context is current.
            let _ = unsafe { sys::cuCtxSynchronize() };
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Ok(_current) = self.pool.context.enter() else { return };
        let ordered = self.pool.ours.iter().try_for_each(|stream| self.pool.release_behind(*stream));
        if ordered.is_ok() {
            // SAFETY: made by `take`, given back once, behind all its uses. On failure it is lost, with the context.
            let _ = unsafe { sys::cuMemFreeAsync(self.address, self.pool.releases.handle()) };
        }
    }
}

/// Page-locked memory, which the device copies from and to by itself.
#[derive(Debug)]
pub(crate) struct PinnedPool {
    state: Mutex<PinnedState>,
    context: Arc<Context>,
}

#[derive(Debug, Default)]
struct PinnedState {
    free: Vec<Pages>,
    /// Those that a copy may still read, in the order of their copies.
    busy: Vec<(Event, Pages)>,
}

#[derive(Debug)]
struct Pages {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pages {}

impl PinnedPool {
    pub(crate) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), context: Arc::clone(context) })
    }

    /// `bytes` of page-locked memory with whatever was in it: the smallest free block that fits.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Result<Pinned, CudaError> {
        let mut state = self.state.lock();
        state.reclaim();
        let fits = state.free.iter().enumerate().filter(|(_, pages)| pages.bytes >= bytes);
        let place = fits.min_by_key(|(_, pages)| pages.bytes).map(|(place, _)| place);
        let pages = match place {
            Some(place) => state.free.swap_remove(place),
            None => self.make(bytes.max(1).next_multiple_of(PINNED_STEP))?,
        };
        Ok(Pinned { pages: Some(pages), len: bytes, behind: None, home: Arc::clone(self) })
    }

    fn make(&self, bytes: usize) -> Result<Pages, CudaError> {
        let mut start = std::ptr::null_mut();
        // SAFETY: the driver gives bytes or an error.
        let code = unsafe { sys::cuMemHostAlloc(&mut start, bytes, 0) };
        if code != CUresult::CUDA_SUCCESS {
            let ordinal = self.context.ordinal();
            return Err(CudaError::NoPinnedMemory { ordinal, bytes, code: describe(code) });
        }
        // SAFETY: as many bytes are there; written once, so that they may be read.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Pages { start: start.cast(), bytes })
    }

    /// Keep the largest of what is free.
    fn put(&self, pages: Pages, behind: Option<Event>) {
        let mut state = self.state.lock();
        match behind {
            Some(event) => state.busy.push((event, pages)),
            None => state.free.push(pages),
        }
        state.reclaim();
        while state.free.len() > MAX_FREE {
            let smallest = state.free.iter().enumerate().min_by_key(|(_, pages)| pages.bytes);
            let Some((place, _)) = smallest else { return };
            let pages = state.free.swap_remove(place);
            self.unmake(&pages);
        }
    }

    fn unmake(&self, pages: &Pages) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: made by `make`; no copy uses it any more.
            let _ = unsafe { sys::cuMemFreeHost(pages.start.cast()) };
        }
    }

    pub(crate) fn trim(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        let mut state = self.state.lock();
        state.reclaim();
        state.free.drain(..).for_each(|pages| self.unmake(&pages));
        Ok(())
    }
}

impl PinnedState {
    fn reclaim(&mut self) {
        for (event, pages) in std::mem::take(&mut self.busy) {
            if event.is_done() {
                self.free.push(pages);
            } else {
                self.busy.push((event, pages));
            }
        }
    }
}

/// A page-locked block. Dropped, it goes back to its pool.
#[derive(Debug)]
pub(crate) struct Pinned {
    pages: Option<Pages>,
    len: usize,
    behind: Option<Event>,
    home: Arc<PinnedPool>,
}

// SAFETY: plain memory with one owner; shared, it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn start(&self) -> *mut u8 {
        self.pages.as_ref().map_or(std::ptr::null_mut(), |pages| pages.start)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as many bytes are there, initialised, until this is dropped; a copy to it was waited for.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; no copy from it is under way before `give_back_behind`.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }

    /// Queue a copy of all to the device.
    pub(crate) fn upload(&self, to: u64, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both blocks have as many bytes, and outlive the copy: they go back behind it.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, self.start().cast(), self.len, stream.handle()) };
        self.home.context.check("cuMemcpyHtoDAsync", code)
    }

    /// Queue a copy from the device over all of it.
    pub(crate) fn download(&mut self, from: u64, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: as above.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(self.start().cast(), from, self.len, stream.handle()) };
        self.home.context.check("cuMemcpyDtoHAsync", code)
    }

    /// Give it back, to be used again once the device has come to `event`.
    pub(crate) fn give_back_behind(mut self, event: Event) {
        self.behind = Some(event);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            self.home.put(pages, self.behind.take());
        }
    }
}
