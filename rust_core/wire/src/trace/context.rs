//! [`Context`]: the identity of a span, as in the header `traceparent`; [`Ids`]: the ids of spans.

use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use opentelemetry::trace::{SpanId, TraceId};
use persia_types::token::Token;
use persia_types::trace::Stage;
use sha2::{Digest, Sha256};
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

/// The name of the W3C Trace Context header.
const HEADER: &str = "traceparent";
/// The length of the header's value in version 00.
const LENGTH: usize = 55;
/// The flag of a sampled trace.
const SAMPLED: u8 = 1;

/// A span and its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
}

impl Context {
    /// The caller's span, if the caller traces this request.
    pub(super) fn of(metadata: &MetadataMap) -> Option<Self> {
        Self::parse(metadata.get(HEADER)?.to_str().ok()?)
    }

    /// Make this the caller's span in the metadata of a request.
    pub(super) fn inject(self, metadata: &mut MetadataMap) {
        let text = format!("00-{:032x}-{:016x}-{SAMPLED:02x}", self.trace, self.span);
        if let Ok(value) = AsciiMetadataValue::try_from(text) {
            metadata.insert(HEADER, value);
        }
    }

    /// Parse `00-TRACE-SPAN-FLAGS`. Later versions may append fields. None if the trace is not sampled.
    fn parse(text: &str) -> Option<Self> {
        let known = text.get(..LENGTH)?;
        let rest = &text[LENGTH..];
        let mut fields = known.split('-');
        let (version, trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let lengths = [version.len(), trace.len(), span.len(), flags.len()] == [2, 32, 16, 2];
        let lower = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-');
        let ends = rest.is_empty() || (version != "00" && rest.starts_with('-'));
        if !lengths || !ends || version == "ff" || !known.bytes().all(lower) {
            return None;
        }
        let context = Self { trace: TraceId::from_hex(trace).ok()?, span: SpanId::from_hex(span).ok()? };
        let valid = context.trace != TraceId::INVALID && context.span != SpanId::INVALID;
        let sampled = u8::from_str_radix(flags, 16).ok()? & SAMPLED == SAMPLED;
        (valid && sampled).then_some(context)
    }
}

/// Generates ids that no other process generates.
pub(super) struct Ids {
    salt: [u8; 32],
    next: AtomicU64,
}

impl Ids {
    pub(super) fn new() -> Self {
        let random = std::hash::RandomState::new().build_hasher().finish();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut hash = Sha256::new();
        hash.update(random.to_le_bytes());
        hash.update(now.as_nanos().to_le_bytes());
        // A forked process has the same random numbers as its parent.
        hash.update(std::process::id().to_le_bytes());
        Self { salt: hash.finalize().into(), next: AtomicU64::new(1) }
    }

    /// The id of a new span.
    pub(super) fn span(&self) -> SpanId {
        let mut hash = Sha256::new();
        hash.update(self.salt);
        hash.update(self.next.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        SpanId::from_bytes(first(&hash.finalize()))
    }

    /// The span of the step of this token. It is equal for equal tokens, as long as `self` is the same.
    pub(super) fn step(&self, token: Token) -> Context {
        let mut hash = Sha256::new();
        hash.update(self.salt);
        for number in [token.job.0, token.generation, token.rank.into(), token.seq] {
            hash.update(number.to_le_bytes());
        }
        let digest = hash.finalize();
        // The id is never 0, and its lowest bits are free for the numbers of the look-up and the push.
        let span = (u64::from_be_bytes(first(&digest[16..])) & !0b11) | (1 << 63);
        Context { trace: TraceId::from_bytes(first(&digest)), span: SpanId::from_bytes(span.to_be_bytes()) }
    }

    /// The span of a stage of the step. For the look-up and the push it is always the same, because requests
    /// refer to it.
    pub(super) fn stage(&self, token: Token, stage: Stage) -> Context {
        let step = self.step(token);
        let derived = |number: u64| {
            let span = u64::from_be_bytes(step.span.to_bytes()) | number;
            SpanId::from_bytes(span.to_be_bytes())
        };
        let span = match stage {
            Stage::LookUp => derived(1),
            Stage::Push => derived(2),
            Stage::Plan | Stage::StalenessWait | Stage::Pool | Stage::SegmentSum => self.span(),
        };
        Context { span, ..step }
    }
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut found = [0; N];
    found.copy_from_slice(&bytes[..N]);
    found
}

#[cfg(test)]
mod tests {
    use persia_types::JobId;

    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn token(seq: u64) -> Token {
        Token { job: JobId(7), generation: 3, rank: 1, seq }
    }

    #[test]
    fn a_header_is_read_as_it_is_written() {
        let context = Context::parse(GOOD).unwrap();
        let mut metadata = MetadataMap::new();
        context.inject(&mut metadata);
        assert_eq!(metadata.get(HEADER).unwrap().to_str().unwrap(), GOOD);
        assert_eq!(Context::of(&metadata), Some(context));
        assert_eq!(Context::parse(&GOOD.replace("00-4", "cc-4").replace("-01", "-03-more")), Some(context));
    }

    #[test]
    fn an_unsampled_or_malformed_header_traces_nothing() {
        let zero_trace = GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32));
        let zero_span = GOOD.replace("00f067aa0ba902b7", &"0".repeat(16));
        let bad = [
            "",
            "00",
            &GOOD.replace("-01", "-00"),
            &GOOD.replace("00-4", "ff-4"),
            &GOOD.replace("4b", "4B"),
            &GOOD.replace("4b", "+4"),
            &GOOD.replace("-00f0", "000f0"),
            &format!("{GOOD}-more"),
            &format!("{GOOD}0"),
            &zero_trace,
            &zero_span,
            "é0-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ];
        for text in bad {
            assert_eq!(Context::parse(text), None, "{text}");
        }
    }

    #[test]
    fn ids_of_a_step_follow_from_its_token() {
        let ids = Ids::new();
        let step = ids.step(token(5));
        assert_eq!(ids.step(token(5)), step);
        assert_ne!(ids.step(token(6)).trace, step.trace);
        assert_ne!(Ids::new().step(token(5)).trace, step.trace, "another run has other traces");
        let look_up = ids.stage(token(5), Stage::LookUp);
        assert_eq!(ids.stage(token(5), Stage::LookUp), look_up);
        let push = ids.stage(token(5), Stage::Push);
        let plan = ids.stage(token(5), Stage::Plan);
        assert!([look_up, push, plan].iter().all(|each| each.trace == step.trace && each.span != step.span));
        assert!(look_up.span != push.span && push.span != plan.span);
        assert_ne!(ids.stage(token(5), Stage::Plan).span, plan.span);
    }
}
