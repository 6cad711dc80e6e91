//! `persia_core.features`: transforms the rows of a table into ids, floats and labels.

use std::collections::HashMap;

use arrow_array::RecordBatch;
use persia_features::hash;
use persia_features::{self as core, Options, Records, Value};
use persia_types::config::features::{Feature, Label, Loss};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::arrow::Batches;
use crate::config::{EmbeddingConfig, split};
use crate::errors;
use crate::samples::Samples;

/// The features and labels that a file declares.
#[pyclass(module = "persia_core.features", frozen)]
pub(crate) struct Features {
    inner: core::Features,
    /// The keys that are accepted but have no effect.
    #[pyo3(get)]
    warnings: Vec<String>,
}

#[pymethods]
impl Features {
    /// Parse the blocks `features` and `labels` in the text of a `persia.yml` called `file`.
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str, file: &str) -> PyResult<Self> {
        let (inner, warnings) = split(py, file, core::Features::parse(text, file))?;
        Ok(Self { inner, warnings })
    }

    /// The (name, type) of each feature, in the order of the file.
    #[getter]
    fn types(&self) -> Vec<(String, &'static str)> {
        let of = |feature: &Feature| (feature.name.clone(), feature.rule.word());
        self.inner.config().features.iter().map(of).collect()
    }

    /// The (name, weight, loss) of each label, in the order of the file.
    #[getter]
    fn labels(&self) -> Vec<(String, f32, &'static str)> {
        let loss = |loss| match loss {
            Loss::Bce => "bce",
            Loss::Mse => "mse",
        };
        let of = |label: &Label| (label.name.clone(), label.weight, loss(label.loss));
        self.inner.config().labels.iter().map(of).collect()
    }

    /// Return the columns that the features need and, with `labels`, those that the labels need.
    #[pyo3(signature = (*, labels=true))]
    fn columns(&self, labels: bool) -> Vec<&str> {
        self.inner.config().columns(labels)
    }

    /// Whether a fit must read rows. If not, it needs only the types of the columns.
    #[getter]
    fn needs_rows(&self) -> bool {
        self.inner.needs_rows()
    }

    /// Return the slots and tables of the features.
    fn embedding_config(&self) -> EmbeddingConfig {
        EmbeddingConfig { parsed: self.inner.embedding(), warnings: Vec::new() }
    }

    /// Fit the features on the training data. Returns the transform.
    fn fit(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Transform> {
        let mut fitter = Fitter { inner: core::Fitter::new(self.inner.clone()) };
        fitter.update(py, data)?;
        fitter.finish(py)
    }

    /// Create the transform of features that need no fit.
    fn transform(&self, py: Python<'_>) -> PyResult<Transform> {
        self.inner
            .transform(core::Fitted::default())
            .map(Transform)
            .map_err(|error| errors::transform(py, &error))
    }

    /// Load the JSON of a transform that was fitted for these features.
    fn load(&self, py: Python<'_>, json: &str) -> PyResult<Transform> {
        self.inner.load(json).map(Transform).map_err(|error| errors::transform(py, &error))
    }
}

/// Fits features in one pass over the training data.
#[pyclass(module = "persia_core.features")]
pub(crate) struct Fitter {
    inner: core::Fitter,
}

#[pymethods]
impl Fitter {
    #[new]
    fn new(features: &Features) -> Self {
        Self { inner: core::Fitter::new(features.inner.clone()) }
    }

    /// Add rows: a table, a record batch, or a stream of them.
    fn update(&mut self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut batches = Batches::of(data)?.ok_or_else(|| no_table(data))?;
        let fitter = &mut self.inner;
        fitter.bind(&batches.schema()).map_err(|error| errors::data(py, &error))?;
        while let Some(batch) = batches.next(py)? {
            py.detach(|| fitter.update(&batch)).map_err(|error| errors::data(py, &error))?;
        }
        Ok(())
    }

    /// Add the data that another fitter for the same features has read.
    fn merge(&mut self, py: Python<'_>, other: &Self) -> PyResult<()> {
        self.inner.merge(&other.inner).map_err(|error| errors::data(py, &error))
    }

    /// The number of rows read.
    #[getter]
    fn rows(&self) -> u64 {
        self.inner.rows()
    }

    /// Create the transform with the fitted values.
    fn finish(&self, py: Python<'_>) -> PyResult<Transform> {
        self.inner.clone().finish().map(Transform).map_err(|error| errors::transform(py, &error))
    }
}

/// Features with their fitted values.
#[pyclass(module = "persia_core.features", frozen)]
pub(crate) struct Transform(core::Transform);

#[pymethods]
impl Transform {
    /// Parse the result of `to_json`.
    #[staticmethod]
    fn from_json(py: Python<'_>, json: &str) -> PyResult<Self> {
        core::Transform::from_json(json).map(Self).map_err(|error| errors::transform(py, &error))
    }

    /// Convert the declarations, the fitted values and the digest to JSON.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        self.0.to_json().map_err(|error| errors::transform(py, &error))
    }

    /// The digest. Transforms with equal digests compute equal ids, floats and labels.
    #[getter]
    fn digest(&self) -> &str {
        self.0.digest()
    }

    /// The declarations.
    #[getter]
    fn features(&self) -> Features {
        Features { inner: self.0.features().clone(), warnings: Vec::new() }
    }

    /// The names of the slots, in the order of their declaration.
    #[getter]
    fn slots(&self) -> Vec<String> {
        self.0.names().slots.clone()
    }

    /// The names of the dense columns, in the order of their declaration.
    #[getter]
    fn dense(&self) -> Vec<String> {
        self.0.names().dense.clone()
    }

    /// The names of the labels, in the order of their declaration.
    #[getter]
    fn labels(&self) -> Vec<String> {
        self.0.names().labels.clone()
    }

    /// Transform a table, a stream, JSON text, a record, or a list of records.
    #[pyo3(signature = (data, *, strict=true, labels=true, first_row=0))]
    fn __call__(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        strict: bool,
        labels: bool,
        first_row: u64,
    ) -> PyResult<Samples> {
        let options = Options { strict, labels, first_row };
        let samples = match input(data)? {
            Input::Batches(batches) => py.detach(|| self.0.batches(&batches, options)),
            Input::Records(records) => py.detach(|| self.0.records(&records, options)),
        };
        samples.map(Samples::new).map_err(|error| errors::data(py, &error))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().to_json(slf.py())?,)))
    }
}

/// The id of a string.
#[pyfunction]
pub(crate) fn hash_text(text: &str) -> u64 {
    hash::hash_text(text.as_bytes())
}

/// The id of a combination of ids.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python converts")]
pub(crate) fn hash_cross(ids: Vec<u64>) -> u64 {
    hash::hash_cross(&ids)
}

enum Input {
    Batches(Vec<RecordBatch>),
    Records(Records),
}

fn no_table(data: &Bound<'_, PyAny>) -> PyErr {
    let kind = data.get_type().name().map_or_else(|_| "an object".into(), |name| name.to_string());
    let message = format!(
        "found {kind}, allowed: a table with the Arrow PyCapsule interface (pyarrow, polars, duckdb, pandas 2.2 or later)"
    );
    errors::feature_type(data.py(), message)
}

fn input(data: &Bound<'_, PyAny>) -> PyResult<Input> {
    let py = data.py();
    let json = |text: &[u8]| {
        let records = py.detach(|| Records::from_json(text));
        records.map(Input::Records).map_err(|error| errors::raise(py, "DataError", error))
    };
    if let Some(batches) = Batches::of(data)? {
        return Ok(Input::Batches(batches.all(py)?));
    }
    if let Ok(text) = data.cast::<PyBytes>() {
        return json(text.as_bytes());
    }
    if let Ok(text) = data.cast::<PyString>() {
        return json(text.to_str()?.as_bytes());
    }
    if let Ok(record) = data.cast::<PyDict>() {
        return Ok(Input::Records(Records::new(vec![row(record)?])));
    }
    let Ok(list) = data.cast::<PyList>() else {
        return Err(errors::feature_type(
            py,
            format!("{}, JSON text, a dict, or a list of dicts", no_table(data).value(py)),
        ));
    };
    let mut rows = Vec::with_capacity(list.len());
    for (index, record) in list.iter().enumerate() {
        let Ok(record) = record.cast::<PyDict>() else {
            let message = format!("record {index}: found {}, allowed: a dict", record.get_type().name()?);
            return Err(errors::feature_type(py, message));
        };
        rows.push(row(record)?);
    }
    Ok(Input::Records(Records::new(rows)))
}

fn row(record: &Bound<'_, PyDict>) -> PyResult<HashMap<String, Value>> {
    let mut row = HashMap::with_capacity(record.len());
    for (key, value) in record.iter() {
        // Skip a key that is not a string, because it names no column.
        if let Ok(key) = key.cast::<PyString>() {
            row.insert(key.to_str()?.to_owned(), value_of(&value, true)?);
        }
    }
    Ok(row)
}

/// Convert a value of a record. Every feature refuses a list within a list, so the items of such a list are
/// not converted.
fn value_of(value: &Bound<'_, PyAny>, lists: bool) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Value::Text(text.to_str()?.to_owned()));
    }
    if let Ok(truth) = value.cast::<PyBool>() {
        return Ok(Value::Bool(truth.is_true()));
    }
    if value.cast::<PyInt>().is_ok() {
        let unsigned = || value.extract().map(Value::Uint);
        return Ok(value
            .extract()
            .map(Value::Int)
            .or_else(|_| unsigned())
            .unwrap_or(Value::Other("an integer of more than 64 bits")));
    }
    if let Ok(number) = value.cast::<PyFloat>() {
        return Ok(Value::Float(number.value()));
    }
    if lists && (value.cast::<PyList>().is_ok() || value.cast::<PyTuple>().is_ok()) {
        let items: PyResult<Vec<Value>> = value.try_iter()?.map(|item| value_of(&item?, false)).collect();
        return Ok(Value::List(items?));
    }
    if value.hasattr("isoformat")? {
        return Ok(Value::Text(value.call_method0("isoformat")?.extract()?));
    }
    // This is a NumPy number, or another object with one item.
    if value.hasattr("item")?
        && value.getattr("ndim").and_then(|ndim| ndim.extract()).is_ok_and(|ndim: u32| ndim == 0)
    {
        let plain = value.call_method0("item")?;
        if !plain.get_type().is(value.get_type()) {
            return value_of(&plain, lists);
        }
    }
    Ok(Value::Other("an object"))
}
