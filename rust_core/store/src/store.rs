//! [`Store`]: the tables of one process, in memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use persia_types::limits::MAX_DIM;
use persia_types::tables::{
    FileEntry, LookupReport, LookupRequest, PushReport, PushRequest, Run, Snapshot, Stats,
};
use persia_types::token::SeenTokens;
use persia_types::{Mode, Schema, ShardedIds, Table, Tables, TablesError, VIRTUAL_SHARDS};

use serde::{Deserialize, Serialize};

use crate::checkpoint::{ShardRows, shard_of_entry};
use crate::copies::Copies;
use crate::export::{export, import, write_frozen};
use crate::lookup::{Effect, Lookup};
use crate::memo::{Memo, Memos};
use crate::push::{Change, Push};
use crate::request::{check_buffer, check_step, check_tables, malformed, of_table};
use crate::row::Layout;
use crate::run::{ActiveRun, bad};
use crate::shard::Shard;
use crate::simd::Level;
use crate::snapshot;
use crate::tokens::{Claims, Verb};

/// How much a [`Store`] may hold and use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// Rows over all tables; nothing is allocated before it is used. At least 1.
    pub capacity: u64,
    /// Threads that write and read a snapshot. At least 1.
    pub snapshot_threads: usize,
    /// The virtual shards held; requests with ids of others are refused, files of others are skipped.
    pub shards: Range<usize>,
    /// Bytes of rows that may be copied because they change while a snapshot of them is to be written. Training requests wait
    /// for room; one that found room may take more.
    pub max_copy_bytes: u64,
    /// How long a training request waits for room. Zero if the caller waits before: see [`Store::wait_for_room`].
    pub throttle: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            capacity: 1_000_000_000,
            snapshot_threads: 4,
            shards: 0..VIRTUAL_SHARDS,
            max_copy_bytes: u64::MAX,
            throttle: Duration::from_secs(10),
        }
    }
}

/// Embedding tables in memory, cut into [`VIRTUAL_SHARDS`].
///
/// * A *look-up* goes through its tables one after the other, with some neighbouring shards locked at a time, and
///   then once more where ids had no row. Its side effects happen once per token; when it is
///   repeated it changes nothing, and an id without row reads as the row the first one would have given it.
///   It counts no ids in [`Stats`] then. Should memory run out, rows admitted so far stay and the token stays
///   unknown.
/// * A *push* is checked whole and then applied. A row with a non-finite gradient is skipped, also when it has
///   no row; a row that is missing is skipped; neither moves any other row.
/// * `begin`, `cut`, `restore` and `clear` wait for requests that are running and hold up those that come; `stats` is not
///   held up. While a `snapshot` writes, requests go on, and what they change is copied before; what replaces or drops
///   all rows waits for it.
pub struct Store {
    schema: Schema,
    options: StoreOptions,
    level: Level,
    shards: Vec<Mutex<Shard>>,
    /// Read by every request for its whole duration, so that none outlives its run.
    run: RwLock<Option<ActiveRun>>,
    claims: Claims,
    memos: Memos,
    counters: Mutex<Counters>,
    /// That of `run`, for whoever must not wait for a snapshot.
    generation: AtomicU64,
    /// Locked while a snapshot is written, and before `run`.
    cut: Mutex<LastCut>,
    copies: Arc<Copies>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counters {
    lookups: LookupReport,
    pushes: PushReport,
}

impl Counters {
    /// Rows looked up and pushed.
    fn rows(&self) -> u64 {
        let Self { lookups, pushes } = self;
        lookups.hits + lookups.inserted + lookups.missing + pushes.rows_pushed
    }
}

/// The cut that was made last.
#[derive(Default)]
struct LastCut {
    /// Of the run with this generation.
    generation: u64,
    number: u64,
    /// Whether its rows are kept.
    held: bool,
}

/// Where a run stands in a [`Store`], besides its rows: what was applied, and the counters of [`Stats`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    lookups: SeenTokens,
    pushes: SeenTokens,
    counters: Counters,
}

impl Store {
    /// An empty store. Memory is taken as rows come, whatever the capacity.
    ///
    /// # Errors
    /// `BadRun` for an option of 0, a dimension out of range, shards that are none, or a table's name that stands there twice.
    pub fn new(schema: Schema, options: StoreOptions) -> Result<Self, TablesError> {
        if options.capacity == 0 || options.snapshot_threads == 0 {
            return bad(format!("capacity and snapshot_threads must be at least 1: {options:?}"));
        }
        if options.shards.is_empty() || options.shards.end > VIRTUAL_SHARDS {
            return bad(format!("shards {:?} are none of the {VIRTUAL_SHARDS}", options.shards));
        }
        for (number, table) in schema.tables.iter().enumerate() {
            if !(1..=MAX_DIM).contains(&table.dim) {
                return bad(format!("table {} has dim {}, want 1 to {MAX_DIM}", table.name, table.dim));
            }
            if schema.tables[..number].iter().any(|other| other.name == table.name) {
                return bad(format!("two tables are called {}", table.name));
            }
        }
        let layouts: Vec<Layout> = schema.tables.iter().map(Layout::stateless).collect();
        let budget = budget(options.capacity);
        let copies = Arc::new(Copies::new(options.max_copy_bytes));
        Ok(Self {
            schema,
            options,
            level: Level::detect(),
            shards: (0..VIRTUAL_SHARDS).map(|_| Mutex::new(Shard::new(&layouts, budget))).collect(),
            run: RwLock::new(None),
            claims: Claims::default(),
            memos: Memos::default(),
            counters: Mutex::default(),
            generation: AtomicU64::new(0),
            cut: Mutex::default(),
            copies,
        })
    }

    /// Slots and tables it was made for.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Everything one shard holds, sorted by id.
    ///
    /// # Panics
    /// When `shard` is not below [`VIRTUAL_SHARDS`].
    pub fn export_shard(&self, shard: usize) -> ShardRows {
        export(shard, &self.shards[shard].lock(), &self.schema)
    }

    /// Rows held of a table, and their layout.
    fn held(&self, table: usize) -> (usize, Layout) {
        let rows = self.shards.iter().map(|shard| shard.lock().tables[table].len()).sum();
        (rows, self.shards[0].lock().tables[table].layout())
    }

    /// The layouts of the tables once `run` begins, or why the rows held do not fit it.
    fn fitting(&self, run: &ActiveRun) -> Result<Vec<Layout>, TablesError> {
        let mut layouts = run.layouts();
        for (number, table) in self.schema.tables.iter().enumerate() {
            let (rows, held) = self.held(number);
            // Without optimizer nothing touches state: rows may keep what they have.
            if rows > 0 && held != layouts[number] && run.trains {
                let (held, asked) = (held.state_len, layouts[number].state_len);
                return bad(format!(
                    "the {rows} rows of table {} have {held} floats of optimizer state, the new optimizer has \
                     {asked}; clear the tables or keep the optimizer",
                    table.name
                ));
            }
            if rows > 0 {
                layouts[number] = held;
            }
        }
        Ok(layouts)
    }

    /// Where the run stands. While no look-up and no push is being applied, this belongs to the rows.
    pub fn progress(&self) -> Progress {
        let (lookups, pushes) = self.claims.applied();
        Progress { lookups, pushes, counters: *self.counters.lock() }
    }

    /// Go on behind what [`Self::progress`] returned; the rows are of the same instant.
    pub fn resume(&self, progress: Progress) {
        self.claims.resume(progress.lookups, progress.pushes);
        *self.counters.lock() = progress.counters;
    }

    /// What [`Tables::begin`] would answer, without its effect: of several stores all begin, or none.
    ///
    /// # Errors
    /// As [`Tables::begin`].
    pub fn check_begin(&self, run: &Run) -> Result<(), TablesError> {
        let active = self.run.read();
        let checked = check_run(active.as_ref(), run, &self.schema)?;
        if !run.fresh {
            self.fitting(&checked)?;
        }
        Ok(())
    }

    /// What [`Tables::restore`] would answer, without its effect: of several stores all restore, or none.
    ///
    /// # Errors
    /// As [`Tables::restore`].
    pub fn check_restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let active = self.run.read();
        self.load(active.as_ref().ok_or(TablesError::NotBegun)?, dir, files, drop).map(drop)
    }

    /// Read the files of the shards held, and keep of each what `keep` does.
    fn load<T: Send>(
        &self,
        run: &ActiveRun,
        dir: &Path,
        files: &[FileEntry],
        keep: impl Fn(Shard) -> T + Sync,
    ) -> Result<BTreeMap<usize, T>, TablesError> {
        let (layouts, keep_state) = (run.layouts(), run.trains);
        let budget = budget(self.options.capacity);
        let files: Vec<FileEntry> = files.iter().filter(|file| self.may_hold(file)).cloned().collect();
        snapshot::load(dir, &files, self.options.snapshot_threads, |rows, path| {
            import(rows, path, &self.schema, &layouts, keep_state, budget).map(&keep)
        })
    }

    /// Keep all rows as they are now, for the next snapshot.
    fn freeze(&self) {
        let _nothing_in_flight = self.run.write();
        let freeze = |shard: usize| {
            let mut shard = self.shards[shard].lock();
            shard.tables.iter_mut().for_each(|table| table.freeze(&self.copies));
        };
        snapshot::each(VIRTUAL_SHARDS, self.options.snapshot_threads, freeze);
    }

    /// Forget what was kept.
    fn thaw(&self) {
        for shard in &self.shards {
            for table in 0..self.schema.tables.len() {
                let kept = shard.lock().tables[table].thaw();
                drop(kept); // whoever waits for the shard does not wait for this
            }
        }
    }

    /// Drop all rows; the caller holds the run's lock.
    fn empty(&self) {
        self.memos.clear();
        self.shards.iter().for_each(|shard| shard.lock().clear());
    }

    /// Whether `file` may be of a shard that is held; one that is of no shard is left for its reader to refuse.
    fn may_hold(&self, file: &FileEntry) -> bool {
        shard_of_entry(&file.name).is_none_or(|shard| self.options.shards.contains(&shard))
    }

    /// Refuse ids of shards that are not held.
    fn check_shards<'a>(&self, mut ids: impl Iterator<Item = &'a ShardedIds>) -> Result<(), TablesError> {
        let held = &self.options.shards;
        let foreign = ids.find_map(|ids| {
            let before = (0..held.start).rev().find(|shard| !ids.range(*shard).is_empty());
            before.or_else(|| (held.end..VIRTUAL_SHARDS).find(|shard| !ids.range(*shard).is_empty()))
        });
        match foreign {
            None => Ok(()),
            Some(shard) => {
                Err(TablesError::WrongShard { peer: "this store".into(), held: held.clone(), shard })
            }
        }
    }

    /// Whether as much is copied for a cut as is allowed.
    pub fn is_full(&self) -> bool {
        self.copies.is_full()
    }

    /// Wait until less is copied for a cut than is allowed, at the latest for `patience`. To be called before a training
    /// request takes anything that others wait for.
    pub fn wait_for_room(&self, patience: Duration) {
        self.copies.wait(patience);
    }

    fn checked_lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        let run = self.run.read();
        let run = run.as_ref().ok_or(TablesError::NotBegun)?;
        if rows.len() != request.tables.len() {
            return malformed(format!("{} buffers for {} tables", rows.len(), request.tables.len()));
        }
        check_tables(&self.schema, request.tables.iter().map(|part| (part.table, part.ids.len())))?;
        for (part, rows) in request.tables.iter().zip(rows.iter()) {
            check_buffer(&self.schema.tables[part.table], part, rows.len())?;
        }
        self.check_shards(request.tables.iter().map(|part| part.ids))?;
        match request.mode {
            Mode::Train => self.train_lookup(run, request, rows),
            Mode::Eval | Mode::Infer => {
                let step = u32::try_from(request.step).unwrap_or(u32::MAX);
                self.read(run, request, Effect::Read(step), None, rows)
            }
        }
    }

    fn checked_push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let run = self.run.read();
        let run = run.as_ref().ok_or(TablesError::NotBegun)?;
        let rows_pushed = request.tables.iter().map(|part| part.ids.len() as u64).sum();
        let report = match self.claims.claim(Verb::Push, request.token)? {
            None => PushReport { rows_pushed, rows_duplicate: rows_pushed, ..PushReport::default() },
            Some(claim) => {
                let push = self.check_push(run, request)?;
                let mut memo = self.memos.take(request.token);
                let report = push.apply(&self.shards, &mut memo);
                claim.applied();
                memo.into_iter().for_each(|memo| self.memos.recycle(memo));
                report
            }
        };
        self.counters.lock().pushes += report;
        Ok(report)
    }

    fn train_lookup(
        &self,
        run: &ActiveRun,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        if !run.trains {
            return Err(TablesError::NoOptimizer);
        }
        let step = check_step(request.step)?;
        let Some(claim) = self.claims.claim(Verb::Lookup, request.token)? else {
            let first = self.memos.take(request.token);
            let report = self.read(run, request, Effect::Repeat(step), first.as_ref(), rows);
            first.into_iter().for_each(|memo| self.memos.keep(request.token, memo));
            return report;
        };
        let mut memo = self.memos.blank();
        let lookup = self.prepared(run, request, Effect::Admit(step), None);
        let report = lookup.run(&self.shards, rows, &mut memo)?;
        self.memos.keep(request.token, memo);
        claim.applied();
        self.counters.lock().lookups += report;
        Ok(report)
    }

    /// A look-up that changes nothing.
    fn read(
        &self,
        run: &ActiveRun,
        request: &LookupRequest<'_>,
        effect: Effect,
        first: Option<&Memo>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        let mut memo = self.memos.blank();
        let report = self.prepared(run, request, effect, first).run(&self.shards, rows, &mut memo);
        self.memos.recycle(memo);
        report
    }

    fn prepared<'a>(
        &'a self,
        run: &'a ActiveRun,
        request: &LookupRequest<'a>,
        effect: Effect,
        first: Option<&'a Memo>,
    ) -> Lookup<'a> {
        Lookup { schema: &self.schema, run, level: self.level, effect, tables: request.tables, first }
    }
}

/// Check every number of `run`, and that it comes after the `active` one.
fn check_run(active: Option<&ActiveRun>, run: &Run, schema: &Schema) -> Result<ActiveRun, TablesError> {
    let current = active.map_or(0, |active| active.generation);
    if run.generation <= current {
        return bad(format!("generation {} is not above the current generation {current}", run.generation));
    }
    ActiveRun::new(run, schema)
}

/// Rows per shard.
fn budget(capacity: u64) -> usize {
    usize::try_from(capacity.div_ceil(VIRTUAL_SHARDS as u64)).unwrap_or(usize::MAX)
}

impl Tables for Store {
    fn begin(&self, run: &Run) -> Result<(), TablesError> {
        // Without a lock a snapshot is being written, which ends its cut itself.
        let mut cut = if run.fresh { Some(self.cut.lock()) } else { self.cut.try_lock() };
        let mut active = self.run.write();
        let checked = check_run(active.as_ref(), run, &self.schema)?;
        if run.fresh {
            cut.iter_mut().for_each(|cut| cut.held = false);
            self.empty();
        }
        let layouts = self.fitting(&checked)?;
        if cut.is_some_and(|mut cut| std::mem::take(&mut cut.held)) {
            self.thaw(); // nobody can ask for it any more
        }
        self.shards.iter().for_each(|shard| shard.lock().adopt(&layouts));
        self.claims.begin(ActiveRun::job(run), run.generation);
        self.memos.clear();
        *self.counters.lock() = Counters::default();
        self.generation.store(run.generation, Ordering::Relaxed);
        *active = Some(checked);
        Ok(())
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        if request.mode == Mode::Train {
            self.wait_for_room(self.options.throttle);
        }
        self.checked_lookup(request, rows)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.wait_for_room(self.options.throttle);
        self.checked_push(request)
    }

    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        let generation = self.generation.load(Ordering::Relaxed);
        if cut.generation != generation {
            // Numbers begin anew.
            *cut = LastCut { generation, number: 0, held: false };
        }
        if number < cut.number || number == cut.number && !cut.held {
            return malformed(format!(
                "cut {number} comes late: the last one was {}, save again",
                cut.number
            ));
        }
        if number > cut.number {
            self.freeze();
            *cut = LastCut { generation, number, held: true };
        }
        Ok(())
    }

    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        if cut.held && cut.number == number {
            cut.held = false;
            self.thaw();
        }
        Ok(())
    }

    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        let mut cut = self.cut.lock();
        let held = std::mem::take(&mut cut.held);
        match number {
            None => self.freeze(),
            Some(number)
                if held
                    && (cut.generation, cut.number) == (self.generation.load(Ordering::Relaxed), number) => {}
            Some(number) => {
                self.thaw();
                let last = cut.number;
                return malformed(format!("cut {number} is not held: the last one was {last}; save again"));
            }
        }
        let threads = self.options.snapshot_threads;
        let (tables, shards) = (self.schema.tables.len(), self.options.shards.clone());
        // Where training waits for the files, they are not to wait for training.
        let trained = || (!self.copies.is_full()).then(|| self.counters.lock().rows());
        let write = |shard| write_frozen(dir, shard, &self.shards[shard], &self.schema);
        let saved = snapshot::save(dir, tables, shards, threads, trained, write);
        if saved.is_err() {
            self.thaw();
        }
        saved
    }

    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        let active = self.run.write();
        let run = active.as_ref().ok_or(TablesError::NotBegun)?;
        let mut loaded = self.load(run, dir, files, |shard| shard)?;
        let (layouts, budget) = (run.layouts(), budget(self.options.capacity));
        self.memos.clear();
        cut.held = false;
        for (number, shard) in self.shards.iter().enumerate() {
            *shard.lock() = loaded.remove(&number).unwrap_or_else(|| Shard::new(&layouts, budget));
        }
        Ok(())
    }

    fn stats(&self) -> Result<Stats, TablesError> {
        let (lookups, pushes) = {
            let counters = self.counters.lock();
            (counters.lookups, counters.pushes)
        };
        let tokens = self.claims.highest_pushes();
        let generation = self.generation.load(Ordering::Relaxed);
        let mut stats = Stats {
            rows: vec![0; self.schema.tables.len()],
            lookups,
            pushes,
            tokens,
            generation,
            ..Stats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.memory_bytes += size_of::<Mutex<Shard>>() as u64;
            for (rows, table) in stats.rows.iter_mut().zip(&shard.tables) {
                *rows += table.len() as u64;
                stats.payload_bytes += table.payload_bytes() as u64;
                stats.memory_bytes += table.memory_bytes() as u64;
            }
        }
        Ok(stats)
    }

    fn clear(&self) -> Result<(), TablesError> {
        let mut cut = self.cut.lock();
        let _nothing_in_flight = self.run.write();
        cut.held = false;
        self.empty();
        Ok(())
    }
}

impl Store {
    /// Everything that can fail, before anything changes.
    fn check_push<'a>(&self, run: &ActiveRun, request: &PushRequest<'a>) -> Result<Push<'a>, TablesError> {
        if !run.trains {
            return Err(TablesError::NoOptimizer);
        }
        let step = check_step(request.step)?;
        if !(0.0..=f32::MAX).contains(&request.lr_factor) {
            return malformed(format!("lr_factor {} is not from 0 to {}", request.lr_factor, f32::MAX));
        }
        check_tables(&self.schema, request.tables.iter().map(|part| (part.table, part.ids.len())))?;
        for part in request.tables {
            let Table { name, dim, .. } = &self.schema.tables[part.table];
            part.gradients.check(part.ids.len(), *dim).map_err(|error| of_table(name, error.into()))?;
        }
        self.check_shards(request.tables.iter().map(|part| part.ids))?;
        let (lr_factor, rank) = (request.lr_factor, request.token.rank);
        let changes = request.tables.iter().map(|part| Change::new(run, part.table, lr_factor, step, rank));
        let changes = changes.collect::<Option<_>>().ok_or(TablesError::NoOptimizer)?;
        Ok(Push { level: self.level, step, tables: request.tables, changes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_do_not_wait_for_a_snapshot() {
        let store = Store::new(Schema::default(), StoreOptions::default()).unwrap();
        let _as_a_snapshot_does = store.run.write();
        let (answer, answered) = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            threads.spawn(|| answer.send(store.stats().unwrap().generation).unwrap());
            let generation = answered.recv_timeout(std::time::Duration::from_secs(20));
            drop(_as_a_snapshot_does);
            assert_eq!(generation, Ok(0));
        });
    }
}

#[cfg(test)]
#[path = "level_tests.rs"]
mod level_tests;
