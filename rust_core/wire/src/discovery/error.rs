//! Errors of discovery.

use std::time::Duration;

/// The maximum length of a job name, in bytes.
pub const MAX_JOB_BYTES: usize = 64;

/// The reason why a process is not announced or found, or has no address to announce.
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
    #[error("address of NATS {url:?} (PERSIA_NATS_URL): {what}; expected nats://HOST:PORT")]
    BadUrl {
        /// The address, without user and password.
        url: String,
        /// The problem.
        what: String,
    },
    /// There is no connection to NATS.
    #[error("NATS at {url} cannot be reached: {}", no_connection(.what.as_deref(), *.waited))]
    NotConnected {
        /// The address of NATS.
        url: String,
        /// The error of the last attempt; None if no attempt has failed yet.
        what: Option<String>,
        /// The time for which the caller waited for the connection; None if it did not wait.
        waited: Option<Duration>,
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
    /// The network interface does not exist, or has no IPv4 address.
    #[error("network interface {name} does not exist or has no IPv4 address; {}", choice(.there))]
    NoInterface {
        /// The name of the interface.
        name: String,
        /// The interfaces with an IPv4 address.
        there: Vec<String>,
    },
    /// The operating system does not list the network interfaces.
    #[error(
        "cannot list the network interfaces to find the address of {name}: {what}; set PERSIA_ADVERTISE to the address \
         of this host"
    )]
    InterfacesUnknown {
        /// The name of the interface.
        name: String,
        /// The error of the operating system.
        what: String,
    },
    /// The host name of NATS has no IPv4 address, or there is no route to it.
    #[error(
        "cannot determine the address from which this host reaches NATS at {url}: {what}; correct \
         PERSIA_NATS_URL, or set PERSIA_ADVERTISE to the address of this host"
    )]
    NoAddress {
        /// The address of NATS.
        url: String,
        /// The cause.
        what: String,
    },
}

/// The reason why there is no connection: the error of the last attempt, if one has failed, and the time
/// waited.
pub(crate) fn no_connection(what: Option<&str>, waited: Option<Duration>) -> String {
    let seconds = waited.map(|waited| format!("{:.1} s", waited.as_secs_f64()));
    match (what, seconds) {
        (Some(what), Some(seconds)) => format!("{what} (waited {seconds})"),
        (Some(what), None) => what.to_owned(),
        (None, Some(seconds)) => format!("no response within {seconds}"),
        (None, None) => "no response yet".to_owned(),
    }
}

/// The next step for messages about an interface that cannot be used: the variable to set.
fn choice(there: &[String]) -> String {
    if there.is_empty() {
        return "no interface of this host has one: set PERSIA_ADVERTISE to the address of this host"
            .to_owned();
    }
    format!("set PERSIA_SOCKET_IFNAME to an interface that has one: {}", there.join(", "))
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
    use super::*;

    #[test]
    fn what_is_known_about_a_missing_connection_is_told() {
        let said = |what: Option<&str>, waited: Option<u64>| {
            let (what, waited) = (what.map(str::to_owned), waited.map(Duration::from_millis));
            DiscoveryError::NotConnected { url: "nats://host".into(), what, waited }.to_string()
        };
        let start = "NATS at nats://host cannot be reached: ";
        for (what, waited, why) in [
            (Some("refused"), Some(1500), "refused (waited 1.5 s)"),
            (Some("refused"), None, "refused"),
            (None, Some(30_000), "no response within 30.0 s"),
            (None, None, "no response yet"),
        ] {
            assert_eq!(said(what, waited), format!("{start}{why}"));
        }
    }

    #[test]
    fn a_missing_interface_is_named_with_what_to_set() {
        let said = |there: &[&str]| {
            let there = there.iter().map(|each| (*each).to_owned()).collect();
            DiscoveryError::NoInterface { name: "eth9".into(), there }.to_string()
        };
        let text = said(&["lo (127.0.0.1)", "eth0 (10.0.0.1)"]);
        assert!(text.ends_with(
            "set PERSIA_SOCKET_IFNAME to an interface that has one: lo (127.0.0.1), eth0 (10.0.0.1)"
        ));
        let text = said(&[]);
        assert!(
            text.contains("eth9") && text.contains("no interface of this host has one: set PERSIA_ADVERTISE")
        );
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("nats://user:pass@host:4222"), "nats://host:4222");
        assert_eq!(without_password("user:p@ss@host"), "host");
        assert_eq!(without_password("nats://host:4222"), "nats://host:4222");
    }
}
