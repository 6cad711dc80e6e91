//! `persia_core.config`: parses and validates the two YAML files.

use persia_types::Dtype;
use persia_types::config::{self, ConfigErrors, Finding, Parsed};
use pyo3::prelude::*;

use crate::errors;

/// A valid `embedding_config.yml`.
#[pyclass(module = "persia_core.config", frozen)]
pub(crate) struct EmbeddingConfig {
    pub(crate) parsed: config::EmbeddingConfig,
    /// The keys that are accepted but have no effect.
    #[pyo3(get)]
    pub(crate) warnings: Vec<String>,
}

#[pymethods]
impl EmbeddingConfig {
    /// The names of the slots, in the order of the file.
    #[getter]
    fn slots(&self) -> Vec<String> {
        self.parsed.schema.slots.iter().map(|slot| slot.name.clone()).collect()
    }

    /// The (name, dim) of each table.
    #[getter]
    fn tables(&self) -> Vec<(String, usize)> {
        self.parsed.schema.tables.iter().map(|table| (table.name.clone(), table.dim)).collect()
    }

    /// For each table, the settings that override those of the run, as text.
    #[getter]
    fn settings(&self) -> Vec<Vec<String>> {
        self.parsed.schema.tables.iter().map(|table| table.settings.describe()).collect()
    }
}

/// A valid `global_config.yml`.
#[pyclass(module = "persia_core.config", frozen)]
pub(crate) struct GlobalConfig {
    pub(crate) parsed: config::GlobalConfig,
    /// The keys that are accepted but have no effect.
    #[pyo3(get)]
    warnings: Vec<String>,
}

#[pymethods]
impl GlobalConfig {
    /// Create a configuration with the defaults.
    #[new]
    fn new() -> Self {
        Self { parsed: config::GlobalConfig::default(), warnings: Vec::new() }
    }

    /// The number of rows that the job holds before it evicts rows.
    #[getter]
    fn capacity(&self) -> u64 {
        self.parsed.capacity
    }

    /// The job's name.
    #[getter]
    fn job_name(&self) -> &str {
        &self.parsed.job_name
    }

    /// Whether processes serve metrics if no address for metrics is given.
    #[getter]
    fn enable_metrics(&self) -> bool {
        self.parsed.enable_metrics
    }

    /// Whether the job serves a checkpoint: `job_type: Infer`.
    #[getter]
    fn serves(&self) -> bool {
        self.parsed.infer.is_some()
    }

    /// The format of rows and gradients on the wire: `f32`, `f16` or `bf16`.
    #[getter]
    fn wire_dtype(&self) -> &'static str {
        match self.parsed.wire_dtype {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// Parse and validate the text of an `embedding_config.yml` called `file`.
#[pyfunction]
pub(crate) fn parse_embedding_config(py: Python<'_>, text: &str, file: &str) -> PyResult<EmbeddingConfig> {
    let (parsed, warnings) = split(py, file, config::EmbeddingConfig::parse(text, file))?;
    Ok(EmbeddingConfig { parsed, warnings })
}

/// Parse and validate the text of a `global_config.yml` called `file`.
#[pyfunction]
pub(crate) fn parse_global_config(py: Python<'_>, text: &str, file: &str) -> PyResult<GlobalConfig> {
    let (parsed, warnings) = split(py, file, config::GlobalConfig::parse(text, file))?;
    Ok(GlobalConfig { parsed, warnings })
}

pub(crate) fn split<T>(
    py: Python<'_>,
    file: &str,
    parsed: Result<Parsed<T>, ConfigErrors>,
) -> PyResult<(T, Vec<String>)> {
    let parsed = parsed.map_err(|errors| errors::config(py, &errors))?;
    let place = |finding: &Finding| format!("{file}: {finding}");
    Ok((parsed.config, parsed.warnings.iter().map(place).collect()))
}

/// The type with this name.
pub(crate) fn dtype_of(py: Python<'_>, dtype: &str) -> PyResult<Dtype> {
    match dtype {
        "f32" => Ok(Dtype::F32),
        "f16" => Ok(Dtype::F16),
        "bf16" => Ok(Dtype::Bf16),
        other => Err(errors::raise(py, "UsageError", format!("dtype={other:?}: expected f32, f16 or bf16"))),
    }
}
