//! [`Node`]: what one embedding server holds, and what it refuses.

mod epoch;
mod order;
mod root;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use persia_store::{Store, StoreOptions};
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats,
};
use persia_types::{JobId, Mode, Schema, Tables, TablesError, Token, server_shards};

pub use epoch::EpochFile;
pub use order::{Order, Phase, Turn};
pub use root::CheckpointRoot;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The only job it works for.
    pub job: String,
    /// Which of the job's servers it is, from 0.
    pub index: u32,
    /// How many there are.
    pub servers: u32,
    /// Slots and tables.
    pub schema: Schema,
    /// Rows of the whole job. Every virtual shard has its share, so that evictions do not depend on the number of
    /// servers.
    pub capacity: u64,
    /// Threads that write and read a snapshot.
    pub snapshot_threads: usize,
    /// Where snapshots may be.
    pub checkpoints: CheckpointRoot,
    /// How long a request of a reproducible run waits for the ranks before it.
    pub turn_timeout: Duration,
    /// Where it listens, for messages.
    pub address: String,
}

/// See the module's documentation.
pub struct Node {
    options: NodeOptions,
    peer: String,
    store: Store,
    epoch: EpochFile,
    order: Arc<Order>,
    /// The run in progress.
    begun: RwLock<Option<Fence>>,
    /// One administrative request at a time: what was checked holds until it is done.
    admin: Mutex<()>,
}

/// A run that a request claims to be of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    /// Its job.
    pub job: JobId,
    /// Its epoch.
    pub epoch: u64,
}

impl Node {
    /// An empty server.
    ///
    /// # Errors
    /// `BadRun` for an index that is not below the number of servers, and what [`Store::new`] refuses.
    pub fn new(options: NodeOptions, epoch: EpochFile) -> Result<Self, TablesError> {
        let (index, servers) = (options.index as usize, options.servers as usize);
        if index >= servers || servers > persia_types::limits::MAX_SERVERS {
            return Err(TablesError::BadRun { what: format!("no server {index} of {servers}") });
        }
        let store_options = StoreOptions {
            capacity: options.capacity,
            snapshot_threads: options.snapshot_threads,
            shards: server_shards(index, servers),
        };
        Ok(Self {
            peer: format!("server {index} of {servers} ({})", options.address),
            store: Store::new(options.schema.clone(), store_options)?,
            options,
            epoch,
            order: Arc::default(),
            begun: RwLock::new(None),
            admin: Mutex::new(()),
        })
    }

    /// What it was started with.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// How messages name it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Begin a run, or with `check_only` say why not. The epoch is durable before this returns.
    ///
    /// # Errors
    /// `Incompatible` for another job or number of servers, `Io` when the epoch can't be kept; else as
    /// [`Tables::begin`].
    pub fn begin(&self, servers: u32, run: &Run, check_only: bool) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        let Run { job, epoch, .. } = run;
        let differs = |what: String| Err(TablesError::Incompatible { peer: self.peer.clone(), what });
        if *job != self.options.job {
            return differs(format!("it works for job {:?}, the run is of job {job:?}", self.options.job));
        }
        if servers != self.options.servers {
            return differs(format!(
                "the caller counts {servers} servers, it counts {}",
                self.options.servers
            ));
        }
        let highest = self.epoch.get();
        if *epoch <= highest {
            let what = format!("epoch {epoch} is not above {highest}, the highest there was");
            return Err(TablesError::BadRun { what });
        }
        self.store.check_begin(run)?;
        if check_only {
            return Ok(());
        }
        // First: a begin that fails here has dropped no row.
        self.epoch.set(*epoch)?;
        self.store.begin(run)?;
        let ordered = run.reproducible && run.optimizer.is_some();
        self.order.begin(*epoch, if ordered { run.world_size } else { 1 });
        *self.begun.write() = Some(Fence { job: JobId::from_name(job), epoch: *epoch });
        tracing::info!(epoch, ranks = run.world_size, reproducible = run.reproducible, "a run began");
        Ok(())
    }

    /// Wait for the turn of a training request, if the run has turns. To be given to [`Self::lookup`] or
    /// [`Self::push`].
    ///
    /// # Errors
    /// `NotBegun`, `StaleEpoch`, `BadShape` for a rank that the run does not have, `Timeout` naming who is missing.
    pub async fn turn(&self, token: Token, phase: Phase) -> Result<Option<Turn>, TablesError> {
        let begun = self.current()?;
        if (begun.job, begun.epoch) != (token.job, token.epoch) {
            return Err(TablesError::StaleEpoch { token, current: begun.epoch });
        }
        self.order.turn(token, phase, self.options.turn_timeout, &self.peer).await
    }

    /// Read rows. `turn` is of [`Self::turn`] for [`Mode::Train`], else None.
    ///
    /// # Errors
    /// As [`Tables::lookup`].
    pub fn lookup(
        &self,
        turn: Option<Turn>,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        debug_assert!(turn.is_none() || request.mode == Mode::Train);
        let report = self.named(self.store.lookup(request, rows))?;
        turn.into_iter().for_each(Turn::done);
        Ok(report)
    }

    /// Apply gradients once. `turn` is of [`Self::turn`].
    ///
    /// # Errors
    /// As [`Tables::push`].
    pub fn push(&self, turn: Option<Turn>, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let report = self.named(self.store.push(request))?;
        turn.into_iter().for_each(Turn::done);
        Ok(report)
    }

    /// Let the next snapshot be of the rows as they are now.
    ///
    /// # Errors
    /// `NotBegun`, `StaleEpoch`.
    pub fn cut(&self, fence: Fence) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        self.store.cut()
    }

    /// Write the rows held into `directory`, below the checkpoint root.
    ///
    /// # Errors
    /// `NotBegun`, `StaleEpoch`, `BadShape` for a directory that is not allowed; `Io`.
    pub fn snapshot(&self, fence: Fence, directory: &str) -> Result<Snapshot, TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        let dir = self.options.checkpoints.resolve(directory)?;
        let snapshot = self.store.snapshot(&dir)?;
        tracing::info!(dir = %dir.display(), files = snapshot.files.len(), "snapshot written");
        Ok(snapshot)
    }

    /// Replace the rows held by those of `files` that belong here, or with `check_only` say why not.
    ///
    /// # Errors
    /// As [`Self::snapshot`]; `Corrupt` and `Foreign` name the file.
    pub fn restore(
        &self,
        fence: Fence,
        directory: &str,
        files: &[FileEntry],
        check_only: bool,
    ) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        let dir = self.options.checkpoints.resolve(directory)?;
        if check_only {
            return self.store.check_restore(&dir, files);
        }
        self.store.restore(&dir, files)?;
        tracing::info!(dir = %dir.display(), "rows restored");
        Ok(())
    }

    /// Drop all rows.
    ///
    /// # Errors
    /// `NotBegun`, `StaleEpoch`.
    pub fn clear(&self, fence: Fence) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        self.store.clear()?;
        tracing::info!("rows dropped");
        Ok(())
    }

    /// Counters and gauges; the epoch is the highest there was, also before a restart.
    ///
    /// # Errors
    /// None of its own.
    pub fn stats(&self) -> Result<Stats, TablesError> {
        let stats = self.store.stats()?;
        Ok(Stats { epoch: stats.epoch.max(self.epoch.get()), ..stats })
    }

    fn current(&self) -> Result<Fence, TablesError> {
        (*self.begun.read()).ok_or(TablesError::NotBegun)
    }

    fn check(&self, fence: Fence) -> Result<(), TablesError> {
        let begun = self.current()?;
        if fence == begun {
            return Ok(());
        }
        let token = Token { job: fence.job, epoch: fence.epoch, rank: 0, seq: 0 };
        Err(TablesError::StaleEpoch { token, current: begun.epoch })
    }

    /// The store does not know who it is.
    fn named<T>(&self, result: Result<T, TablesError>) -> Result<T, TablesError> {
        result.map_err(|error| match error {
            TablesError::WrongShard { held, shard, .. } => {
                TablesError::WrongShard { peer: self.peer.clone(), held, shard }
            }
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use persia_types::tables::TableIds;
    use persia_types::{Initializer, Optimizer, ShardedIds, Table};

    use super::*;

    fn node(data: &std::path::Path) -> Node {
        let schema = Schema { slots: vec![], tables: vec![Table::new("a", 4)] };
        let options = NodeOptions {
            job: "job".into(),
            index: 0,
            servers: 1,
            schema,
            capacity: 1000,
            snapshot_threads: 1,
            checkpoints: CheckpointRoot::new(None),
            turn_timeout: Duration::from_secs(1),
            address: "here".into(),
        };
        Node::new(options, EpochFile::open(Some(data)).unwrap()).unwrap()
    }

    fn run(node: &Node, epoch: u64) -> Run {
        Run {
            job: "job".into(),
            epoch,
            schema: node.options.schema.clone(),
            seed: 7,
            optimizer: Some(Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 }),
            initializer: Initializer::Zero,
            admit_probability: 1.0,
            admit_min_count: 1,
            weight_bound: 0.0,
            fresh: true,
            world_size: 1,
            reproducible: false,
        }
    }

    #[test]
    fn a_begin_whose_epoch_cannot_be_kept_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let node = node(&data);
        node.begin(1, &run(&node, 1), false).unwrap();
        let ids = ShardedIds::group(&[1, 2, 3]).unwrap();
        let token = Token { job: JobId::from_name("job"), epoch: 1, rank: 0, seq: 1 };
        let tables = [TableIds { table: 0, ids: &ids, uses: None }];
        let request = LookupRequest { token, step: 1, mode: Mode::Train, tables: &tables };
        node.lookup(None, &request, &mut [&mut [0.0; 12]]).unwrap();
        std::fs::remove_dir_all(&data).unwrap();
        let error = node.begin(1, &run(&node, 2), false).unwrap_err();
        assert!(matches!(error, TablesError::Io { .. }), "{error}");
        let stats = node.stats().unwrap();
        assert_eq!((stats.rows, stats.epoch), (vec![3], 1));
    }
}
