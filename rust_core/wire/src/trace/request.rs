//! [`RequestSpan`]: the span of a request at a server or middleware, and the spans of its parts.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanId, SpanKind};
use persia_types::token::Token;
use tonic::metadata::MetadataMap;

use super::context::Context;
use super::exporter::{Ended, Exporter, current};
use crate::proto;

/// A span that is recorded when it is dropped. The span counts as cancelled unless [`Self::note`] or [`Self::end`] has
/// recorded its result. If its request is not traced, no span is recorded.
#[derive(Default)]
pub struct RequestSpan(Option<Box<Open>>);

struct Open {
    exporter: Arc<Exporter>,
    context: Context,
    parent: SpanId,
    remote: bool,
    name: &'static str,
    kind: SpanKind,
    start: SystemTime,
    since: Instant,
    token: Option<Token>,
    more: Vec<KeyValue>,
    error: Option<String>,
}

impl RequestSpan {
    /// The span of a request with these headers. The request is traced if the caller traces it and this process has an
    /// exporter.
    pub fn of(metadata: &MetadataMap, name: &'static str) -> Self {
        let traced = Context::of(metadata).and_then(|caller| Some((caller, current()?)));
        Self(traced.map(|(caller, exporter)| Open::new(exporter, caller, true, name, SpanKind::Server)))
    }

    /// Begin the span of a part of the request.
    pub fn part(&self, name: &'static str) -> Self {
        self.below(name, SpanKind::Internal)
    }

    /// Begin the span of a call to another process for this request.
    pub fn call(&self, name: &'static str, server: usize) -> Self {
        let mut call = self.below(name, SpanKind::Client);
        if let Some(open) = &mut call.0 {
            open.more.push(KeyValue::new("persia.server", server as i64));
        }
        call
    }

    fn below(&self, name: &'static str, kind: SpanKind) -> Self {
        Self(self.0.as_ref().map(|open| {
            let mut below = Open::new(Arc::clone(&open.exporter), open.context, false, name, kind);
            below.token = open.token;
            below
        }))
    }

    /// Set the token of the request. Parts that begin later also have this token.
    pub fn set_token(&mut self, token: Option<proto::Token>) {
        if let Some(open) = &mut self.0 {
            open.token = token.map(Token::from);
        }
    }

    /// Make this the caller's span in the headers of another request.
    pub fn inject(&self, metadata: &mut MetadataMap) {
        if let Some(open) = &self.0 {
            open.context.inject(metadata);
        }
    }

    /// Record how the span ended.
    pub fn note<T, E: Display>(&mut self, result: &Result<T, E>) {
        if let Some(open) = &mut self.0 {
            open.error = result.as_ref().err().map(E::to_string);
        }
    }

    /// Run `work` within this span, and record how it ended.
    pub async fn around<T, E: Display>(self, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        self.end(work.await)
    }

    /// End the span now, and record the result.
    pub fn end<T, E: Display>(mut self, result: Result<T, E>) -> Result<T, E> {
        self.note(&result);
        result
    }
}

impl Open {
    fn new(
        exporter: Arc<Exporter>,
        above: Context,
        remote: bool,
        name: &'static str,
        kind: SpanKind,
    ) -> Box<Self> {
        let context = Context { span: exporter.ids.span(), ..above };
        Box::new(Self {
            exporter,
            context,
            parent: above.span,
            remote,
            name,
            kind,
            start: SystemTime::now(),
            since: Instant::now(),
            token: None,
            more: Vec::new(),
            error: Some("it was cancelled".into()), // unless `note` is called
        })
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let Some(open) = self.0.take() else { return };
        let Open { exporter, context, parent, remote, name, kind, start, since, token, more, error } = *open;
        let end = start + since.elapsed();
        exporter.record(Ended { context, parent, remote, name, kind, start, end, token, more, error });
    }
}
