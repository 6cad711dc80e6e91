//! [`WireTables`]: the blocking client.

use std::path::Path;
use std::time::Duration;

use persia_kernels::Bags;
use persia_types::TablesError;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, ServedCheckpoint, Snapshot, Stats,
    Tables,
};
use tokio::runtime::{Builder, Runtime};

use super::call::Caller;
use super::options::ClientOptions;
use super::stats;

/// The number of threads that send and receive bytes. Chunks are created, checked and copied on the callers'
/// threads.
const IO_THREADS: usize = 2;

/// The rows on the embedding servers of a job.
///
/// The methods block, so they must not be called on a thread that runs a tokio runtime. A look-up or push is
/// retried with the same token, through another middleware if one failed, until
/// [`ClientOptions::rpc_timeout`] has passed. Dropping the client closes its connections without waiting.
///
/// Before training, call [`Self::wait_ready`]. Then rank 0 calls `begin` with `highest_generation() + 1`, and the other
/// ranks call [`Self::join`]. From then on, [`TablesError::Lost`] is returned if a server or all middlewares are
/// unreachable, or if a server has lost the run.
#[derive(Debug)]
pub struct WireTables {
    caller: Caller,
    /// None while `self` is being dropped.
    runtime: Option<Runtime>,
}

impl WireTables {
    /// Create a client, which connects at its first call.
    ///
    /// # Errors
    /// `Unreachable` if no thread can be started.
    pub fn connect(options: ClientOptions) -> Result<Self, TablesError> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(IO_THREADS).thread_name("persia-wire").enable_all().build();
        let runtime = runtime.map_err(|error| TablesError::Unreachable {
            peer: options.targets.to_string(),
            what: format!("cannot start a thread: {error}"),
        })?;
        Ok(Self { caller: Caller::new(options), runtime: Some(runtime) })
    }

    fn wait<T>(&self, future: impl Future<Output = Result<T, TablesError>>) -> Result<T, TablesError> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => Err(TablesError::Unreachable {
                peer: self.caller.options.targets.to_string(),
                what: "the client is closed".into(),
            }),
        }
    }

    /// Wait until every server of the job has responded.
    ///
    /// # Errors
    /// `Unreachable` or `Recovering` after `limit`, with a message that names the missing processes;
    /// `Refused` and `Incompatible` without waiting.
    pub fn wait_ready(&self, limit: Duration) -> Result<(), TablesError> {
        self.wait(self.caller.wait_ready(limit))
    }

    /// The number of servers of the job.
    ///
    /// # Errors
    /// Those of [`Tables::stats`].
    pub fn servers(&self) -> Result<usize, TablesError> {
        self.wait(self.caller.servers()).map(|servers| servers as usize)
    }

    /// The highest generation of any server; 0 before the first run. All servers must respond.
    ///
    /// # Errors
    /// Those of [`Tables::stats`].
    pub fn highest_generation(&self) -> Result<u64, TablesError> {
        self.stats().map(|stats| stats.generation)
    }

    /// Check that every server can write files into `dir`, which is below the checkpoint root or a URL.
    ///
    /// # Errors
    /// `Io` with the error of a server that cannot write, or if `dir` is elsewhere; `BadShape`, `NotBegun`,
    /// `StaleGeneration`; those of the connection, as in [`Tables::stats`].
    pub fn check_storage(&self, dir: &Path) -> Result<(), TablesError> {
        self.wait(self.caller.check_storage(dir))
    }

    /// The statistics of each server, by index.
    ///
    /// # Errors
    /// Those of [`Tables::stats`].
    pub fn stats_by_server(&self) -> Result<Vec<Stats>, TablesError> {
        self.wait(self.caller.stats_by_server())
    }

    /// The checkpoint that the servers of an infer job serve, and the number that identifies its rows.
    ///
    /// # Errors
    /// `Incompatible` if a server serves no checkpoint or a different one; those of [`Tables::stats`].
    pub fn served(&self) -> Result<(u64, ServedCheckpoint), TablesError> {
        self.stats_by_server().and_then(stats::served)
    }

    /// Join the run that rank 0 began.
    pub fn join(&self, job: &str, generation: u64) {
        self.caller.enter(job, generation);
    }

    /// Read rows of a run that another process trains. An outage of the servers is then not reported as `Lost`.
    pub fn observe(&self, job: &str, generation: u64) {
        self.caller.observe(job, generation);
    }
}

impl Tables for WireTables {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        self.wait(self.caller.begin(run))
    }

    fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        self.caller.pools(dim, ids, bags)
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        self.wait(self.caller.lookup(request, rows))
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.wait(self.caller.push(request))
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.wait(self.caller.prepare_snapshot(number))
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.wait(self.caller.abort_snapshot(number))
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        self.wait(self.caller.write_snapshot(dir, number))
    }

    fn commit_snapshot(&self, number: u64, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.wait(self.caller.commit_snapshot(number, dir, files))
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.wait(self.caller.restore(dir, files))
    }

    /// The totals over all servers. Sequence numbers and generation are the highest of any server.
    fn stats(&self) -> Result<Stats, TablesError> {
        self.stats_by_server().map(stats::sum)
    }

    fn clear(&self) -> Result<(), TablesError> {
        self.wait(self.caller.clear())
    }
}

impl Drop for WireTables {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
