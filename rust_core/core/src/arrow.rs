//! Reads Python tables through the Arrow PyCapsule interface, without a copy.
#![allow(unsafe_code)]

use std::ffi::CStr;

use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi};
use arrow_array::ffi_stream::{FFI_ArrowArrayStream, RecordBatchStreamReader};
use arrow_array::{RecordBatch, RecordBatchReader, StructArray};
use arrow_schema::{ArrowError, SchemaRef};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::errors;

const SCHEMA: &CStr = c"arrow_schema";
const ARRAY: &CStr = c"arrow_array";
const STREAM: &CStr = c"arrow_array_stream";

/// The record batches of a table.
pub(crate) enum Batches {
    /// One batch; None once it is taken.
    One(SchemaRef, Option<RecordBatch>),
    /// A stream of batches.
    Stream(RecordBatchStreamReader),
}

impl Batches {
    /// The record batches of an object with the Arrow PyCapsule interface; None if it does not have the interface.
    pub(crate) fn of(data: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if data.hasattr("__arrow_c_array__")? {
            return one(data).map(Some);
        }
        if !data.hasattr("__arrow_c_stream__")? {
            return Ok(None);
        }
        let capsule = data.call_method0("__arrow_c_stream__")?;
        let capsule = capsule.cast::<PyCapsule>()?;
        let pointer = capsule.pointer_checked(Some(STREAM))?.cast::<FFI_ArrowArrayStream>();
        // SAFETY: by the interface, a capsule of this name contains a valid stream. The stream is moved out, and an
        // empty one is left for the capsule to release.
        let stream = unsafe { FFI_ArrowArrayStream::from_raw(pointer.as_ptr()) };
        let reader = RecordBatchStreamReader::try_new(stream).map_err(|error| wrong(data.py(), &error))?;
        Ok(Some(Self::Stream(reader)))
    }

    pub(crate) fn schema(&self) -> SchemaRef {
        match self {
            Self::One(schema, _) => schema.clone(),
            Self::Stream(reader) => reader.schema(),
        }
    }

    /// Return the next batch; None at the end. Other Python threads can run during the wait for a stream.
    /// Signals are handled before this wait.
    pub(crate) fn next(&mut self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        match self {
            Self::One(_, batch) => Ok(batch.take()),
            Self::Stream(reader) => {
                py.check_signals()?;
                py.detach(|| reader.next()).transpose().map_err(|error| wrong(py, &error))
            }
        }
    }

    /// Return all batches.
    pub(crate) fn all(mut self, py: Python<'_>) -> PyResult<Vec<RecordBatch>> {
        let mut all = Vec::new();
        while let Some(batch) = self.next(py)? {
            all.push(batch);
        }
        Ok(all)
    }
}

/// Read a record batch, which is an array of structs without nulls.
fn one(data: &Bound<'_, PyAny>) -> PyResult<Batches> {
    let py = data.py();
    let pair = data.call_method0("__arrow_c_array__")?;
    let pair = pair.cast::<PyTuple>()?;
    let (schema, array) = (pair.get_item(0)?, pair.get_item(1)?);
    let schema = schema.cast::<PyCapsule>()?.pointer_checked(Some(SCHEMA))?.cast::<FFI_ArrowSchema>();
    let array = array.cast::<PyCapsule>()?.pointer_checked(Some(ARRAY))?.cast::<FFI_ArrowArray>();
    // SAFETY: by the interface, capsules of these names contain a valid schema and its array. The array is moved out,
    // and an empty one is left for the capsule to release. The schema is read while its capsule is alive.
    let array = unsafe { from_ffi(FFI_ArrowArray::from_raw(array.as_ptr()), schema.as_ref()) };
    let array = array.map_err(|error| wrong(py, &error))?;
    if !matches!(array.data_type(), arrow_schema::DataType::Struct(_)) || array.nulls().is_some() {
        let nulls = if array.nulls().is_some() { " with nulls" } else { "" };
        let kind = array.data_type();
        let message = format!("found an Arrow array of {kind}{nulls}, allowed: a table or a record batch");
        return Err(errors::feature_type(py, message));
    }
    let batch = RecordBatch::from(StructArray::from(array));
    Ok(Batches::One(batch.schema(), Some(batch)))
}

fn wrong(py: Python<'_>, error: &ArrowError) -> PyErr {
    errors::raise(py, "DataError", format!("cannot read the table: {error}"))
}
