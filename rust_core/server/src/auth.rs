//! [`AuthInterceptor`]: authenticates calls, counts refused calls, and logs them at a limited rate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_wire::auth::Guard;
use persia_wire::peer::PeerInfo;
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::metrics;

/// The minimum time between two log lines about refused calls. Without it, unauthenticated peers could fill
/// the disk.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Lets only authenticated calls pass.
#[derive(Clone)]
pub(crate) struct AuthInterceptor {
    guard: Guard,
    log: Arc<Mutex<LogLimiter>>,
}

/// The time of the last log line about refused calls, and the number of calls refused since. A log line
/// states this number and the reason for the last refusal.
#[derive(Default)]
struct LogLimiter {
    last: Option<Instant>,
    refused: u64,
}

impl AuthInterceptor {
    pub(crate) fn new(guard: Guard) -> Self {
        Self { guard, log: Arc::default() }
    }
}

impl Interceptor for AuthInterceptor {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let peer = PeerInfo::of(&request).cloned();
        match self.guard.call(request) {
            Ok(request) => {
                peer.iter().for_each(PeerInfo::set_authenticated);
                Ok(request)
            }
            Err(status) => {
                metrics::count_refused();
                self.log.lock().refused(peer.and_then(|peer| peer.address()), status.message());
                Err(status)
            }
        }
    }
}

impl LogLimiter {
    fn refused(&mut self, peer: Option<SocketAddr>, why: &str) {
        self.refused += 1;
        if self.last.is_some_and(|last| last.elapsed() < LOG_INTERVAL) {
            return;
        }
        let peer = peer.map_or_else(|| "this host, over a Unix socket".to_owned(), |peer| peer.to_string());
        let refused = if self.refused > 1 { "calls refused, the last one" } else { "call refused" };
        tracing::warn!(peer, calls = self.refused, "{refused}: {why}");
        *self = Self { last: Some(Instant::now()), refused: 0 };
    }
}
