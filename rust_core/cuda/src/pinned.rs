//! Page-locked host memory, from a list of free blocks.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use parking_lot::Mutex;

use crate::driver::{Context, Event, Stream, describe};
use crate::error::CudaError;

/// The granularity of block sizes, in bytes.
const PINNED_STEP: usize = 1 << 16;
/// The maximum number of free blocks that are kept. A look-up takes one block, and the sums of a push take two.
const MAX_FREE: usize = 16;

/// A pool of page-locked memory, which the device accesses without the CPU.
#[derive(Debug)]
pub(crate) struct PinnedPool {
    state: Mutex<PinnedState>,
    context: Arc<Context>,
}

#[derive(Debug, Default)]
struct PinnedState {
    free: Vec<Pages>,
    /// The blocks that a copy may still read, in the order of the copies.
    busy: Vec<(Event, Pages)>,
}

#[derive(Debug)]
struct Pages {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: this is plain memory with one owner.
unsafe impl Send for Pages {}

impl PinnedPool {
    pub(crate) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), context: Arc::clone(context) })
    }

    /// Take `bytes` of page-locked memory with unspecified content. This is the smallest free block that fits
    /// or, if there is none, a new block.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Result<Pinned, CudaError> {
        let mut state = self.state.lock();
        state.reclaim();
        let fits = state.free.iter().enumerate().filter(|(_, pages)| pages.bytes >= bytes);
        let place = fits.min_by_key(|(_, pages)| pages.bytes).map(|(place, _)| place);
        let pages = match place {
            Some(place) => state.free.swap_remove(place),
            None => self.make(bytes.max(1).next_multiple_of(PINNED_STEP))?,
        };
        Ok(Pinned { pages: Some(pages), len: bytes, free_after: None, home: Arc::clone(self) })
    }

    fn make(&self, bytes: usize) -> Result<Pages, CudaError> {
        let mut start = std::ptr::null_mut();
        // SAFETY: the driver returns memory or an error.
        let code = unsafe { sys::cuMemHostAlloc(&mut start, bytes, 0) };
        if code != CUresult::CUDA_SUCCESS {
            let ordinal = self.context.ordinal();
            return Err(CudaError::NoPinnedMemory { ordinal, bytes, code: describe(code) });
        }
        // SAFETY: the block has this many bytes. Initializing them makes reads sound.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Pages { start: start.cast(), bytes })
    }

    /// Return a block. If too many blocks are free, the largest are kept.
    fn put(&self, pages: Pages, free_after: Option<Event>) {
        let mut state = self.state.lock();
        match free_after {
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
            // SAFETY: `make` allocated the memory, and no copy uses it any more.
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

/// A page-locked block. When it is dropped, it returns to its pool.
#[derive(Debug)]
pub(crate) struct Pinned {
    pages: Option<Pages>,
    len: usize,
    free_after: Option<Event>,
    home: Arc<PinnedPool>,
}

// SAFETY: this is plain memory with one owner. Through shared references it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn start(&self) -> *mut u8 {
        self.pages.as_ref().map_or(std::ptr::null_mut(), |pages| pages.start)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the block has this many initialized bytes until it is dropped, and any copy to it has ended.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block has this many initialized bytes until it is dropped, and any copy to it has
        // ended. No copy from the block is in progress before `give_back_after`.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }

    /// Queue a copy of the whole block to the device.
    pub(crate) fn upload(&self, to: u64, stream: &Stream) -> Result<(), CudaError> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: both blocks have this many bytes, and both are freed only after the copy.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, self.start().cast(), self.len, stream.handle()) };
        self.home.context.check("cuMemcpyHtoDAsync", code)
    }

    /// Queue a copy from the device that overwrites the whole block.
    pub(crate) fn download(&mut self, from: u64, stream: &Stream) -> Result<(), CudaError> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: both blocks have this many bytes, and both are freed only after the copy.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(self.start().cast(), from, self.len, stream.handle()) };
        self.home.context.check("cuMemcpyDtoHAsync", code)
    }

    /// Return the block, so that it is reused once the device has reached `event`.
    pub(crate) fn give_back_after(mut self, event: Event) {
        self.free_after = Some(event);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            self.home.put(pages, self.free_after.take());
        }
    }
}
