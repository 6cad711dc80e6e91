//! [`Failure`]: an error of an object store, with a message that states the cause and what to do.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;

use object_store::Error;

use crate::client::endpoint;

/// The URL of the object or place, and the cause. The kind of the cause is `InvalidInput` for a URL that cannot be
/// used and `InvalidData` for an object that is too large. It is never `NotFound`, which would mean that a file is
/// missing.
#[derive(Debug, thiserror::Error)]
#[error("{url}: {source}")]
pub struct Failure {
    /// The URL.
    pub url: PathBuf,
    /// The cause, and what to do.
    pub source: io::Error,
}

impl Failure {
    pub(crate) fn new(url: impl Into<PathBuf>, kind: io::ErrorKind, what: impl Into<String>) -> Self {
        Self { url: url.into(), source: io::Error::new(kind, what.into()) }
    }
}

/// Whether an error means that the object does not exist, but the bucket does.
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
        _ if status(&text).is_none() && is_of_transport(error) => {
            let where_to = endpoint().map_or_else(
                || "AWS_REGION and the network; another store needs AWS_ENDPOINT_URL".to_owned(),
                |endpoint| format!("the network and AWS_ENDPOINT_URL={}", without_password(&endpoint)),
            );
            (io::ErrorKind::Other, format!("the store does not respond: check {where_to}"))
        }
        _ => (io::ErrorKind::Other, String::new()),
    };
    let separator = if hint.is_empty() { "" } else { "; " };
    io::Error::new(kind, format!("{what}{separator}{hint}"))
}

/// The address in a URL, without user and password.
fn without_password(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, address)| address)
}

/// Parts of the addresses at which credentials are sought last.
const INSTANCE_METADATA: [&str; 3] = ["169.254.169.254", "/latest/api/token", "/latest/meta-data"];

fn is_of_transport(error: &Error) -> bool {
    matches!(error, Error::Generic { .. })
}

/// The response of the store if there is one, otherwise the innermost cause.
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

/// The HTTP status in the text of an error, such as `503 Service Unavailable`.
fn status(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("status code: ")?;
    let end = rest.find([':', '<', '\n']).unwrap_or(rest.len());
    Some(rest[..end].trim())
}

/// The content of an XML element.
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
        let found = failure(&generic("Connection refused (os error 111)")).to_string();
        assert!(found.starts_with("Connection refused") && found.contains("check"), "{found}");
    }
}
