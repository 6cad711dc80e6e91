//! Errors of discovery.

/// The maximum length of a job name, in bytes.
pub const MAX_JOB_BYTES: usize = 64;

/// The reason why a process is not announced or found.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiscoveryError {
    /// The job name is invalid.
    #[error(
        "job name {name:?}: expected 1 to {MAX_JOB_BYTES} of the characters A-Z a-z 0-9 . _ -; set PERSIA_JOB, or \
         job_name in global_config.yml"
    )]
    BadJob {
        /// The name.
        name: String,
    },
    /// The address of NATS is invalid.
    #[error("PERSIA_NATS_URL={url:?}: {what}; expected nats://HOST:PORT")]
    BadUrl {
        /// The address as given.
        url: String,
        /// The problem.
        what: String,
    },
    /// NATS does not respond.
    #[error("NATS at {url} cannot be reached: {what}")]
    NotConnected {
        /// The address of NATS.
        url: String,
        /// The error of the last attempt, or the time waited.
        what: String,
    },
    /// NATS refuses the token.
    #[error(
        "NATS at {url} refused the connection: {what}; NATS and this process need the same token file \
         (PERSIA_TOKEN_FILE)"
    )]
    Refused {
        /// The address of NATS.
        url: String,
        /// The reason that NATS gives.
        what: String,
    },
    /// The network interface does not exist.
    #[error(
        "network interface {name} does not exist or has no IPv4 address; interfaces with one: {}",
        .there.join(", ")
    )]
    NoInterface {
        /// The name of the interface.
        name: String,
        /// The interfaces with an IPv4 address.
        there: Vec<String>,
    },
    /// The host name of NATS has no IPv4 address, or there is no route to it.
    #[error(
        "cannot determine the address of this host on the network of NATS at {url}: {what}; correct \
         PERSIA_NATS_URL, or set PERSIA_ADVERTISE to the address of this host"
    )]
    NoAddress {
        /// The address of NATS.
        url: String,
        /// The cause.
        what: String,
    },
}

/// The address for messages, without user and password.
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
