//! Errors of discovery.

/// Longest name of a job, in bytes.
pub const MAX_JOB_BYTES: usize = 64;

/// The reason why a process is not announced or found.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiscoveryError {
    /// An invalid job name.
    #[error(
        "job name {name:?}: want 1 to {MAX_JOB_BYTES} of A-Z a-z 0-9 . _ -; PERSIA_JOB or global_config.yml sets it"
    )]
    BadJob {
        /// The name.
        name: String,
    },
    /// An invalid address of NATS.
    #[error("PERSIA_NATS_URL={url:?}: {what}; want nats://host:4222")]
    BadUrl {
        /// The text.
        url: String,
        /// The problem.
        what: String,
    },
    /// NATS does not answer.
    #[error("NATS at {url} cannot be reached: {what}")]
    NotConnected {
        /// Its address.
        url: String,
        /// The error of the last attempt, or the time waited.
        what: String,
    },
    /// NATS rejects the token.
    #[error(
        "NATS at {url} refused: {what}; NATS and this process need the same token file (PERSIA_TOKEN_FILE)"
    )]
    Refused {
        /// Its address.
        url: String,
        /// Its reason.
        what: String,
    },
    /// An unknown network interface.
    #[error("network interface {name} does not exist or has no IPv4 address; those of this host are {}", .there.join(", "))]
    NoInterface {
        /// Its name.
        name: String,
        /// The interfaces with an IPv4 address.
        there: Vec<String>,
    },
    /// No route from this host to NATS.
    #[error("no address of this host can reach NATS at {url}: {what}; set PERSIA_ADVERTISE")]
    NoAddress {
        /// NATS's address.
        url: String,
        /// Why.
        what: String,
    },
}

/// The address as it is shown in messages.
pub(super) fn without_password(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (scheme, rest));
    match rest.rsplit_once('@') {
        Some((_, host)) if scheme.is_empty() => host.to_owned(),
        Some((_, host)) => format!("{scheme}://{host}"),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::without_password;

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("nats://user:pass@host:4222"), "nats://host:4222");
        assert_eq!(without_password("user:p@ss@host"), "host");
        assert_eq!(without_password("nats://host:4222"), "nats://host:4222");
    }
}
