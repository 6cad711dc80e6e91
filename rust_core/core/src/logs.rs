//! Log lines of the Rust side, on standard error like those of `persia.logger`.

use std::sync::Once;

use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

use crate::errors;

static BEGUN: Once = Once::new();

/// Start logging at `LOG_LEVEL`, and at the levels in `PERSIA_LOG`, once per process.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    let level = std::env::var("LOG_LEVEL").unwrap_or_default().trim().to_lowercase();
    let level = match level.as_str() {
        "" | "notset" => "info",
        "warning" => "warn",
        "critical" | "fatal" => "error",
        other => other,
    };
    let own = persia_wire::logs::directives(&std::env::var("PERSIA_LOG").unwrap_or_default());
    let level = own.iter().rev().find(|each| !each.contains('=')).map_or(level, String::as_str);
    let mut directives = format!("off,persia_wire={level},persia_engine={level}");
    for each in own.iter().filter(|each| each.contains('=')) {
        directives.push(',');
        directives.push_str(each);
    }
    let filter = EnvFilter::try_new(directives).map_err(|error| {
        errors::raise(py, "ConfigError", format!("LOG_LEVEL={level:?}, PERSIA_LOG={own:?}: {error}"))
    })?;
    BEGUN.call_once(|| {
        let lines = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .finish();
        // Another extension of this process may have set a subscriber already.
        let _ = tracing::subscriber::set_global_default(lines);
    });
    Ok(())
}
