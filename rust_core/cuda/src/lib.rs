//! Pools embedding rows, and sums their gradients, on a CUDA device.
//!
//! * [`Cuda`]: a device with its context, streams, kernels and memory, once per process and device
//! * [`CudaDevice`]: a device as an engine uses it, which implements [`persia_engine::device::Device`]
//! * [`Step`]: the tensors of one look-up, and the sums of their gradients
//! * [`kernels`]: the three kernels and their arguments
//! * [`layout`]: the memory layout of a step's lists, vectors and sums
//! * `by_hand`: memory and launches for tests and measurements, with the cargo feature `by_hand`
//!
//! Neither building nor loading this crate needs CUDA, because the driver's library is opened together with
//! the first device.
//!
//! A look-up is copied and pooled on a separate stream, concurrently with the model on PyTorch's stream.
//! Events order the work of the streams. Only the following wait for the device:
//!
//! * the push thread, and the drop of [`Sums`], which wait for the copy of the sums
//! * [`Cuda::trim`]
//! * a call that fails after it has queued work
#![allow(unsafe_code)] // calls into the driver, a C library, are unsafe

#[cfg(feature = "by_hand")]
pub mod by_hand;
mod driver;
mod error;
pub mod kernels;
pub mod layout;
mod memory;
mod pinned;
mod step;
mod sums;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

pub use driver::is_driver_present;
pub use error::CudaError;
pub use layout::Gradient;
pub use memory::PoolUse;
pub use step::{CudaDevice, DeviceTensor, Step};
pub use sums::Sums;

use driver::{Context, Stream};
use kernels::Kernels;
use memory::DevicePool;
use pinned::PinnedPool;

/// One device, with the state that steps share.
#[derive(Debug)]
pub struct Cuda {
    pub(crate) kernels: Kernels,
    /// The stream of look-ups: copies to the device, and pooling.
    pub(crate) lookups: Stream,
    /// The stream of sums of gradients, and of their copies back.
    pub(crate) sums: Stream,
    pub(crate) pinned: Arc<PinnedPool>,
    pub(crate) pool: DevicePool,
    pub(crate) context: Arc<Context>,
}

impl Cuda {
    /// The device with this number. It is opened at its first use.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver, the device does not exist, or the kernels do not support it, or
    /// from the driver.
    pub fn device(ordinal: i32) -> Result<Arc<Self>, CudaError> {
        static DEVICES: Mutex<BTreeMap<i32, Arc<Cuda>>> = Mutex::new(BTreeMap::new());
        let mut devices = DEVICES.lock();
        if let Some(cuda) = devices.get(&ordinal) {
            return Ok(Arc::clone(cuda));
        }
        // The bindings panic if the driver's library lacks a function.
        let opened = catch_unwind(AssertUnwindSafe(|| Self::open(ordinal))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            let what = text.unwrap_or_else(|| "a call of its library failed".into());
            Err(CudaError::BrokenDriver { ordinal, what })
        });
        let cuda = Arc::new(opened?);
        devices.insert(ordinal, Arc::clone(&cuda));
        Ok(cuda)
    }

    fn open(ordinal: i32) -> Result<Self, CudaError> {
        let context = Context::open(ordinal)?;
        let _current = context.enter()?;
        let (lookups, sums) = (Stream::new(&context)?, Stream::new(&context)?);
        Ok(Self {
            kernels: Kernels::load(&context)?,
            pool: DevicePool::new(&context, [lookups.handle(), sums.handle()])?,
            pinned: PinnedPool::new(&context),
            lookups,
            sums,
            context: Arc::clone(&context),
        })
    }

    /// The number of the device.
    pub fn ordinal(&self) -> i32 {
        self.context.ordinal()
    }

    /// The stream on which gradients must be ready before [`Step::sum`], as a number for DLPack.
    pub fn sums_stream(&self) -> usize {
        self.sums.handle() as usize
    }

    /// The device memory that steps hold, and the memory that is allocated for these and later steps, in bytes.
    ///
    /// # Errors
    /// [`CudaError`] from the driver.
    pub fn memory(&self) -> Result<PoolUse, CudaError> {
        self.pool.used()
    }

    /// Return the memory that no step holds and no copy uses: device memory to the device, and page-locked
    /// memory to the operating system.
    ///
    /// # Errors
    /// [`CudaError`] from the driver.
    pub fn trim(&self) -> Result<(), CudaError> {
        self.pinned.trim()?;
        self.pool.trim()
    }
}
