//! A device for the engine that runs the kernels on the CPU, in host memory.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use persia_cuda::layout::{Gradient, Jobs, StepLayout, SumsLayout};
use persia_engine::device::{Device, DeviceError, DeviceGradients, DeviceLookup, DeviceWork, OnDevice};
use persia_types::Dtype;

use crate::host::Shim;

/// Device memory with the alignment of a real device's blocks.
pub(crate) struct Block(Vec<[u128; 16]>);

impl Block {
    fn new(bytes: usize) -> Self {
        Self(vec![[0x5555; 16]; bytes.div_ceil(256).max(1)])
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

pub(crate) struct HostDevice {
    pub(crate) shim: Arc<Mutex<Shim>>,
    pub(crate) vectors: Dtype,
}

struct Lookup<'a> {
    device: &'a HostDevice,
    layout: StepLayout,
    inputs: Block,
    outputs: Block,
    launches: [Jobs; 2],
}

pub(crate) struct Step {
    pub(crate) layout: StepLayout,
    pub(crate) inputs: Block,
    pub(crate) outputs: Block,
}

impl Device for HostDevice {
    fn begin<'a>(&'a self, work: &DeviceWork<'_>) -> Result<Box<dyn DeviceLookup + 'a>, DeviceError> {
        let layout = StepLayout::new(work, self.vectors);
        let (mut inputs, outputs) = (Block::new(layout.input_bytes()), Block::new(layout.output_bytes()));
        let address = inputs.address();
        let launches = layout.write(inputs.bytes_mut(), work, address, outputs.address());
        Ok(Box::new(Lookup { device: self, layout, inputs, outputs, launches }))
    }
}

impl DeviceLookup for Lookup<'_> {
    fn rows(&mut self) -> Vec<&mut [f32]> {
        self.layout.rows(self.inputs.bytes_mut())
    }

    fn launch(self: Box<Self>) -> Result<OnDevice, DeviceError> {
        for jobs in self.launches {
            assert_eq!(launch(&self.device.shim.lock().unwrap(), &self.inputs, jobs), 0);
        }
        let Self { layout, inputs, outputs, .. } = *self;
        Ok(Arc::new(Step { layout, inputs, outputs }))
    }
}

fn launch(shim: &Shim, block: &Block, jobs: Jobs) -> u32 {
    let bytes = jobs.count as usize * size_of::<persia_cuda::kernels::Job>();
    let list: &[persia_cuda::kernels::Job] =
        bytemuck::cast_slice(&block.bytes()[jobs.place..jobs.place + bytes]);
    if jobs.blocks == 0 { 0 } else { shim.launch(jobs.kernel, list, jobs.blocks) }
}

pub(crate) struct Sums {
    layout: SumsLayout,
    memory: Block,
    wire: Dtype,
}

impl DeviceGradients for Sums {
    fn wait(&mut self) -> Result<Vec<Cow<'_, [f32]>>, DeviceError> {
        let back = &self.memory.bytes()[self.layout.back()];
        let floats = |bytes: &[u8]| -> Vec<f32> {
            match self.wire {
                Dtype::F32 => bytemuck::cast_slice(bytes).to_vec(),
                _ => bytes
                    .chunks_exact(2)
                    .map(|half| f32::from_bits(u32::from(u16::from_le_bytes([half[0], half[1]])) << 16))
                    .collect(),
            }
        };
        Ok(self.layout.tables().into_iter().map(|at| Cow::Owned(floats(&back[at]))).collect())
    }
}

pub(crate) fn sum(shim: &Shim, step: &Step, gradients: &[Vec<f32>], scale: f32, wire: Dtype) -> (Sums, u32) {
    let layout = SumsLayout::new(&step.layout, wire);
    let mut memory = Block::new(layout.bytes());
    layout.zeros().for_each(|zeros| memory.bytes_mut()[zeros].fill(0));
    let there: Vec<Gradient> = gradients
        .iter()
        .map(|values| Gradient { address: values.as_ptr() as u64, dtype: Dtype::F32 })
        .collect();
    let address = memory.address();
    let (jobs, launches) = layout.jobs(&step.layout, &there, scale, step.inputs.address(), address);
    let bytes: &[u8] = bytemuck::cast_slice(&jobs);
    memory.bytes_mut()[layout.jobs_place()..][..bytes.len()].copy_from_slice(bytes);
    let flag = launches.into_iter().fold(0, |flag, jobs| flag | launch(shim, &memory, jobs));
    (Sums { layout, memory, wire }, flag)
}
