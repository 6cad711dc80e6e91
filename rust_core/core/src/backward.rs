//! `persia_core.backward`: the gradients of a training loop.

use parking_lot::Mutex;
use persia_engine::device::DeviceGradients;
use pyo3::prelude::*;

use crate::dlpack::{Tensor, borrow_f32};

/// The gradients of a step, which its device sums. `TrainingBatch.push_sums` pushes them.
#[pyclass(module = "persia_core.backward", frozen)]
pub(crate) struct Sums {
    flag: Py<Tensor>,
    gradients: Mutex<Option<Box<dyn DeviceGradients>>>,
}

impl Sums {
    #[cfg(feature = "cuda")]
    pub(crate) fn new(flag: Py<Tensor>, gradients: Box<dyn DeviceGradients>) -> Self {
        Self { flag, gradients: Mutex::new(Some(gradients)) }
    }

    /// Take the gradients. Returns None if they were taken before.
    pub(crate) fn take(&self) -> Option<Box<dyn DeviceGradients>> {
        self.gradients.lock().take()
    }
}

#[pymethods]
impl Sums {
    /// An int32 on the device: 1 if the sum of any id is not finite, otherwise 0. Reading it waits for the device.
    #[getter]
    fn nonfinite(&self, py: Python<'_>) -> Py<Tensor> {
        self.flag.clone_ref(py)
    }
}

impl Drop for Sums {
    fn drop(&mut self) {
        // Dropping the gradients waits for the device.
        let gradients = self.gradients.lock().take();
        Python::attach(|py| py.detach(|| drop(gradients)));
    }
}

/// Return the flat position of the first NaN or infinity in a contiguous float32 CPU tensor, or None if all
/// values are finite.
#[pyfunction]
pub(crate) fn first_nonfinite(py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let shape: Vec<usize> = tensor.getattr("shape")?.extract()?;
    let values = borrow_f32(tensor, "the tensor to check", &shape)?;
    Ok(py.detach(|| find(values.as_ref())))
}

/// Test block by block without branches, and search only in a block that fails the test.
fn find(values: &[f32]) -> Option<usize> {
    const BLOCK: usize = 1024;
    let wrong = |value: &f32| !value.is_finite();
    values.chunks(BLOCK).enumerate().find_map(|(block, chunk)| {
        let any = chunk.iter().fold(false, |any, value| any | wrong(value));
        any.then(|| block * BLOCK + chunk.iter().position(wrong).unwrap_or(0))
    })
}
