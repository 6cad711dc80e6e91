//! [`Servers`]: the job's embedding servers, as far as they are known, and connections to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use persia_types::TablesError;
use persia_wire::auth::{Credentials, Role, Secret};
use persia_wire::discovery::{Discovery, Peer, Service};
use persia_wire::proto::embedding_server_client::EmbeddingServerClient;
use persia_wire::settings::Endpoint;
use persia_wire::{PROTOCOL, VERSION, bounded};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, ClientTlsConfig};

use crate::exit::Exit;

/// How long NATS has to answer.
const FIND_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the announcements are read while all servers are known, and while some are missing.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// The least time between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(200);
/// How long a request waits for servers that are missing; its caller tries again.
const PATIENCE: Duration = Duration::from_secs(2);

/// A client of one server.
pub type Client = EmbeddingServerClient<InterceptedService<Channel, Credentials>>;

/// What is needed to call a server.
#[derive(Debug, Clone, Default)]
pub struct Link {
    /// The secret of the cluster.
    pub secret: Option<Secret>,
    /// With it servers are called by TLS.
    pub tls: Option<ClientTlsConfig>,
}

/// One server.
#[derive(Debug)]
pub struct Member {
    /// "server 1 of 2 at host:8888"
    pub peer: String,
    endpoint: Endpoint,
    data: Client,
    admin: Client,
}

impl Member {
    fn new(peer: String, endpoint: Endpoint, link: &Link) -> Result<Self, tonic::transport::Error> {
        let channel = endpoint.channel(link.tls.as_ref())?;
        let client = |role| {
            let credentials = Credentials::new(role, link.secret.as_ref());
            bounded!(EmbeddingServerClient::with_interceptor(channel.clone(), credentials))
        };
        Ok(Self { data: client(Role::Middleware), admin: client(Role::Admin), peer, endpoint })
    }

    /// For look-ups, pushes and statistics.
    pub fn data(&self) -> Client {
        self.data.clone()
    }

    /// For everything else.
    pub fn admin(&self) -> Client {
        self.admin.clone()
    }
}

/// What is known: one entry per server of the job, and why it is not all.
#[derive(Debug, Clone, Default)]
struct Known {
    members: Vec<Option<Arc<Member>>>,
    disagreement: Option<(String, String)>,
}

impl Known {
    fn complete(&self) -> Option<Vec<Arc<Member>>> {
        if self.members.is_empty() { None } else { self.members.iter().cloned().collect() }
    }

    fn missing(&self) -> String {
        let servers = self.members.len();
        if servers == 0 {
            return "none has announced itself".into();
        }
        let missing: Vec<String> = (0..servers)
            .filter(|index| self.members[*index].is_none())
            .map(|index| format!("server {index} of {servers}"))
            .collect();
        format!("{} did not announce itself", missing.join(", "))
    }
}

/// See the module's documentation.
pub struct Servers {
    known: watch::Receiver<Known>,
    look: Arc<Notify>,
    searched: String,
    search: Option<AbortHandle>,
}

impl Drop for Servers {
    fn drop(&mut self) {
        if let Some(search) = &self.search {
            search.abort();
        }
    }
}

impl Servers {
    /// The servers at `endpoints`, in the order of their index.
    ///
    /// # Errors
    /// `Usage` for a certificate that can't be used.
    pub fn fixed(endpoints: &[Endpoint], link: &Link) -> Result<Self, Exit> {
        let servers = endpoints.len();
        let members = endpoints.iter().enumerate().map(|(index, endpoint)| {
            let peer = format!("server {index} of {servers} at {endpoint}");
            Member::new(peer, endpoint.clone(), link).map(|member| Some(Arc::new(member)))
        });
        let members = members.collect::<Result<_, _>>();
        let members = members.map_err(|error| Exit::Usage(format!("PERSIA_TLS_CA: {error}")))?;
        let (_, known) = watch::channel(Known { members, disagreement: None });
        Ok(Self { known, look: Arc::default(), searched: "--servers".into(), search: None })
    }

    /// The servers that announce themselves, from now on and whenever they change.
    pub fn discovered(discovery: Discovery, link: Link) -> Self {
        let (publish, known) = watch::channel(Known::default());
        let look = Arc::new(Notify::new());
        let searched = format!("servers of job {}", discovery.job());
        let search = Search { discovery, link, publish, elders: BTreeMap::new() };
        let task = tokio::spawn(search.run(Arc::clone(&look)));
        Self { known, look, searched, search: Some(task.abort_handle()) }
    }

    /// All servers, waiting a moment for those that are missing.
    ///
    /// # Errors
    /// `Unreachable` naming those that are missing; `Incompatible` naming one that does not fit.
    pub async fn all(&self) -> Result<Vec<Arc<Member>>, TablesError> {
        let mut known = self.known.clone();
        let settled = known.wait_for(|known| known.complete().is_some() || known.disagreement.is_some());
        let known = match tokio::time::timeout(PATIENCE, settled).await {
            Ok(Ok(known)) => known.clone(),
            _ => self.known.borrow().clone(),
        };
        if let Some(members) = known.complete() {
            return Ok(members);
        }
        self.look_again();
        Err(match known.disagreement {
            Some((peer, what)) => TablesError::Incompatible { peer, what },
            None => TablesError::Unreachable { peer: self.searched.clone(), what: known.missing() },
        })
    }

    /// Servers in the order of their index; None where one is not known.
    pub fn known(&self) -> Vec<Option<Arc<Member>>> {
        self.known.borrow().members.clone()
    }

    /// Wait until all servers are known.
    pub async fn found(&self) {
        let mut known = self.known.clone();
        if known.wait_for(|known| known.complete().is_some()).await.is_err() {
            // The search ends with the process only.
            std::future::pending::<()>().await;
        }
    }

    /// A server did not answer: read the announcements again, soon.
    pub fn look_again(&self) {
        self.look.notify_one();
    }
}

/// Reads the announcements again and again.
struct Search {
    discovery: Discovery,
    link: Link,
    publish: watch::Sender<Known>,
    elders: BTreeMap<usize, Elder>,
}

/// The process that an index belongs to.
#[derive(Debug)]
struct Elder {
    /// When it started by its own clock, and what NATS calls it.
    age: (u64, String),
    /// Looks in a row that it did not answer.
    missed: u32,
}

/// One that did not answer as often is gone, and makes room for whoever has its index.
const MISSED_WHEN_GONE: u32 = 3;

/// Whether `peer` is to have its index: of two that are there, the younger, because the older is about to go.
fn succeeds(elders: &mut BTreeMap<usize, Elder>, peer: &Peer) -> bool {
    let started = peer.metadata.get("started").and_then(|text| text.parse().ok()).unwrap_or(0);
    let age = (started, peer.id.clone());
    let index = peer.index as usize;
    // Clocks of two hosts differ, so that the start counts only while both are there.
    if elders.get(&index).is_some_and(|elder| elder.age > age && elder.missed < MISSED_WHEN_GONE) {
        return false;
    }
    elders.insert(index, Elder { age, missed: 0 });
    true
}

/// Note who answered this look and who did not.
fn note_missed(elders: &mut BTreeMap<usize, Elder>, peers: &[Peer]) {
    for elder in elders.values_mut() {
        let there = peers.iter().any(|peer| peer.id == elder.age.1);
        elder.missed = if there { 0 } else { elder.missed.saturating_add(1) };
    }
}

impl Search {
    async fn run(mut self, look: Arc<Notify>) {
        loop {
            // NATS being away is logged by discovery; what is known stays good.
            if let Ok(peers) = self.discovery.find(Service::Server, FIND_TIMEOUT).await {
                self.update(&peers);
            }
            let complete = self.publish.borrow().complete().is_some();
            let interval = if complete { LOOK_INTERVAL } else { SEARCH_INTERVAL };
            tokio::time::sleep(LOOK_PAUSE).await;
            let _ = tokio::time::timeout(interval, look.notified()).await;
        }
    }

    fn update(&mut self, peers: &[Peer]) {
        let before = self.publish.borrow().clone();
        let mut next = before.clone();
        match disagreement(peers) {
            // A stranger that comes later does not disturb those that work together.
            found @ Some(_) => {
                next.disagreement = found;
            }
            None => {
                next.disagreement = None;
                self.take(peers, &mut next);
            }
        }
        if let Some((peer, what)) = &next.disagreement
            && next.disagreement != before.disagreement
        {
            tracing::error!("{peer} does not fit: {what}");
        }
        if next.complete().is_some() && before.complete().is_none() {
            tracing::info!(servers = next.members.len(), "all servers are known");
        } else if next.complete().is_none() && next.missing() != before.missing() {
            tracing::info!("waiting for servers: {}", next.missing());
        }
        self.publish.send_replace(next);
    }

    fn take(&mut self, peers: &[Peer], known: &mut Known) {
        let Some(servers) = peers.first().map(|peer| peer.replicas as usize) else { return };
        if known.members.len() != servers {
            known.members = vec![None; servers];
            self.elders.clear();
        }
        note_missed(&mut self.elders, peers);
        for peer in peers {
            let (index, Some(endpoint)) = (peer.index as usize, &peer.address) else { continue };
            if !succeeds(&mut self.elders, peer) {
                continue;
            }
            let same = known.members[index].as_ref().is_some_and(|member| member.endpoint == *endpoint);
            if same {
                continue;
            }
            match Member::new(peer.describe(), endpoint.clone(), &self.link) {
                Ok(member) => {
                    tracing::info!("found {}", member.peer);
                    known.members[index] = Some(Arc::new(member));
                }
                Err(error) => tracing::error!("{}: {error}", peer.describe()),
            }
        }
    }
}

/// Why these servers cannot work together: who, and what.
fn disagreement(peers: &[Peer]) -> Option<(String, String)> {
    let first = peers.first()?;
    peers.iter().find_map(|peer| {
        let what = if peer.protocol != PROTOCOL {
            format!("it speaks protocol {}, this middleware speaks {PROTOCOL}", peer.protocol)
        } else if peer.version != VERSION {
            format!("it is of version {}, this middleware of {VERSION}", peer.version)
        } else if peer.replicas != first.replicas {
            format!("there is also {}: all need the same REPLICA_SIZE", first.describe())
        } else if peer.address.is_none() {
            "it announces no address".into()
        } else {
            return None;
        };
        Some((peer.describe(), what))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(index: u32, replicas: u32, version: &str) -> Peer {
        Peer {
            service: Service::Server,
            id: format!("id-{index}"),
            job: "job".into(),
            index,
            replicas,
            address: Some(format!("host-{index}:8888").parse().unwrap()),
            protocol: PROTOCOL,
            version: version.into(),
            metadata: BTreeMap::new(),
        }
    }

    #[test]
    fn servers_that_do_not_fit_together_are_named() {
        assert_eq!(disagreement(&[peer(0, 2, VERSION), peer(1, 2, VERSION)]), None);
        let (who, what) = disagreement(&[peer(0, 2, VERSION), peer(1, 2, "0.0.9")]).unwrap();
        assert!(who.contains("server 1 of 2 at host-1:8888") && what.contains("0.0.9"), "{who}: {what}");
        let (who, what) = disagreement(&[peer(0, 2, VERSION), peer(2, 3, VERSION)]).unwrap();
        assert!(who.contains("server 2 of 3") && what.contains("server 0 of 2"), "{who}: {what}");
    }

    #[test]
    fn of_two_the_younger_and_of_one_that_is_gone_whoever_is_there() {
        let of = |id: &str, started: u64| {
            let metadata = BTreeMap::from([("started".to_owned(), started.to_string())]);
            Peer { id: id.into(), metadata, ..peer(0, 1, VERSION) }
        };
        let (first, second) = (of("first", 2000), of("second", 1000));
        let mut elders = BTreeMap::new();
        let mut look = |peers: &[Peer]| {
            note_missed(&mut elders, peers);
            peers.iter().map(|peer| succeeds(&mut elders, peer)).collect::<Vec<_>>()
        };
        assert_eq!(look(&[first.clone(), second.clone()]), [true, false]);
        // The first one is gone; the clock of its successor's host is behind.
        let taken: Vec<bool> = (0..4).map(|_| look(std::slice::from_ref(&second))[0]).collect();
        assert_eq!(taken, [false, false, true, true]);
        assert_eq!(look(&[second, first]), [true, true]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let known = Known { members: vec![None, None], disagreement: None };
        assert_eq!(known.missing(), "server 0 of 2, server 1 of 2 did not announce itself");
    }
}
