//! The peers of a client, and the choice of the next one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_types::TablesError;
use tonic::transport::{Channel, ClientTlsConfig};

use super::options::{ClientOptions, Targets};
use crate::auth::Credentials;
use crate::discovery::{DiscoveryError, Peer, Service, no_connection};
use crate::error::with_causes;
use crate::rpc::Rpc;
use crate::settings::Endpoint;
use crate::{PROTOCOL, VERSION};

/// The time for which a failed peer is skipped while another peer is available.
const PASSED_OVER: Duration = Duration::from_secs(5);
/// The minimum time between two refreshes in the background.
const REFRESH_PAUSE: Duration = Duration::from_secs(2);
/// The time limit for discovery.
const FIND_TIMEOUT: Duration = Duration::from_secs(2);

/// A middleware, or the only server.
#[derive(Debug)]
pub(super) struct Remote {
    /// The name in messages, such as "middleware at host:7777".
    pub(super) name: String,
    service: Service,
    endpoint: Endpoint,
    channel: Channel,
    failed: Mutex<Option<Instant>>,
}

impl Remote {
    /// A client that calls this peer with the given credentials.
    pub(super) fn rpc(&self, credentials: &Credentials) -> Rpc {
        Rpc::new(self.service, self.channel.clone(), credentials.clone())
    }

    /// Record a failure: log it if it is the first since a success, and prefer other peers for a while.
    pub(super) fn note_failure(&self, what: &dyn std::fmt::Display) {
        if self.failed.lock().replace(Instant::now()).is_none() {
            tracing::warn!(peer = self.name, %what, "a call to a peer failed");
        }
    }

    pub(super) fn note_success(&self) {
        if self.failed.lock().take().is_some() {
            tracing::info!(peer = self.name, "the peer responds again");
        }
    }

    fn failed_at(&self) -> Option<Instant> {
        *self.failed.lock()
    }
}

#[derive(Debug)]
pub(super) struct Pool {
    remotes: Arc<Mutex<Vec<Arc<Remote>>>>,
    rank: usize,
    refreshed: Mutex<Option<Instant>>,
}

impl Pool {
    pub(super) fn new(options: &ClientOptions) -> Self {
        Self { remotes: Arc::default(), rank: options.rank as usize, refreshed: Mutex::default() }
    }

    /// Return the rank's preferred peer or, if it has failed recently, the next peer that has not. If all
    /// peers have failed recently, or no peer is known, first discover the peers again. If all discovered
    /// peers have failed recently, return the peer whose failure is the oldest.
    pub(super) async fn pick(&self, options: &ClientOptions) -> Result<Arc<Remote>, TablesError> {
        let fine = |remote: &Remote| remote.failed_at().is_none_or(|at| at.elapsed() >= PASSED_OVER);
        if !self.remotes.lock().iter().any(|remote| fine(remote)) {
            resolve(&self.remotes, options).await?;
        }
        let remotes = self.remotes.lock();
        let count = remotes.len();
        let in_order = || (0..count).map(|step| &remotes[(self.rank + step) % count]);
        let choice = in_order()
            .find(|remote| fine(remote))
            .or_else(|| in_order().min_by_key(|remote| remote.failed_at()));
        choice.map(Arc::clone).ok_or_else(|| TablesError::Unreachable {
            peer: options.targets.to_string(),
            what: format!("no {} has announced itself", options.service_name()),
        })
    }

    /// After a failure, query discovery in the background for the peers that are announced now.
    pub(super) fn refresh(&self, options: &ClientOptions) {
        if matches!(options.targets, Targets::Fixed(_)) {
            return;
        }
        let mut refreshed = self.refreshed.lock();
        if refreshed.is_some_and(|at| at.elapsed() < REFRESH_PAUSE) {
            return;
        }
        *refreshed = Some(Instant::now());
        let (remotes, options) = (Arc::clone(&self.remotes), options.clone());
        tokio::spawn(async move {
            if let Err(error) = resolve(&remotes, &options).await {
                tracing::warn!("cannot search for another {}: {error}", options.service_name());
            }
        });
    }
}

/// Replace `remotes` by the given or announced peers, in their order. `remotes` is kept if none is announced,
/// or if discovery fails while peers are known.
async fn resolve(remotes: &Mutex<Vec<Arc<Remote>>>, options: &ClientOptions) -> Result<(), TablesError> {
    let found = match &options.targets {
        Targets::Fixed(endpoints) => endpoints.clone(),
        Targets::Discovered(discovery) => match discovery.find(options.service, FIND_TIMEOUT).await {
            Ok(peers) => endpoints_of(&peers)?,
            // The known peers may still respond.
            Err(_) if !remotes.lock().is_empty() => return Ok(()),
            Err(error) => return Err(of_discovery(&error)),
        },
    };
    if found.is_empty() {
        return Ok(());
    }
    let mut remotes = remotes.lock();
    let mut next = Vec::with_capacity(found.len());
    for endpoint in found {
        next.push(match remotes.iter().find(|remote| remote.endpoint == endpoint) {
            Some(remote) => Arc::clone(remote),
            None => Arc::new(new_remote(options, endpoint)?),
        });
    }
    *remotes = next;
    Ok(())
}

fn new_remote(options: &ClientOptions, endpoint: Endpoint) -> Result<Remote, TablesError> {
    let name = format!("{} at {endpoint}", options.service_name());
    let tls: Option<&ClientTlsConfig> = options.tls.as_ref();
    let channel = endpoint.channel(tls).map_err(|error| unusable(&name, &error, tls.is_some()))?;
    Ok(Remote { name, service: options.service, endpoint, channel, failed: Mutex::default() })
}

/// The error of a channel that cannot be created.
fn unusable(peer: &str, error: &tonic::transport::Error, tls: bool) -> TablesError {
    let (peer, why) = (peer.to_owned(), with_causes(error));
    if tls {
        let next = "check the authority in PERSIA_TLS_CA and the name in PERSIA_TLS_NAME";
        TablesError::Refused { peer, what: format!("cannot use TLS: {why}; {next}") }
    } else {
        TablesError::Unreachable { peer, what: format!("its address cannot be used: {why}") }
    }
}

fn endpoints_of(peers: &[Peer]) -> Result<Vec<Endpoint>, TablesError> {
    for peer in peers {
        if peer.protocol != PROTOCOL || peer.version != VERSION {
            return Err(TablesError::Incompatible {
                peer: peer.describe(),
                what: format!(
                    "it has version {} and protocol {}, but this process has version {VERSION} and protocol {PROTOCOL}",
                    peer.version, peer.protocol
                ),
            });
        }
    }
    Ok(peers.iter().filter_map(|peer| peer.address.clone()).collect())
}

fn of_discovery(error: &DiscoveryError) -> TablesError {
    match error {
        DiscoveryError::Refused { url, what } => {
            TablesError::Refused { peer: format!("NATS at {url}"), what: what.clone() }
        }
        DiscoveryError::NotConnected { url, what, waited } => TablesError::Unreachable {
            peer: format!("NATS at {url}"),
            what: no_connection(what.as_deref(), *waited),
        },
        other => TablesError::Unreachable { peer: "NATS".into(), what: other.to_string() },
    }
}
