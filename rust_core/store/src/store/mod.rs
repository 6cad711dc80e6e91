//! [`Store`]: the tables of one process, in memory.
//!
//! * `run`: begin and resume a run
//! * `requests`: look-ups and pushes
//! * `snapshots`: save and restore all rows
//! * `progress`, `prepared`: the applied pushes, and the snapshot for which rows are held
//! * `transfer`: cancellation of reading and writing files

mod prepared;
mod progress;
mod requests;
mod run;
mod snapshots;
mod transfer;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use persia_types::limits::MAX_DIM;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats, TableStats,
};
use persia_types::{Schema, Table, Tables, TablesError, VIRTUAL_SHARDS};

use crate::checkpoint::ShardRows;
use crate::request::row_index_cache::RowIndexCache;
use crate::request::threads::RequestThreads;
use crate::request::tokens::Claims;
use crate::run::{ActiveRun, bad};
use crate::shard::{CopyBudget, Layout, Shard};
use crate::simd::InstructionSet;
use crate::snapshot;
use prepared::PreparedSnapshot;
use progress::Counters;
pub use progress::Progress;
use transfer::Cancellations;
pub use transfer::TransferStart;

/// Limits of a [`Store`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// The maximum number of rows over all tables and all [`VIRTUAL_SHARDS`] shards, at least 1. Each shard
    /// holds an equal part, rounded up. Memory is allocated as rows are inserted.
    pub capacity: u64,
    /// The number of threads that execute a look-up or push with many ids, at least 1. Its results are the same for
    /// every number. With 1, the caller's thread executes them.
    pub request_threads: usize,
    /// The number of threads that write or read a snapshot, at least 1.
    pub snapshot_threads: usize,
    /// The virtual shards that the store holds. Requests with ids of other shards are refused, and files of other
    /// shards are skipped.
    pub shards: Range<usize>,
    /// The limit, in bytes, for copies of rows that change before a snapshot of them is written. Pushes wait
    /// once it is reached. A push that has begun may exceed it.
    pub max_copy_bytes: u64,
    /// How long a push waits for the copy budget. It is zero if the caller waits before the push, with
    /// [`Store::wait_for_room`].
    pub throttle: Duration,
    /// Whether the store serves a trained model. It then counts all look-ups, not only those of training.
    pub serves: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            capacity: 1_000_000_000,
            request_threads: 1,
            snapshot_threads: 4,
            shards: 0..VIRTUAL_SHARDS,
            max_copy_bytes: u64::MAX,
            throttle: Duration::from_secs(10),
            serves: false,
        }
    }
}

/// Embedding tables in memory, in [`VIRTUAL_SHARDS`] shards.
///
/// * A *look-up* changes no row. It makes a pass over its tables, in batches of ids whose shards are locked
///   together, and a second pass if ids had no row. Several threads divide a large request by shards. In
///   training, an id that a push of the same step would admit reads as its new row. A batch that is looked up
///   but not trained on has no effect.
/// * A *push* is checked as a whole and then applied, once per token. It records the use of rows, admits ids
///   without a row, and updates rows. An id that is not admitted, or whose gradient is not finite or too
///   large, is skipped without an effect on other rows. If there is no memory for new rows, nothing changes.
///   If another push takes the memory in between, the rest of the push is applied, and the token counts as
///   applied. In both cases the error names the table.
/// * Beginning a run or a snapshot, restoring and clearing wait for the requests in flight and block new
///   ones. Reading statistics does not. Requests continue while a snapshot is written. Rows are copied before
///   they change. An operation that replaces or drops all rows waits for the end of a snapshot. If the
///   snapshot's [transfer is cancelled](Self::cancel_transfers), the snapshot ends soon, and a fresh run does
///   not wait for it.
pub struct Store {
    schema: Schema,
    options: StoreOptions,
    level: InstructionSet,
    shards: Vec<Mutex<Shard>>,
    threads: RequestThreads,
    /// Every request holds the read lock for its whole duration, so no request outlives its run.
    run: RwLock<Option<ActiveRun>>,
    claims: Claims,
    row_index_cache: RowIndexCache,
    counters: Mutex<Counters>,
    /// The generation of `run`, for readers that must not wait for the lock of `run`.
    generation: AtomicU64,
    /// The snapshot for which rows are held. It is locked while a snapshot is written. Lock it before `run`.
    prepared: Mutex<PreparedSnapshot>,
    /// The snapshot that is being written: its number, if any, and the start of its transfer.
    writing: Mutex<Option<(Option<u64>, TransferStart)>>,
    cancellations: Cancellations,
    copy_budget: Arc<CopyBudget>,
}

impl Store {
    /// Create an empty store.
    ///
    /// # Errors
    /// `BadRun` for an option of 0, a dimension out of range, an invalid range of shards, or two tables with the
    /// same name; `Io` if the operating system refuses a thread.
    pub fn new(schema: Schema, options: StoreOptions) -> Result<Self, TablesError> {
        if options.capacity == 0 || options.snapshot_threads == 0 || options.request_threads == 0 {
            return bad(format!(
                "capacity is {}, request_threads is {} and snapshot_threads is {}; each must be at least 1",
                options.capacity, options.request_threads, options.snapshot_threads
            ));
        }
        if options.shards.is_empty() || options.shards.end > VIRTUAL_SHARDS {
            return bad(format!("shards {:?} are not a range within 0..{VIRTUAL_SHARDS}", options.shards));
        }
        for (number, table) in schema.tables.iter().enumerate() {
            if !(1..=MAX_DIM).contains(&table.dim) {
                return bad(format!("table {} has dim {}, expected 1 to {MAX_DIM}", table.name, table.dim));
            }
            if schema.tables[..number].iter().any(|other| other.name == table.name) {
                return bad(format!("two tables have the name {}", table.name));
            }
        }
        let layouts: Vec<Layout> = schema.tables.iter().map(Layout::stateless).collect();
        let budget = shard_budget(options.capacity);
        let threads = RequestThreads::start(options.request_threads, options.shards.clone())?;
        let copy_budget = Arc::new(CopyBudget::new(options.max_copy_bytes));
        Ok(Self {
            schema,
            options,
            level: InstructionSet::detect(),
            shards: (0..VIRTUAL_SHARDS).map(|_| Mutex::new(Shard::new(&layouts, budget))).collect(),
            threads,
            run: RwLock::new(None),
            claims: Claims::default(),
            row_index_cache: RowIndexCache::default(),
            counters: Mutex::default(),
            generation: AtomicU64::new(0),
            prepared: Mutex::default(),
            writing: Mutex::default(),
            cancellations: Cancellations::default(),
            copy_budget,
        })
    }

    /// The schema of the store.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// All content of a shard, sorted by id.
    ///
    /// # Panics
    /// If `shard` is not below [`VIRTUAL_SHARDS`].
    pub fn export_shard(&self, shard: usize) -> ShardRows {
        snapshot::export(shard, &self.shards[shard].lock(), &self.schema)
    }

    /// Remove all rows and admission counts. The caller holds the lock of `run`.
    fn drop_rows(&self) {
        self.row_index_cache.clear();
        self.shards.iter().for_each(|shard| shard.lock().clear());
    }
}

/// The budget of a shard, in rows.
fn shard_budget(capacity: u64) -> usize {
    usize::try_from(capacity.div_ceil(VIRTUAL_SHARDS as u64)).unwrap_or(usize::MAX)
}

impl Tables for Store {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        self.begin_run(run)
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        self.apply_lookup(request, rows)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.wait_for_room(self.options.throttle);
        self.apply_push(request)
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.prepare(number)
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        self.abort(number);
        Ok(())
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        self.write_started(self.start_transfer(), dir, number)
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        self.restore_rows(dir, files, &|_| ())
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        let Counters { lookups, pushes, by_table } = self.counters.lock().clone();
        let of_table = |(number, table): (usize, &Table)| TableStats {
            name: table.name.clone(),
            lookups: by_table.get(number).copied().unwrap_or_default(),
            ..TableStats::default()
        };
        let mut stats = Stats {
            rows: vec![0; self.schema.tables.len()],
            lookups,
            pushes,
            tokens: self.claims.highest(),
            generation: self.generation.load(Ordering::Relaxed),
            begun: self.generation.load(Ordering::Relaxed),
            tables: self.schema.tables.iter().enumerate().map(of_table).collect(),
            ..Stats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.memory_bytes += size_of::<Mutex<Shard>>() as u64;
            for ((rows, sum), table) in stats.rows.iter_mut().zip(&mut stats.tables).zip(&shard.tables) {
                let part = table.stats();
                *rows += part.rows;
                stats.payload_bytes += part.payload_bytes;
                stats.memory_bytes += part.memory_bytes;
                *sum += &part;
            }
        }
        Ok(stats)
    }

    fn clear(&self) -> Result<(), TablesError> {
        let mut prepared = self.prepared.lock();
        let _nothing_in_flight = self.run.write();
        prepared.release();
        self.drop_rows();
        Ok(())
    }
}

#[cfg(test)]
mod level_tests;
#[cfg(test)]
mod memory_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_do_not_wait_for_a_snapshot() {
        let store = Store::new(Schema::default(), StoreOptions::default()).unwrap();
        let as_a_snapshot_does = store.run.write();
        let (answer, answered) = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            threads.spawn(|| answer.send(store.stats().unwrap().generation).unwrap());
            let generation = answered.recv_timeout(Duration::from_secs(20));
            drop(as_a_snapshot_does);
            assert_eq!(generation, Ok(0));
        });
    }
}
