//! Saving and restoring all rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::MutexGuard;
use persia_types::tables::{FileEntry, Snapshot};
use persia_types::{TablesError, VIRTUAL_SHARDS};

use crate::checkpoint::shard_of_entry;
use crate::run::ActiveRun;
use crate::shard::Shard;
use crate::snapshot;
use crate::store::prepared::PreparedSnapshot;
use crate::store::{Store, TransferStart, shard_budget};

/// The interval at which an operation that waits for a writer checks whether the writer's transfer was
/// cancelled.
const POLL: Duration = Duration::from_millis(20);

impl Store {
    /// Hold the current rows for the snapshot with this number.
    pub(super) fn prepare(&self, number: u64) -> Result<(), TablesError> {
        let mut prepared = self.prepared.lock();
        if prepared.prepare(self.generation.load(Ordering::Relaxed), number)? {
            self.begin_snapshot();
        }
        Ok(())
    }

    /// Release the rows of the snapshot with this number, if they are held. If the snapshot is being written,
    /// all transfers are cancelled, and the writer soon releases the rows.
    pub(super) fn abort(&self, number: u64) {
        loop {
            if self.writing.lock().is_some_and(|(of, _)| of == Some(number)) {
                self.cancel_transfers();
                return;
            }
            if let Some(mut prepared) = self.prepared.try_lock_for(POLL) {
                if prepared.release_number(number) {
                    self.end_snapshot();
                }
                return;
            }
        }
    }

    /// Lock the prepared snapshot. Returns None while a snapshot whose transfer was cancelled is being
    /// written.
    pub(super) fn lock_unless_cancelled(&self) -> Option<MutexGuard<'_, PreparedSnapshot>> {
        loop {
            if let prepared @ Some(_) = self.prepared.try_lock_for(POLL) {
                return prepared;
            }
            if self.writing.lock().is_some_and(|(_, start)| self.is_cancelled(start)) {
                return None;
            }
        }
    }

    /// Write the rows of a prepared snapshot, or the current rows, to files in `dir`. Afterwards no rows are held.
    /// After an error, including a cancellation since `start`, `dir` contains no file of this call.
    ///
    /// # Errors
    /// Those of [`Tables::write_snapshot`](persia_types::Tables::write_snapshot).
    pub fn write_started(
        &self,
        start: TransferStart,
        dir: &Path,
        number: Option<u64>,
    ) -> Result<Snapshot, TablesError> {
        let mut prepared = self.prepared.lock();
        *self.writing.lock() = Some((number, start));
        let written = self.write_locked(&mut prepared, start, dir, number);
        *self.writing.lock() = None;
        written
    }

    fn write_locked(
        &self,
        prepared: &mut PreparedSnapshot,
        start: TransferStart,
        dir: &Path,
        number: Option<u64>,
    ) -> Result<Snapshot, TablesError> {
        match number {
            None => {
                prepared.release();
                self.begin_snapshot();
            }
            Some(number) => {
                let generation = self.generation.load(Ordering::Relaxed);
                prepared.release_for_write(generation, number).inspect_err(|_| self.end_snapshot())?;
            }
        }
        let threads = self.options.snapshot_threads;
        let (tables, shards) = (self.schema.tables.len(), self.options.shards.clone());
        // Writing is not throttled while pushes wait for the copy budget, or after a cancellation.
        let is_unthrottled = || self.copy_budget.is_full() || self.is_cancelled(start);
        let trained = || (!is_unthrottled()).then(|| self.counters.lock().rows());
        let check = || self.check_transfer(start);
        let write = |shard: usize| {
            check().map_err(|source| Self::cancelled_at(dir, source))?;
            snapshot::write_shard_snapshot(dir, shard, &self.shards[shard], &self.schema, &check)
        };
        // Check once more: if a run began in the meantime and dropped the rows, the remaining shards appeared
        // to be empty.
        let accept = || check().map_err(|source| Self::cancelled_at(dir, source));
        let saved = snapshot::save(dir, tables, shards, threads, trained, write, accept);
        if saved.is_err() {
            self.end_snapshot();
        }
        // If rows were dropped in the meantime, the error may be a different one. Report the cancellation
        // instead.
        let cancelled = |error| check().map_or_else(|source| Self::cancelled_at(dir, source), |()| error);
        saved.map_err(cancelled)
    }

    /// Return what [`Tables::restore`](persia_types::Tables::restore) would return, but change nothing, so that either
    /// all of several stores restore or none does.
    ///
    /// # Errors
    /// Those of `restore`.
    pub fn check_restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let active = self.run.read();
        self.load(active.as_ref().ok_or(TablesError::NotBegun)?, dir, files, &|_| (), drop).map(drop)
    }

    /// Like [`Tables::restore`](persia_types::Tables::restore); `read` is called with the size of each file
    /// that was read.
    ///
    /// # Errors
    /// Those of `restore`; `Io` if the transfer was cancelled.
    pub fn restore_rows(
        &self,
        dir: &Path,
        files: &[FileEntry],
        read: &(dyn Fn(u64) + Sync),
    ) -> Result<(), TablesError> {
        let mut prepared = self.prepared.lock();
        let active = self.run.write();
        let run = active.as_ref().ok_or(TablesError::NotBegun)?;
        let mut loaded = self.load(run, dir, files, read, |shard| shard)?;
        let (layouts, budget) = (run.layouts(), shard_budget(self.options.capacity));
        self.row_index_cache.clear();
        prepared.release();
        for (number, shard) in self.shards.iter().enumerate() {
            *shard.lock() = loaded.remove(&number).unwrap_or_else(|| Shard::new(&layouts, budget));
        }
        Ok(())
    }

    /// Read the files of the held shards, and apply `keep` to each shard.
    fn load<T: Send>(
        &self,
        run: &ActiveRun,
        dir: &Path,
        files: &[FileEntry],
        read: &(dyn Fn(u64) + Sync),
        keep: impl Fn(Shard) -> T + Sync,
    ) -> Result<BTreeMap<usize, T>, TablesError> {
        let start = self.start_transfer();
        let (layouts, initial_state, keep_state) = (run.layouts(), run.initial_state(), run.trains);
        let budget = shard_budget(self.options.capacity);
        let files = self.held_files(files);
        snapshot::load(dir, &files, self.options.snapshot_threads, |rows, file, path| {
            self.check_transfer(start).map_err(|source| Self::cancelled_at(path, source))?;
            let schema = &self.schema;
            let shard = snapshot::import(rows, path, schema, &layouts, &initial_state, keep_state, budget)?;
            read(file.bytes);
            Ok(keep(shard))
        })
    }

    /// The files of the shards that this store holds. A file that belongs to no shard is included, so that
    /// reading it reports the error.
    pub fn held_files(&self, files: &[FileEntry]) -> Vec<FileEntry> {
        let may_hold = |file: &&FileEntry| {
            shard_of_entry(&file.name).is_none_or(|shard| self.options.shards.contains(&shard))
        };
        files.iter().filter(may_hold).cloned().collect()
    }

    /// Hold the current rows in every table.
    fn begin_snapshot(&self) {
        let _nothing_in_flight = self.run.write();
        let begin = |shard: usize| {
            let mut shard = self.shards[shard].lock();
            shard.tables.iter_mut().for_each(|table| table.begin_snapshot(&self.copy_budget));
        };
        snapshot::for_each_job(VIRTUAL_SHARDS, self.options.snapshot_threads, begin);
    }

    /// Release the held rows.
    pub(super) fn end_snapshot(&self) {
        for shard in &self.shards {
            for table in 0..self.schema.tables.len() {
                let snapshot = shard.lock().tables[table].end_snapshot();
                drop(snapshot); // after the lock is released, because this may take long
            }
        }
    }
}
