//! [`Node`]: one embedding server, with its rows, its run, and its checks of requests.
//!
//! * [`admission`]: the path of a training request
//! * [`snapshot`]: the requests of a checkpoint
//! * [`sequencer`]: the order of requests in a reproducible run
//! * [`serving`]: a server of an infer job
//! * [`request_log`]: the log and its base; [`recovery`]: recovers from the log; [`progress`]: the progress of a
//!   recovery
//! * [`generation_file`], [`checkpoint_root`]: the directories of a server

mod admission;
mod checkpoint_root;
mod generation_file;
mod progress;
mod recovery;
mod request_log;
mod sequencer;
mod serving;
mod snapshot;

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};
use persia_store::{Store, StoreOptions};
use persia_types::tables::{Run, ServedCheckpoint, Stats};
use persia_types::{JobId, Schema, Tables, TablesError, Token, server_shards};
use persia_wire::VERSION;

use self::recovery::Unresumed;
use self::request_log::{Owner, RequestLog, WalPosition};
use crate::exit::Exit;

pub use self::checkpoint_root::CheckpointRoot;
pub use self::generation_file::GenerationFile;
pub use self::progress::RecoveryProgress;
pub use self::request_log::LogOptions;
pub use self::sequencer::{Phase, RankSequencer, Turn};
pub use self::serving::{ServableCheckpoint, checkpoint_dir};

/// The settings of a server.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The only job that the server serves.
    pub job: String,
    /// The index among the job's servers, from 0.
    pub index: u32,
    /// The number of the job's servers.
    pub servers: u32,
    /// Slots and tables.
    pub schema: Schema,
    /// The capacity of the whole job, in rows. Each shard gets an equal part, so evictions do not depend on the number
    /// of servers.
    pub capacity: u64,
    /// The number of threads that execute a large request: see [`StoreOptions::request_threads`].
    pub request_threads: usize,
    /// The number of threads that write and read a snapshot.
    pub snapshot_threads: usize,
    /// The limit for the copies of a snapshot: see [`StoreOptions::max_copy_bytes`].
    pub max_copy_bytes: u64,
    /// The directory or URL below which checkpoints are.
    pub checkpoints: CheckpointRoot,
    /// The maximum time that a request of a reproducible run waits for its turn.
    pub turn_timeout: Duration,
    /// The address of the server, for messages.
    pub address: String,
    /// The log of pushes. Without a log, the job resumes from its last checkpoint.
    pub log: Option<LogOptions>,
}

impl NodeOptions {
    /// The name of the server in messages.
    pub fn peer(&self) -> String {
        format!("server {} of {} ({})", self.index, self.servers, self.address)
    }
}

/// One embedding server.
pub struct Node {
    options: NodeOptions,
    peer: String,
    store: Arc<Store>,
    generation: GenerationFile,
    sequencer: Arc<RankSequencer>,
    log: Option<RequestLog>,
    /// The run in progress.
    begun: RwLock<Option<Run>>,
    /// The oldest generation whose rows are those with which the run in progress began.
    oldest: Mutex<u64>,
    /// Locked by an administrative request while its checks must stay valid, but not while files are written.
    admin: Mutex<()>,
    /// Locked while the files of a snapshot are written, and by requests that must wait until they are written. Lock
    /// it before `admin`.
    writing: Mutex<()>,
    /// The checkpoint of an infer job.
    served: Option<ServedCheckpoint>,
    /// The time of the last message that the log cannot be written.
    warned: Mutex<Option<Instant>>,
}

/// The interval at which a begin cancels the transfers of the previous run, until it has locked `admin`.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// The run that a request claims to belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    /// The job.
    pub job: JobId,
    /// The generation.
    pub generation: u64,
}

fn empty_store(options: &NodeOptions, serves: bool) -> Result<Arc<Store>, Exit> {
    let store_options = StoreOptions {
        capacity: if serves { u64::MAX } else { options.capacity }, // a served row is never evicted
        request_threads: options.request_threads,
        snapshot_threads: options.snapshot_threads,
        shards: server_shards(options.index as usize, options.servers as usize),
        max_copy_bytes: options.max_copy_bytes,
        // The server throttles requests itself, before they take a turn.
        throttle: Duration::ZERO,
        serves,
    };
    let store = Store::new(options.schema.clone(), store_options);
    store.map(Arc::new).map_err(|error| match error {
        TablesError::BadRun { what } => Exit::Usage(format!("cannot start the server: {what}")),
        // The system refuses a thread.
        other => Exit::Again(format!("cannot start the server: {other}")),
    })
}

impl Node {
    /// Create a server. It recovers from its log or, without a usable log, starts empty.
    ///
    /// # Errors
    /// `Usage` for an index that is not below the number of servers, for options that [`Store::new`] refuses, and for a
    /// log directory that cannot be used. `Again` if the system refuses a thread, and if the checkpoint on which the log
    /// is based cannot be read from an object store.
    pub fn new(options: NodeOptions, generation: GenerationFile) -> Result<Self, Exit> {
        Self::recovering(options, generation, &RecoveryProgress::default())
    }

    /// Like [`Self::new`]. `progress` shows how much of the log has been read.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn recovering(
        options: NodeOptions,
        generation: GenerationFile,
        progress: &RecoveryProgress,
    ) -> Result<Self, Exit> {
        let (index, servers) = (options.index, options.servers);
        let owner = Owner { version: VERSION.into(), index, servers, capacity: options.capacity };
        let timeout = options.turn_timeout;
        let log = options.log.clone().map(|log| RequestLog::open(log, owner, timeout)).transpose()?;
        let mut node = Self::empty(options, generation, log, false)?;
        match node.recover(progress) {
            Ok(()) => {}
            Err(Unresumed::Unread(why)) => {
                return Err(Exit::Again(format!(
                    "cannot read the rows of the checkpoint on which the log is based: {why}; the log is kept, and the \
                     next start reads both again"
                )));
            }
            Err(Unresumed::Unusable(why)) => {
                tracing::warn!("cannot use the log, so the job resumes from its last checkpoint: {why}");
                node.store = empty_store(&node.options, false)?;
                node.sequencer = Arc::default();
                node.begun = RwLock::new(None);
                node.log.iter().for_each(RequestLog::close);
            }
        }
        Ok(node)
    }

    /// Create a server without rows and without a run.
    fn empty(
        options: NodeOptions,
        generation: GenerationFile,
        log: Option<RequestLog>,
        serves: bool,
    ) -> Result<Self, Exit> {
        let (index, servers) = (options.index, options.servers);
        if index >= servers || servers as usize > persia_types::limits::MAX_SERVERS {
            return Err(Exit::Usage(format!(
                "server {index} of {servers} is not possible: expected an index below the number of servers, which \
                 is at most {}",
                persia_types::limits::MAX_SERVERS
            )));
        }
        Ok(Self {
            peer: options.peer(),
            store: empty_store(&options, serves)?,
            options,
            generation,
            sequencer: Arc::default(),
            log,
            begun: RwLock::new(None),
            oldest: Mutex::default(),
            admin: Mutex::new(()),
            writing: Mutex::new(()),
            served: None,
            warned: Mutex::default(),
        })
    }

    /// The settings of the server.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// The name of the server in messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Begin a run or, with `check_only`, only check whether it can begin. The generation of a run that began
    /// is durable before this returns, if there is a data directory.
    ///
    /// When a new run begins, a rank that saved or restored in an earlier run has ended. Files that are still written
    /// or read for that rank are not needed, so a begin does not wait for them.
    ///
    /// # Errors
    /// `Incompatible` for another job or number of servers, or in an infer job; `Io` if the generation or the log
    /// cannot be written; `Lost` if the run continues other rows than those of this server; those of
    /// [`Tables::begin`].
    pub fn begin(&self, servers: u32, run: &Run, check_only: bool) -> Result<(), TablesError> {
        self.refuse_change()?;
        self.check_newer(servers, run)?;
        self.check_continues(run)?; // before anything is cancelled
        let _alone = self.lock_for_begin();
        self.check_newer(servers, run)?;
        self.check_continues(run)?;
        self.store.check_begin(run)?;
        if check_only {
            return Ok(());
        }
        let continues_log = !run.fresh && self.log.as_ref().is_some_and(RequestLog::has_base);
        if !continues_log {
            // Write the generation first, because a begin that fails here has dropped no row.
            self.set_generation(run.generation)?;
        }
        match &self.log {
            None => self.start(run)?,
            Some(log) if continues_log => {
                // Write to the log first, so that a server that is killed in between recovers the run.
                log.begin(run, || self.start(run)).map_err(|error| self.on_this_host(error))?;
                self.set_generation(run.generation)?;
            }
            // The log does not contain the current rows, so a recovery from it would lose them. It stays closed until
            // a restore or a fresh run.
            Some(_) if !run.fresh && self.holds_rows()? => {
                tracing::warn!(
                    "the log does not contain the current rows, so pushes are refused until a checkpoint is loaded \
                     or a run begins with empty tables"
                );
                self.start(run)?;
            }
            Some(log) => {
                let restarted = log.restart(|| {
                    self.start(run)?;
                    Ok((run.clone(), None, self.position()))
                });
                if restarted.is_err() {
                    *self.begun.write() = None;
                }
                restarted.map_err(|error| self.on_this_host(error))?;
            }
        }
        let Run { generation, world_size: ranks, reproducible, .. } = run;
        tracing::info!(generation, ranks, reproducible, "run begun");
        Ok(())
    }

    /// Record `generation` as the highest that began on this server; on the disk too, if there is a data directory.
    fn set_generation(&self, generation: u64) -> Result<(), TablesError> {
        self.generation.set(generation).map_err(|error| self.on_this_host(error))
    }

    /// Lock `admin`, and cancel all transfers in progress.
    fn lock_for_begin(&self) -> MutexGuard<'_, ()> {
        loop {
            let alone = self.admin.try_lock_for(CANCEL_INTERVAL);
            self.store.cancel_transfers();
            if let Some(alone) = alone {
                return alone;
            }
        }
    }

    fn check_newer(&self, servers: u32, run: &Run) -> Result<(), TablesError> {
        let Run { job, generation, .. } = run;
        let NodeOptions { job: own, servers: configured, .. } = &self.options;
        let differs = |what: String| Err(TablesError::Incompatible { peer: self.peer.clone(), what });
        if job != own {
            return differs(format!(
                "it serves job {own:?}, but the run belongs to job {job:?}: set the same PERSIA_JOB for all processes"
            ));
        }
        if servers != *configured {
            return differs(format!(
                "it has REPLICA_SIZE={configured}, but the caller expects REPLICA_SIZE={servers}"
            ));
        }
        let highest = self.generation.get();
        if *generation <= highest {
            let what = format!(
                "generation {generation} is not above {highest}, the latest on this server: another run of this \
                 job has begun in the meantime; run only one at a time, or set another PERSIA_JOB for this one"
            );
            return Err(TablesError::BadRun { what });
        }
        Ok(())
    }

    /// Refuse a run that continues to train rows other than those of this server.
    fn check_continues(&self, run: &Run) -> Result<(), TablesError> {
        let (expected, own) = (run.continues, self.generations_of_rows());
        if run.fresh || own.contains(&expected) {
            return Ok(());
        }
        let what = match own.end() {
            0 => format!("it was restarted and has lost the rows of generation {expected}"),
            own => {
                format!("its rows belong to generation {own}, but the run continues generation {expected}")
            }
        };
        Err(TablesError::Lost { peer: self.peer.clone(), what })
    }

    /// The generations that began or ended with the current rows. 0 stands for an empty server before its first run.
    fn generations_of_rows(&self) -> RangeInclusive<u64> {
        let begun = self.begun.read().as_ref().map_or(0, |run| run.generation);
        let unchanged = self.store.progress().is_empty();
        if unchanged { *self.oldest.lock()..=begun } else { begun..=begun }
    }

    /// Begin `run`, which has passed all checks.
    fn start(&self, run: &Run) -> Result<(), TablesError> {
        let oldest = *self.generations_of_rows().start();
        self.store.begin(run)?;
        *self.oldest.lock() = if run.fresh || oldest == 0 { run.generation } else { oldest };
        let ordered = run.reproducible && run.optimizer.is_some();
        self.sequencer.begin(run.generation, if ordered { run.world_size } else { 1 });
        *self.begun.write() = Some(run.clone());
        Ok(())
    }

    fn holds_rows(&self) -> Result<bool, TablesError> {
        Ok(self.store.stats()?.rows.iter().any(|rows| *rows > 0))
    }

    /// The counters and gauges. The generation is the highest so far, including generations before a restart.
    ///
    /// # Errors
    /// Those of the store.
    pub fn stats(&self) -> Result<Stats, TablesError> {
        let stats = self.store.stats()?;
        let begun = self.begun.read().as_ref().map_or(0, |run| run.generation);
        let generation = stats.generation.max(self.generation.get());
        Ok(Stats { generation, begun, served: self.served.clone(), ..stats })
    }

    /// The age of the oldest record of the log that is not durable, zero if all are; None without a log.
    pub fn log_unsynced(&self) -> Option<Duration> {
        self.log.as_ref().map(RequestLog::unsynced)
    }

    /// The size of the log, in bytes, if there is one.
    pub fn log_bytes(&self) -> Option<u64> {
        self.log.as_ref().map(RequestLog::bytes)
    }

    /// The progress of the run. Call this while no request is being applied.
    fn position(&self) -> WalPosition {
        WalPosition { progress: self.store.progress(), reached: self.sequencer.reached() }
    }

    fn current(&self) -> Result<Fence, TablesError> {
        let begun = self.begun.read();
        let run = begun.as_ref().ok_or(TablesError::NotBegun)?;
        Ok(Fence { job: JobId::from_name(&run.job), generation: run.generation })
    }

    /// Refuse an administrative request of another job or generation, as [`admission`] does for training requests.
    fn check_fence(&self, Fence { job, generation }: Fence) -> Result<(), TablesError> {
        self.check_fence_of(Token { job, generation, rank: 0, seq: 0 })
    }

    fn io(&self, kind: io::ErrorKind, what: &str) -> TablesError {
        TablesError::Io { path: self.peer.clone().into(), source: io::Error::new(kind, what) }
    }

    /// Add the name of this server to the path of a file, because the caller does not know on which host the file is.
    fn on_this_host(&self, error: TablesError) -> TablesError {
        match error {
            TablesError::Io { path, source } => {
                TablesError::Io { path: format!("{}: {}", self.peer, path.display()).into(), source }
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests;
