//! Saving and restoring all rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

use persia_types::tables::{FileEntry, Snapshot};
use persia_types::{TablesError, VIRTUAL_SHARDS};

use crate::checkpoint::shard_of_entry;
use crate::run::ActiveRun;
use crate::shard::Shard;
use crate::snapshot;
use crate::store::{Store, shard_budget};

impl Store {
    /// Hold the current rows for the snapshot with this number.
    pub(super) fn prepare(&self, number: u64) -> Result<(), TablesError> {
        let mut prepared = self.prepared.lock();
        if prepared.prepare(self.generation.load(Ordering::Relaxed), number)? {
            self.begin_snapshot();
        }
        Ok(())
    }

    /// Release the rows of this snapshot, if they are held.
    pub(super) fn abort(&self, number: u64) {
        let mut prepared = self.prepared.lock();
        if prepared.release_number(number) {
            self.end_snapshot();
        }
    }

    /// Write the rows of a prepared snapshot, or the current ones, to files in `dir`. Afterwards no rows are held.
    pub(super) fn write(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError> {
        let mut prepared = self.prepared.lock();
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
        // Do not throttle writing while training waits for it.
        let trained = || (!self.copy_budget.is_full()).then(|| self.counters.lock().rows());
        let write = |shard| snapshot::write_shard_snapshot(dir, shard, &self.shards[shard], &self.schema);
        let saved = snapshot::save(dir, tables, shards, threads, trained, write);
        if saved.is_err() {
            self.end_snapshot();
        }
        saved
    }

    /// The result of [`Tables::restore`](persia_types::Tables::restore) without its effect, so that several stores all
    /// restore, or none.
    ///
    /// # Errors
    /// As `restore`.
    pub fn check_restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let active = self.run.read();
        self.load(active.as_ref().ok_or(TablesError::NotBegun)?, dir, files, drop).map(drop)
    }

    pub(super) fn restore_rows(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let mut prepared = self.prepared.lock();
        let active = self.run.write();
        let run = active.as_ref().ok_or(TablesError::NotBegun)?;
        let mut loaded = self.load(run, dir, files, |shard| shard)?;
        let (layouts, budget) = (run.layouts(), shard_budget(self.options.capacity));
        self.slot_cache.clear();
        prepared.release();
        for (number, shard) in self.shards.iter().enumerate() {
            *shard.lock() = loaded.remove(&number).unwrap_or_else(|| Shard::new(&layouts, budget));
        }
        Ok(())
    }

    /// Read the files of the shards held, and apply `keep` to each shard.
    fn load<T: Send>(
        &self,
        run: &ActiveRun,
        dir: &Path,
        files: &[FileEntry],
        keep: impl Fn(Shard) -> T + Sync,
    ) -> Result<BTreeMap<usize, T>, TablesError> {
        let (layouts, keep_state) = (run.layouts(), run.trains);
        let budget = shard_budget(self.options.capacity);
        let files: Vec<FileEntry> = files.iter().filter(|file| self.may_hold(file)).cloned().collect();
        snapshot::load(dir, &files, self.options.snapshot_threads, |rows, path| {
            snapshot::import(rows, path, &self.schema, &layouts, keep_state, budget).map(&keep)
        })
    }

    /// Whether `file` may be of a shard that is held. A file of no shard passes, because its reader refuses it.
    fn may_hold(&self, file: &FileEntry) -> bool {
        shard_of_entry(&file.name).is_none_or(|shard| self.options.shards.contains(&shard))
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
                drop(snapshot); // without the lock
            }
        }
    }
}
