//! Converts errors to Python exceptions, whose classes are in `errors.py`.

use std::io;
use std::path::Path;

use persia_engine::Error;
use persia_features::{DataErrors, TransformError};
use persia_types::config::ConfigErrors;
use persia_types::{TablesError, is_url};
use pyo3::prelude::*;
use pyo3::types::PyModule;

const SOURCE: &std::ffi::CStr = c_str(concat!(include_str!("errors.py"), "\0"));

const fn c_str(text: &str) -> &std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("errors.py holds a NUL byte"),
    }
}

/// Create the module `persia_core.errors`.
pub(crate) fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    PyModule::from_code(py, SOURCE, c"persia_core/errors.py", c"persia_core.errors")
}

/// Create an exception of the class `name` in `errors.py`.
pub(crate) fn raise(py: Python<'_>, name: &str, message: impl Into<String>) -> PyErr {
    let class = py.import("persia_core.errors").and_then(|module| module.getattr(name));
    match class.and_then(|class| class.call1((message.into(),))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// The exception for a feature, gradient or label of a wrong type.
pub(crate) fn feature_type(py: Python<'_>, message: String) -> PyErr {
    raise(py, "FeatureTypeError", message)
}

/// Convert an error of a look-up, push, snapshot or restore.
pub(crate) fn tables(py: Python<'_>, error: &TablesError) -> PyErr {
    of_tables(py, error, error.to_string())
}

/// Create an exception without the hint of its class, because the message contains the next step.
pub(crate) fn raise_without_hint(py: Python<'_>, name: &str, message: impl Into<String>) -> PyErr {
    let raised = raise(py, name, message);
    match raised.value(py).setattr("hint", "") {
        Ok(()) => raised,
        Err(failed) => failed,
    }
}

/// Create the exception for `error`. The hint of `StorageError` is about files, not memory.
pub(crate) fn of_tables(py: Python<'_>, error: &TablesError, message: String) -> PyErr {
    match error {
        TablesError::OutOfMemory { .. } => raise_without_hint(py, tables_class(error), message),
        TablesError::Io { path, source } => storage(py, path, source, message),
        _ => raise(py, tables_class(error), message),
    }
}

/// Create the exception for a file or an object that cannot be read or written. The hint of `StorageError` is about
/// what the operating system refuses: owners and free space. Any other message, such as that about an object store or
/// a path that is occupied or not allowed, contains the next step.
pub(crate) fn storage(py: Python<'_>, path: &Path, source: &io::Error, message: String) -> PyErr {
    use io::ErrorKind::{AlreadyExists, ResourceBusy};
    let by_the_system = source.raw_os_error().is_some();
    if is_url(path) || !by_the_system || matches!(source.kind(), AlreadyExists | ResourceBusy) {
        raise_without_hint(py, "StorageError", message)
    } else {
        raise(py, "StorageError", message)
    }
}

fn tables_class(error: &TablesError) -> &'static str {
    match error {
        TablesError::StaleGeneration { .. } => "StaleGenerationError",
        TablesError::NotBegun | TablesError::NoOptimizer | TablesError::BadRun { .. } => "UsageError",
        TablesError::BadShape { .. } | TablesError::TooManyIds { .. } | TablesError::BadTable { .. } => {
            "DataError"
        }
        TablesError::Corrupt { .. } => "CheckpointError",
        TablesError::Foreign { .. } => "ForeignCheckpointError",
        TablesError::Io { .. } | TablesError::OutOfMemory { .. } => "StorageError",
        TablesError::Unable { .. } | TablesError::Unreachable { .. } | TablesError::Recovering { .. } => {
            "UnreachableError"
        }
        TablesError::WrongShard { .. } | TablesError::Incompatible { .. } => "IncompatibleError",
        TablesError::Refused { .. } => "AuthError",
        TablesError::Lost { .. } => "RunLostError",
        TablesError::Timeout { .. } => "WaitTimeoutError",
    }
}

/// Convert an error of a batch, a pipeline or the engine.
pub(crate) fn engine(py: Python<'_>, error: &Error) -> PyErr {
    let of = |class| raise(py, class, error.to_string());
    let raised = match error {
        Error::Source(source) => {
            return match source.downcast_ref::<PyErr>() {
                Some(raised) => raised.clone_ref(py),
                None => raise(py, "DataError", error.to_string()),
            };
        }
        Error::Lookup { source, .. } | Error::Push { source, .. } => of_tables(py, source, error.to_string()),
        Error::Device { .. } => of("DeviceError"),
        Error::Empty { .. } | Error::UnequalBatchSizes { .. } => of("BatchSizeError"),
        Error::BadOption { .. } => of("ConfigError"),
        Error::Closed { .. } => of("UsageError"),
        Error::Panicked { .. } | Error::Spawn { .. } => of("PersiaError"),
        Error::DuplicateNames { .. }
        | Error::BadFeature { .. }
        | Error::BadTensor { .. }
        | Error::TooLarge { .. }
        | Error::NonFinite { .. }
        | Error::LabelNotBinary { .. }
        | Error::BadBytes { .. }
        | Error::FeatureMismatch { .. }
        | Error::BadGradient { .. } => of("DataError"),
    };
    if let Error::Lookup { step, .. } | Error::Push { step, .. } | Error::BadGradient { step, .. } = error {
        // The classes in `errors.py` accept any attribute. This one identifies the batch that failed.
        if let Err(failed) = raised.value(py).setattr("step", step) {
            return failed;
        }
    }
    raised
}

/// Convert all errors in a configuration file.
pub(crate) fn config(py: Python<'_>, errors: &ConfigErrors) -> PyErr {
    let raised = raise(py, "ConfigError", errors.to_string());
    let findings: Vec<(usize, usize, &str, &str)> = errors
        .errors
        .iter()
        .map(|found| (found.line, found.column, found.path.as_str(), found.message.as_str()))
        .collect();
    match raised.value(py).setattr("findings", findings) {
        Ok(()) => raised,
        Err(failed) => failed,
    }
}

/// Convert all errors in the data of a transform.
pub(crate) fn data(py: Python<'_>, errors: &DataErrors) -> PyErr {
    raise(py, "DataError", errors.to_string())
}

/// Convert the error of a transform that cannot be created. The hint of `CheckpointError` is about checkpoints. The
/// Python code that reads a transform knows its origin, and adds the next step to the message.
pub(crate) fn transform(py: Python<'_>, error: &TransformError) -> PyErr {
    let message = error.to_string();
    match error {
        TransformError::Unfitted { .. } => raise(py, "UsageError", message),
        TransformError::NothingToFit { .. } => raise(py, "DataError", message),
        TransformError::Contradiction { .. } => raise(py, "ConfigError", message),
        TransformError::Invalid { .. } => raise_without_hint(py, "CheckpointError", message),
        TransformError::OtherFeatures { .. } => raise_without_hint(py, "ForeignCheckpointError", message),
    }
}
