//! Transformed rows and their report, for Python.

use std::sync::Arc;

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use parking_lot::Mutex;
use persia_engine::{Batch as EngineBatch, BatchParts, Dtype, Error, IdFeature, Tensor};
use persia_features as core;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::data::Batch;
use crate::errors;

/// The ids of a slot: all ids, row by row, the offsets of the rows, and the weights.
type PyIds<'py> =
    (Bound<'py, PyArray1<u64>>, Option<Bound<'py, PyArray1<u32>>>, Option<Bound<'py, PyArray1<f32>>>);

/// The ids, floats and labels of rows.
#[pyclass(module = "persia_core.features", frozen)]
pub(crate) struct Samples(core::Samples);

impl Samples {
    pub(crate) fn new(samples: core::Samples) -> Self {
        Self(samples)
    }
}

#[pymethods]
impl Samples {
    /// Concatenate samples of one transform, in order.
    #[staticmethod]
    fn concat(py: Python<'_>, parts: &Bound<'_, PyList>) -> PyResult<Self> {
        let parts: Vec<PyRef<'_, Self>> = parts.extract()?;
        let Some((first, rest)) = parts.split_first() else {
            let text = "no samples to concatenate: pass at least one Samples object";
            return Err(errors::raise(py, "DataError", text));
        };
        let mut joined = first.0.clone();
        for part in rest {
            if !joined.extend(&part.0) {
                return Err(errors::raise(
                    py,
                    "DataError",
                    "cannot concatenate samples of different transforms, or samples with and without labels",
                ));
            }
        }
        Ok(Self(joined))
    }

    fn __len__(&self) -> usize {
        self.0.rows()
    }

    /// Return the ids of a slot as values, offsets (None for one id in every row) and weights (None if all
    /// are 1).
    fn ids<'py>(&self, py: Python<'py>, slot: &str) -> PyResult<PyIds<'py>> {
        let Some(index) = self.0.names().slots.iter().position(|name| name == slot) else {
            let message = format!("no slot {slot:?}; the slots are: {}", self.0.names().slots.join(", "));
            return Err(errors::raise(py, "DataError", message));
        };
        let ids = &self.0.ids()[index];
        Ok((
            PyArray1::from_slice(py, &ids.ids),
            ids.offsets.as_ref().map(|offsets| PyArray1::from_slice(py, offsets)),
            ids.weights.as_ref().map(|weights| PyArray1::from_slice(py, weights)),
        ))
    }

    /// Return the dense columns, as float32 with the shape `[rows, columns]`.
    #[getter]
    fn dense<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let shape = [self.0.rows(), self.0.names().dense.len()];
        PyArray1::from_slice(py, self.0.dense()).reshape(shape)
    }

    /// Return a label, as float32 with the shape `[rows]`.
    fn label<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let index = self.0.names().labels.iter().position(|known| known == name);
        match index.and_then(|index| self.0.labels().get(index)) {
            Some(label) => Ok(PyArray1::from_slice(py, label)),
            None => {
                let message = match index {
                    Some(_) => format!("label {name:?} was not read; transform the rows with labels=True"),
                    None => {
                        format!("no label {name:?}; the labels are: {}", self.0.names().labels.join(", "))
                    }
                };
                Err(errors::raise(py, "DataError", message))
            }
        }
    }

    /// The counts of unusual values in the rows.
    #[getter]
    fn report(&self) -> Report {
        Report(Mutex::new(self.0.report().clone()))
    }

    /// Return the rows at these positions, in this order.
    fn take(&self, py: Python<'_>, places: PyReadonlyArray1<'_, i64>) -> PyResult<Self> {
        let places = places.as_slice()?;
        let taken = py.detach(|| {
            let places: Option<Vec<usize>> =
                places.iter().map(|place| usize::try_from(*place).ok()).collect();
            self.0.take(&places?)
        });
        taken.map(Self).ok_or_else(|| {
            let exists = |place: i64| usize::try_from(place).is_ok_and(|place| place < self.0.rows());
            let outside = places.iter().find(|place| !exists(**place)).copied().unwrap_or_default();
            self.outside(py, &format!("row index {outside} is"))
        })
    }

    /// Return the rows from `start` up to, but not including, `stop`.
    fn slice(&self, py: Python<'_>, start: usize, stop: usize) -> PyResult<Self> {
        let part = py.detach(|| self.0.slice(start..stop));
        part.map(Self).ok_or_else(|| self.outside(py, &format!("the rows from {start} to {stop} are")))
    }

    /// Create a batch for the engine. The dense columns become one tensor, and each label becomes a tensor of
    /// the shape `[rows, 1]`.
    #[pyo3(signature = (requires_grad=true, meta=None))]
    fn batch(&self, py: Python<'_>, requires_grad: bool, meta: Option<Vec<u8>>) -> PyResult<Batch> {
        if requires_grad && self.0.labels().is_empty() {
            let message = "a batch for training needs labels, which these samples do not have; transform the \
                           rows with labels=True";
            return Err(errors::raise(py, "MissingLabelError", message));
        }
        let batch = py.detach(|| engine_batch(&self.0, requires_grad, meta));
        batch.map(|batch| Batch(Arc::new(batch))).map_err(|error| errors::engine(py, &error))
    }
}

impl Samples {
    fn outside(&self, py: Python<'_>, what: &str) -> PyErr {
        let text = format!("{what} out of range: the number of rows is {}", self.0.rows());
        errors::raise(py, "DataError", text)
    }
}

fn engine_batch(
    samples: &core::Samples,
    requires_grad: bool,
    meta: Option<Vec<u8>>,
) -> Result<EngineBatch, Error> {
    let names = samples.names();
    let rows = samples.rows();
    let feature = |(name, ids): (&String, &core::Ids)| {
        let feature = match &ids.offsets {
            None => IdFeature::single(name, &ids.ids),
            Some(offsets) => IdFeature::ragged(name, &ids.ids, offsets.clone()),
        }?;
        match &ids.weights {
            None => Ok(feature),
            Some(weights) => feature.with_weights(weights),
        }
    };
    let id_features: Result<Vec<_>, Error> = names.slots.iter().zip(samples.ids()).map(feature).collect();
    let floats = |name: &str, floats: &[f32], columns: usize| {
        Tensor::new(Some(name.into()), Dtype::F32, vec![rows, columns], bytemuck::cast_slice(floats).to_vec())
    };
    let width = names.dense.len();
    let dense = if width == 0 { Vec::new() } else { vec![floats("dense", samples.dense(), width)?] };
    let labels: Result<Vec<_>, Error> =
        names.labels.iter().zip(samples.labels()).map(|(name, label)| floats(name, label, 1)).collect();
    EngineBatch::new(BatchParts {
        id_features: id_features?,
        dense,
        labels: labels?,
        batch_size: Some(rows),
        requires_grad,
        meta,
    })
}

/// The counts of unusual values for each feature and label.
#[pyclass(module = "persia_core.features", frozen)]
pub(crate) struct Report(Mutex<core::Report>);

#[pymethods]
impl Report {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    /// The number of rows that were transformed.
    #[getter]
    fn rows(&self) -> u64 {
        self.0.lock().rows()
    }

    /// Return the nonzero counts, by feature or label, and then by kind.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.0.lock();
        let all = PyDict::new(py);
        for (name, counts) in report.counts() {
            let one = PyDict::new(py);
            for (word, count) in counts {
                one.set_item(word, count)?;
            }
            all.set_item(name, one)?;
        }
        Ok(all)
    }

    /// Add the counts of another report.
    fn add(&self, other: &Self) {
        let other = other.0.lock().clone();
        self.0.lock().add(&other);
    }

    /// Count the ids of a feature for which the look-up found no row.
    fn add_unseen(&self, feature: &str, ids: u64) {
        self.0.lock().add_unseen(feature, ids);
    }
}
