//! Backward on a device: sums the gradients of samples per unique id, and copies the sums to the host.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use persia_engine::device::{DeviceError, DeviceGradients};
use persia_kernels::half::{Bf16, F16, widen};
use persia_kernels::simd::{InstructionSet, Lanes, SimdLoop};
use persia_types::Dtype;

use crate::driver::Event;
use crate::error::CudaError;
use crate::layout::{Gradient, SumsLayout};
use crate::memory::Block;
use crate::pinned::Pinned;
use crate::step::{DeviceTensor, Step};

/// The summed gradients of a step, while they are copied to the host.
pub struct Sums {
    wire: Dtype,
    /// The event that is recorded after the copy to `host`.
    copied: Event,
    host: Pinned,
    /// For each table, the position of its vectors in `host`, in bytes. 16-bit vectors are widened into a copy.
    tables: Vec<std::ops::Range<usize>>,
    widened: Vec<Vec<f32>>,
    /// The memory that the device uses until the copy is complete.
    held: Option<Held>,
}

/// The device memory that is in use until the sums have been copied.
struct Held {
    _step: Arc<Step>,
    _memory: Arc<Block>,
    /// The owners of the gradients.
    _gradients: Box<dyn Any + Send>,
}

impl Step {
    /// Sum gradients, one for each id feature. They must be ready on [`Cuda::sums_stream`](crate::Cuda::sums_stream).
    /// Each sum is multiplied by `scale`. Also returns a word on the device, which is 1 if a sum is not finite,
    /// otherwise 0.
    ///
    /// This function does not wait. [`Sums::wait`](DeviceGradients::wait) drops `owners`, this step and the
    /// memory of the sums as soon as the sums have been copied, before they are pushed.
    ///
    /// # Errors
    /// [`CudaError`] if there is no memory or gradients do not fit the step, or from the driver.
    pub fn sum(
        self: &Arc<Self>,
        gradients: &[Gradient],
        scale: f32,
        owners: Box<dyn Any + Send>,
    ) -> Result<(Sums, DeviceTensor), CudaError> {
        if gradients.len() != self.layout.features() {
            let (found, expected) = (gradients.len(), self.layout.features());
            let what = format!("found {found}, expected {expected}, one for each id feature");
            return Err(CudaError::BadGradient { what });
        }
        if !self.layout.trains() {
            let what = "this batch was looked up for evaluation, so its gradients cannot be pushed".into();
            return Err(CudaError::BadGradient { what });
        }
        let cuda = self.device.cuda();
        let _current = cuda.context.enter()?;
        let stream = &cuda.sums;
        let layout = SumsLayout::new(&self.layout, self.device.wire());
        let memory = cuda.pool.take(layout.bytes(), "sums of gradients", stream)?;
        let address = memory.address();
        // The kernels read lists that were copied together with the look-up.
        stream.wait(&self.ready)?;
        for zeros in layout.zeros() {
            memory.clear(zeros, stream)?;
        }
        let (jobs, launches) = layout.jobs(&self.layout, gradients, scale, self.inputs.address(), address);
        let back = layout.back();
        let mut host = cuda.pinned.take(back.len())?;
        let mut staging = cuda.pinned.take(size_of_val(&jobs[..]))?;
        staging.bytes_mut().copy_from_slice(bytemuck::cast_slice(&jobs));
        let queue = stream.queue();
        staging.upload(address + layout.jobs_place() as u64, stream)?;
        staging.give_back_after(stream.record()?);
        for jobs in launches {
            let flag = address + SumsLayout::FLAG as u64;
            // SAFETY: the jobs are laid out for `memory` and the step's inputs, which `Sums` keeps, and for gradients
            // whose sizes the caller has checked and which `owners` keep.
            unsafe { cuda.kernels.launch(jobs, address, flag, stream)? };
        }
        let memory = Arc::new(memory);
        let ready = Arc::new(stream.record()?);
        let flag = DeviceTensor { block: Arc::clone(&memory), place: SumsLayout::FLAG, ready };
        host.download(address + back.start as u64, stream)?;
        let copied = stream.record()?;
        queue.finish();
        let sums = Sums {
            wire: self.device.wire(),
            copied,
            host,
            tables: layout.tables(),
            widened: Vec::new(),
            held: Some(Held { _step: Arc::clone(self), _memory: memory, _gradients: owners }),
        };
        Ok((sums, flag))
    }
}

impl DeviceGradients for Sums {
    fn wait(&mut self) -> Result<Vec<Cow<'_, [f32]>>, DeviceError> {
        self.copied.synchronize().map_err(|error| Arc::new(error) as DeviceError)?;
        // Free the memory before the push, which may take long.
        self.held = None;
        let (bytes, wire) = (self.host.bytes(), self.wire);
        if wire == Dtype::F32 {
            return Ok(self
                .tables
                .iter()
                .map(|at| Cow::Borrowed(bytemuck::cast_slice(&bytes[at.clone()])))
                .collect());
        }
        let widen = |at: &std::ops::Range<usize>| {
            let from = bytemuck::cast_slice(&bytes[at.clone()]);
            let mut to = vec![0.0; from.len()];
            InstructionSet::detect().run(Widen { from, wire, to: &mut to });
            to
        };
        self.widened = self.tables.iter().map(widen).collect();
        Ok(self.widened.iter().map(|rows| Cow::Borrowed(&rows[..])).collect())
    }
}

impl Drop for Sums {
    fn drop(&mut self) {
        // PyTorch reuses the memory of the gradients immediately, so no kernel may still read it.
        let _ = self.copied.synchronize();
    }
}

struct Widen<'a> {
    from: &'a [u16],
    wire: Dtype,
    to: &'a mut [f32],
}

impl SimdLoop for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.wire {
            Dtype::F16 => widen::<L, F16>(self.from, self.to),
            Dtype::Bf16 | Dtype::F32 => widen::<L, Bf16>(self.from, self.to),
        }
    }
}
