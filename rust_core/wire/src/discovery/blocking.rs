//! Discovery for callers without a tokio runtime.

use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::connection::{Announced, Discovery, DiscoveryOptions};
use super::error::{DiscoveryError, without_password};
use super::peer::{Announcement, Peer, Service};

/// [`Discovery`] on its own thread, with blocking methods. Dropping it closes the connection without waiting.
#[derive(Debug)]
pub struct BlockingDiscovery {
    discovery: Discovery,
    /// None while `self` is being dropped.
    runtime: Option<Runtime>,
}

impl BlockingDiscovery {
    /// Like [`Discovery::connect`].
    ///
    /// # Errors
    /// Those of [`Discovery::connect`]; `NotConnected` if no thread can be started.
    pub fn connect(options: DiscoveryOptions) -> Result<Self, DiscoveryError> {
        let no_thread = |error: std::io::Error| DiscoveryError::NotConnected {
            url: without_password(&options.url),
            what: Some(format!("cannot start a thread: {error}")),
            waited: None,
        };
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name("persia-nats").enable_all().build();
        let runtime = runtime.map_err(no_thread)?;
        let discovery = runtime.block_on(Discovery::connect(options))?;
        Ok(Self { discovery, runtime: Some(runtime) })
    }

    /// The connection, for `Targets::Discovered`. It is closed when `self` is dropped.
    pub fn discovery(&self) -> &Discovery {
        &self.discovery
    }

    fn wait<T>(&self, future: impl Future<Output = Result<T, DiscoveryError>>) -> Result<T, DiscoveryError> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => Err(self.discovery.not_connected("the connection is closed")),
        }
    }

    /// Like [`Discovery::wait_connected`].
    ///
    /// # Errors
    /// Those of [`Discovery::wait_connected`].
    pub fn wait_connected(&self, limit: Option<Duration>) -> Result<(), DiscoveryError> {
        self.wait(self.discovery.wait_connected(limit))
    }

    /// Like [`Discovery::announce`].
    ///
    /// # Errors
    /// Those of [`Discovery::announce`].
    pub fn announce(&self, announcement: Announcement) -> Result<Announced, DiscoveryError> {
        self.wait(self.discovery.announce(announcement))
    }

    /// Like [`Discovery::find`].
    ///
    /// # Errors
    /// Those of [`Discovery::find`].
    pub fn find(&self, service: Service, limit: Duration) -> Result<Vec<Peer>, DiscoveryError> {
        self.wait(self.discovery.find(service, limit))
    }
}

impl Drop for BlockingDiscovery {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
