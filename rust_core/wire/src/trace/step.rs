//! The spans of a rank: the step, the calls of its training loop, and the stages of the engine's threads.

use std::time::{Instant, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanId, SpanKind};
use persia_types::token::Token;
use persia_types::trace::{self, Recorder, Stage};
use tonic::metadata::MetadataMap;

use super::exporter::{Ended, current, time_of};

/// A call of a training loop.
#[derive(Debug, Clone)]
pub struct StepCall {
    /// The name of the call, such as `forward`.
    pub name: &'static str,
    /// The time at which it began.
    pub start: SystemTime,
    /// The time at which it ended.
    pub end: SystemTime,
    /// The index of the call that contains this one, if any.
    pub parent: Option<usize>,
    /// The name of the thread, such as `loop`.
    pub thread: &'static str,
    /// The error that ended the call, if any.
    pub error: Option<String>,
}

/// Write the span of the look-up or push to the header of a request, if the step is sampled.
pub fn inject_step(metadata: &mut MetadataMap, token: Token, stage: Stage) {
    if let Some(exporter) = current().filter(|exporter| exporter.samples(token)) {
        exporter.ids.stage(token, stage).inject(metadata);
    }
}

/// Record a step with the calls of its training loop. Without an exporter, this does nothing.
pub fn record_step(token: Token, start: SystemTime, end: SystemTime, calls: Vec<StepCall>) {
    let Some(exporter) = current() else { return };
    let step = exporter.ids.step(token);
    let spans: Vec<SpanId> = calls.iter().map(|_| exporter.ids.span()).collect();
    let span = |context, parent, name, start, end, more, error| Ended {
        context,
        parent,
        remote: false,
        name,
        kind: SpanKind::Internal,
        start,
        end,
        token: Some(token),
        more,
        error,
    };
    exporter.record(span(step, SpanId::INVALID, "step", start, end, Vec::new(), None));
    for (call, id) in calls.into_iter().zip(&spans) {
        let parent = call.parent.and_then(|index| spans.get(index)).unwrap_or(&step.span);
        let context = super::context::Context { span: *id, ..step };
        let more = vec![KeyValue::new("thread.name", call.thread)];
        exporter.record(span(context, *parent, call.name, call.start, call.end, more, call.error));
    }
}

/// Install the recorder that receives the times of the engine's threads.
pub(super) fn install() {
    trace::install(Box::new(StageRecorder));
}

/// Records stages with the current exporter.
struct StageRecorder;

impl Recorder for StageRecorder {
    fn samples(&self, token: Token) -> bool {
        current().is_some_and(|exporter| exporter.samples(token))
    }

    fn record(&self, token: Token, stage: Stage, start: Instant, end: Instant, failed: bool) {
        let Some(exporter) = current() else { return };
        let (name, thread, kind) = match stage {
            Stage::Plan => ("plan", "look-up", SpanKind::Internal),
            Stage::StalenessWait => ("staleness wait", "look-up", SpanKind::Internal),
            Stage::LookUp => ("look-up", "look-up", SpanKind::Client),
            Stage::Pool => ("pool", "look-up", SpanKind::Internal),
            Stage::SegmentSum => ("segment sum", "push", SpanKind::Internal),
            Stage::Push => ("push", "push", SpanKind::Client),
        };
        let start = time_of(start);
        exporter.record(Ended {
            context: exporter.ids.stage(token, stage),
            parent: exporter.ids.step(token).span,
            remote: false,
            name,
            kind,
            start,
            end: time_of(end).max(start),
            token: Some(token),
            more: vec![KeyValue::new("thread.name", thread)],
            error: failed.then(|| "it failed; the log has the error".to_owned()),
        });
    }
}
