//! `persia_core.data`: the engine's batches.

use std::sync::Arc;

use numpy::{Element, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use persia_engine::{Batch as EngineBatch, BatchParts, Dtype, IdFeature, Tensor};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;

/// A batch after all checks, with deduplicated ids. It can be looked up any number of times.
#[pyclass(module = "persia_core.data", frozen)]
pub(crate) struct Batch(pub(crate) Arc<EngineBatch>);

#[pymethods]
impl Batch {
    /// Decode the result of `to_bytes`.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let batch =
            py.detach(|| EngineBatch::from_bytes(data)).map_err(|error| errors::engine(py, &error))?;
        Ok(Self(Arc::new(batch)))
    }

    /// Encode the batch in the versioned wire format, with a checksum.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.0.to_bytes()).map_err(|error| errors::engine(py, &error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The number of samples.
    #[getter]
    fn batch_size(&self) -> usize {
        self.0.batch_size()
    }

    /// The names of the id features, in the user's order.
    #[getter]
    fn slots(&self) -> Vec<String> {
        self.0.id_features().iter().map(|feature| feature.name().to_owned()).collect()
    }

    /// The names of the dense inputs, in the user's order; None for an input without a name.
    #[getter]
    fn dense_names(&self) -> Vec<Option<&str>> {
        self.0.dense().iter().map(Tensor::name).collect()
    }

    /// The names of the labels, in the user's order; None for a label without a name.
    #[getter]
    fn label_names(&self) -> Vec<Option<&str>> {
        self.0.labels().iter().map(Tensor::name).collect()
    }

    /// Whether the batch is for training.
    #[getter]
    fn requires_grad(&self) -> bool {
        self.0.requires_grad()
    }

    /// The user's metadata, if any.
    #[getter]
    fn meta(&self) -> Option<&[u8]> {
        self.0.meta()
    }
}

/// Collects the parts of a batch.
#[pyclass(module = "persia_core.data")]
pub(crate) struct BatchBuilder(BatchParts);

#[pymethods]
impl BatchBuilder {
    #[new]
    fn new(batch_size: usize, requires_grad: bool, meta: Option<Vec<u8>>) -> Self {
        Self(BatchParts { batch_size: Some(batch_size), requires_grad, meta, ..Default::default() })
    }

    /// Add a feature with one id for each sample.
    fn add_single(&mut self, py: Python<'_>, name: String, ids: PyReadonlyArray1<'_, u64>) -> PyResult<()> {
        let ids = ids.as_slice()?;
        let feature =
            py.detach(|| IdFeature::single(name, ids)).map_err(|error| errors::engine(py, &error))?;
        self.0.id_features.push(feature);
        Ok(())
    }

    /// Add a feature whose sample `i` has the ids `values[offsets[i]:offsets[i + 1]]`. `weights` has a weight
    /// for each id; None means 1 for all.
    #[pyo3(signature = (name, values, offsets, weights=None))]
    fn add_list(
        &mut self,
        py: Python<'_>,
        name: String,
        values: PyReadonlyArray1<'_, u64>,
        offsets: PyReadonlyArray1<'_, i64>,
        weights: Option<PyReadonlyArray1<'_, f32>>,
    ) -> PyResult<()> {
        let (values, offsets) = (values.as_slice()?, offsets.as_slice()?);
        let weights = weights.as_ref().map(|weights| weights.as_slice()).transpose()?;
        let feature = py.detach(|| {
            // A negative offset becomes larger than any limit, so the engine refuses it.
            let offsets: Vec<usize> =
                offsets.iter().map(|&at| usize::try_from(at).unwrap_or(usize::MAX)).collect();
            let feature = IdFeature::lists(name, values, &offsets)?;
            match weights {
                None => Ok(feature),
                Some(weights) => feature.with_weights(weights),
            }
        });
        self.0.id_features.push(feature.map_err(|error| errors::engine(py, &error))?);
        Ok(())
    }

    /// Add a dense input.
    fn add_dense(&mut self, name: Option<String>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.dense.push(tensor(name, data)?);
        Ok(())
    }

    /// Add a label.
    fn add_label(&mut self, name: Option<String>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.labels.push(tensor(name, data)?);
        Ok(())
    }

    /// Check the parts and create the batch. The builder is empty afterwards.
    fn build(&mut self, py: Python<'_>) -> PyResult<Batch> {
        let parts = std::mem::take(&mut self.0);
        let batch = py.detach(|| EngineBatch::new(parts)).map_err(|error| errors::engine(py, &error))?;
        Ok(Batch(Arc::new(batch)))
    }
}

fn tensor(name: Option<String>, data: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = data.py();
    let read = read::<f32>(data, Dtype::F32)
        .or_else(|| read::<f64>(data, Dtype::F64))
        .or_else(|| read::<i64>(data, Dtype::I64))
        .or_else(|| read::<i32>(data, Dtype::I32))
        .or_else(|| read::<i16>(data, Dtype::I16))
        .or_else(|| read::<i8>(data, Dtype::I8))
        .or_else(|| read::<u8>(data, Dtype::U8))
        .or_else(|| read::<bool>(data, Dtype::Bool));
    let Some((dtype, shape, bytes)) = read else {
        return Err(errors::feature_type(
            py,
            format!(
                "{}: expected a contiguous array of float32, float64, int8 to int64, uint8 or bool",
                name.as_deref().unwrap_or("a tensor without a name")
            ),
        ));
    };
    Tensor::new(name, dtype, shape, bytes).map_err(|error| errors::engine(py, &error))
}

fn read<T: Element + bytemuck::NoUninit>(
    data: &Bound<'_, PyAny>,
    dtype: Dtype,
) -> Option<(Dtype, Vec<usize>, Vec<u8>)> {
    let array: PyReadonlyArrayDyn<'_, T> = data.extract().ok()?;
    let values = array.as_slice().ok()?;
    Some((dtype, array.shape().to_vec(), bytemuck::cast_slice(values).to_vec()))
}
