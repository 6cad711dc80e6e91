//! `persia_core.trace`: sends the spans of traced steps to an OpenTelemetry collector.

use std::time::{Duration, SystemTime};

use persia_wire::trace::{self, Process, StepCall};
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::{errors, logs};

/// The calls of a training loop: the verb in `persia.runtime.flight`, the name of the span, and the thread.
const CALLS: &[(&str, &str, &str)] = &[
    ("data wait", "data wait", "loop"),
    ("look-up", "look-up wait", "loop"),
    ("forward", "forward", "loop"),
    ("backward", "backward", "loop"),
    ("all-reduce", "all-reduce", "loop"),
    ("agreement", "agreement", "loop"),
    ("collective", "collective", "loop"),
    ("push", "queue gradients", "loop"),
    ("optimizer", "optimizer", "loop"),
    ("checkpoint", "checkpoint", "loop"),
    ("read", "read batch", "read"),
];

/// The verb, the begin and end in Unix seconds, the index of the call that contains this one, and the class of the
/// error that ended it.
type Call = (String, f64, f64, Option<usize>, String);

/// Start the exporter of this rank if `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set,
/// and tracing is not disabled. Returns whether it was started. Every `every`-th step is traced. If `every` is 0, no
/// step is traced.
#[pyfunction]
pub(crate) fn start(py: Python<'_>, rank: u32, run_id: String, every: u64) -> PyResult<bool> {
    logs::begin(py)?;
    let process = Process { service: "persia-trainer", replica: rank, run_id, every };
    py.detach(|| trace::start(process)).map_err(|error| errors::raise(py, "ConfigError", error.to_string()))
}

/// Send the waiting spans, for at most 5 s, and record no more spans.
#[pyfunction]
pub(crate) fn stop(py: Python<'_>) {
    py.detach(trace::stop);
}

/// Record a step of the engine with the calls of its training loop. Times are in Unix seconds.
#[pyfunction]
pub(crate) fn record_step(engine: &Engine, step: u64, began: f64, ended: f64, calls: Vec<Call>) {
    let calls = calls.into_iter().map(|(verb, began, ended, parent, error)| {
        let known = CALLS.iter().find(|(known, ..)| *known == verb);
        let (_, name, thread) = known.copied().unwrap_or(("", "other", "loop"));
        let error = Some(error).filter(|error| !error.is_empty());
        StepCall { name, start: time(began), end: time(ended), parent, thread, error }
    });
    trace::record_step(engine.token(step), time(began), time(ended), calls.collect());
}

fn time(seconds: f64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
