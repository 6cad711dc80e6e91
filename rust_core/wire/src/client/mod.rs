//! Rows behind the network: [`Tables`] over gRPC, with deadlines, and retries that count once.

mod admin;
mod call;
mod options;
mod pool;
mod rows;

use std::path::Path;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;
use persia_kernels::Bags;
use persia_types::TablesError;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats, Tables,
};
use tokio::runtime::{Builder, Runtime};

pub use self::options::{ClientOptions, Targets};
use self::pool::Pool;
use crate::auth::{Credentials, Role};
use crate::proto;

/// Threads that move bytes; the callers' threads cut, check and copy chunks.
const IO_THREADS: usize = 2;

/// Rows held by the embedding servers of a job.
///
/// Its methods wait, so they must not be called on a thread that runs a tokio runtime. A request is tried again, under
/// the same token, until [`ClientOptions::rpc_timeout`] is over, by another middleware where one failed. Dropping it
/// closes its connections without waiting.
///
/// Before training: [`Self::wait_ready`], then rank 0 calls `begin` with `highest_generation() + 1` and the others
/// [`Self::join`]. From then on servers and middlewares that cannot be reached, and servers that have forgotten the run, are
/// [`TablesError::Lost`].
#[derive(Debug)]
pub struct WireTables {
    inner: Inner,
    /// Some until it is dropped.
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct Inner {
    pool: Pool,
    options: ClientOptions,
    trainer: Credentials,
    admin: Credentials,
    /// The run in progress.
    fence: Mutex<Option<proto::Fence>>,
    /// Whether this process only reads rows of that run, which loses nothing when nobody answers for a while.
    observes: AtomicBool,
    /// Number of servers; 0 until one has told.
    servers: AtomicU32,
}

impl WireTables {
    /// A client; nothing is connected yet.
    ///
    /// # Errors
    /// `Unreachable` when no thread can be started.
    pub fn connect(options: ClientOptions) -> Result<Self, TablesError> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(IO_THREADS).thread_name("persia-wire").enable_all().build();
        let runtime = runtime.map_err(|error| TablesError::Unreachable {
            peer: options.targets.to_string(),
            what: format!("cannot start a thread: {error}"),
        })?;
        let inner = Inner {
            pool: Pool::new(&options),
            trainer: Credentials::new(Role::Trainer, options.secret.as_ref()),
            admin: Credentials::new(Role::Admin, options.secret.as_ref()),
            options,
            fence: Mutex::default(),
            observes: AtomicBool::new(false),
            servers: AtomicU32::new(0),
        };
        Ok(Self { inner, runtime: Some(runtime) })
    }

    fn wait<T>(&self, future: impl Future<Output = Result<T, TablesError>>) -> Result<T, TablesError> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(future),
            None => Err(TablesError::Unreachable {
                peer: self.inner.options.targets.to_string(),
                what: "the client was closed".into(),
            }),
        }
    }

    /// Wait until every server of the job has answered.
    ///
    /// # Errors
    /// `Unreachable` after `limit`, saying exactly what is missing; `Refused` and `Incompatible` at once.
    pub fn wait_ready(&self, limit: std::time::Duration) -> Result<(), TablesError> {
        self.wait(self.inner.wait_ready(limit))
    }

    /// Number of servers of the job.
    ///
    /// # Errors
    /// As [`Tables::stats`].
    pub fn servers(&self) -> Result<usize, TablesError> {
        self.wait(self.inner.servers()).map(|servers| servers as usize)
    }

    /// The highest generation any server knows; 0 where none has begun. All servers have to answer.
    ///
    /// # Errors
    /// As [`Tables::stats`].
    pub fn highest_generation(&self) -> Result<u64, TablesError> {
        self.stats().map(|stats| stats.generation)
    }

    /// Ask every server whether it can write files into `dir`, below the checkpoint root.
    ///
    /// # Errors
    /// `Io` where one cannot, saying why; `BadShape`, `NotBegun`, `StaleGeneration`; `Unreachable`.
    pub fn check_storage(&self, dir: &Path) -> Result<(), TablesError> {
        self.wait(self.inner.check_storage(dir))
    }

    /// Every server's own counters, in the order of their indexes.
    ///
    /// # Errors
    /// As [`Tables::stats`].
    pub fn stats_by_server(&self) -> Result<Vec<Stats>, TablesError> {
        self.wait(self.inner.stats_by_server())
    }

    /// Take part in the run that rank 0 began.
    pub fn join(&self, job: &str, generation: u64) {
        self.inner.enter(job, generation);
    }

    /// Read rows of a run that others train.
    pub fn observe(&self, job: &str, generation: u64) {
        self.inner.observes.store(true, Ordering::Relaxed);
        self.inner.enter(job, generation);
    }
}

impl Inner {
    fn enter(&self, job: &str, generation: u64) {
        let job = persia_types::JobId::from_name(job).0;
        *self.fence.lock() = Some(proto::Fence { job, generation });
    }

    fn known_servers(&self) -> Option<u32> {
        Some(self.servers.load(Ordering::Relaxed)).filter(|servers| *servers > 0)
    }
}

impl Tables for WireTables {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        self.wait(self.inner.begin(run))
    }

    fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        self.inner.pools(dim, ids, bags)
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        self.wait(self.inner.lookup(request, rows))
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.wait(self.inner.push(request))
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.wait(self.inner.prepare_snapshot(number))
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.wait(self.inner.abort_snapshot(number))
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        self.wait(self.inner.write_snapshot(dir, number))
    }

    fn commit_snapshot(&self, number: u64, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.wait(self.inner.commit_snapshot(number, dir, files))
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.wait(self.inner.restore(dir, files))
    }

    /// Sums over all servers; tokens and generation are the highest of any.
    fn stats(&self) -> Result<Stats, TablesError> {
        self.stats_by_server().map(admin::sum)
    }

    fn clear(&self) -> Result<(), TablesError> {
        self.wait(self.inner.clear())
    }
}

impl Drop for WireTables {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
