//! Converts [`TablesError`] to a gRPC status and back: the caller gets the same variant with the same fields.

use std::error::Error;

use persia_types::TablesError;
use prost::Message;
use serde_json::Value;
use tonic::{Code, Status};

use crate::proto::Failure;

/// The maximum size of a text in a status, in bytes. A status is sent in HTTP headers of limited size.
const MAX_TEXT: usize = 2048;

/// The text with which a middleware reports a server without a run, because [`TablesError::NotBegun`] names no
/// server. A client whose run has not begun interprets an error with this text as `NotBegun`.
pub const FORGOTTEN: &str = "it was restarted and has lost the run";

/// Truncate the text to the size that fits into a header.
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

/// Truncate every text of a serialized error.
fn shorten(value: &mut Value) {
    match value {
        Value::String(text) if text.len() > MAX_TEXT => *text = short(text),
        Value::Array(values) => values.iter_mut().for_each(shorten),
        Value::Object(fields) => fields.values_mut().for_each(shorten),
        _ => {}
    }
}

/// Convert an error to a part of a message, such as a server's outcome in a `PushReply`.
pub fn to_failure(error: &TablesError) -> Failure {
    // {"Variant": {fields}}, or "Variant" if it has none.
    let mut fields = serde_json::to_value(error).unwrap_or_default();
    shorten(&mut fields);
    let kind = match &fields {
        Value::Object(tagged) => tagged.keys().next().cloned().unwrap_or_default(),
        tag => tag.as_str().unwrap_or_default().to_owned(),
    };
    Failure { kind, message: short(&error.to_string()), fields: fields.to_string() }
}

/// The error from which [`to_failure`] created the message. Long texts are truncated. An error that this version
/// cannot decode, such as one of an unknown kind, becomes `Incompatible`.
pub fn from_failure(peer: &str, failure: &Failure) -> TablesError {
    serde_json::from_str(&failure.fields).unwrap_or_else(|_| TablesError::Incompatible {
        peer: peer.to_owned(),
        what: format!(
            "it sent an error that this version cannot decode, {:?}: {}",
            failure.kind, failure.message
        ),
    })
}

/// Convert the error to a status.
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
        E::Unable { .. } | E::Unreachable { .. } | E::Recovering { .. } => Code::Unavailable,
    };
    let failure = to_failure(error);
    let details = failure.encode_to_vec();
    Status::with_details(code, failure.message, details.into())
}

fn failure_of(status: &Status) -> Option<Failure> {
    let details = status.details();
    if details.is_empty() { None } else { Failure::decode(details).ok() }
}

/// The messages of the status and of its causes or, if there are none, the description of the code.
pub fn describe(status: &Status) -> String {
    let mut text = status.message().to_owned();
    add_causes(&mut text, status.source());
    if text.is_empty() { status.code().description().to_owned() } else { text }
}

/// The messages of the error and of its causes, without a period at the end. An error of the transport states the
/// reason only in its causes.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    add_causes(&mut text, error.source());
    text.trim_end_matches('.').to_owned()
}

/// Append the messages of a cause and of its causes, unless the text contains them.
fn add_causes(text: &mut String, mut cause: Option<&(dyn Error + 'static)>) {
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&more);
        }
        cause = error.source();
    }
}

/// The error in a status from `peer`.
pub fn from_status(peer: &str, status: &Status) -> TablesError {
    if let Some(failure) = failure_of(status) {
        return from_failure(peer, &failure);
    }
    let (peer, what) = (peer.to_owned(), describe(status));
    if is_certificate_error(&what) {
        return TablesError::Refused { peer, what: format!("the TLS connection failed: {what}") };
    }
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => TablesError::Refused { peer, what },
        Code::DeadlineExceeded => TablesError::Timeout { peer, what },
        Code::Unimplemented => TablesError::Incompatible {
            peer,
            what: format!("it does not implement the called method: {what}"),
        },
        Code::InvalidArgument => TablesError::BadShape { what },
        // A message exceeds the limit only if it has the statistics of tens of thousands of tables over all servers,
        // or if the peer is of another build.
        Code::OutOfRange => {
            TablesError::Incompatible { peer, what: format!("a message exceeds a limit: {what}") }
        }
        _ => TablesError::Unreachable { peer, what },
    }
}

/// Whether a retry, or another peer, may succeed. The peer may have processed the request nevertheless.
pub fn is_transient(status: &Status) -> bool {
    match failure_of(status) {
        Some(failure) => is_transient_failure(&failure),
        None => {
            let other = is_curable(&from_status("", status));
            other || status.code() == Code::DataLoss
        }
    }
}

/// Like [`is_transient`], for the outcome of one server.
pub fn is_transient_failure(failure: &Failure) -> bool {
    is_curable(&from_failure("", failure))
}

fn is_curable(error: &TablesError) -> bool {
    use TablesError as E;
    matches!(error, E::Unable { .. } | E::Unreachable { .. } | E::Timeout { .. } | E::Recovering { .. })
}

/// Whether a certificate is invalid or a peer does not use TLS. Only the text shows this, because tonic wraps
/// the errors of rustls.
fn is_certificate_error(what: &str) -> bool {
    what.contains("certificate") || what.contains("InvalidContentType")
}

#[cfg(test)]
mod tests {
    use std::io;

    use persia_types::{JobId, Token};

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
            E::BadTable { table: 2, tables: 2, what: "unknown".into() },
            E::BadTable { table: 0, tables: 2, what: "named twice in one request".into() },
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
            E::Unable { peer: peer(), what: what() },
            E::Unreachable { peer: peer(), what: what() },
            E::Recovering { peer: peer(), done: 43, total: 100 },
        ]
    }

    #[test]
    fn every_error_round_trips() {
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
    fn long_texts_are_truncated_to_what_headers_hold() {
        let status = to_status(&TablesError::BadRun { what: "ä".repeat(100_000) });
        assert!(status.message().len() < 2 * MAX_TEXT && status.details().len() < 4 * MAX_TEXT);
        assert!(from_status("peer", &status).to_string().ends_with('…'));
    }

    #[test]
    fn only_errors_that_a_retry_may_cure_are_transient() {
        for error in every_variant() {
            assert_eq!(is_transient(&to_status(&error)), is_curable(&error), "{error}");
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
    fn each_cause_is_told_once() {
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let inner = io::Error::other(Outer("cannot connect", refused()));
        let outer = Outer("transport error", inner);
        let said = format!("transport error: cannot connect: {}", refused());
        assert_eq!(with_causes(&outer), said);
        assert_eq!(with_causes(&refused()), refused().to_string());
    }

    /// An error whose message does not contain its cause.
    #[derive(Debug)]
    struct Outer(&'static str, io::Error);

    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn a_status_without_details_is_read_by_its_code() {
        let error = from_status("server 0", &Status::permission_denied("role data may not call Push"));
        assert_eq!(error.to_string(), "access to server 0 was refused: role data may not call Push");
        let error = from_status("server 0", &Status::out_of_range("decoded message length too large"));
        let said = "server 0 is incompatible: a message exceeds a limit: decoded message length too large";
        assert_eq!(error.to_string(), said, "the reply may be what is too large");
        let unknown = Failure { kind: "New".into(), message: "text".into(), fields: "{\"New\":{}}".into() };
        assert!(matches!(from_failure("server 0", &unknown), TablesError::Incompatible { .. }));
    }
}
