//! `persia_core`: the Python extension for Persia's engine, store and network client.
//!
//! * `config`: the two YAML files
//! * `data`: batches
//! * `features`: transforms the rows of a table into batches
//! * `optim`: how rows are initialized and updated
//! * `engine`: a rank's engine, over rows in this process or on servers
//! * `discovery`: finds the processes of a job
//! * `forward`, `backward`: the batches of a training loop, and their gradients
//! * `checkpoint`: saves, loads and inspects checkpoints
//! * `serving`: the rows of a serving bundle
//! * `trace`: the spans of traced steps
//! * `errors`: the exceptions
//!
//! The extension may be a single `persia_core.so`, which is not a package, so it registers its sub-modules itself.

mod arrow;
mod backend;
mod backward;
mod checkpoint;
mod checkpoint_rows;
mod checkpoint_slots;
mod config;
mod data;
#[cfg(feature = "cuda")]
#[path = "cuda.rs"]
mod device;
#[cfg(not(feature = "cuda"))]
mod device;
mod discovery;
mod dlpack;
mod engine;
mod errors;
mod features;
mod logs;
mod optim;
mod pipeline;
mod remote;
mod samples;
mod serving;
mod stats;
mod trace;
mod training_batch;
mod wait;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyModule};

/// The name and the version as one string, which can be found in the binary.
const VERSION_TEXT: &str = concat!("persia_core version ", env!("CARGO_PKG_VERSION"));

fn version() -> &'static str {
    std::hint::black_box(VERSION_TEXT).rsplit(' ').next().unwrap_or_default()
}

/// The optional features of this build.
fn build_features() -> Vec<&'static str> {
    if cfg!(feature = "cuda") { vec!["cuda"] } else { vec![] }
}

fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("profile", env!("PERSIA_PROFILE"))?;
    info.set_item("target", env!("PERSIA_TARGET"))?;
    info.set_item("rustc", env!("PERSIA_RUSTC"))?;
    info.set_item("features", build_features().join(" "))?;
    // The commit of a release, which `make release` sets.
    if let Some(revision) = option_env!("PERSIA_REVISION").filter(|text| !text.is_empty()) {
        info.set_item("revision", revision)?;
    }
    Ok(info)
}

fn register(parent: &Bound<'_, PyModule>, name: &str, module: &Bound<'_, PyModule>) -> PyResult<()> {
    parent.add(name, module)?;
    parent.py().import("sys")?.getattr("modules")?.set_item(format!("persia_core.{name}"), module)
}

fn submodule<'py>(parent: &Bound<'py, PyModule>, name: &str) -> PyResult<Bound<'py, PyModule>> {
    let module = PyModule::new(parent.py(), &format!("persia_core.{name}"))?;
    register(parent, name, &module)?;
    Ok(module)
}

/// The module. Its sub-modules are registered under their own names.
#[pymodule]
fn persia_core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = m.py();
    m.add("__version__", version())?;
    m.add("FEATURES", build_features())?;
    m.add("BUILD_INFO", build_info(py)?)?;
    register(m, "errors", &errors::module(py)?)?;

    let config = submodule(m, "config")?;
    config.add_class::<config::EmbeddingConfig>()?;
    config.add_class::<config::GlobalConfig>()?;
    config.add_function(wrap_pyfunction!(config::parse_embedding_config, &config)?)?;
    config.add_function(wrap_pyfunction!(config::parse_global_config, &config)?)?;

    let data = submodule(m, "data")?;
    data.add_class::<data::Batch>()?;
    data.add_class::<data::BatchBuilder>()?;

    let features = submodule(m, "features")?;
    features.add_class::<features::Features>()?;
    features.add_class::<features::Fitter>()?;
    features.add_class::<features::Transform>()?;
    features.add_class::<samples::Samples>()?;
    features.add_class::<samples::Report>()?;
    features.add_function(wrap_pyfunction!(features::hash_text, &features)?)?;
    features.add_function(wrap_pyfunction!(features::hash_cross, &features)?)?;

    let optim = submodule(m, "optim")?;
    optim.add_class::<optim::OptimizerSpec>()?;
    optim.add_class::<optim::InitializerSpec>()?;
    submodule(m, "engine")?.add_class::<engine::Engine>()?;

    let discovery = submodule(m, "discovery")?;
    discovery.add_class::<discovery::Discovery>()?;
    discovery.add_class::<discovery::Announcement>()?;
    discovery.add_function(wrap_pyfunction!(discovery::advertised_host, &discovery)?)?;

    let forward = submodule(m, "forward")?;
    forward.add_class::<pipeline::Pipeline>()?;
    forward.add_class::<training_batch::TrainingBatch>()?;
    forward.add_class::<dlpack::Tensor>()?;
    forward.add_function(wrap_pyfunction!(device::check_device, &forward)?)?;
    forward.add_function(wrap_pyfunction!(device::device_memory, &forward)?)?;

    let backward = submodule(m, "backward")?;
    backward.add_class::<backward::Sums>()?;
    backward.add_function(wrap_pyfunction!(backward::first_nonfinite, &backward)?)?;
    backward.add_function(wrap_pyfunction!(device::check_device, &backward)?)?;

    let checkpoint = submodule(m, "checkpoint")?;
    checkpoint.add_class::<checkpoint::Checkpoint>()?;
    checkpoint.add_class::<checkpoint::Saver>()?;
    checkpoint.add_class::<checkpoint_rows::Importer>()?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint_rows::read_rows, &checkpoint)?)?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint::listing, &checkpoint)?)?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint::latest, &checkpoint)?)?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint::publish_latest, &checkpoint)?)?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint::probe, &checkpoint)?)?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint::remove_object, &checkpoint)?)?;
    checkpoint.add_function(wrap_pyfunction!(checkpoint::prune, &checkpoint)?)?;

    let serving = submodule(m, "serving")?;
    serving.add_class::<serving::MappedFile>()?;
    serving.add_class::<serving::MappedRows>()?;
    serving.add_function(wrap_pyfunction!(serving::blake3, &serving)?)?;
    serving.add_function(wrap_pyfunction!(serving::write_tables, &serving)?)?;

    let trace = submodule(m, "trace")?;
    trace.add_function(wrap_pyfunction!(trace::start, &trace)?)?;
    trace.add_function(wrap_pyfunction!(trace::stop, &trace)?)?;
    trace.add_function(wrap_pyfunction!(trace::record_step, &trace)?)?;
    Ok(())
}
