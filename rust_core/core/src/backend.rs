//! [`Backend`]: the rows of an engine, in this process or on embedding servers.

use std::path::Path;
use std::sync::Arc;

use persia_store::Store;
use persia_types::{Tables, TablesError};
use pyo3::prelude::*;

use crate::errors;
use crate::remote::Remote;

pub(crate) enum Backend {
    Embedded(Arc<Store>),
    Remote(Remote),
}

impl Backend {
    pub(crate) fn tables(&self) -> Arc<dyn Tables> {
        match self {
            Self::Embedded(store) => Arc::clone(store) as Arc<dyn Tables>,
            Self::Remote(remote) => remote.tables(),
        }
    }

    pub(crate) fn remote(&self, py: Python<'_>) -> PyResult<&Remote> {
        match self {
            Self::Remote(remote) => Ok(remote),
            Self::Embedded(_) => Err(errors::raise(
                py,
                "UsageError",
                "cannot join the run of another process in embedded mode: all rows are in this process; set \
                 PERSIA_NATS_URL to use servers",
            )),
        }
    }

    pub(crate) fn wait_ready(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        match self {
            Self::Embedded(_) => Ok(()),
            Self::Remote(remote) => remote.wait_ready(py, timeout_s),
        }
    }

    /// Check that every server can write into `directory`. In embedded mode, there is no server to check.
    pub(crate) fn check_storage(&self, directory: &Path) -> Result<(), TablesError> {
        match self {
            Self::Embedded(_) => Ok(()),
            Self::Remote(remote) => remote.check_storage(directory),
        }
    }

    /// The highest generation of any server; None in embedded mode.
    pub(crate) fn highest_generation(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        match self {
            Self::Embedded(_) => Ok(None),
            Self::Remote(remote) => remote.highest_generation(py).map(Some),
        }
    }

    /// The number of rows of each server; one value in embedded mode.
    pub(crate) fn server_rows(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        match self {
            Self::Embedded(store) => {
                let stats = py.detach(|| store.stats()).map_err(|error| errors::tables(py, &error))?;
                Ok(vec![stats.rows.iter().sum()])
            }
            Self::Remote(remote) => remote.server_rows(py),
        }
    }

    /// Free the memory of rows in this process. Rows on servers are kept.
    pub(crate) fn release(&self, py: Python<'_>) -> PyResult<()> {
        match self {
            Self::Embedded(store) => py.detach(|| store.clear()).map_err(|error| errors::tables(py, &error)),
            Self::Remote(_) => Ok(()),
        }
    }
}
