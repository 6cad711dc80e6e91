//! Recovery of a [`Node`] from its log: loads the base, and then applies every later request with the code that
//! applied it originally.

use std::path::Path;
use std::time::Instant;

use persia_kernels::Gradients;
use persia_types::tables::{PushRequest, Run, TableGradients};
use persia_types::{ShardedIds, Tables, TablesError, Token, is_url};

use super::request_log::{Rows, WalBase, WalPosition};
use super::sequencer::Phase;
use super::{Node, RecoveryProgress};
use crate::wal::{ReplayError, ReplayOp};

/// The reason why a server does not recover from its log.
pub(super) enum Unresumed {
    /// The log cannot be used, so the job resumes from its last checkpoint.
    Unusable(String),
    /// The object store with the rows of the base cannot be read at the moment. The log is kept.
    Unread(String),
}

impl From<String> for Unresumed {
    fn from(why: String) -> Self {
        Self::Unusable(why)
    }
}

impl Node {
    /// Recover from the log, if there is one. `progress` shows how much has been read.
    ///
    /// # Errors
    /// The reason why the log is not replayed. The rows are then undefined.
    pub(super) fn recover(&self, progress: &RecoveryProgress) -> Result<(), Unresumed> {
        let Some(log) = &self.log else { return Ok(()) };
        let started = Instant::now();
        let Some(base) = log.base()? else { return Ok(()) };
        self.check_job(&base.run)?;
        let files = base.rows.iter().flat_map(|rows| self.store.held_files(&rows.files));
        progress.expect(files.map(|file| file.bytes).sum::<u64>() + log.bytes_after(&base));
        self.resume(&base, progress).map_err(|error| match (&error, &base.rows) {
            (TablesError::Io { .. }, Some(rows)) if is_url(Path::new(&rows.directory)) => {
                Unresumed::Unread(error.to_string())
            }
            _ => Unresumed::Unusable(error.to_string()),
        })?;
        let replayed = log.replay(&base, |op, bytes| {
            if let ReplayOp::Begin(run) = &op {
                self.check_job(run).map_err(ReplayError::Refused)?;
            }
            let made = self.replay(op).map_err(replay_error)?;
            progress.advance(bytes);
            Ok(made)
        })?;
        let generation = self.current().map_err(|error| error.to_string())?.generation;
        let highest = self.generation.get();
        if generation < highest {
            let why = format!(
                "the log belongs to generation {generation}, but generation {highest} has begun since"
            );
            return Err(why.into());
        }
        if generation > highest {
            // The process was killed after it had logged the begin of this generation.
            self.generation.set(generation).map_err(|error| error.to_string())?;
        }
        if replayed.torn > 0 && replayed.refused.is_none() {
            let bytes = replayed.torn;
            tracing::warn!(
                bytes,
                "dropped the incomplete end of the log: its requests were not acknowledged or not yet durable"
            );
        }
        if let Some(why) = &replayed.refused {
            tracing::warn!(
                "dropped the last record of the log, because its request was refused and not acknowledged: {why}"
            );
        }
        let (records, seconds) = (replayed.records, started.elapsed().as_secs_f64());
        tracing::info!(generation, records, seconds, "run resumed from the log");
        Ok(())
    }

    fn resume(&self, base: &WalBase, progress: &RecoveryProgress) -> Result<(), TablesError> {
        self.start(&base.run)?;
        if let Some(Rows { directory, files }) = &base.rows {
            let dir = self.options.checkpoints.resolve(directory)?;
            self.store.restore_rows(&dir, files, &|bytes| progress.advance(bytes))?;
        }
        self.store.resume(base.position.progress.clone());
        self.sequencer.resume(base.position.reached);
        Ok(())
    }

    /// Refuse a run of another job, because the directory of the log may belong to another server.
    fn check_job(&self, run: &Run) -> Result<(), String> {
        let (theirs, own) = (&run.job, &self.options.job);
        if theirs == own {
            return Ok(());
        }
        Err(format!("the log belongs to job {theirs:?}, but this server serves job {own:?}"))
    }

    /// Apply a record. If the record is a cut, returns its number and the progress of the run.
    fn replay(&self, op: ReplayOp) -> Result<Option<(u64, WalPosition)>, TablesError> {
        match op {
            ReplayOp::Begin(run) => self.start(&run)?,
            ReplayOp::PrepareSnapshot(number) => {
                self.store.prepare_snapshot(number)?;
                return Ok(Some((number, self.position())));
            }
            ReplayOp::AbortSnapshot(number) => self.store.abort_snapshot(number)?,
            ReplayOp::Lookup(token) => self.sequencer.advance(token, Phase::Lookup),
            ReplayOp::Push { token, step, lr_factor, tables } => {
                self.replay_push(token, step, lr_factor, &tables)?;
            }
        }
        Ok(None)
    }

    fn replay_push(
        &self,
        token: Token,
        step: u64,
        lr_factor: f32,
        tables: &[(usize, ShardedIds, Vec<f32>)],
    ) -> Result<(), TablesError> {
        let tables: Vec<TableGradients<'_>> = tables
            .iter()
            .map(|(table, ids, rows)| TableGradients { table: *table, ids, gradients: Gradients::Rows(rows) })
            .collect();
        self.store.push(&PushRequest { token, step, lr_factor, tables: &tables })?;
        self.sequencer.advance(token, Phase::Push);
        Ok(())
    }
}

/// Convert the error of a record. A record with an invalid request is refused, because the request was also refused
/// originally.
fn replay_error(error: TablesError) -> ReplayError {
    use TablesError as E;
    match error {
        E::StaleGeneration { .. }
        | E::NotBegun
        | E::NoOptimizer
        | E::BadRun { .. }
        | E::BadShape { .. }
        | E::BadTable { .. }
        | E::TooManyIds { .. }
        | E::WrongShard { .. } => ReplayError::Refused(error.to_string()),
        // With any other error, such as a lack of memory, the request may have been applied originally.
        other => ReplayError::Failed(other.to_string()),
    }
}
