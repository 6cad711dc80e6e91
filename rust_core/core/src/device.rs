//! Devices in a build without CUDA. Every device is refused, with instructions.

use std::sync::Arc;

use persia_engine::device::{Device, OnDevice};
use persia_types::Dtype;
use pyo3::prelude::*;

use crate::backward::Sums;
use crate::dlpack::{ElementType, Tensor, TensorKind};
use crate::errors;

/// Raise an error for a CUDA device that this build does not support or this machine does not have.
#[pyfunction]
pub(crate) fn check_device(py: Python<'_>, device_id: i32) -> PyResult<()> {
    open(py, device_id, Dtype::F32, Dtype::F32).map(drop)
}

/// Return the memory of a CUDA device that steps use, and the memory that is reserved for them, in bytes.
#[pyfunction]
pub(crate) fn device_memory(py: Python<'_>, device_id: i32) -> PyResult<(u64, u64)> {
    check_device(py, device_id).map(|()| (0, 0))
}

/// Open the device of an engine.
pub(crate) fn open(py: Python<'_>, ordinal: i32, _vectors: Dtype, _wire: Dtype) -> PyResult<Arc<dyn Device>> {
    let file = py.import("persia_core")?.getattr("__file__").and_then(|file| file.extract::<String>());
    let file = file.unwrap_or_else(|_| "persia_core".into());
    let text = format!(
        "CUDA device {ordinal} is requested, but {file} was built without CUDA; build it with: cargo build \
         --release --package persia-core --features cuda --manifest-path rust_core/Cargo.toml, then copy \
         rust_core/target/release/libpersia_core.so to persia_core.so in a folder on PYTHONPATH; or omit device_id to \
         train on the CPU"
    );
    Err(errors::raise(py, "DeviceError", text))
}

/// The number of a step's CUDA device; None if the step is not on a CUDA device.
pub(crate) fn ordinal(_step: &OnDevice) -> Option<i32> {
    None
}

/// The type of a step's vectors.
pub(crate) fn vectors(_step: &OnDevice) -> ElementType {
    ElementType::F32
}

/// A tensor of a step; None if the step has no such tensor on a CUDA device.
pub(crate) fn tensor(_: &OnDevice, _: TensorKind, _: ElementType, _: &[usize]) -> Option<Tensor> {
    None
}

/// Sum gradients on their device.
pub(crate) fn sum(
    py: Python<'_>,
    step: u64,
    _: &OnDevice,
    _: &[(Bound<'_, PyAny>, Vec<usize>)],
    _: f32,
) -> PyResult<Sums> {
    let text = format!("cannot sum the gradients of step {step} on a device: its embeddings are on the CPU");
    Err(errors::raise(py, "UsageError", text))
}
