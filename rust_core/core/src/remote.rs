//! Rows on embedding servers, reached through the job's middlewares.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use persia_types::tables::ServedCheckpoint;
use persia_types::{Dtype, Tables, TablesError};
use persia_wire::client::{ClientOptions, Targets, WireTables};
use persia_wire::discovery::BlockingDiscovery;
use persia_wire::settings::Endpoint;
use persia_wire::tls::TlsFiles;
use pyo3::prelude::*;

use crate::discovery::{Discovery, duration, secret};
use crate::{errors, wait};

/// The maximum delay of a signal while `wait_ready` queries the servers.
const WAIT_SLICE: Duration = Duration::from_secs(1);

/// The options of a rank's client.
pub(crate) struct RemoteOptions {
    pub(crate) rank: u32,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) checkpoint_root: Option<PathBuf>,
    pub(crate) rpc_timeout_s: f64,
    pub(crate) wire_dtype: Dtype,
}

/// A client, and the connection that finds its peers.
pub(crate) struct Remote {
    tables: Arc<WireTables>,
    /// The connection; None if the middlewares are given.
    _discovery: Option<Arc<BlockingDiscovery>>,
}

impl Remote {
    /// Create a client, which connects at its first call.
    pub(crate) fn connect(py: Python<'_>, discovery: &Discovery, options: RemoteOptions) -> PyResult<Self> {
        let discovery = discovery.open(py)?;
        let targets = Targets::Discovered(discovery.discovery().clone());
        Self::to(py, targets, Some(discovery), options)
    }

    /// Create a client for the middlewares at these addresses.
    pub(crate) fn listed(py: Python<'_>, addresses: &[String], options: RemoteOptions) -> PyResult<Self> {
        let parsed = addresses.iter().map(|address| address.parse()).collect::<Result<Vec<Endpoint>, _>>();
        let endpoints = parsed.map_err(|error| {
            errors::raise(py, "UsageError", format!("invalid address of a middleware: {error}"))
        })?;
        Self::to(py, Targets::Fixed(endpoints), None, options)
    }

    fn to(
        py: Python<'_>,
        targets: Targets,
        discovery: Option<Arc<BlockingDiscovery>>,
        options: RemoteOptions,
    ) -> PyResult<Self> {
        let tls = TlsFiles::from_env()
            .client()
            .map_err(|error| errors::raise(py, "ConfigError", error.to_string()))?;
        let options = ClientOptions {
            rank: options.rank,
            secret: secret(py, options.token_file)?,
            tls,
            rpc_timeout: duration(options.rpc_timeout_s),
            wire_dtype: options.wire_dtype,
            checkpoint_root: options.checkpoint_root,
            ..ClientOptions::new(targets)
        };
        let tables =
            py.detach(|| WireTables::connect(options)).map_err(|error| errors::tables(py, &error))?;
        Ok(Self { tables: Arc::new(tables), _discovery: discovery })
    }

    pub(crate) fn tables(&self) -> Arc<dyn Tables> {
        Arc::clone(&self.tables) as Arc<dyn Tables>
    }

    /// Join the generation that rank 0 began.
    pub(crate) fn join(&self, job: &str, generation: u64) {
        self.tables.join(job, generation);
    }

    /// Read rows of a generation that another process trains.
    pub(crate) fn observe(&self, job: &str, generation: u64) {
        self.tables.observe(job, generation);
    }

    /// The checkpoint of an infer job, and the number that identifies its rows.
    pub(crate) fn served(&self, py: Python<'_>) -> PyResult<(u64, ServedCheckpoint)> {
        py.detach(|| self.tables.served()).map_err(|error| errors::tables(py, &error))
    }

    pub(crate) fn wait_ready(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let begun = Instant::now();
        let mut end = begun + duration(timeout_s);
        let mut read = 0;
        wait::until(py, |_| match self.tables.wait_ready(WAIT_SLICE) {
            Ok(()) => Ok(Some(())),
            // Wait for a server that makes progress, however long its log is.
            Err(TablesError::Recovering { done, .. }) if done > read => {
                (read, end) = (done, Instant::now() + duration(timeout_s));
                Ok(None)
            }
            Err(
                TablesError::Unable { .. }
                | TablesError::Unreachable { .. }
                | TablesError::Lost { .. }
                | TablesError::Recovering { .. },
            ) if Instant::now() < end => Ok(None),
            Err(error) => {
                let waited = format!("{error} (waited {:.0} s)", begun.elapsed().as_secs_f64());
                let text = if Instant::now() < end { error.to_string() } else { waited };
                Err(Python::attach(|py| errors::of_tables(py, &error, text)))
            }
        })
    }

    pub(crate) fn highest_generation(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.tables.highest_generation()).map_err(|error| errors::tables(py, &error))
    }

    pub(crate) fn check_storage(&self, directory: &Path) -> Result<(), TablesError> {
        self.tables.check_storage(directory)
    }

    /// The number of rows of each server, by index.
    pub(crate) fn server_rows(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let servers =
            py.detach(|| self.tables.stats_by_server()).map_err(|error| errors::tables(py, &error))?;
        Ok(servers.iter().map(|stats| stats.rows.iter().sum()).collect())
    }
}
