//! `persia_core.discovery`: finds the processes of a job.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_wire::auth::{Role, Secret};
use persia_wire::discovery::{
    self as wire, Announced, BlockingDiscovery, DiscoveryError, DiscoveryOptions, Peer, Service,
};
use pyo3::prelude::*;

use crate::{errors, logs, wait};

/// A connection to NATS that reconnects automatically.
#[pyclass(module = "persia_core.discovery", frozen)]
pub(crate) struct Discovery {
    job: String,
    /// The connection; None once it is closed.
    connection: Mutex<Option<Arc<BlockingDiscovery>>>,
}

#[pymethods]
impl Discovery {
    /// Connect in the background to NATS at `url`. Only processes of `job` are found.
    #[new]
    #[pyo3(signature = (url, job, token_file=None))]
    fn new(py: Python<'_>, url: String, job: String, token_file: Option<PathBuf>) -> PyResult<Self> {
        logs::begin(py)?;
        persia_wire::logs::name_run(&job);
        let secret = secret(py, token_file)?;
        let token = secret.map(|secret| secret.token(Role::Nats));
        let options = DiscoveryOptions { url, job: job.clone(), token };
        let connection =
            py.detach(|| BlockingDiscovery::connect(options)).map_err(|error| raise(py, &error))?;
        Ok(Self { job, connection: Mutex::new(Some(Arc::new(connection))) })
    }

    /// Whether the connection is up.
    #[getter]
    fn connected(&self) -> bool {
        self.connection.lock().as_ref().is_some_and(|connection| connection.discovery().is_connected())
    }

    /// Wait at most `timeout_s` until the connection is up.
    pub(crate) fn wait_connected(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let connection = self.open(py)?;
        let (start, end) = (Instant::now(), end(timeout_s));
        wait::until(py, |slice| match connection.wait_connected(Some(slice)) {
            Ok(()) => Ok(Some(())),
            Err(DiscoveryError::NotConnected { .. }) if Instant::now() < end => Ok(None),
            Err(DiscoveryError::NotConnected { url, what, .. }) => {
                let waited = Some(start.elapsed()); // in total, not only in the last slice
                Err(Python::attach(|py| raise(py, &DiscoveryError::NotConnected { url, what, waited })))
            }
            Err(error) => Err(Python::attach(|py| raise(py, &error))),
        })
    }

    /// Announce this process until the announcement is closed, even if NATS is restarted. `address` is
    /// empty if the process serves no requests. The value of `metrics` in `extra` is the address of its metrics.
    fn announce(
        &self,
        py: Python<'_>,
        service: &str,
        index: u32,
        replicas: u32,
        address: &str,
        mut extra: BTreeMap<String, String>,
    ) -> PyResult<Announcement> {
        let connection = self.open(py)?;
        let address = if address.is_empty() { None } else { Some(address.parse()) };
        let address = address.transpose().map_err(|error| {
            errors::raise(py, "UsageError", format!("cannot announce this process: {error}"))
        })?;
        let announcement = wire::Announcement {
            service: service_of(py, service)?,
            index,
            replicas,
            address,
            metrics: extra.remove("metrics"),
            more: extra,
        };
        let announced = py.detach(|| connection.announce(announcement)).map_err(|error| raise(py, &error))?;
        Ok(Announcement { announced: Mutex::new(Some(announced)) })
    }

    /// Find the job's processes of `service`, sorted by index. Waits at most `timeout_s` for NATS and for
    /// responses, but at least 0.2 s for responses.
    fn find(&self, py: Python<'_>, service: &str, timeout_s: f64) -> PyResult<Vec<BTreeMap<String, String>>> {
        let service = service_of(py, service)?;
        let start = Instant::now();
        self.wait_connected(py, timeout_s)?;
        let connection = self.open(py)?;
        let left = duration(timeout_s).saturating_sub(start.elapsed()).max(Duration::from_millis(200));
        let found = py.detach(|| connection.find(service, left)).map_err(|error| raise(py, &error))?;
        Ok(found.into_iter().map(metadata_of).collect())
    }

    /// Release the connection. It stays open as long as an engine uses it. When it closes, its announcements are
    /// withdrawn.
    fn close(&self, py: Python<'_>) {
        let connection = self.connection.lock().take();
        py.detach(|| drop(connection));
    }
}

impl Discovery {
    pub(crate) fn job(&self) -> &str {
        &self.job
    }

    /// The open connection, for a client that searches for its peers.
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<Arc<BlockingDiscovery>> {
        let connection = self.connection.lock().clone();
        connection.ok_or_else(|| {
            errors::raise(py, "UsageError", "cannot use this Discovery: it is closed; create a new one")
        })
    }
}

/// The announcement of this process. It lasts until it is closed.
#[pyclass(module = "persia_core.discovery", frozen)]
pub(crate) struct Announcement {
    announced: Mutex<Option<Announced>>,
}

#[pymethods]
impl Announcement {
    /// Withdraw the announcement.
    fn close(&self) {
        self.announced.lock().take();
    }
}

/// Return the address at which other processes reach this one: `PERSIA_ADVERTISE` if set, otherwise the address of
/// the interface `PERSIA_SOCKET_IFNAME` if set, otherwise the local address of a connection to NATS. Waits at most
/// `timeout_s` until the host name of NATS can be resolved. Docker resolves the name of a container only while the
/// container runs.
#[pyfunction]
#[pyo3(signature = (nats_url, *, timeout_s = 0.0))]
pub(crate) fn advertised_host(py: Python<'_>, nats_url: &str, timeout_s: f64) -> PyResult<String> {
    logs::begin(py)?;
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let (given, interface) = (variable("PERSIA_ADVERTISE"), variable("PERSIA_SOCKET_IFNAME"));
    let (end, mut said) = (end(timeout_s), false);
    loop {
        let find = || wire::advertised_host(nats_url, given.as_deref().map(str::trim), interface.as_deref());
        match py.detach(find) {
            Ok(host) => return Ok(host),
            Err(error @ DiscoveryError::NoAddress { .. }) if Instant::now() < end => {
                if !said {
                    tracing::warn!(target: "persia_wire::discovery", "waiting for NATS: {error}");
                }
                said = true;
                py.detach(|| std::thread::sleep(ADDRESS_INTERVAL));
                py.check_signals()?;
            }
            Err(error) => return Err(raise(py, &error)),
        }
    }
}

/// The interval at which the host name of NATS is resolved until it has an address.
const ADDRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Read the secret from the token file, if one is given.
pub(crate) fn secret(py: Python<'_>, token_file: Option<PathBuf>) -> PyResult<Option<Secret>> {
    Secret::read_if_given(token_file.as_deref())
        .map_err(|error| errors::raise(py, "AuthError", error.to_string()))
}

pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(24 * 3600))
}

fn end(timeout_s: f64) -> Instant {
    Instant::now() + duration(timeout_s)
}

fn service_of(py: Python<'_>, service: &str) -> PyResult<Service> {
    Service::from_name(service).ok_or_else(|| {
        let text = format!(
            "{service:?} is not a service; expected persia-server, persia-middleware, persia-trainer or persia-data"
        );
        errors::raise(py, "UsageError", text)
    })
}

fn metadata_of(peer: Peer) -> BTreeMap<String, String> {
    let mut all = peer.metadata;
    all.insert("id".into(), peer.id);
    all
}

fn raise(py: Python<'_>, error: &DiscoveryError) -> PyErr {
    let class = match error {
        DiscoveryError::BadJob { .. }
        | DiscoveryError::BadUrl { .. }
        | DiscoveryError::NoInterface { .. }
        | DiscoveryError::InterfacesUnknown { .. }
        | DiscoveryError::NoAddress { .. } => "ConfigError",
        DiscoveryError::NotConnected { .. } => "UnreachableError",
        DiscoveryError::Refused { .. } => "AuthError",
    };
    errors::raise(py, class, error.to_string())
}
