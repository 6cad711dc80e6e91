//! [`Watched`]: the guard, whose refusals are counted and told.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_wire::auth::Guard;
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::metrics;

/// Between two lines of the log: a stranger must not fill the disk with them.
const PAUSE: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Clone)]
pub(crate) struct Watched {
    guard: Guard,
    told: Arc<Mutex<Told>>,
}

#[derive(Default)]
struct Told {
    last: Option<Instant>,
    calls_since: u64,
}

impl Watched {
    pub(crate) fn new(guard: Guard) -> Self {
        Self { guard, told: Arc::default() }
    }

    fn tell(&self, peer: Option<SocketAddr>, why: &str) {
        metrics::count_refused();
        let mut told = self.told.lock();
        told.calls_since += 1;
        if told.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        let peer = peer.map_or_else(|| "this host, by Unix socket".to_owned(), |peer| peer.to_string());
        tracing::warn!(peer, calls = told.calls_since, "refused: {why}");
        *told = Told { last: Some(Instant::now()), calls_since: 0 };
    }
}

impl Interceptor for Watched {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let peer = request.remote_addr();
        self.guard.call(request).inspect_err(|status| self.tell(peer, status.message()))
    }
}
