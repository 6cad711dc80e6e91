//! `persia_core.backward`: what a training loop gives back.

use pyo3::prelude::*;

use crate::dlpack::borrow_f32;

/// Position of the first NaN or infinity of a contiguous float32 CPU tensor, flattened; None if all is finite.
#[pyfunction]
pub(crate) fn first_nonfinite(py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let shape: Vec<usize> = tensor.getattr("shape")?.extract()?;
    let values = borrow_f32(tensor, "first_nonfinite", &shape)?;
    Ok(py.detach(|| find(values.as_ref())))
}

/// One pass without branches decides for a block; the place is looked for only where there is something to find.
fn find(values: &[f32]) -> Option<usize> {
    const BLOCK: usize = 1024;
    let wrong = |value: &f32| !value.is_finite();
    values.chunks(BLOCK).enumerate().find_map(|(block, chunk)| {
        let any = chunk.iter().fold(false, |any, value| any | wrong(value));
        any.then(|| block * BLOCK + chunk.iter().position(wrong).unwrap_or(0))
    })
}
