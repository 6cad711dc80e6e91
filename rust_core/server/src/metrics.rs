//! Metrics in the text format of Prometheus, and health over HTTP.
//!
//! Durations are histograms in seconds. Gauges that are expensive to compute are set when the metrics are read.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics::{counter, gauge, histogram};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use persia_types::tables::{LookupReport, PushReport};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tonic::Code;

use crate::service::StartingNode;

const REQUEST_DURATION: &str = "persia_request_duration_seconds";
const REQUESTS_FAILED: &str = "persia_requests_failed_total";
const REFUSED_CALLS: &str = "persia_refused_calls_total";
const LOOKUP_ROWS: &str = "persia_lookup_rows_total";
const PUSH_ROWS: &str = "persia_push_rows_total";
const ROW_CHANGES: &str = "persia_row_changes_total";
const CONNECTIONS: &str = "persia_connections";
const GENERATION: &str = "persia_generation";
const ROWS: &str = "persia_rows";
const PAYLOAD: &str = "persia_payload_bytes";
const MEMORY: &str = "persia_memory_bytes";
const LOG: &str = "persia_log_bytes";
const REQUEST_MEMORY: &str = "persia_request_memory_bytes";
const MEMORY_WAITS: &str = "persia_request_memory_waits_total";
const LOG_UNSYNCED: &str = "persia_log_unsynced_seconds";
const LOG_WAITS: &str = "persia_log_waits_total";
const RECOVERED: &str = "persia_recovered_ratio";
const START: &str = "persia_start_duration_seconds";
const INFO: &str = "persia_process_info";
const RESIDENT: &str = "process_resident_memory_bytes";
/// The upper limits of the buckets, in seconds. They range from a fraction of a loopback call to the checkpoint of a
/// large table.
const BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of concurrent connections. Further connections wait in the socket's backlog.
const MAX_CONNECTIONS: usize = 32;

/// Start to record metrics. Only the first recorder of a process is used. Tests run several servers in one process.
///
/// # Errors
/// None in practice: the buckets are not empty.
pub fn start() -> Result<PrometheusHandle, metrics_exporter_prometheus::BuildError> {
    let recorder = PrometheusBuilder::new().set_buckets(BUCKETS)?.build_recorder();
    let handle = recorder.handle();
    let _ = metrics::set_global_recorder(recorder);
    metrics::describe_histogram!(
        REQUEST_DURATION,
        metrics::Unit::Seconds,
        "Time until a request was answered or cancelled, by method"
    );
    metrics::describe_counter!(REQUESTS_FAILED, "Requests that failed or were cancelled, by method and code");
    metrics::describe_counter!(
        REFUSED_CALLS,
        "Calls with a missing or wrong token, or with a missing or unknown role"
    );
    metrics::describe_counter!(
        LOOKUP_ROWS,
        "Unique ids looked up for training or in an infer job, by outcome"
    );
    metrics::describe_counter!(PUSH_ROWS, "Rows pushed, by outcome");
    metrics::describe_counter!(
        ROW_CHANGES,
        "Rows that pushes inserted, evicted, or found expired, by change"
    );
    metrics::describe_gauge!(CONNECTIONS, "Open connections");
    metrics::describe_gauge!(REQUEST_MEMORY, metrics::Unit::Bytes, "Memory of requests in flight");
    metrics::describe_counter!(MEMORY_WAITS, "Requests that waited for memory that other requests held");
    metrics::describe_gauge!(GENERATION, "Highest generation that began on this server");
    metrics::describe_gauge!(ROWS, "Rows, by table");
    metrics::describe_gauge!(PAYLOAD, metrics::Unit::Bytes, "Size of weights and optimizer state");
    metrics::describe_gauge!(
        LOG,
        metrics::Unit::Bytes,
        "Size of the log of requests since the last checkpoint"
    );
    metrics::describe_gauge!(
        LOG_UNSYNCED,
        metrics::Unit::Seconds,
        "Age of the oldest record of the log that is not durable"
    );
    metrics::describe_counter!(LOG_WAITS, "Requests that waited for the slow disk of the log");
    metrics::describe_gauge!(
        RECOVERED,
        "Fraction of the checkpoint and log that has been read since the start, from 0 to 1"
    );
    metrics::describe_gauge!(MEMORY, metrics::Unit::Bytes, "Memory of rows and indexes");
    metrics::describe_gauge!(
        START,
        metrics::Unit::Seconds,
        "Time from the start of the process until it served, including the recovery of its rows"
    );
    metrics::describe_gauge!(
        INFO,
        "1, with the service, the replica and the version of the process as labels"
    );
    metrics::describe_gauge!(RESIDENT, metrics::Unit::Bytes, "Resident memory of the process");
    Ok(handle)
}

/// Record the service, replica and version of this process.
pub(crate) fn describe_process(service: &'static str, replica: u32) {
    let version = persia_wire::VERSION;
    gauge!(INFO, "service" => service, "replica" => replica.to_string(), "version" => version).set(1.0);
}

/// Record the duration of the start. Call this when the process begins to serve.
pub(crate) fn started(since: Instant) {
    gauge!(START).set(since.elapsed().as_secs_f64());
}

/// Set the gauge of the resident memory, if the system reports it.
fn set_resident_memory() {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse::<u64>().ok());
    if let Some(kib) = kib {
        gauge!(RESIDENT).set((kib * 1024) as f64);
    }
}

/// Count a call that was not authenticated.
pub(crate) fn count_refused() {
    counter!(REFUSED_CALLS).increment(1);
}

/// Times one request. If the caller disconnects, the timer is dropped early, and the request counts as cancelled.
pub(crate) struct Timer {
    method: &'static str,
    since: Instant,
    ended: bool,
}

impl Drop for Timer {
    fn drop(&mut self) {
        histogram!(REQUEST_DURATION, "method" => self.method).record(self.since.elapsed());
        if !self.ended {
            self.count_failure(Code::Cancelled);
        }
    }
}

impl Timer {
    pub(crate) fn start(method: &'static str) -> Self {
        Self { method, since: Instant::now(), ended: false }
    }

    fn count_failure(&self, code: Code) {
        counter!(REQUESTS_FAILED, "method" => self.method, "code" => format!("{code:?}")).increment(1);
    }

    /// Record that a part of the request failed with `code`. The reply of the request describes the failure.
    pub(crate) fn end_partly_failed(mut self, code: Code) {
        self.ended = true;
        self.count_failure(code);
    }

    /// Record how the request ended.
    pub(crate) fn end<T>(mut self, result: Result<T, tonic::Status>) -> Result<T, tonic::Status> {
        self.ended = true;
        if let Err(status) = &result {
            self.count_failure(status.code());
            let (method, message) = (self.method, status.message());
            match status.code() {
                // The caller logs a missing peer once, and not for each request.
                Code::Unavailable | Code::Cancelled => tracing::debug!(method, "request failed: {message}"),
                code => tracing::warn!(method, ?code, "request failed: {message}"),
            }
        }
        result
    }
}

/// Count a request that waited for a slow disk.
pub(crate) fn waited_for_sync() {
    counter!(LOG_WAITS).increment(1);
}

pub(crate) fn looked_up(report: &LookupReport) {
    let LookupReport { hits, initial, missing } = *report;
    for (outcome, rows) in [("hit", hits), ("initial", initial), ("missing", missing)] {
        counter!(LOOKUP_ROWS, "outcome" => outcome).increment(rows);
    }
}

pub(crate) fn pushed(report: &PushReport) {
    let outcomes = [
        ("applied", report.rows_applied),
        ("missing", report.rows_missing),
        ("nonfinite", report.rows_nonfinite),
        ("duplicate", report.rows_duplicate),
    ];
    for (outcome, rows) in outcomes {
        counter!(PUSH_ROWS, "outcome" => outcome).increment(rows);
    }
    let changes = [
        ("inserted", report.rows_inserted),
        ("evicted", report.rows_evicted),
        ("expired", report.rows_expired),
    ];
    for (change, rows) in changes {
        counter!(ROW_CHANGES, "change" => change).increment(rows);
    }
}

/// Counts a connection while it is open.
#[derive(Debug)]
pub(crate) struct Connected(());

impl Connected {
    pub(crate) fn count() -> Self {
        gauge!(CONNECTIONS).increment(1.0);
        Self(())
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        gauge!(CONNECTIONS).decrement(1.0);
    }
}

/// Count a request that waits for memory.
pub(crate) fn count_memory_wait() {
    counter!(MEMORY_WAITS).increment(1);
}

/// Counts the memory of a request while it is in flight.
#[derive(Debug)]
pub(crate) struct RequestMemory(u64);

impl RequestMemory {
    pub(crate) fn count(bytes: u64) -> Self {
        gauge!(REQUEST_MEMORY).increment(bytes as f64);
        Self(bytes)
    }
}

impl Drop for RequestMemory {
    fn drop(&mut self) {
        gauge!(REQUEST_MEMORY).decrement(self.0 as f64);
    }
}

/// Set the gauges of a server. Before it has recovered, only the progress of the recovery is set.
pub fn set_gauges(starting: &StartingNode) {
    let Ok(node) = starting.node() else {
        let (done, total) = starting.progress().bytes();
        gauge!(RECOVERED).set(done as f64 / total.max(1) as f64);
        return;
    };
    gauge!(RECOVERED).set(1.0);
    let Ok(stats) = node.stats() else { return };
    gauge!(GENERATION).set(stats.generation as f64);
    gauge!(PAYLOAD).set(stats.payload_bytes as f64);
    gauge!(MEMORY).set(stats.memory_bytes as f64);
    if let Some(bytes) = node.log_bytes() {
        gauge!(LOG).set(bytes as f64);
    }
    if let Some(age) = node.log_unsynced() {
        gauge!(LOG_UNSYNCED).set(age.as_secs_f64());
    }
    for (table, rows) in node.options().schema.tables.iter().zip(&stats.rows) {
        gauge!(ROWS, "table" => table.name.clone()).set(*rows as f64);
    }
}

/// The content that the HTTP listener serves.
#[derive(Clone)]
pub struct Page {
    /// Renders the metrics.
    pub metrics: PrometheusHandle,
    /// Whether the process serves. `/health` returns 200 if it does, and 503 if it does not.
    pub ready: Arc<AtomicBool>,
    /// Called before each rendering, to set gauges, on a thread that may block.
    pub refresh: Arc<dyn Fn() + Send + Sync>,
    /// Why the process does not serve yet, if there is a known reason.
    pub waits_for: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

/// Answer `/metrics` and `/health` until the process ends.
pub async fn serve(listener: TcpListener, page: Page) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Usually the process has no free file descriptor, so other connections must be closed first.
                tracing::warn!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let page = page.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let answer = service_fn(|request| answer(request, page.clone()));
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
            if let Err(error) = http.serve_connection(TokioIo::new(stream), answer).await {
                tracing::debug!(%error, "a connection for metrics failed");
            }
        });
    }
}

async fn answer(request: Request<Incoming>, page: Page) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => {
            let refresh = Arc::clone(&page.refresh);
            let gauges = move || {
                set_resident_memory();
                refresh();
            };
            match tokio::task::spawn_blocking(gauges).await {
                Ok(()) => (StatusCode::OK, page.metrics.render()),
                Err(error) => {
                    let text = format!("cannot collect the metrics: {error}\n");
                    (StatusCode::INTERNAL_SERVER_ERROR, text)
                }
            }
        }
        (&Method::GET, "/health") if page.ready.load(Ordering::Relaxed) => {
            (StatusCode::OK, "serving\n".into())
        }
        (&Method::GET, "/health") => {
            let why = (page.waits_for)().unwrap_or_else(|| "not ready".into());
            (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"))
        }
        _ => (StatusCode::NOT_FOUND, "not found; see /metrics and /health\n".into()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_request_is_timed_and_counted() {
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            drop(Timer::start("push"));
            Timer::start("lookup").end(Ok(())).unwrap();
        });
        let text = recorder.handle().render();
        assert!(text.contains("code=\"Cancelled\"") && !text.contains("method=\"lookup\",code"), "{text}");
        for method in ["push", "lookup"] {
            let series = format!("persia_request_duration_seconds_count{{method=\"{method}\"}} 1");
            assert!(text.contains(&series), "{text}");
        }
    }
}
