//! Log lines of the extension, on standard error. With `LOG_FORMAT=json`, they have the keys of
//! `persia.runtime.logging`.

use std::sync::Once;

use persia_wire::logs::{Lines, Origin, directives};
use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

use crate::errors;

static BEGUN: Once = Once::new();

/// Start logging at `LOG_LEVEL`, and at the levels in `PERSIA_LOG`, once per process.
pub(crate) fn begin(py: Python<'_>) -> PyResult<()> {
    let given = |name: &str| std::env::var(name).unwrap_or_default();
    let (level, own) = (given("LOG_LEVEL"), given("PERSIA_LOG"));
    let refused = |name: &str, value: &str, error: &dyn std::fmt::Display| {
        let text = format!("{name}={value:?}: {error}; use error, warn, info, debug or trace");
        errors::raise(py, "ConfigError", text)
    };
    let of_level = directives(&level).map_err(|error| refused("LOG_LEVEL", &level, &error))?;
    let of_own = directives(&own).map_err(|error| refused("PERSIA_LOG", &own, &error))?;
    let all = || of_level.iter().chain(&of_own);
    let base = all().rfind(|each| !each.contains('=')).map_or("info", String::as_str);
    let mut filters = format!("off,persia_wire={base},persia_engine={base},persia_store={base}");
    for each in all().filter(|each| each.contains('=')) {
        filters.push(',');
        filters.push_str(each);
    }
    let filter = EnvFilter::try_new(filters).map_err(|error| {
        let text = format!(
            "LOG_LEVEL={level:?}, PERSIA_LOG={own:?}: {error}; use LEVEL or TARGET=LEVEL, separated by commas"
        );
        errors::raise(py, "ConfigError", text)
    })?;
    BEGUN.call_once(|| {
        let logs =
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
        // Another extension in this process may already have set a subscriber.
        let _ = if variable("LOG_FORMAT").as_deref() == Some("json") {
            tracing::subscriber::set_global_default(logs.event_format(Lines::json(origin())).finish())
        } else {
            tracing::subscriber::set_global_default(logs.finish())
        };
    });
    Ok(())
}

/// The role of this process in its job, as in `persia.runtime.logging`.
fn origin() -> Origin {
    if let Some(job) = variable("PERSIA_JOB") {
        persia_wire::logs::name_run(&job);
    }
    let index = |name: &str| variable(name).and_then(|text| text.parse().ok());
    if let Some(rank) = index("RANK") {
        return Origin::here("persia-trainer", rank, Some(rank));
    }
    let service = if std::env::var_os("PERSIA_LAUNCHER_SERVED").is_some() { "persia-data" } else { "persia" };
    Origin::here(service, index("REPLICA_INDEX").unwrap_or(0), None)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}
