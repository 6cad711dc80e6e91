//! Creates and reads announcements of processes.

use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use async_nats::service::Info;
use persia_types::limits::MAX_RANKS;

use super::error::{DiscoveryError, MAX_JOB_BYTES};
use crate::settings::Endpoint;
use crate::{PROTOCOL, VERSION};

/// The maximum size of an announcement that is read, in bytes. NATS is configured with the same limit.
const MAX_INFO_BYTES: usize = 64 << 10;

/// Check a job name, which becomes part of log lines, file names and metadata.
///
/// # Errors
/// `BadJob`.
pub fn check_job_name(name: &str) -> Result<(), DiscoveryError> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if (1..=MAX_JOB_BYTES).contains(&name.len()) && name.bytes().all(good) {
        Ok(())
    } else {
        Err(DiscoveryError::BadJob { name: name.to_owned() })
    }
}

/// The role of a process in its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Service {
    /// An embedding server, which holds rows.
    Server,
    /// A middleware, which splits requests among the servers.
    Middleware,
    /// A rank.
    Trainer,
    /// A data-compose replica.
    Data,
}

impl Service {
    /// The name of the service in NATS.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "persia-server",
            Self::Middleware => "persia-middleware",
            Self::Trainer => "persia-trainer",
            Self::Data => "persia-data",
        }
    }

    /// The service with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Server, Self::Middleware, Self::Trainer, Self::Data];
        all.into_iter().find(|service| service.name() == name)
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Server => "holds the embedding rows of its shards",
            Self::Middleware => "splits look-ups and pushes by server",
            Self::Trainer => "one rank of a training run",
            Self::Data => "sends batches to trainer ranks",
        }
    }
}

/// The announcement of a process.
#[derive(Debug, Clone)]
pub struct Announcement {
    /// The role of the process in the job.
    pub service: Service,
    /// The index among the replicas.
    pub index: u32,
    /// The number of replicas.
    pub replicas: u32,
    /// The address at which other processes reach it; None if it serves no requests.
    pub address: Option<Endpoint>,
    /// The `host:port` of its metrics; None if it serves none.
    pub metrics: Option<String>,
    /// Further metadata, such as `store` and `build`. An entry with the name of other metadata, such as `job`
    /// or `pid`, is ignored.
    pub more: BTreeMap<String, String>,
}

impl Announcement {
    pub(super) fn metadata(&self, job: &str) -> HashMap<String, String> {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        // The start time shows which of two processes with the same index is newer, as far as the clocks of
        // their hosts agree.
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut metadata: HashMap<String, String> = self.more.clone().into_iter().collect();
        let own = [
            ("job", job.to_owned()),
            ("index", self.index.to_string()),
            ("replicas", self.replicas.to_string()),
            ("address", self.address.as_ref().map(Endpoint::to_string).unwrap_or_default()),
            ("metrics", self.metrics.clone().unwrap_or_default()),
            ("version", VERSION.to_owned()),
            ("protocol", PROTOCOL.to_string()),
            ("host", host.trim().to_owned()),
            ("pid", std::process::id().to_string()),
            ("started", started.to_string()),
        ];
        metadata.extend(own.map(|(key, value)| (key.to_owned(), value)));
        metadata
    }
}

/// The announcement of another process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The role of the process in the job.
    pub service: Service,
    /// The id of the announcement in NATS. It is different after each start.
    pub id: String,
    /// The job of the process.
    pub job: String,
    /// The index among the replicas.
    pub index: u32,
    /// The number of replicas.
    pub replicas: u32,
    /// The address at which to reach the process; None if it serves no requests.
    pub address: Option<Endpoint>,
    /// The protocol number, to be compared with [`PROTOCOL`].
    pub protocol: u32,
    /// The version, to be compared with [`VERSION`].
    pub version: String,
    /// All metadata, including the fields above.
    pub metadata: BTreeMap<String, String>,
}

impl Peer {
    /// Parse a response to `$SRV.INFO`. The error is a message that names the malformed part.
    pub(super) fn parse(service: Service, answer: &[u8]) -> Result<Self, String> {
        if answer.len() > MAX_INFO_BYTES {
            return Err(format!("a response of {} bytes, but the limit is {MAX_INFO_BYTES}", answer.len()));
        }
        let info: Info = serde_json::from_slice(answer).map_err(|error| error.to_string())?;
        if info.name != service.name() {
            return Err(format!("{}: its name is {:?}, expected {:?}", info.id, info.name, service.name()));
        }
        let metadata: BTreeMap<String, String> = info.metadata.into_iter().collect();
        let text = |key: &str| metadata.get(key).map_or("", String::as_str);
        let number = |key: &str| -> Result<u32, String> {
            text(key).parse().map_err(|_| format!("{}: {key}={:?} is not a number", info.id, text(key)))
        };
        let (index, replicas) = (number("index")?, number("replicas")?);
        if index >= replicas || replicas > MAX_RANKS {
            return Err(format!(
                "{}: index {index} of {replicas}, expected an index below the number of replicas, which is at most \
                 {MAX_RANKS}",
                info.id
            ));
        }
        let job = text("job").to_owned();
        check_job_name(&job).map_err(|error| format!("{}: {error}", info.id))?;
        let address = match text("address") {
            "" => None,
            text => Some(text.parse().map_err(|error| format!("{}: {error}", info.id))?),
        };
        let (protocol, version) = (number("protocol")?, text("version").to_owned());
        Ok(Self { service, id: info.id, job, index, replicas, address, protocol, version, metadata })
    }

    /// The name in messages: "server 1 of 2 at host:8888".
    pub fn describe(&self) -> String {
        let name = self.service.name().trim_start_matches("persia-");
        let at = self.address.as_ref().map(|address| format!(" at {address}")).unwrap_or_default();
        format!("{name} {} of {}{at}", self.index, self.replicas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(change: &[(&str, &str)]) -> Vec<u8> {
        let announcement = Announcement {
            service: Service::Server,
            index: 1,
            replicas: 2,
            address: Some("host:8888".parse().unwrap()),
            metrics: None,
            more: BTreeMap::from([("build".to_owned(), "release".to_owned())]),
        };
        let mut metadata = announcement.metadata("job-1");
        metadata.extend(change.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        let info = serde_json::json!({
            "type": "io.nats.micro.v1.info_response", "name": "persia-server", "id": "abc",
            "description": "", "version": VERSION, "metadata": metadata, "endpoints": [],
        });
        info.to_string().into_bytes()
    }

    #[test]
    fn an_announcement_is_read() {
        let peer = Peer::parse(Service::Server, &answer(&[])).unwrap();
        assert_eq!(peer.describe(), "server 1 of 2 at host:8888");
        assert_eq!((peer.job.as_str(), peer.protocol, peer.version.as_str()), ("job-1", PROTOCOL, VERSION));
        assert_eq!(peer.metadata["build"], "release");
        assert_eq!(peer.metadata["pid"], std::process::id().to_string());
        assert_eq!(Peer::parse(Service::Server, &answer(&[("address", "")])).unwrap().address, None);
    }

    #[test]
    fn malformed_announcements_are_refused() {
        let bad = [("index", "2"), ("index", "-1"), ("replicas", "x"), ("address", "host"), ("job", "a b")];
        for change in bad {
            let error = Peer::parse(Service::Server, &answer(&[change])).unwrap_err();
            assert!(error.starts_with("abc: "), "{error}");
        }
        assert!(Peer::parse(Service::Trainer, &answer(&[])).is_err());
        assert!(Peer::parse(Service::Server, b"{}").is_err());
        assert!(Peer::parse(Service::Server, &vec![b' '; MAX_INFO_BYTES + 1]).is_err());
    }

    #[test]
    fn job_names_are_checked() {
        for good in ["persia_default_jobname", "a", "A.b-c_9"] {
            check_job_name(good).unwrap();
        }
        for bad in ["", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(check_job_name(bad).is_err());
        }
    }
}
