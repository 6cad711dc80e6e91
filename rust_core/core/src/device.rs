//! Which devices this build can use.

use pyo3::prelude::*;

use crate::errors;

/// Refuse a CUDA device that this build or machine does not have.
#[pyfunction]
pub(crate) fn check_device(py: Python<'_>, device_id: i32) -> PyResult<()> {
    let file = py.import("persia_core")?.getattr("__file__").and_then(|file| file.extract::<String>());
    let file = file.unwrap_or_else(|_| "persia_core".into());
    let features = crate::features();
    let built =
        if features.is_empty() { "no features".into() } else { format!("features {}", features.join(", ")) };
    let advice = if cfg!(feature = "cuda") {
        "CUDA kernels are not in this version; leave device_id out to train on the CPU".to_owned()
    } else {
        "build it with CUDA: cargo build --release --package persia-core --features cuda \
         --manifest-path rust_core/Cargo.toml, then copy rust_core/target/release/libpersia_core.so to \
         persia_core.so in a folder on PYTHONPATH; or leave device_id out to train on the CPU"
            .to_owned()
    };
    Err(errors::raise(
        py,
        "DeviceError",
        format!("CUDA device {device_id} was asked for, but {file} was built with {built}; {advice}"),
    ))
}
