//! CUDA devices, and the order between PyTorch's streams and the engine's.

use std::sync::Arc;

use persia_cuda::{Cuda, CudaDevice, CudaError, DeviceTensor, Gradient, Step};
use persia_engine::device::{Device, OnDevice};
use persia_types::Dtype;
use pyo3::prelude::*;

use crate::backward::Sums;
use crate::dlpack::{BF16, CUDA, ElementType, F16, OnStream, Tensor, TensorKind, borrow_from};
use crate::errors;

fn failed(py: Python<'_>, error: &CudaError) -> PyErr {
    errors::raise(py, "DeviceError", error.to_string())
}

fn cuda(py: Python<'_>, ordinal: i32) -> PyResult<Arc<Cuda>> {
    py.detach(|| Cuda::device(ordinal)).map_err(|error| failed(py, &error))
}

/// Raise an error for a CUDA device that this build does not support or this machine does not have.
#[pyfunction]
pub(crate) fn check_device(py: Python<'_>, device_id: i32) -> PyResult<()> {
    cuda(py, device_id).map(drop)
}

/// Return the memory of a CUDA device that steps use, and the memory that is reserved for them, in bytes.
#[pyfunction]
pub(crate) fn device_memory(py: Python<'_>, device_id: i32) -> PyResult<(u64, u64)> {
    let used = cuda(py, device_id)?.memory().map_err(|error| failed(py, &error))?;
    Ok((used.held, used.reserved))
}

/// Open the device of an engine.
pub(crate) fn open(py: Python<'_>, ordinal: i32, vectors: Dtype, wire: Dtype) -> PyResult<Arc<dyn Device>> {
    Ok(Arc::new(CudaDevice::new(cuda(py, ordinal)?, vectors, wire)))
}

fn step(on_device: &OnDevice) -> Option<Arc<Step>> {
    Arc::clone(on_device).downcast().ok()
}

/// The number of a step's CUDA device; None if the step is not on a CUDA device.
pub(crate) fn ordinal(on_device: &OnDevice) -> Option<i32> {
    step(on_device).map(|step| step.device().cuda().ordinal())
}

/// The type of a step's vectors.
pub(crate) fn vectors(on_device: &OnDevice) -> ElementType {
    match step(on_device).map(|step| step.device().vectors()) {
        Some(Dtype::F16) => F16,
        Some(Dtype::Bf16) => BF16,
        Some(Dtype::F32) | None => ElementType::F32,
    }
}

/// A tensor of a step or of its sums.
struct OnCuda {
    part: DeviceTensor,
    ordinal: i32,
}

impl OnStream for OnCuda {
    fn device(&self) -> (i32, i32) {
        (CUDA, self.ordinal)
    }

    fn hand_to(&self, stream: usize) -> Result<(), String> {
        self.part.hand_to(stream).map_err(|error| error.to_string())
    }

    fn used_on(&self, stream: usize) {
        self.part.used_on(stream);
    }
}

/// A tensor of a step; None if the step has no such tensor on a CUDA device.
pub(crate) fn tensor(
    on_device: &OnDevice,
    kind: TensorKind,
    dtype: ElementType,
    shape: &[usize],
) -> Option<Tensor> {
    let step = step(on_device)?;
    let part = match kind {
        TensorKind::Vectors(feature) => step.vectors(feature),
        TensorKind::Mask(feature) => step.mask(feature),
        TensorKind::Given(index) => step.tensor(index),
    }?;
    let (address, ordinal) = (part.address(), step.device().cuda().ordinal());
    Some(Tensor::on_device(Arc::new(OnCuda { part, ordinal }), address, dtype, shape))
}

/// Sum gradients on their device. They are in the order of the features, each with its required shape.
pub(crate) fn sum(
    py: Python<'_>,
    number: u64,
    on_device: &OnDevice,
    gradients: &[(Bound<'_, PyAny>, Vec<usize>)],
    scale: f32,
) -> PyResult<Sums> {
    let Some(step) = step(on_device) else {
        let text =
            format!("cannot sum the gradients of step {number} on a device: its embeddings are on the CPU");
        return Err(errors::raise(py, "UsageError", text));
    };
    let cuda = step.device().cuda();
    let place = (CUDA, cuda.ordinal());
    let (mut taken, mut owners) = (Vec::new(), Vec::new());
    for (index, (gradient, shape)) in gradients.iter().enumerate() {
        let what = format!("step {number}, gradient {index}");
        // PyTorch makes this stream wait for PyTorch's own stream.
        let borrowed = borrow_from(gradient, &what, shape, place, Some(cuda.sums_stream()))?;
        let dtype = match borrowed.dtype {
            ElementType::F32 => Dtype::F32,
            F16 => Dtype::F16,
            BF16 => Dtype::Bf16,
            other => {
                let text = format!("{what}: expected float32, float16 or bfloat16, found {other}");
                return Err(errors::feature_type(py, text));
            }
        };
        taken.push(Gradient { address: borrowed.data as u64, dtype });
        owners.push(borrowed.capsule);
    }
    let summed = py.detach(|| step.sum(&taken, scale, Box::new(owners)));
    let (sums, part) = summed.map_err(|error| match &error {
        CudaError::BadGradient { what } => {
            errors::engine(py, &persia_engine::Error::BadGradient { step: number, what: what.clone() })
        }
        of_device => failed(py, of_device),
    })?;
    let (address, ordinal) = (part.address(), cuda.ordinal());
    let flag = Tensor::on_device(Arc::new(OnCuda { part, ordinal }), address, ElementType::new(0, 32), &[1]);
    Ok(Sums::new(Py::new(py, flag)?, Box::new(sums)))
}
