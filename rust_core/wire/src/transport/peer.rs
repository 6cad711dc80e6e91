//! [`PeerInfo`]: the peer of a connection, and whether it has authenticated. Unauthenticated connections are limited
//! in number and time.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tonic::Request;
use tonic::transport::server::TlsConnectInfo;

/// The time limit for a new connection to authenticate. Clients authenticate with their first request.
pub(super) const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of unauthenticated connections from one IP address: a quarter of all connections.
pub(super) const MAX_UNAUTHENTICATED: usize = persia_types::limits::MAX_CONNECTIONS / 4;

/// Counts the unauthenticated connections of each IP address.
#[derive(Debug, Clone, Default)]
pub(super) struct Unauthenticated(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl Unauthenticated {
    /// Count a new connection. Returns None if its address already has [`MAX_UNAUTHENTICATED`] unauthenticated
    /// connections.
    pub(super) fn admit(&self, address: Option<SocketAddr>) -> Option<PeerInfo> {
        let counted = match address {
            Some(address) => Some(self.count(address.ip())?),
            None => None, // a Unix socket has no address
        };
        let state = State { authenticated: AtomicBool::new(false), counted: Mutex::new(counted) };
        Some(PeerInfo { address, state: Arc::new(state) })
    }

    fn count(&self, address: IpAddr) -> Option<Counted> {
        let mut counts = self.0.lock();
        let count = counts.entry(address).or_default();
        if *count >= MAX_UNAUTHENTICATED {
            return None;
        }
        *count += 1;
        Some(Counted { counts: self.clone(), address })
    }
}

/// Counts a connection until it has authenticated or is closed.
#[derive(Debug)]
struct Counted {
    counts: Unauthenticated,
    address: IpAddr,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[derive(Debug)]
struct State {
    authenticated: AtomicBool,
    counted: Mutex<Option<Counted>>,
}

/// The peer of a connection. It is in the extensions of each request.
#[derive(Debug, Clone)]
pub struct PeerInfo {
    address: Option<SocketAddr>,
    state: Arc<State>,
}

impl PeerInfo {
    /// The peer that sent `request`, with or without TLS.
    pub fn of<T>(request: &Request<T>) -> Option<&Self> {
        let extensions = request.extensions();
        extensions.get().or_else(|| extensions.get().map(TlsConnectInfo::<Self>::get_ref))
    }

    /// The address of the peer; None for a Unix socket.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Record that a call was authenticated, so that the connection stays open.
    pub fn set_authenticated(&self) {
        if !self.state.authenticated.swap(true, Ordering::Relaxed) {
            *self.state.counted.lock() = None;
        }
    }

    /// Whether a call was authenticated.
    pub(super) fn has_authenticated(&self) -> bool {
        self.state.authenticated.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_bounded_number_of_connections_that_have_not_authenticated() {
        let unauthenticated = Unauthenticated::default();
        let (one, other) = (Some("10.0.0.1:1".parse().unwrap()), Some("10.0.0.2:1".parse().unwrap()));
        let mut open: Vec<PeerInfo> =
            (0..MAX_UNAUTHENTICATED).map(|_| unauthenticated.admit(one).unwrap()).collect();
        assert!(unauthenticated.admit(one).is_none());
        assert!(unauthenticated.admit(other).is_some() && unauthenticated.admit(None).is_some());
        open[0].set_authenticated();
        open[0].set_authenticated();
        open.push(unauthenticated.admit(one).unwrap());
        assert!(unauthenticated.admit(one).is_none());
        open.pop();
        assert!(unauthenticated.admit(one).is_some());
        drop(open);
        assert!(unauthenticated.0.lock().is_empty());
    }
}
