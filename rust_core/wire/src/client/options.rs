//! What a client needs to know.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use persia_types::Dtype;
use tonic::transport::ClientTlsConfig;

use crate::auth::Secret;
use crate::discovery::{Discovery, Service};
use crate::settings::Endpoint;

/// Where the peers are.
#[derive(Debug, Clone)]
pub enum Targets {
    /// At these endpoints, for ever.
    Fixed(Vec<Endpoint>),
    /// Where they announce themselves.
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

/// How a [`super::WireTables`] finds its peers and how patient it is.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Where the peers are.
    pub targets: Targets,
    /// [`Service::Middleware`], or [`Service::Server`] for a job's only server.
    pub service: Service,
    /// The trainer rank; it prefers the middleware `rank mod n`.
    pub rank: u32,
    /// The cluster's secret; without one only processes in protected mode answer.
    pub secret: Option<Secret>,
    /// With it, connections by TCP use TLS.
    pub tls: Option<ClientTlsConfig>,
    /// How long a look-up or push, or a question, may take with all its retries (`PERSIA_RPC_TIMEOUT`).
    pub rpc_timeout: Duration,
    /// How long the servers may take to begin, save, restore or clear.
    pub admin_timeout: Duration,
    /// What rows and gradients travel as.
    pub wire_dtype: Dtype,
    /// What servers call `PERSIA_CKPT_DIR`; checkpoints lie below it.
    pub checkpoint_root: Option<PathBuf>,
}

impl ClientOptions {
    /// Middlewares at `targets`, as rank 0, with the defaults of everything else.
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

    /// How long one try may take before another peer is asked, so that one that hangs does not use up all the time.
    pub(super) fn try_timeout(&self) -> Duration {
        self.rpc_timeout / 4
    }

    pub(super) fn service_name(&self) -> &'static str {
        self.service.name().trim_start_matches("persia-")
    }
}
