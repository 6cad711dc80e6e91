//! The peers a client knows, and which one it asks next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_types::TablesError;
use tonic::transport::{Channel, ClientTlsConfig};

use super::options::{ClientOptions, Targets};
use crate::discovery::{DiscoveryError, Peer, Service};
use crate::settings::Endpoint;
use crate::{PROTOCOL, VERSION};

/// How long a peer that failed is passed over while there is another.
const PASSED_OVER: Duration = Duration::from_secs(5);
/// The least time between two looks beside requests.
const LOOK_PAUSE: Duration = Duration::from_secs(2);
/// How long peers have to answer when they are looked for.
const FIND_TIMEOUT: Duration = Duration::from_secs(2);

/// A middleware, or the only server.
#[derive(Debug)]
pub(super) struct Remote {
    /// For messages: "middleware at host:7777".
    pub(super) name: String,
    pub(super) service: Service,
    endpoint: Endpoint,
    pub(super) channel: Channel,
    failed: Mutex<Option<Instant>>,
}

impl Remote {
    /// Keep in mind, and log once, that it does not answer.
    pub(super) fn note_failure(&self, what: &dyn std::fmt::Display) {
        if self.failed.lock().replace(Instant::now()).is_none() {
            tracing::warn!(peer = self.name, %what, "a peer failed, trying on");
        }
    }

    pub(super) fn note_success(&self) {
        if self.failed.lock().take().is_some() {
            tracing::info!(peer = self.name, "the peer answers again");
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
    looked: Mutex<Option<Instant>>,
}

impl Pool {
    pub(super) fn new(options: &ClientOptions) -> Self {
        Self { remotes: Arc::default(), rank: options.rank as usize, looked: Mutex::default() }
    }

    /// The peer to ask: the rank's own, or the next one that has not failed just now, or the one that failed first.
    /// Peers are looked for when none is known, or all have failed.
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

    /// A peer failed: find out, beside the requests, which are still announced, and which are new.
    pub(super) fn look_again(&self, options: &ClientOptions) {
        if matches!(options.targets, Targets::Fixed(_)) {
            return;
        }
        let mut looked = self.looked.lock();
        if looked.is_some_and(|at| at.elapsed() < LOOK_PAUSE) {
            return;
        }
        *looked = Some(Instant::now());
        let (remotes, options) = (Arc::clone(&self.remotes), options.clone());
        tokio::spawn(async move {
            if let Err(error) = resolve(&remotes, &options).await {
                tracing::warn!("cannot look for other peers: {error}");
            }
        });
    }
}

/// Make `remotes` those that are announced, in their order; none is announced: leave them.
async fn resolve(remotes: &Mutex<Vec<Arc<Remote>>>, options: &ClientOptions) -> Result<(), TablesError> {
    let found = match &options.targets {
        Targets::Fixed(endpoints) => endpoints.clone(),
        Targets::Discovered(discovery) => match discovery.find(options.service, FIND_TIMEOUT).await {
            Ok(peers) => endpoints_of(&peers)?,
            // Those known before may still be there.
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
    let channel = endpoint.channel(tls).map_err(|error| TablesError::Refused {
        peer: name.clone(),
        what: format!("TLS: {error}: {:?}", std::error::Error::source(&error)),
    })?;
    Ok(Remote { name, service: options.service, endpoint, channel, failed: Mutex::default() })
}

fn endpoints_of(peers: &[Peer]) -> Result<Vec<Endpoint>, TablesError> {
    for peer in peers {
        if peer.protocol != PROTOCOL || peer.version != VERSION {
            return Err(TablesError::Incompatible {
                peer: peer.describe(),
                what: format!(
                    "it is version {} with protocol {}, this process is version {VERSION} with protocol {PROTOCOL}",
                    peer.version, peer.protocol
                ),
            });
        }
    }
    Ok(peers.iter().filter_map(|peer| peer.address.clone()).collect())
}

fn of_discovery(error: &DiscoveryError) -> TablesError {
    let what = error.to_string();
    match error {
        DiscoveryError::Refused { url, .. } => TablesError::Refused { peer: format!("NATS at {url}"), what },
        _ => TablesError::Unreachable { peer: "discovery".into(), what },
    }
}
