//! [`TablesError`] as gRPC status and back: the caller gets the very variant, fields included.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use persia_types::{JobId, TablesError, Token};
use prost::Message;
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};

use crate::proto::Failure;

/// Bytes a text may have in a status, which travels in HTTP headers of limited size.
const MAX_TEXT: usize = 2048;

/// What a middleware says of a server that knows of no run: it names the server, which [`TablesError::NotBegun`] can't.
/// A client whose run has not begun takes it for `NotBegun`.
pub const FORGOTTEN: &str = "it was started again and knows nothing of the run";

/// Fields of every variant as JSON, in [`Failure::fields`]; the tag is [`Failure::kind`].
#[derive(Serialize, Deserialize)]
enum Fields {
    StaleGeneration { job: JobId, generation: u64, rank: u32, seq: u64, current: u64 },
    NotBegun,
    BadRun { what: String },
    BadShape { what: String },
    TooManyIds { ids: usize, max: usize },
    BadTable { table: usize, tables: usize, what: String },
    NoOptimizer,
    OutOfMemory { table: String, bytes: u64 },
    Corrupt { path: PathBuf, what: String },
    Foreign { path: PathBuf, what: String },
    Io { path: PathBuf, code: Option<i32>, text: String },
    WrongShard { peer: String, start: usize, end: usize, shard: usize },
    Incompatible { peer: String, what: String },
    Refused { peer: String, what: String },
    Lost { peer: String, what: String },
    Timeout { peer: String, what: String },
    Unreachable { peer: String, what: String },
}

/// The text, cut where it is too long for a header.
fn short(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_owned();
    }
    let mut end = MAX_TEXT;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

impl From<&TablesError> for Fields {
    fn from(error: &TablesError) -> Self {
        use TablesError as E;
        let with = |peer: &str, what: &str| (peer.to_owned(), short(what));
        match error {
            E::StaleGeneration { token: Token { job, generation, rank, seq }, current } => {
                Self::StaleGeneration {
                    job: *job,
                    generation: *generation,
                    rank: *rank,
                    seq: *seq,
                    current: *current,
                }
            }
            E::NotBegun => Self::NotBegun,
            E::BadRun { what } => Self::BadRun { what: short(what) },
            E::BadShape { what } => Self::BadShape { what: short(what) },
            E::TooManyIds { ids, max } => Self::TooManyIds { ids: *ids, max: *max },
            E::BadTable { table, tables, what } => {
                Self::BadTable { table: *table, tables: *tables, what: (*what).to_owned() }
            }
            E::NoOptimizer => Self::NoOptimizer,
            E::OutOfMemory { table, bytes } => Self::OutOfMemory { table: table.clone(), bytes: *bytes },
            E::Corrupt { path, what } => Self::Corrupt { path: path.clone(), what: short(what) },
            E::Foreign { path, what } => Self::Foreign { path: path.clone(), what: short(what) },
            E::Io { path, source } => {
                Self::Io { path: path.clone(), code: source.raw_os_error(), text: short(&source.to_string()) }
            }
            E::WrongShard { peer, held, shard } => {
                Self::WrongShard { peer: peer.clone(), start: held.start, end: held.end, shard: *shard }
            }
            E::Incompatible { peer, what } => {
                let (peer, what) = with(peer, what);
                Self::Incompatible { peer, what }
            }
            E::Refused { peer, what } => {
                let (peer, what) = with(peer, what);
                Self::Refused { peer, what }
            }
            E::Lost { peer, what } => {
                let (peer, what) = with(peer, what);
                Self::Lost { peer, what }
            }
            E::Timeout { peer, what } => {
                let (peer, what) = with(peer, what);
                Self::Timeout { peer, what }
            }
            E::Unreachable { peer, what } => {
                let (peer, what) = with(peer, what);
                Self::Unreachable { peer, what }
            }
        }
    }
}

impl From<Fields> for TablesError {
    fn from(fields: Fields) -> Self {
        match fields {
            Fields::StaleGeneration { job, generation, rank, seq, current } => {
                Self::StaleGeneration { token: Token { job, generation, rank, seq }, current }
            }
            Fields::NotBegun => Self::NotBegun,
            Fields::BadRun { what } => Self::BadRun { what },
            Fields::BadShape { what } => Self::BadShape { what },
            Fields::TooManyIds { ids, max } => Self::TooManyIds { ids, max },
            Fields::BadTable { table, tables, what } => {
                let what = if what == "unknown" { "unknown" } else { "named twice in one request" };
                Self::BadTable { table, tables, what }
            }
            Fields::NoOptimizer => Self::NoOptimizer,
            Fields::OutOfMemory { table, bytes } => Self::OutOfMemory { table, bytes },
            Fields::Corrupt { path, what } => Self::Corrupt { path, what },
            Fields::Foreign { path, what } => Self::Foreign { path, what },
            Fields::Io { path, code, text } => {
                let source = code.map_or_else(|| io::Error::other(text), io::Error::from_raw_os_error);
                Self::Io { path, source }
            }
            Fields::WrongShard { peer, start, end, shard } => {
                Self::WrongShard { peer, held: start..end, shard }
            }
            Fields::Incompatible { peer, what } => Self::Incompatible { peer, what },
            Fields::Refused { peer, what } => Self::Refused { peer, what },
            Fields::Lost { peer, what } => Self::Lost { peer, what },
            Fields::Timeout { peer, what } => Self::Timeout { peer, what },
            Fields::Unreachable { peer, what } => Self::Unreachable { peer, what },
        }
    }
}

/// An error as part of a message, such as a server's outcome in a `PushReply`.
pub fn to_failure(error: &TablesError) -> Failure {
    // {"Variant": {fields}} or "Variant": the tag says the kind, a second time and readable.
    let fields = serde_json::to_value(Fields::from(error)).unwrap_or_default();
    let kind = match &fields {
        serde_json::Value::Object(tagged) => tagged.keys().next().cloned().unwrap_or_default(),
        tag => tag.as_str().unwrap_or_default().to_owned(),
    };
    Failure { kind, message: short(&error.to_string()), fields: fields.to_string() }
}

/// The error that [`to_failure`] was given. One of a kind that this version does not know is `Incompatible`.
pub fn from_failure(peer: &str, failure: &Failure) -> TablesError {
    match serde_json::from_str::<Fields>(&failure.fields) {
        Ok(fields) => fields.into(),
        Err(_) => TablesError::Incompatible {
            peer: peer.to_owned(),
            what: format!("it sent an error of unknown kind {:?}: {}", failure.kind, failure.message),
        },
    }
}

/// The status that tells a caller of this error.
pub fn to_status(error: &TablesError) -> Status {
    use TablesError as E;
    let code = match error {
        E::StaleGeneration { .. } | E::NotBegun | E::NoOptimizer => Code::FailedPrecondition,
        E::Foreign { .. } | E::WrongShard { .. } | E::Incompatible { .. } => Code::FailedPrecondition,
        E::BadRun { .. } | E::BadShape { .. } | E::TooManyIds { .. } | E::BadTable { .. } => {
            Code::InvalidArgument
        }
        E::OutOfMemory { .. } => Code::ResourceExhausted,
        E::Corrupt { .. } => Code::DataLoss,
        E::Io { .. } => Code::Internal,
        E::Refused { .. } => Code::Unauthenticated,
        E::Lost { .. } => Code::Aborted,
        E::Timeout { .. } => Code::DeadlineExceeded,
        E::Unreachable { .. } => Code::Unavailable,
    };
    let failure = to_failure(error);
    let details = failure.encode_to_vec();
    Status::with_details(code, failure.message, details.into())
}

fn failure_of(status: &Status) -> Option<Failure> {
    let details = status.details();
    if details.is_empty() { None } else { Failure::decode(details).ok() }
}

/// The status's message and that of everything behind it.
pub fn describe(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = status.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = if text.is_empty() { more } else { format!("{text}: {more}") };
        }
        cause = error.source();
    }
    if text.is_empty() { status.code().description().to_owned() } else { text }
}

/// The error a status of `peer` stands for.
pub fn from_status(peer: &str, status: &Status) -> TablesError {
    if let Some(failure) = failure_of(status) {
        return from_failure(peer, &failure);
    }
    let (peer, what) = (peer.to_owned(), describe(status));
    if is_certificate_trouble(&what) {
        return TablesError::Refused { peer, what: format!("TLS: {what}") };
    }
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => TablesError::Refused { peer, what },
        Code::DeadlineExceeded => TablesError::Timeout { peer, what },
        Code::Unimplemented => {
            TablesError::Incompatible { peer, what: format!("it does not offer this call ({what})") }
        }
        Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted => TablesError::BadShape { what },
        _ => TablesError::Unreachable { peer, what },
    }
}

/// Whether the peer never got as far as judging the request, so that asking again, or another one, may help.
pub fn is_transient(status: &Status) -> bool {
    match failure_of(status) {
        Some(failure) => is_transient_failure(&failure),
        None => {
            let other = matches!(
                from_status("", status),
                TablesError::Unreachable { .. } | TablesError::Timeout { .. }
            );
            other || status.code() == Code::DataLoss
        }
    }
}

/// As [`is_transient`], for one server's outcome.
pub fn is_transient_failure(failure: &Failure) -> bool {
    matches!(from_failure("", failure), TablesError::Unreachable { .. } | TablesError::Timeout { .. })
}

/// rustls tells of certificates and of peers without TLS in words only, once tonic has wrapped it.
fn is_certificate_trouble(what: &str) -> bool {
    what.contains("certificate") || what.contains("InvalidContentType")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_variant() -> Vec<TablesError> {
        use TablesError as E;
        let token = Token { job: JobId::from_name("job"), generation: 3, rank: 1, seq: u64::MAX };
        let (peer, what) = (|| "server 1 of 2 at host:8888".to_owned(), || "what \"it\" is".to_owned());
        vec![
            E::StaleGeneration { token, current: 4 },
            E::NotBegun,
            E::BadRun { what: what() },
            E::BadShape { what: what() },
            E::TooManyIds { ids: 3, max: 2 },
            E::BadTable { table: 2, tables: 2, what: "unknown" },
            E::BadTable { table: 0, tables: 2, what: "named twice in one request" },
            E::NoOptimizer,
            E::OutOfMemory { table: "user".into(), bytes: 1 << 40 },
            E::Corrupt { path: "shard-003.arrow".into(), what: what() },
            E::Foreign { path: "shard-003.arrow".into(), what: what() },
            E::Io { path: "dir".into(), source: io::Error::from_raw_os_error(28) },
            E::Io { path: "dir".into(), source: io::Error::other("a directory") },
            E::WrongShard { peer: peer(), held: 0..128, shard: 200 },
            E::Incompatible { peer: peer(), what: what() },
            E::Refused { peer: peer(), what: what() },
            E::Lost { peer: peer(), what: what() },
            E::Timeout { peer: peer(), what: what() },
            E::Unreachable { peer: peer(), what: what() },
        ]
    }

    #[test]
    fn every_error_comes_back_as_it_was() {
        for error in every_variant() {
            let back = from_status("peer", &to_status(&error));
            assert_eq!(format!("{back:?}"), format!("{error:?}"));
            assert_eq!(back.to_string(), error.to_string());
            let failure = to_failure(&error);
            assert_eq!(format!("{:?}", from_failure("peer", &failure)), format!("{error:?}"));
            assert!(format!("{error:?}").starts_with(&failure.kind), "{}", failure.kind);
        }
    }

    #[test]
    fn long_texts_are_cut_to_what_headers_hold() {
        let status = to_status(&TablesError::BadRun { what: "ä".repeat(100_000) });
        assert!(status.message().len() < 2 * MAX_TEXT && status.details().len() < 4 * MAX_TEXT);
        assert!(from_status("peer", &status).to_string().ends_with('…'));
    }

    #[test]
    fn only_what_a_retry_may_cure_is_transient() {
        for error in every_variant() {
            let curable = matches!(error, TablesError::Unreachable { .. } | TablesError::Timeout { .. });
            assert_eq!(is_transient(&to_status(&error)), curable, "{error}");
        }
        for status in [Status::unavailable("gone"), Status::data_loss("crc"), Status::unknown("h2")] {
            assert!(is_transient(&status));
        }
        for status in
            [Status::unauthenticated("token"), Status::unimplemented(""), Status::invalid_argument("x")]
        {
            assert!(!is_transient(&status));
        }
    }

    #[test]
    fn a_status_without_details_is_told_by_its_code() {
        let error = from_status("server 0", &Status::permission_denied("role data may not call Push"));
        assert_eq!(error.to_string(), "server 0 refused: role data may not call Push");
        let unknown = Failure { kind: "New".into(), message: "text".into(), fields: "{\"New\":{}}".into() };
        assert!(matches!(from_failure("server 0", &unknown), TablesError::Incompatible { .. }));
    }
}
