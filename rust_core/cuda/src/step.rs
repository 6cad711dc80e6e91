//! One look-up on a device.

use std::sync::Arc;

use persia_engine::device::{Device, DeviceError, DeviceLookup, DeviceWork, OnDevice};
use persia_types::Dtype;

use crate::Cuda;
use crate::driver::Event;
use crate::error::CudaError;
use crate::layout::{Jobs, StepLayout};
use crate::memory::Block;
use crate::pinned::Pinned;

/// A device, as one engine uses it.
#[derive(Debug, Clone)]
pub struct CudaDevice {
    cuda: Arc<Cuda>,
    /// The type of the vectors of samples.
    vectors: Dtype,
    /// The wire type of summed gradients.
    wire: Dtype,
}

impl CudaDevice {
    /// Use a device for an engine. `vectors` is the type that the model gets, and `wire` is the type of gradients on
    /// the network.
    pub fn new(cuda: Arc<Cuda>, vectors: Dtype, wire: Dtype) -> Self {
        Self { cuda, vectors, wire }
    }

    /// The device.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// The type of the vectors of samples.
    pub fn vectors(&self) -> Dtype {
        self.vectors
    }

    pub(crate) fn wire(&self) -> Dtype {
        self.wire
    }
}

impl Device for CudaDevice {
    fn begin<'a>(&'a self, work: &DeviceWork<'_>) -> Result<Box<dyn DeviceLookup + 'a>, DeviceError> {
        Ok(Box::new(StagedLookup::begin(self, work).map_err(|error| Arc::new(error) as DeviceError)?))
    }
}

/// The staging memory of a look-up whose rows have not been written yet.
struct StagedLookup<'a> {
    device: &'a CudaDevice,
    layout: StepLayout,
    staging: Pinned,
    inputs: Block,
    outputs: Block,
    launches: [Jobs; 2],
}

impl<'a> StagedLookup<'a> {
    fn begin(device: &'a CudaDevice, work: &DeviceWork<'_>) -> Result<Self, CudaError> {
        let cuda = &device.cuda;
        let _current = cuda.context.enter()?;
        let layout = StepLayout::new(work, device.vectors);
        let mut staging = cuda.pinned.take(layout.input_bytes())?;
        let inputs = cuda.pool.take(layout.input_bytes(), "rows and lists of a batch", &cuda.lookups)?;
        let outputs = cuda.pool.take(layout.output_bytes(), "vectors of samples", &cuda.lookups)?;
        let launches = layout.write(staging.bytes_mut(), work, inputs.address(), outputs.address());
        Ok(Self { device, layout, staging, inputs, outputs, launches })
    }

    fn start(self) -> Result<Step, CudaError> {
        let cuda = &self.device.cuda;
        let _current = cuda.context.enter()?;
        let stream = &cuda.lookups;
        let queue = stream.queue();
        self.staging.upload(self.inputs.address(), stream)?;
        self.staging.give_back_after(stream.record()?);
        for jobs in self.launches {
            // SAFETY: both blocks are laid out for these jobs, and `Step` keeps them; they are freed after the work on
            // this stream.
            unsafe { cuda.kernels.launch(jobs, self.inputs.address(), 0, stream)? };
        }
        let ready = Arc::new(stream.record()?);
        queue.finish();
        Ok(Step {
            ready,
            device: self.device.clone(),
            layout: self.layout,
            inputs: Arc::new(self.inputs),
            outputs: Arc::new(self.outputs),
        })
    }
}

impl DeviceLookup for StagedLookup<'_> {
    fn rows(&mut self) -> Vec<&mut [f32]> {
        self.layout.rows(self.staging.bytes_mut())
    }

    fn launch(self: Box<Self>) -> Result<OnDevice, DeviceError> {
        Ok(Arc::new(self.start().map_err(|error| Arc::new(error) as DeviceError)?))
    }
}

/// A look-up that is copied and pooled on the device.
#[derive(Debug)]
pub struct Step {
    pub(crate) device: CudaDevice,
    pub(crate) ready: Arc<Event>,
    pub(crate) layout: StepLayout,
    pub(crate) inputs: Arc<Block>,
    outputs: Arc<Block>,
}

/// A tensor of a step or of its sums. It keeps its block alive, but nothing else of the step.
#[derive(Debug, Clone)]
pub struct DeviceTensor {
    pub(crate) block: Arc<Block>,
    pub(crate) place: usize,
    pub(crate) ready: Arc<Event>,
}

impl DeviceTensor {
    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.block.address() + self.place as u64
    }

    /// Make work that is queued on `stream` later wait until the tensor is computed.
    ///
    /// # Errors
    /// [`CudaError`] from the driver.
    pub fn hand_to(&self, stream: usize) -> Result<(), CudaError> {
        self.ready.let_wait(stream as _)
    }

    /// Record that the work on `stream` so far uses the tensor. Call this when the user of the tensor drops it.
    pub fn used_on(&self, stream: usize) {
        self.block.used_on(stream);
    }
}

impl Step {
    /// The device of the engine.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The vectors of an id feature, with the shape `[samples, dim]`.
    pub fn vectors(&self, feature: usize) -> Option<DeviceTensor> {
        Some(self.of_block(&self.outputs, self.layout.vectors(feature)?))
    }

    /// The mask of a raw feature, with a byte for each position.
    pub fn mask(&self, feature: usize) -> Option<DeviceTensor> {
        Some(self.of_block(&self.outputs, self.layout.mask(feature)?))
    }

    /// A dense input or label, in the order of [`DeviceWork::tensors`]. It shares its block with the rows and lists of
    /// the batch, and keeps the whole block alive.
    pub fn tensor(&self, index: usize) -> Option<DeviceTensor> {
        Some(self.of_block(&self.inputs, self.layout.tensor(index)?))
    }

    fn of_block(&self, block: &Arc<Block>, place: usize) -> DeviceTensor {
        DeviceTensor { block: Arc::clone(block), place, ready: Arc::clone(&self.ready) }
    }
}
