//! [`ClientOptions`]: the addresses of peers, time limits and credentials.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use persia_types::{Dtype, TablesError, is_url};
use tonic::transport::ClientTlsConfig;

use crate::auth::Secret;
use crate::discovery::{Discovery, Service};
use crate::settings::Endpoint;

/// The addresses of the peers.
#[derive(Debug, Clone)]
pub enum Targets {
    /// Peers at these endpoints.
    Fixed(Vec<Endpoint>),
    /// The peers that are announced over this connection.
    Discovered(Discovery),
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(endpoints) => {
                let texts: Vec<String> = endpoints.iter().map(Endpoint::to_string).collect();
                f.write_str(&texts.join(", "))
            }
            Self::Discovered(discovery) => {
                write!(f, "job {} on NATS at {}", discovery.job(), discovery.url())
            }
        }
    }
}

/// Options of a [`super::WireTables`].
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The addresses of the peers.
    pub targets: Targets,
    /// [`Service::Middleware`], or [`Service::Server`] for a job's only server.
    pub service: Service,
    /// The rank of this trainer, which prefers middleware `rank mod n`.
    pub rank: u32,
    /// The job's secret. Without a secret, only processes in protected mode accept calls.
    pub secret: Option<Secret>,
    /// TLS for TCP connections.
    pub tls: Option<ClientTlsConfig>,
    /// The time limit for a look-up, a push or reading statistics, including retries (`PERSIA_RPC_TIMEOUT`).
    /// Time in which a server recovers from its log and makes progress is not counted.
    pub rpc_timeout: Duration,
    /// The time limit for the servers to begin, save, restore or clear.
    pub admin_timeout: Duration,
    /// The format of rows and gradients on the wire.
    pub wire_dtype: Dtype,
    /// The servers' `PERSIA_CKPT_DIR`: a directory or a URL. Checkpoints are below this directory or URL. If it is a
    /// directory, they may also be at any URL.
    pub checkpoint_root: Option<PathBuf>,
}

impl ClientOptions {
    /// Options for middlewares at `targets`, with rank 0 and default values.
    pub fn new(targets: Targets) -> Self {
        Self {
            targets,
            service: Service::Middleware,
            rank: 0,
            secret: None,
            tls: None,
            rpc_timeout: Duration::from_secs(60),
            admin_timeout: Duration::from_secs(3600),
            wire_dtype: Dtype::F32,
            checkpoint_root: None,
        }
    }

    /// The time limit for one attempt, after which another peer is tried. It leaves time for the other peer if the
    /// first one hangs.
    pub(super) fn attempt_timeout(&self) -> Duration {
        self.rpc_timeout / 4
    }

    pub(super) fn service_name(&self) -> &'static str {
        self.service.name().trim_start_matches("persia-")
    }

    /// `dir` relative to the checkpoint root, below which the servers and this process see the same files. A URL is
    /// returned unchanged.
    pub(super) fn checkpoint_directory(&self, dir: &Path) -> Result<String, TablesError> {
        let bad = |what: String| TablesError::Io {
            path: dir.to_owned(),
            source: io::Error::new(io::ErrorKind::InvalidInput, what),
        };
        if is_url(dir) {
            let url = dir.to_str().ok_or_else(|| bad("its name is not UTF-8".into()))?;
            return match self.checkpoint_root.as_deref().filter(|root| is_url(root)) {
                Some(root) if !dir.starts_with(root) => Err(bad(format!(
                    "it is not below PERSIA_CKPT_DIR={}; use a URL below it",
                    root.display()
                ))),
                _ => Ok(url.to_owned()),
            };
        }
        let Some(root) = &self.checkpoint_root else {
            return Err(bad(
                "the servers write checkpoints below PERSIA_CKPT_DIR, which is not set for this process; set it to \
                 the same folder or URL for servers and trainers"
                    .into(),
            ));
        };
        let real_dir = without_links(dir).map_err(|error| bad(error.to_string()))?;
        let real_root = without_links(root)
            .map_err(|error| bad(format!("PERSIA_CKPT_DIR={}: {error}", root.display())))?;
        let outside = || {
            let kind = if is_url(root) { "URL" } else { "folder" };
            bad(format!(
                "it is not below PERSIA_CKPT_DIR={}, where servers and trainers share checkpoints; use a {kind} \
                 below it",
                root.display()
            ))
        };
        let below = real_dir.strip_prefix(&real_root).map_err(|_| outside())?;
        if !below.components().all(|component| matches!(component, Component::Normal(_))) {
            return Err(outside());
        }
        below.to_str().map(str::to_owned).ok_or_else(|| bad("its name is not UTF-8".into()))
    }
}

/// The path with all symbolic links resolved. Its last components need not exist.
fn without_links(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) if !parent.as_os_str().is_empty() => {
                Ok(without_links(parent)?.join(name))
            }
            (Some(_), Some(name)) => Ok(Path::new(".").canonicalize()?.join(name)),
            _ => Err(error),
        },
        other => other,
    }
}
