//! [`Node`]: what one embedding server holds, and what it refuses.

mod generation;
mod journal;
mod order;
mod record;
mod recovery;
mod root;
mod segment;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use persia_store::checkpoint::probe_file;
use persia_store::{Store, StoreOptions};
use persia_types::config::LogSync;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats,
};
use persia_types::{JobId, Mode, Schema, Tables, TablesError, Token, server_shards};
use persia_wire::VERSION;

use self::journal::{Journal, Mark, Owner, Rows};
use self::record::Record;
use crate::exit::Exit;

pub use generation::GenerationFile;
pub use order::{Order, Phase, Turn};
pub use root::CheckpointRoot;

/// How long a cut waits for another administrative request: more than any that touches no file takes.
const CUT_PATIENCE: Duration = Duration::from_secs(1);

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
    /// As [`StoreOptions::max_copy_bytes`].
    pub max_copy_bytes: u64,
    /// Where snapshots may be.
    pub checkpoints: CheckpointRoot,
    /// How long a request of a reproducible run waits for the ranks before it.
    pub turn_timeout: Duration,
    /// Where it listens, for messages.
    pub address: String,
    /// Where a journal is kept, and when it is durable; None where the job goes on from its last checkpoint.
    pub journal: Option<(PathBuf, LogSync)>,
}

/// See the module's documentation.
pub struct Node {
    options: NodeOptions,
    peer: String,
    store: Store,
    generation: GenerationFile,
    order: Arc<Order>,
    journal: Option<Journal>,
    /// The run in progress.
    begun: RwLock<Option<Run>>,
    /// One administrative request at a time: what was checked holds until it is done.
    admin: Mutex<()>,
}

/// A run that a request claims to be of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    /// Its job.
    pub job: JobId,
    /// Its generation.
    pub generation: u64,
}

fn empty_store(options: &NodeOptions) -> Result<Store, Exit> {
    let store_options = StoreOptions {
        capacity: options.capacity,
        snapshot_threads: options.snapshot_threads,
        shards: server_shards(options.index as usize, options.servers as usize),
        max_copy_bytes: options.max_copy_bytes,
    };
    Store::new(options.schema.clone(), store_options).map_err(|error| Exit::Usage(error.to_string()))
}

impl Node {
    /// A server that goes on where its journal ends, or, without one that can be used, an empty one.
    ///
    /// # Errors
    /// `Usage` for an index that is not below the number of servers, what [`Store::new`] refuses, and a journal that cannot
    /// be kept where it is to be.
    pub fn new(options: NodeOptions, generation: GenerationFile) -> Result<Self, Exit> {
        let (index, servers) = (options.index, options.servers);
        if index >= servers || servers as usize > persia_types::limits::MAX_SERVERS {
            return Err(Exit::Usage(format!("no server {index} of {servers}")));
        }
        let owner = Owner { version: VERSION.into(), index, servers, capacity: options.capacity };
        let journal =
            options.journal.clone().map(|(dir, sync)| Journal::open(dir, sync, owner)).transpose()?;
        let mut node = Self {
            peer: format!("server {index} of {servers} ({})", options.address),
            store: empty_store(&options)?,
            options,
            generation,
            order: Arc::default(),
            journal,
            begun: RwLock::new(None),
            admin: Mutex::new(()),
        };
        if let Err(why) = node.recover() {
            tracing::warn!("the journal cannot be used; the job goes on from its last checkpoint: {why}");
            node.store = empty_store(&node.options)?;
            node.order = Arc::default();
            node.begun = RwLock::new(None);
        }
        Ok(node)
    }

    /// Begin `run`, and serve it.
    fn start(&self, run: &Run) -> Result<(), TablesError> {
        self.store.begin(run)?;
        let ordered = run.reproducible && run.optimizer.is_some();
        self.order.begin(run.generation, if ordered { run.world_size } else { 1 });
        *self.begun.write() = Some(run.clone());
        Ok(())
    }

    /// Where the run stands. Nothing is being applied.
    fn mark(&self) -> Mark {
        Mark { progress: self.store.progress(), reached: self.order.reached() }
    }

    /// What it was started with.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// How messages name it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Begin a run, or with `check_only` say why not. The generation is durable before this returns.
    ///
    /// # Errors
    /// `Incompatible` for another job or number of servers, `Io` when the generation can't be kept; else as
    /// [`Tables::begin`].
    pub fn begin(&self, servers: u32, run: &Run, check_only: bool) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        let Run { job, generation, .. } = run;
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
        let highest = self.generation.get();
        if *generation <= highest {
            let what = format!("generation {generation} is not above {highest}, the highest there was");
            return Err(TablesError::BadRun { what });
        }
        self.store.check_begin(run)?;
        if check_only {
            return Ok(());
        }
        // First: a begin that fails here has dropped no row.
        self.generation.set(*generation)?;
        match &self.journal {
            None => self.start(run)?,
            Some(journal) if !run.fresh && journal.has_base() => journal.begin(run, || self.start(run))?,
            Some(journal) => {
                let begun = journal.restart(|| {
                    self.start(run)?;
                    Ok((run.clone(), None, self.mark()))
                });
                if begun.is_err() {
                    *self.begun.write() = None;
                }
                begun?;
            }
        }
        tracing::info!(generation, ranks = run.world_size, reproducible = run.reproducible, "a run began");
        Ok(())
    }

    /// Whether training requests are to [wait](Self::wait_for_room) before anything else.
    pub fn is_full(&self) -> bool {
        self.store.is_full()
    }

    /// Wait until files that are written for a checkpoint need fewer copies of rows, for a part of the time that a
    /// [turn](Self::turn) is waited for.
    pub fn wait_for_room(&self) {
        self.store.wait_for_room(self.options.turn_timeout / 4);
    }

    /// Wait for the turn of a training request, if the run has turns. To be given to [`Self::lookup`] or
    /// [`Self::push`].
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`, `BadShape` for a rank that the run does not have, `Timeout` naming who is missing.
    pub async fn turn(&self, token: Token, phase: Phase) -> Result<Option<Turn>, TablesError> {
        let begun = self.current()?;
        if (begun.job, begun.generation) != (token.job, token.generation) {
            return Err(TablesError::StaleGeneration { token, current: begun.generation });
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
        let apply = || {
            let report = self.named(self.store.lookup_at_once(request, rows))?;
            turn.into_iter().for_each(Turn::done);
            Ok(report)
        };
        match &self.journal {
            Some(journal) if request.mode == Mode::Train => {
                self.logged(journal.append(&Record::lookup(request), apply))
            }
            _ => apply(),
        }
    }

    /// Apply gradients once. `turn` is of [`Self::turn`].
    ///
    /// # Errors
    /// As [`Tables::push`].
    pub fn push(&self, turn: Option<Turn>, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let apply = || {
            let report = self.named(self.store.push_at_once(request))?;
            turn.into_iter().for_each(Turn::done);
            Ok(report)
        };
        match &self.journal {
            None => apply(),
            Some(journal) => self.logged(journal.append(&Record::push(request), apply)),
        }
    }

    /// Keep the rows as they are now, for a snapshot of this cut.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`; as [`Tables::prepare_snapshot`].
    pub fn prepare_snapshot(&self, fence: Fence, number: u64) -> Result<(), TablesError> {
        self.check(fence)?;
        // Ranks stand still until a cut is made: it does not wait for a disk.
        let Some(_alone) = self.admin.try_lock_for(CUT_PATIENCE) else {
            return Err(
                self.io(io::ErrorKind::ResourceBusy, "the files of an earlier save are still being written")
            );
        };
        self.check(fence)?;
        match &self.journal {
            None => self.store.prepare_snapshot(number),
            Some(journal) => journal.cut(number, || {
                self.store.prepare_snapshot(number)?;
                Ok(self.mark())
            }),
        }
    }

    /// Forget this cut, if it is held.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`.
    pub fn abort_snapshot(&self, fence: Fence, number: u64) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        self.forget(number)
    }

    fn forget(&self, number: u64) -> Result<(), TablesError> {
        self.store.abort_snapshot(number)?;
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.has_base())
            && let Err(error) = journal.append(&Record::uncut(number), || Ok(()))
        {
            tracing::warn!(
                number,
                "a server that goes on where its log ends would copy rows for a cut: {error}"
            );
        }
        Ok(())
    }

    /// The snapshot of this cut is part of the checkpoint that `files` in `directory` are: the journal begins behind it from
    /// now on, if no other cut was made since.
    ///
    /// # Errors
    /// As [`Self::write_snapshot`].
    pub fn commit_snapshot(
        &self,
        fence: Fence,
        number: u64,
        directory: &str,
        files: &[FileEntry],
    ) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        self.options.checkpoints.resolve(directory)?;
        let Some(journal) = &self.journal else { return Ok(()) };
        let run = self.begun.read().clone().ok_or(TablesError::NotBegun)?;
        journal.rebase(number, run, Rows { directory: directory.into(), files: files.to_vec() })
    }

    /// Say whether a snapshot can be written into `directory`, below the checkpoint root.
    ///
    /// # Errors
    /// As [`Self::write_snapshot`].
    pub fn check_storage(&self, fence: Fence, directory: &str) -> Result<(), TablesError> {
        self.check(fence)?;
        self.options.checkpoints.resolve(directory).and_then(|dir| probe_file(&dir)).map_err(|error| {
            match error {
                TablesError::Io { path, source } => {
                    let what = format!("server {}: {source}", self.options.index);
                    TablesError::Io { path, source: std::io::Error::new(source.kind(), what) }
                }
                other => other,
            }
        })
    }

    /// Write the rows held into `directory`, below the checkpoint root.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`, `BadShape` for a directory that is not allowed; `Io`.
    pub fn write_snapshot(
        &self,
        fence: Fence,
        directory: &str,
        number: Option<u64>,
    ) -> Result<Snapshot, TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        let snapshot = self
            .options
            .checkpoints
            .resolve(directory)
            .and_then(|dir| self.store.write_snapshot(&dir, number));
        if let (Err(_), Some(number)) = (&snapshot, number) {
            self.forget(number)?;
        }
        let snapshot = snapshot?;
        tracing::info!(directory, files = snapshot.files.len(), "snapshot written");
        Ok(snapshot)
    }

    /// Replace the rows held by those of `files` that belong here, or with `check_only` say why not.
    ///
    /// # Errors
    /// As [`Self::write_snapshot`]; `Corrupt` and `Foreign` name the file.
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
        let rows = Rows { directory: directory.into(), files: files.to_vec() };
        self.replace(Some(rows), || self.store.restore(&dir, files))?;
        tracing::info!(dir = %dir.display(), "rows restored");
        Ok(())
    }

    /// Drop all rows.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`.
    pub fn clear(&self, fence: Fence) -> Result<(), TablesError> {
        let _alone = self.admin.lock();
        self.check(fence)?;
        self.replace(None, || self.store.clear())?;
        tracing::info!("rows dropped");
        Ok(())
    }

    /// Do what puts `rows` in the place of all that are held. Of the run in progress.
    fn replace(
        &self,
        rows: Option<Rows>,
        change: impl FnOnce() -> Result<(), TablesError>,
    ) -> Result<(), TablesError> {
        let Some(journal) = &self.journal else { return change() };
        let run = self.begun.read().clone().ok_or(TablesError::NotBegun)?;
        journal.restart(|| {
            change()?;
            Ok((run, rows, self.mark()))
        })
    }

    /// Bytes of the journal; None where there is none.
    pub fn journal_bytes(&self) -> Option<u64> {
        self.journal.as_ref().map(Journal::bytes)
    }

    /// Counters and gauges; the generation is the highest there was, also before a restart.
    ///
    /// # Errors
    /// None of its own.
    pub fn stats(&self) -> Result<Stats, TablesError> {
        let stats = self.store.stats()?;
        Ok(Stats { generation: stats.generation.max(self.generation.get()), ..stats })
    }

    fn current(&self) -> Result<Fence, TablesError> {
        let begun = self.begun.read();
        let run = begun.as_ref().ok_or(TablesError::NotBegun)?;
        Ok(Fence { job: JobId::from_name(&run.job), generation: run.generation })
    }

    fn io(&self, kind: io::ErrorKind, what: &str) -> TablesError {
        TablesError::Io { path: self.peer.clone().into(), source: io::Error::new(kind, what) }
    }

    fn check(&self, fence: Fence) -> Result<(), TablesError> {
        let begun = self.current()?;
        if fence == begun {
            return Ok(());
        }
        let token = Token { job: fence.job, generation: fence.generation, rank: 0, seq: 0 };
        Err(TablesError::StaleGeneration { token, current: begun.generation })
    }

    /// There may be room for a journal again: whoever asks is to try again for a while.
    fn logged<T>(&self, result: Result<T, TablesError>) -> Result<T, TablesError> {
        result.map_err(|error| match error {
            TablesError::Io { path, source } => TablesError::Unreachable {
                peer: self.peer.clone(),
                what: format!("it cannot write its log, {}: {source}", path.display()),
            },
            other => other,
        })
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
        node_with(data, None)
    }

    fn node_with(data: &std::path::Path, checkpoints: Option<PathBuf>) -> Node {
        let schema = Schema { slots: vec![], tables: vec![Table::new("a", 4)] };
        let options = NodeOptions {
            job: "job".into(),
            index: 0,
            servers: 1,
            schema,
            capacity: 1000,
            snapshot_threads: 1,
            max_copy_bytes: u64::MAX,
            checkpoints: CheckpointRoot::new(checkpoints),
            turn_timeout: Duration::from_secs(1),
            address: "here".into(),
            journal: None,
        };
        Node::new(options, GenerationFile::open(Some(data)).unwrap()).unwrap()
    }

    fn run(node: &Node, generation: u64) -> Run {
        Run {
            job: "job".into(),
            generation,
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
    fn a_begin_whose_generation_cannot_be_kept_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let node = node(&data);
        node.begin(1, &run(&node, 1), false).unwrap();
        let ids = ShardedIds::group(&[1, 2, 3]).unwrap();
        let token = Token { job: JobId::from_name("job"), generation: 1, rank: 0, seq: 1 };
        let tables = [TableIds { table: 0, ids: &ids, per_sample: None }];
        let request = LookupRequest { token, step: 1, mode: Mode::Train, tables: &tables };
        node.lookup(None, &request, &mut [&mut [0.0; 12]]).unwrap();
        std::fs::remove_dir_all(&data).unwrap();
        let error = node.begin(1, &run(&node, 2), false).unwrap_err();
        assert!(matches!(error, TablesError::Io { .. }), "{error}");
        let stats = node.stats().unwrap();
        assert_eq!((stats.rows, stats.generation), (vec![3], 1));
    }

    #[test]
    fn a_directory_that_this_server_cannot_write_into_is_told() {
        let dir = tempfile::tempdir().unwrap();
        // Nobody may make files below it, whoever this test runs as.
        let node = node_with(dir.path(), Some("/proc".into()));
        node.begin(1, &run(&node, 1), false).unwrap();
        let fence = Fence { job: JobId::from_name("job"), generation: 1 };
        let error = node.check_storage(fence, "sys").unwrap_err().to_string();
        assert!(
            error.contains("/proc/sys: server 0: user ") && error.contains("cannot write here"),
            "{error}"
        );
    }
}
