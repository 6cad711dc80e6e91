//! Beginning and resuming a run.

use std::sync::atomic::Ordering;

use persia_types::tables::Run;
use persia_types::{Schema, TablesError};

use crate::run::{ActiveRun, bad};
use crate::shard::Layout;
use crate::store::Store;
use crate::store::progress::{Counters, Progress};

impl Store {
    /// Return what [`Tables::begin`](persia_types::Tables::begin) would return, but change nothing, so that either
    /// all of several stores begin a run or none does.
    ///
    /// # Errors
    /// Those of `begin`.
    pub fn check_begin(&self, run: &Run) -> Result<(), TablesError> {
        let active = self.run.read();
        let checked = check_run(active.as_ref(), run, &self.schema)?;
        if !run.fresh {
            self.resolve_layouts(&checked)?;
        }
        Ok(())
    }

    pub(super) fn begin_run(&self, run: &Run) -> Result<(), TablesError> {
        // None means that a snapshot is being written. Its writer releases the rows.
        let prepared = if run.fresh { self.lock_unless_cancelled() } else { self.prepared.try_lock() };
        let mut active = self.run.write();
        let checked = check_run(active.as_ref(), run, &self.schema)?;
        if run.fresh {
            self.drop_rows();
        }
        let layouts = self.resolve_layouts(&checked)?;
        if prepared.is_some_and(|mut prepared| prepared.release()) {
            self.end_snapshot(); // the snapshot is of the previous generation and will not be written
        }
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.set_layouts(&layouts);
            shard.reset_changes();
        }
        self.claims.begin(ActiveRun::job(run), run.generation, run.world_size);
        self.row_index_cache.clear();
        *self.counters.lock() = Counters::default();
        self.generation.store(run.generation, Ordering::Relaxed);
        *active = Some(checked);
        Ok(())
    }

    /// The pushes applied since the run began. The result is consistent with the rows if no push is in
    /// flight.
    pub fn progress(&self) -> Progress {
        Progress { pushes: self.claims.applied(), counted: self.counters.lock().pushes }
    }

    /// Restore the result of [`Self::progress`]. The rows must be from the same point in time.
    pub fn resume(&self, progress: Progress) {
        self.claims.resume(progress.pushes);
        self.counters.lock().pushes = progress.counted;
    }

    /// The layouts of the tables in `run`, or the reason why the current rows do not fit.
    fn resolve_layouts(&self, run: &ActiveRun) -> Result<Vec<Layout>, TablesError> {
        let mut layouts = run.layouts();
        for (number, table) in self.schema.tables.iter().enumerate() {
            let (rows, held) = self.rows_and_layout(number);
            // Without an optimizer nothing reads the optimizer state, so the rows may keep it.
            if rows > 0 && held != layouts[number] && run.trains {
                let (held, asked) = (held.state_len, layouts[number].state_len);
                return bad(format!(
                    "table {} has rows ({rows}) with optimizer state of size {held}, but the new optimizer needs \
                     size {asked}; clear the tables or keep the optimizer",
                    table.name
                ));
            }
            if rows > 0 {
                layouts[number] = held;
            }
        }
        Ok(layouts)
    }

    /// The number of rows of a table, and their layout.
    fn rows_and_layout(&self, table: usize) -> (usize, Layout) {
        let rows = self.shards.iter().map(|shard| shard.lock().tables[table].len()).sum();
        (rows, self.shards[0].lock().tables[table].layout())
    }
}

/// Check every setting of `run`, and that `run` is newer than the `active` run.
fn check_run(active: Option<&ActiveRun>, run: &Run, schema: &Schema) -> Result<ActiveRun, TablesError> {
    let current = active.map_or(0, |active| active.generation);
    if run.generation <= current {
        return bad(format!("generation {} is not above the current generation {current}", run.generation));
    }
    ActiveRun::new(run, schema)
}
