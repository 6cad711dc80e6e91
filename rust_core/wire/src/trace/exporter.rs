//! The exporter of this process: a bounded queue, and the thread that sends spans in batches.
//!
//! Recording a span never waits. A span is lost if the queue is full or the collector does not accept it. The first
//! loss is logged, and the number of lost spans is logged at the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter as OtlpExporter, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks, SpanProcessor,
};
use parking_lot::{Mutex, RwLock};
use persia_types::token::Token;
use tokio::runtime::{Builder, Runtime};

use super::context::{Context, Ids};
use super::settings::{BadTraceSettings, TraceSettings};
use super::step;
use crate::VERSION;

/// The maximum number of spans that wait to be sent. They take about 1 MiB.
const QUEUE: usize = 2048;
/// The time limit for sending a batch.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limits for sending the remaining spans at the end. The first one applies if the collector accepted the
/// last batch, and the second one if it did not.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
const LAST_TRY: Duration = Duration::from_secs(1);
/// The number of times that [`time_of`] reads the monotonic and the wall clock to find their difference.
const READINGS: usize = 3;

static EXPORTER: RwLock<Option<Arc<Exporter>>> = RwLock::new(None);

/// The description of the process that records spans.
#[derive(Debug, Clone)]
pub struct Process {
    /// The service, such as `persia-server`.
    pub service: &'static str,
    /// The index of the replica, or the rank.
    pub replica: u32,
    /// The name of the run or job, which logs contain as `run_id`.
    pub run_id: String,
    /// A rank samples one of this many steps; 0 means none. It is 0 for other processes.
    pub every: u64,
}

/// Start the exporter of this process if an endpoint is set and tracing is not disabled. Returns whether it
/// was started. A previous exporter is stopped as by [`stop`].
///
/// # Errors
/// A variable has an invalid value, or the exporter cannot be started.
pub fn start(process: Process) -> Result<bool, BadTraceSettings> {
    let Some(settings) = TraceSettings::from_env()? else { return Ok(false) };
    let (service, every) = (process.service, process.every);
    let exporter = Exporter::new(&settings, process)?;
    let previous = EXPORTER.write().replace(Arc::new(exporter));
    if let Some(previous) = previous {
        previous.end();
    }
    if every > 0 {
        step::install();
    }
    let endpoint = settings.endpoint;
    tracing::info!(endpoint, service, every_steps = every, "sending spans of traced steps");
    Ok(true)
}

/// Send the waiting spans, for at most 5 s, and record no more spans. This blocks, so do not call it on a thread
/// that runs a tokio runtime.
pub fn stop() {
    let exporter = EXPORTER.write().take();
    if let Some(exporter) = exporter {
        exporter.end();
    }
}

/// The exporter, if it was started.
pub(super) fn current() -> Option<Arc<Exporter>> {
    EXPORTER.read().clone()
}

/// A span that has ended.
pub(super) struct Ended {
    pub(super) context: Context,
    /// The parent span; [`SpanId::INVALID`] for the first span of a trace.
    pub(super) parent: SpanId,
    /// Whether the parent belongs to another process.
    pub(super) remote: bool,
    pub(super) name: &'static str,
    pub(super) kind: SpanKind,
    pub(super) start: SystemTime,
    pub(super) end: SystemTime,
    pub(super) token: Option<Token>,
    pub(super) more: Vec<KeyValue>,
    /// The error that ended the span, if any.
    pub(super) error: Option<String>,
}

/// Queues spans and sends them.
pub(super) struct Exporter {
    pub(super) ids: Ids,
    /// The process samples one of this many steps; 0 means none.
    pub(super) every: u64,
    run_id: String,
    scope: InstrumentationScope,
    queue: Arc<Queue>,
    processor: BatchSpanProcessor,
    runtime: Mutex<Option<Runtime>>,
}

impl Exporter {
    fn new(settings: &TraceSettings, process: Process) -> Result<Self, BadTraceSettings> {
        let connection = settings.connection()?.timeout(SEND_TIMEOUT);
        let failed = |what: String| settings.unusable(what);
        let threads =
            Builder::new_multi_thread().worker_threads(1).thread_name("persia-trace").enable_all().build();
        let runtime = threads.map_err(|error| {
            failed(format!("cannot send spans, because no thread can be started: {error}"))
        })?;
        let sender = {
            let _inside = runtime.enter(); // the connection runs on its thread
            OtlpExporter::builder().with_tonic().with_channel(connection.connect_lazy()).build()
        };
        let sender = match sender {
            Ok(sender) => sender,
            Err(error) => {
                runtime.shutdown_background(); // dropping it would block the caller's thread
                return Err(failed(error.to_string()));
            }
        };
        let queue = Arc::new(Queue::new(format!("{}={}", settings.variable, settings.endpoint)));
        let config = BatchConfigBuilder::default().with_max_queue_size(QUEUE).build();
        let delivery = Delivery { sender, queue: Arc::clone(&queue) };
        let mut processor = BatchSpanProcessor::builder(delivery).with_batch_config(config).build();
        processor.set_resource(&resource(&process));
        Ok(Self {
            ids: Ids::new(),
            every: process.every,
            run_id: process.run_id,
            scope: InstrumentationScope::builder("persia").with_version(VERSION).build(),
            queue,
            processor,
            runtime: Mutex::new(Some(runtime)),
        })
    }

    /// Whether the step of this token is sampled.
    pub(super) fn samples(&self, token: Token) -> bool {
        self.every > 0 && token.seq.is_multiple_of(self.every)
    }

    /// Queue a span, or count it as lost.
    pub(super) fn record(&self, span: Ended) {
        if !self.queue.enter() {
            return;
        }
        let mut attributes = vec![KeyValue::new("persia.run_id", self.run_id.clone())];
        if let Some(token) = span.token {
            attributes.push(KeyValue::new("persia.token", token.to_string()));
            attributes.push(KeyValue::new("persia.step", token.seq as i64));
            attributes.push(KeyValue::new("persia.rank", i64::from(token.rank)));
        }
        attributes.extend(span.more);
        let Context { trace, span: id } = span.context;
        self.processor.on_end(SpanData {
            span_context: SpanContext::new(trace, id, TraceFlags::SAMPLED, false, TraceState::default()),
            parent_span_id: span.parent,
            parent_span_is_remote: span.remote,
            span_kind: span.kind,
            name: span.name.into(),
            start_time: span.start,
            end_time: span.end.max(span.start),
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: span.error.map_or(Status::Unset, Status::error),
            instrumentation_scope: self.scope.clone(),
        });
    }

    fn end(&self) {
        let limit = if self.queue.delivers() { FLUSH_TIMEOUT } else { LAST_TRY };
        // Spans that are not sent by then are counted below.
        let _ = self.processor.shutdown_with_timeout(limit);
        self.queue.end();
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }
}

/// The attributes of this process. `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` take precedence over Persia's
/// values.
fn resource(process: &Process) -> Resource {
    let own = [
        KeyValue::new("service.name", process.service),
        KeyValue::new("service.instance.id", format!("{}-{}", process.service, process.replica)),
        KeyValue::new("service.version", VERSION),
        KeyValue::new("host.name", crate::logs::node()),
        KeyValue::new("process.pid", i64::from(std::process::id())),
        KeyValue::new("persia.service", process.service),
        KeyValue::new("persia.replica", i64::from(process.replica)),
    ];
    let given =
        Resource::builder_empty().with_attributes(own).with_detector(Box::new(EnvResourceDetector::new()));
    let name = std::env::var("OTEL_SERVICE_NAME").ok().filter(|name| !name.trim().is_empty());
    name.into_iter().fold(given, |given, name| given.with_service_name(name)).build()
}

/// Counts the spans that wait and the spans that were lost.
#[derive(Debug)]
struct Queue {
    /// The collector, for messages: the variable that sets its endpoint, with the value.
    receiver: String,
    waiting: AtomicUsize,
    lost: AtomicU64,
    warned: AtomicBool,
    /// Whether the last batch was accepted.
    delivers: AtomicBool,
}

impl Queue {
    fn new(receiver: String) -> Self {
        Self {
            receiver,
            waiting: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            delivers: AtomicBool::new(true),
        }
    }

    /// Reserve space for one span. Returns false if the queue is full.
    fn enter(&self) -> bool {
        if self.waiting.fetch_add(1, Ordering::Relaxed) < QUEUE {
            return true;
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.lose(1, &format_args!("it accepts spans too slowly, and {QUEUE} spans wait to be sent"));
        false
    }

    /// Record that a batch was sent, or the error.
    fn leave(&self, spans: usize, sent: &OTelSdkResult) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        self.delivers.store(sent.is_ok(), Ordering::Relaxed);
        if let Err(error) = sent {
            self.lose(spans, error);
        }
    }

    fn lose(&self, spans: usize, why: &dyn std::fmt::Display) {
        self.lost.fetch_add(spans as u64, Ordering::Relaxed);
        if !self.warned.swap(true, Ordering::Relaxed) {
            let receiver = &self.receiver;
            tracing::warn!(
                "spans are lost on the way to {receiver}: {why}; check that an OTLP receiver for gRPC accepts spans \
                 there. Nothing else is affected, and further losses are only counted"
            );
        }
    }

    fn delivers(&self) -> bool {
        self.delivers.load(Ordering::Relaxed)
    }

    fn end(&self) {
        let left = self.waiting.load(Ordering::Relaxed);
        if left > 0 {
            self.lose(left, &"no response before the end of the process");
        }
        let lost = self.lost.load(Ordering::Relaxed);
        if lost > 0 {
            tracing::warn!(lost, "spans were lost; the traces of this process are incomplete");
        }
    }
}

/// Sends batches, and counts the spans that are not accepted.
#[derive(Debug)]
struct Delivery {
    sender: OtlpExporter,
    queue: Arc<Queue>,
}

impl SpanExporter for Delivery {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let sent = self.sender.export(batch).await;
        self.queue.leave(spans, &sent);
        sent
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.sender.set_resource(resource);
    }
}

/// Convert an instant to the time of day. An interruption between the readings of the two clocks would shift the
/// result, so the closest pair of several readings is used.
pub(super) fn time_of(instant: Instant) -> SystemTime {
    let readings = (0..READINGS).map(|_| {
        let (before, today) = (Instant::now(), SystemTime::now());
        (before.elapsed(), before, today)
    });
    let Some((_, now, today)) = readings.min_by_key(|(apart, ..)| *apart) else { return SystemTime::now() };
    match now.checked_duration_since(instant) {
        Some(ago) => today.checked_sub(ago).unwrap_or(today),
        None => today + instant.saturating_duration_since(now),
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_sdk::error::OTelSdkError;

    use super::*;

    #[test]
    fn instants_keep_their_order_and_distance_as_times_of_day() {
        let early = Instant::now();
        let late = early + Duration::from_secs(3);
        let apart = time_of(late).duration_since(time_of(early)).unwrap();
        assert!((2_900..3_100).contains(&apart.as_millis()), "{apart:?}");
        assert!(time_of(early) <= SystemTime::now());
    }

    #[test]
    fn a_full_queue_loses_spans_and_counts_them() {
        let queue = Queue::new("http://collector:4317".into());
        assert_eq!((0..QUEUE + 3).filter(|_| queue.enter()).count(), QUEUE);
        assert_eq!(queue.lost.load(Ordering::Relaxed), 3);
        queue.leave(512, &Ok(()));
        assert!(queue.enter() && queue.delivers());
        queue.leave(2, &Err(OTelSdkError::InternalFailure("refused".into())));
        assert!(!queue.delivers());
        assert_eq!(queue.lost.load(Ordering::Relaxed), 5);
        queue.end();
        assert_eq!(queue.lost.load(Ordering::Relaxed) as usize, 5 + QUEUE - 512 + 1 - 2);
    }
}
