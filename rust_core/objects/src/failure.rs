//! [`Failure`]: an error of an object store, with a message that states the cause and, if it is known, what
//! to do.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use crate::client::endpoint;

/// The URL of the object or place, and the cause. The kind of the cause is `InvalidInput` for a URL that cannot be
/// used and `InvalidData` for an object that is too large. It is never `NotFound`, which would mean that a file is
/// missing.
#[derive(Debug, thiserror::Error)]
#[error("{url}: {source}")]
pub struct Failure {
    /// The URL, without user and password.
    pub url: PathBuf,
    /// The cause and, if it is known, what to do.
    pub source: io::Error,
}

impl Failure {
    pub(crate) fn new(url: impl Into<PathBuf>, kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Self { url: url.into(), source: io::Error::new(kind, what.into()) }
    }
}

/// Whether an error means that the object does not exist. An error that names a missing bucket does not
/// count, but the response to a HEAD request does not distinguish a missing bucket from a missing object.
pub(crate) fn is_absent(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) && !error.to_string().contains("NoSuchBucket")
}

/// Whether an error means that the object ends before the requested bytes.
pub(crate) fn is_beyond_end(error: &Error) -> bool {
    status(&error.to_string()).is_some_and(|status| status.starts_with("416"))
}

/// The error of a request. Its kind is never `NotFound`, which would mean that a file is missing.
pub(crate) fn failure(error: &Error) -> io::Error {
    let text = error.to_string();
    let what = described(error, &text);
    let (kind, hint) = match error {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => (
            io::ErrorKind::PermissionDenied,
            "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for trainers and servers, and their permissions: get, \
             put, list and delete objects"
                .to_owned(),
        ),
        _ if text.contains("NoSuchBucket") => {
            (io::ErrorKind::Other, "create the bucket, or correct its name; see also AWS_ENDPOINT_URL".into())
        }
        _ if INSTANCE_METADATA.iter().any(|part| text.contains(part)) => (
            io::ErrorKind::Other,
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for trainers and servers".into(),
        ),
        _ => (io::ErrorKind::Other, connection_hint(error, &what)),
    };
    let separator = if hint.is_empty() { "" } else { "; " };
    io::Error::new(kind, format!("{what}{separator}{hint}"))
}

/// The part of a URL after user and password; the whole URL if it has none.
fn without_password(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, address)| address)
}

/// Parts of the addresses at which credentials are requested if the environment has none.
const INSTANCE_METADATA: [&str; 3] = ["169.254.169.254", "/latest/api/token", "/latest/meta-data"];

/// What to check if the connection failed; empty for any other cause.
fn connection_hint(error: &Error, what: &str) -> String {
    let problem = match http_error(error).map(HttpError::kind) {
        Some(HttpErrorKind::Connect) if what.contains("certificate") => {
            "the certificate of the store is not accepted: check the authorities that this host trusts,"
        }
        Some(HttpErrorKind::Connect) => "the store cannot be reached: check",
        Some(HttpErrorKind::Timeout) => "the store does not respond: check",
        Some(HttpErrorKind::Request | HttpErrorKind::Interrupted) => {
            "the connection to the store broke: check"
        }
        _ => return String::new(),
    };
    let place = endpoint().map_or_else(
        || "AWS_REGION and the network; a store other than AWS S3 needs AWS_ENDPOINT_URL".to_owned(),
        |endpoint| format!("the network and AWS_ENDPOINT_URL={}", without_password(&endpoint)),
    );
    format!("{problem} {place}")
}

/// The error of the HTTP client among the causes. None for a response with an error status, and if no request
/// was sent.
fn http_error(error: &Error) -> Option<&HttpError> {
    let mut cause = error.source();
    while let Some(each) = cause {
        if let Some(found) = each.downcast_ref() {
            return Some(found);
        }
        cause = each.source();
    }
    None
}

/// The status in the response of the store, with its code and message; without a status, the innermost cause.
fn described(error: &Error, text: &str) -> String {
    if let Some(status) = status(text) {
        let parts = [tag(text, "Code"), tag(text, "Message")].into_iter().flatten().collect::<Vec<_>>();
        let details = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(": ")) };
        return format!("the store answered {status}{details}");
    }
    let mut cause = error.source();
    let mut found = None;
    while let Some(each) = cause {
        found = Some(each.to_string());
        cause = each.source();
    }
    found.unwrap_or_else(|| text.to_owned()).replace('\n', " ")
}

/// The HTTP status in the text of an error, such as `503 Service Unavailable`; None if the text has none.
fn status(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("status code: ")?;
    let end = rest.find([':', '<', '\n']).unwrap_or(rest.len());
    Some(rest[..end].trim())
}

/// The content of the first XML element of this name, if there is one.
fn tag<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(content, _)| content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> Error {
        Error::Generic { store: "S3", source: text.into() }
    }

    #[test]
    fn an_answer_of_the_store_is_named_with_its_code() {
        let text = "Error performing PUT http://h/b/k in 3ms - Server returned non-2xx status code: 503 Service \
                    Unavailable: <Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>";
        let found = failure(&generic(text)).to_string();
        assert_eq!(found, "the store answered 503 Service Unavailable: SlowDown: Reduce your rate");
    }

    #[test]
    fn wrong_credentials_and_a_missing_bucket_say_what_to_do() {
        let source = "status code: 403 Forbidden: <Code>InvalidAccessKeyId</Code>".into();
        let found = failure(&Error::PermissionDenied { path: "k".into(), source });
        assert_eq!(found.kind(), io::ErrorKind::PermissionDenied);
        assert!(found.to_string().contains("InvalidAccessKeyId; check AWS_ACCESS_KEY_ID"), "{found}");
        let source = "status code: 404 Not Found: <Code>NoSuchBucket</Code>".into();
        let missing = Error::NotFound { path: "k".into(), source };
        assert!(!is_absent(&missing));
        let found = failure(&missing);
        assert_ne!(found.kind(), io::ErrorKind::NotFound, "else training would start from the beginning");
        assert!(found.to_string().contains("create the bucket"), "{found}");
        assert!(is_absent(&Error::NotFound { path: "k".into(), source: "status code: 404".into() }));
    }

    #[test]
    fn an_address_is_shown_without_its_password() {
        assert_eq!(without_password("http://key:a@b@host:9000"), "host:9000");
        assert_eq!(without_password("http://host:9000"), "http://host:9000");
    }

    #[test]
    fn missing_credentials_are_told_from_a_store_that_does_not_respond() {
        let found =
            failure(&generic("Error performing PUT http://169.254.169.254/latest/api/token")).to_string();
        assert!(found.contains("there are no credentials: set AWS_ACCESS_KEY_ID"), "{found}");
    }

    /// A failure of the HTTP client with this cause.
    fn of_connection(kind: HttpErrorKind, cause: &str) -> String {
        let source = Box::new(HttpError::new(kind, io::Error::other(cause)));
        failure(&Error::Generic { store: "S3", source }).to_string()
    }

    #[test]
    fn only_a_connection_that_timed_out_means_that_the_store_does_not_respond() {
        for (kind, cause, said) in [
            (HttpErrorKind::Connect, "Connection refused", "the store cannot be reached: check"),
            (HttpErrorKind::Timeout, "operation timed out", "the store does not respond: check"),
            (HttpErrorKind::Interrupted, "reset by peer", "the connection to the store broke: check"),
            (HttpErrorKind::Request, "connection closed", "the connection to the store broke: check"),
            (
                HttpErrorKind::Connect,
                "invalid peer certificate: UnknownIssuer",
                "the certificate of the store is not accepted: check",
            ),
        ] {
            let found = of_connection(kind, cause);
            assert!(found.starts_with(&format!("{cause}; {said}")), "{found}");
        }
        assert_eq!(of_connection(HttpErrorKind::Decode, "invalid gzip header"), "invalid gzip header");
        let text = "Server returned error response: <Error><Code>InternalError</Code></Error>";
        assert_eq!(failure(&generic(text)).to_string(), text, "the store responded");
    }
}
