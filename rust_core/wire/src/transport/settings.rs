//! [`Endpoint`], and channels and servers with the same limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use persia_types::limits::{MAX_CHUNK_BYTES, MAX_STREAMS_PER_CONNECTION};
use serde::{Deserialize, Serialize};
use tonic::transport::{Channel, ClientTlsConfig, Server, ServerTlsConfig};

/// The maximum size of a message, in bytes. Chunks are smaller, and so are heads with the counts of all shards of 4,096
/// tables. The largest messages are the settings of 4,096 slots (below 4 MiB) and the statistics of all tables of all
/// servers (about 260 bytes each).
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;
const _: () = assert!(MAX_MESSAGE_BYTES > 2 * MAX_CHUNK_BYTES);
/// The HTTP/2 flow-control window of a request, in bytes.
const WINDOW_BYTES: u32 = 64 << 20;
/// The HTTP/2 flow-control window of a connection, in bytes. A request whose receiver does not read leaves space
/// for other requests.
const CONNECTION_WINDOW_BYTES: u32 = 4 * WINDOW_BYTES;
const MAX_FRAME_BYTES: u32 = 256 << 10;
const MAX_HEADER_BYTES: u32 = 64 << 10;
/// The time limit for connecting.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between pings to a silent peer, and the time limit for the response.
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
pub(crate) const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The address of a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Endpoint {
    /// `host:port`, with an IPv6 address in brackets.
    Tcp {
        /// The host name or address, without brackets.
        host: String,
        /// The port; 0 binds any free port.
        port: u16,
    },
    /// `unix:/path`.
    Unix(PathBuf),
}

/// The endpoint is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an endpoint: expected host:port, [ipv6]:port or unix:/path")]
pub struct BadEndpoint {
    text: String,
}

impl FromStr for Endpoint {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        let bad = || BadEndpoint { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.starts_with('/') { Ok(Self::Unix(path.into())) } else { Err(bad()) };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let port = port.parse().map_err(|_| bad())?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let host = match inner {
            Some(address) if address.parse::<std::net::Ipv6Addr>().is_ok() => address,
            None if !host.is_empty() && host.chars().all(good) => host,
            _ => return Err(bad()),
        };
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl TryFrom<String> for Endpoint {
    type Error = BadEndpoint;

    fn try_from(text: String) -> Result<Self, BadEndpoint> {
        text.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> Self {
        endpoint.to_string()
    }
}

impl Endpoint {
    /// Whether only processes of this host can reach the endpoint.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp { host, .. } if host == "localhost" => true,
            Self::Tcp { host, .. } => {
                host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
            }
        }
    }

    /// Create a channel that connects when it is used and reconnects automatically. TLS is used only for TCP.
    /// Requires a tokio runtime.
    ///
    /// # Errors
    /// An address that cannot be used, or an invalid certificate.
    pub fn channel(&self, tls: Option<&ClientTlsConfig>) -> Result<Channel, tonic::transport::Error> {
        let builder = match (self, tls) {
            (Self::Tcp { .. }, Some(tls)) => {
                tonic::transport::Endpoint::from_shared(format!("https://{self}"))?.tls_config(tls.clone())?
            }
            (Self::Tcp { .. }, None) => tonic::transport::Endpoint::from_shared(format!("http://{self}"))?,
            (Self::Unix(path), _) => {
                tonic::transport::Endpoint::from_shared(format!("unix://{}", path.display()))?
            }
        };
        let builder = builder
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(MAX_FRAME_BYTES)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .tcp_nodelay(true)
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        Ok(builder.connect_lazy())
    }
}

/// Create a server with the limits of this module. Limit the messages of its services with [`bounded!`].
///
/// # Errors
/// An invalid certificate or key.
pub fn server(tls: Option<ServerTlsConfig>) -> Result<Server, tonic::transport::Error> {
    let server = Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(MAX_FRAME_BYTES)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT));
    match tls {
        Some(tls) => server.tls_config(tls),
        None => Ok(server),
    }
}

/// Create a generated client or server whose messages are limited to [`MAX_MESSAGE_BYTES`].
#[macro_export]
macro_rules! bounded {
    ($service:expr) => {
        $service
            .max_decoding_message_size($crate::settings::MAX_MESSAGE_BYTES)
            .max_encoding_message_size($crate::settings::MAX_MESSAGE_BYTES)
    };
}

#[cfg(test)]
mod tests {
    use persia_types::limits::{MAX_DIM, MAX_NAME_BYTES, MAX_SLOTS};
    use persia_types::schema::{Admission, Initializer, Optimizer, Schema, Slot, Table, TableSettings};

    use super::*;

    #[test]
    fn the_settings_of_the_largest_job_fit_into_a_message() {
        let name = |index: usize| format!("{index:0>MAX_NAME_BYTES$}");
        let settings = TableSettings {
            optimizer: Some(Optimizer::Adam {
                lr: 0.001_234_567,
                beta1: 0.912_345_6,
                beta2: 0.998_765_4,
                weight_decay: 0.000_123_456_7,
                eps: 1.234_567e-9,
            }),
            initializer: Some(Initializer::Uniform { low: -0.012_345_67, high: 0.012_345_67 }),
            admission: Some(Admission { probability: 0.123_456_7, min_count: u32::MAX }),
            ..TableSettings::default()
        };
        let schema = Schema {
            slots: (0..MAX_SLOTS).map(|at| Slot { name: name(at), table: at, ..Slot::default() }).collect(),
            tables: (0..MAX_SLOTS).map(|at| Table { name: name(at), dim: MAX_DIM, settings }).collect(),
        };
        let bytes = serde_json::to_vec(&schema).unwrap().len();
        assert!(bytes < MAX_MESSAGE_BYTES / 2, "{bytes}");
    }

    #[test]
    fn endpoints_are_read_and_written() {
        for text in ["host:8888", "10.0.0.1:0", "[::1]:7777", "unix:/run/persia/server 0.sock", "a-b_c.d:1"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in
            ["", "host", "host:", ":1", "host:65536", "::1:7777", "unix:relative", "http://h:1", "[x]:1"]
        {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
