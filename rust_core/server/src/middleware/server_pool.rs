//! [`ServerPool`]: the known embedding servers of the job, and the connections to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use persia_types::TablesError;
use persia_wire::auth::{Credentials, Role, Secret};
use persia_wire::discovery::{Discovery, Peer, Service};
use persia_wire::error::with_causes;
use persia_wire::rpc::Rpc;
use persia_wire::settings::Endpoint;
use persia_wire::{PROTOCOL, VERSION};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tonic::transport::ClientTlsConfig;

use crate::exit::Exit;

/// The time for which a search through NATS waits for responses.
const FIND_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval at which announcements are read: while all servers are known, and while some are missing.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// The minimum time between two searches.
const SEARCH_PAUSE: Duration = Duration::from_millis(200);
/// The maximum time that a request waits for missing servers. Its caller then retries the request.
const MISSING_TIMEOUT: Duration = Duration::from_secs(2);

/// The credentials and the TLS settings for calls to servers.
#[derive(Debug, Clone, Default)]
pub struct Link {
    /// The secret of the job.
    pub secret: Option<Secret>,
    /// The TLS settings for calls to servers; None means plain text.
    pub tls: Option<ClientTlsConfig>,
}

/// A known server.
#[derive(Debug)]
pub struct ServerClient {
    /// "server 1 of 2 at host:8888"
    pub peer: String,
    endpoint: Endpoint,
    data: Rpc,
    admin: Rpc,
}

impl ServerClient {
    /// # Errors
    /// The reason why the address or TLS cannot be used for calls to this server.
    fn new(peer: String, endpoint: Endpoint, link: &Link) -> Result<Self, String> {
        let channel = endpoint.channel(link.tls.as_ref()).map_err(|error| {
            let with = if link.tls.is_some() { " with PERSIA_TLS_CA and PERSIA_TLS_NAME" } else { "" };
            format!("cannot call {peer}{with}: {}", with_causes(&error))
        })?;
        let rpc = |role| {
            let credentials = Credentials::new(role, link.secret.as_ref());
            Rpc::new(Service::Server, channel.clone(), credentials)
        };
        Ok(Self { data: rpc(Role::Middleware), admin: rpc(Role::Admin), peer, endpoint })
    }

    /// A client for look-ups, pushes and statistics.
    pub fn data(&self) -> Rpc {
        self.data.clone()
    }

    /// A client for all other methods.
    pub fn admin(&self) -> Rpc {
        self.admin.clone()
    }
}

/// The known servers, with one entry for each index. `disagreement` is an incompatible server that the last search
/// found, and the reason.
#[derive(Debug, Clone, Default)]
struct ServerTable {
    servers: Vec<Option<Arc<ServerClient>>>,
    disagreement: Option<(String, String)>,
}

impl ServerTable {
    fn complete(&self) -> Option<Vec<Arc<ServerClient>>> {
        if self.servers.is_empty() { None } else { self.servers.iter().cloned().collect() }
    }

    fn missing(&self) -> String {
        let servers = self.servers.len();
        if servers == 0 {
            return "none has announced itself".into();
        }
        let missing: Vec<String> = (0..servers)
            .filter(|index| self.servers[*index].is_none())
            .map(|index| format!("server {index} of {servers}"))
            .collect();
        format!("no announcement of {}", missing.join(", "))
    }
}

/// The servers of a job.
pub struct ServerPool {
    known: watch::Receiver<ServerTable>,
    refresh: Arc<Notify>,
    searched: String,
    search: Option<AbortHandle>,
}

impl Drop for ServerPool {
    fn drop(&mut self) {
        if let Some(search) = &self.search {
            search.abort();
        }
    }
}

impl ServerPool {
    /// Create a pool of the servers at `endpoints`, in the order of their index.
    ///
    /// # Errors
    /// `Usage` for an address or TLS settings that cannot be used.
    pub fn fixed(endpoints: &[Endpoint], link: &Link) -> Result<Self, Exit> {
        let count = endpoints.len();
        let servers = endpoints.iter().enumerate().map(|(index, endpoint)| {
            let peer = format!("server {index} of {count} at {endpoint}");
            ServerClient::new(peer, endpoint.clone(), link).map(|server| Some(Arc::new(server)))
        });
        let servers = servers.collect::<Result<_, _>>();
        let servers = servers.map_err(Exit::Usage)?;
        let (_, known) = watch::channel(ServerTable { servers, disagreement: None });
        Ok(Self { known, refresh: Arc::default(), searched: "--servers".into(), search: None })
    }

    /// Create a pool of the announced servers. The pool is kept up to date.
    pub fn discovered(discovery: Discovery, link: Link) -> Self {
        let (publish, known) = watch::channel(ServerTable::default());
        let refresh = Arc::new(Notify::new());
        let searched = format!("servers of job {}", discovery.job());
        let search = Search { discovery, link, publish, incumbents: BTreeMap::new() };
        let task = tokio::spawn(search.run(Arc::clone(&refresh)));
        Self { known, refresh, searched, search: Some(task.abort_handle()) }
    }

    /// Return all servers. Waits at most `MISSING_TIMEOUT` for missing servers.
    ///
    /// # Errors
    /// `Unreachable`, with the names of the missing servers; `Incompatible`, with the name of an incompatible server.
    pub async fn all(&self) -> Result<Vec<Arc<ServerClient>>, TablesError> {
        let mut known = self.known.clone();
        let settled = known.wait_for(|known| known.complete().is_some() || known.disagreement.is_some());
        let known = match tokio::time::timeout(MISSING_TIMEOUT, settled).await {
            Ok(Ok(known)) => known.clone(),
            _ => self.known.borrow().clone(),
        };
        if let Some(servers) = known.complete() {
            return Ok(servers);
        }
        self.refresh();
        Err(match known.disagreement {
            Some((peer, what)) => TablesError::Incompatible { peer, what },
            None => TablesError::Unreachable { peer: self.searched.clone(), what: known.missing() },
        })
    }

    /// Whether the servers were given as a list, whose order may be wrong.
    pub fn is_listed(&self) -> bool {
        self.search.is_none()
    }

    /// The servers in the order of their index; None for an unknown server.
    pub fn known(&self) -> Vec<Option<Arc<ServerClient>>> {
        self.known.borrow().servers.clone()
    }

    /// Wait until all servers are known.
    pub async fn found(&self) {
        let mut known = self.known.clone();
        if known.wait_for(|known| known.complete().is_some()).await.is_err() {
            // The search ends only with the process.
            std::future::pending::<()>().await;
        }
    }

    /// Request a search for announcements. Call this when a server did not respond.
    pub fn refresh(&self) {
        self.refresh.notify_one();
    }
}

/// Reads the announcements repeatedly.
struct Search {
    discovery: Discovery,
    link: Link,
    publish: watch::Sender<ServerTable>,
    incumbents: BTreeMap<usize, Incumbent>,
}

/// The process that currently has an index.
#[derive(Debug)]
struct Incumbent {
    /// The start time, by the clock of its host, and the id in NATS.
    age: (u64, String),
    /// The number of consecutive searches to which it did not respond.
    missed: u32,
}

/// The number of unanswered searches after which a process counts as ended, so that another one can take its index.
const MISSED_WHEN_GONE: u32 = 3;

/// Decide whether `peer` gets its index and, if it does, record it. Of two live processes with one index, the newer
/// process gets the index, because the older one is about to end.
fn succeeds(incumbents: &mut BTreeMap<usize, Incumbent>, peer: &Peer) -> bool {
    let started = peer.metadata.get("started").and_then(|text| text.parse().ok()).unwrap_or(0);
    let age = (started, peer.id.clone());
    let index = peer.index as usize;
    // The clocks of hosts differ, so the start time decides only while both processes are alive.
    if incumbents
        .get(&index)
        .is_some_and(|incumbent| incumbent.age > age && incumbent.missed < MISSED_WHEN_GONE)
    {
        return false;
    }
    incumbents.insert(index, Incumbent { age, missed: 0 });
    true
}

/// Count, for each known process, the consecutive searches to which it has not responded.
fn note_missed(incumbents: &mut BTreeMap<usize, Incumbent>, peers: &[Peer]) {
    for incumbent in incumbents.values_mut() {
        let there = peers.iter().any(|peer| peer.id == incumbent.age.1);
        incumbent.missed = if there { 0 } else { incumbent.missed.saturating_add(1) };
    }
}

impl Search {
    async fn run(mut self, refresh: Arc<Notify>) {
        loop {
            // Discovery logs that NATS is unreachable. Known servers stay valid.
            if let Ok(peers) = self.discovery.find(Service::Server, FIND_TIMEOUT).await {
                self.update(&peers);
            }
            let complete = self.publish.borrow().complete().is_some();
            let interval = if complete { REFRESH_INTERVAL } else { SEARCH_INTERVAL };
            tokio::time::sleep(SEARCH_PAUSE).await;
            let _ = tokio::time::timeout(interval, refresh.notified()).await;
        }
    }

    fn update(&mut self, peers: &[Peer]) {
        let before = self.publish.borrow().clone();
        let mut next = before.clone();
        match disagreement(peers) {
            // An incompatible server that arrives later does not affect the known ones.
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
            tracing::error!("{peer} is incompatible: {what}");
        }
        if next.complete().is_some() && before.complete().is_none() {
            tracing::info!(servers = next.servers.len(), "all servers are known");
        } else if next.complete().is_none() && next.missing() != before.missing() {
            tracing::info!("waiting for servers: {}", next.missing());
        }
        self.publish.send_replace(next);
    }

    fn take(&mut self, peers: &[Peer], known: &mut ServerTable) {
        let Some(servers) = peers.first().map(|peer| peer.replicas as usize) else { return };
        if known.servers.len() != servers {
            known.servers = vec![None; servers];
            self.incumbents.clear();
        }
        note_missed(&mut self.incumbents, peers);
        for peer in peers {
            let (index, Some(endpoint)) = (peer.index as usize, &peer.address) else { continue };
            if !succeeds(&mut self.incumbents, peer) {
                continue;
            }
            let same = known.servers[index].as_ref().is_some_and(|server| server.endpoint == *endpoint);
            if same {
                continue;
            }
            match ServerClient::new(peer.describe(), endpoint.clone(), &self.link) {
                Ok(server) => {
                    tracing::info!("found {}", server.peer);
                    known.servers[index] = Some(Arc::new(server));
                }
                Err(why) => tracing::error!("{why}"),
            }
        }
    }
}

/// Find a server that is incompatible with this middleware or with the first server, or that cannot be
/// called. Returns the server and the reason.
fn disagreement(peers: &[Peer]) -> Option<(String, String)> {
    let first = peers.first()?;
    peers.iter().find_map(|peer| {
        let what = if peer.protocol != PROTOCOL {
            format!("it uses protocol {}, but this middleware uses {PROTOCOL}", peer.protocol)
        } else if peer.version != VERSION {
            format!("it has version {}, but this middleware has {VERSION}", peer.version)
        } else if peer.replicas != first.replicas {
            format!("{} has a different REPLICA_SIZE; set the same value for all servers", first.describe())
        } else if peer.address.is_none() {
            "it announces no address, so it cannot be called".into()
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
    fn servers_that_do_not_match_are_named() {
        assert_eq!(disagreement(&[peer(0, 2, VERSION), peer(1, 2, VERSION)]), None);
        let (who, what) = disagreement(&[peer(0, 2, VERSION), peer(1, 2, "0.0.9")]).unwrap();
        assert!(who.contains("server 1 of 2 at host-1:8888") && what.contains("0.0.9"), "{who}: {what}");
        let (who, what) = disagreement(&[peer(0, 2, VERSION), peer(2, 3, VERSION)]).unwrap();
        assert!(who.contains("server 2 of 3") && what.contains("server 0 of 2"), "{who}: {what}");
    }

    #[test]
    fn of_two_processes_the_younger_gets_the_index_until_it_ends() {
        let of = |id: &str, started: u64| {
            let metadata = BTreeMap::from([("started".to_owned(), started.to_string())]);
            Peer { id: id.into(), metadata, ..peer(0, 1, VERSION) }
        };
        let (first, second) = (of("first", 2000), of("second", 1000));
        let mut incumbents = BTreeMap::new();
        let mut look = |peers: &[Peer]| {
            note_missed(&mut incumbents, peers);
            peers.iter().map(|peer| succeeds(&mut incumbents, peer)).collect::<Vec<_>>()
        };
        assert_eq!(look(&[first.clone(), second.clone()]), [true, false]);
        // The first process has ended. The clock of the second process's host is slow.
        let taken: Vec<bool> = (0..4).map(|_| look(std::slice::from_ref(&second))[0]).collect();
        assert_eq!(taken, [false, false, true, true]);
        assert_eq!(look(&[second, first]), [true, true]);
    }

    #[test]
    fn tls_that_cannot_be_used_is_reported_with_its_cause() {
        let tls = Some(ClientTlsConfig::new().domain_name("not a name"));
        let pool = ServerPool::fixed(&["host:1".parse().unwrap()], &Link { secret: None, tls });
        let Err(Exit::Usage(text)) = pool else { panic!("accepted") };
        assert!(text.starts_with("cannot call server 0 of 1 at host:1 with PERSIA_TLS_CA and "), "{text}");
        assert!(text.ends_with(": invalid dns name"), "{text}");
    }

    #[test]
    fn missing_servers_are_named() {
        let known = ServerTable { servers: vec![None, None], disagreement: None };
        assert_eq!(known.missing(), "no announcement of server 0 of 2, server 1 of 2");
    }
}
