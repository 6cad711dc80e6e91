//! [`Tables`]: the interface between the engine and the rows.
//!
//! The in-process store and the network client implement [`Tables`]. Embedded and distributed mode differ only in the
//! implementation. The crate `persia-contract` tests both implementations.

use std::path::Path;

use persia_kernels::{Bags, Csr, Gradients};
use serde::{Deserialize, Serialize};

pub use crate::error::TablesError;
use crate::id::{Id, ShardedIds};
use crate::schema::{Admission, Initializer, Optimizer, Schema, Table};
pub use crate::stats::{ServedCheckpoint, Stats, TableStats};
use crate::token::Token;

/// The mode of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Training. A missing row that a push of the same step would insert reads as the row to be inserted. Other
    /// missing rows read as zeros.
    Train,
    /// Evaluation. Missing rows read as zeros.
    Eval,
    /// Serving. Missing rows read as zeros.
    Infer,
}

/// The settings that rank 0 sends to every implementation of [`Tables`] before the first look-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The job's name.
    pub job: String,
    /// The generation, which is 1 + the highest known generation.
    #[serde(rename = "epoch", alias = "generation")]
    pub generation: u64,
    /// The slots and tables. They must equal those with which the implementation was configured.
    pub schema: Schema,
    /// The seed of initializers and admission.
    pub seed: u64,
    /// The optimizer. None means that the run only evaluates: training look-ups and pushes are then refused, even for
    /// tables that set an optimizer.
    pub optimizer: Option<Optimizer>,
    /// The initializer of new rows.
    pub initializer: Initializer,
    /// The probability that a push gives a missing id a row, in `0..=1`. The draw is a hash of (seed, id, step).
    pub admit_probability: f32,
    /// The number of pushes of an id that are required before it gets a row, at least 1. See [`Admission`].
    #[serde(default = "one")]
    pub admit_min_count: u32,
    /// The magnitude to which weights are clamped after an update; 0 means no bound.
    pub weight_bound: f32,
    /// Whether existing rows are dropped, so that the run starts empty.
    #[serde(default)]
    pub fresh: bool,
    /// Unless `fresh` is set, the generation whose rows the run continues to train; 0 if there are none. A server with
    /// rows of another generation refuses the run.
    #[serde(default)]
    pub continues: u64,
    /// The number of ranks, at least 1.
    #[serde(default = "one")]
    pub world_size: u32,
    /// Whether runs with equal inputs give bit-identical results. If set, look-ups and pushes of a step are
    /// executed in the order of ranks, and every rank sends both at every step, even if they are empty.
    #[serde(default)]
    pub reproducible: bool,
}

fn one() -> u32 {
    1
}

impl Run {
    /// The admission rule for tables that do not set one.
    pub fn admission(&self) -> Admission {
        Admission { probability: self.admit_probability, min_count: self.admit_min_count }
    }

    /// The optimizer of `table`; None if nothing is trained.
    pub fn optimizer_of(&self, table: &Table) -> Option<Optimizer> {
        self.optimizer.map(|optimizer| table.settings.optimizer.unwrap_or(optimizer))
    }
}

/// Unique ids of one table.
#[derive(Debug, Clone, Copy)]
pub struct TableIds<'a> {
    /// The index into the schema's tables. A request names a table at most once.
    pub table: usize,
    /// The ids.
    pub ids: &'a ShardedIds,
    /// If set, one vector per sample is requested instead of one row per id.
    pub per_sample: Option<PerSample<'a>>,
}

/// The vector of each sample.
#[derive(Debug, Clone, Copy)]
pub enum PerSample<'a> {
    /// The row of the sample's only id. Every sample occurs once in the lists.
    Gathered(Csr<'a>),
    /// The pooled rows of the sample's ids. An implementation that does not [pool](Tables::pools) refuses
    /// this.
    Pooled(Bags<'a>),
}

impl<'a> TableIds<'a> {
    /// For each id, the samples that receive its row; None if samples are not gathered.
    pub fn gathered(&self) -> Option<Csr<'a>> {
        match self.per_sample {
            Some(PerSample::Gathered(csr)) => Some(csr),
            _ => None,
        }
    }

    /// The number of vectors in the response: of ids, or of samples if [`Self::per_sample`] is set.
    pub fn vectors(&self) -> usize {
        match &self.per_sample {
            None => self.ids.len(),
            Some(PerSample::Gathered(csr)) => csr.indices.len(),
            Some(PerSample::Pooled(bags)) => bags.samples(),
        }
    }
}

/// A look-up of unique ids. It changes no row.
#[derive(Debug, Clone, Copy)]
pub struct LookupRequest<'a> {
    /// The token of this look-up and its push. It is ignored unless the mode is [`Mode::Train`].
    pub token: Token,
    /// The global step, from 1.
    pub step: u64,
    /// The mode of the look-up.
    pub mode: Mode,
    /// The tables, with their ids.
    pub tables: &'a [TableIds<'a>],
}

/// Implements methods that list and add the counters of a report. A field that is not a counter follows the
/// semicolon.
macro_rules! counters {
    ($report:ident { $($counter:ident),+ $(; $other:ident)? }) => {
        impl $report {
            /// The name and the value of every counter.
            pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($counter), self.$counter)),+].into_iter()
            }

            fn add_counters(&mut self, more: Self) {
                let Self { $($counter,)+ $($other: _)? } = more;
                $(self.$counter += $counter;)+
            }
        }
    };
}

/// The result of a look-up. Unique ids are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupReport {
    /// The number of ids that had a row.
    pub hits: u64,
    /// The number of ids without a row that read as the row that their push would insert.
    #[serde(default)]
    pub initial: u64,
    /// The number of ids without a row that read as zeros.
    pub missing: u64,
}

counters!(LookupReport { hits, initial, missing });

impl std::ops::AddAssign for LookupReport {
    fn add_assign(&mut self, more: Self) {
        self.add_counters(more);
    }
}

/// The gradients of unique ids of one table.
#[derive(Debug, Clone, Copy)]
pub struct TableGradients<'a> {
    /// The index into the schema's tables. A request names a table at most once.
    pub table: usize,
    /// The ids: those of the look-up, or some of them.
    pub ids: &'a ShardedIds,
    /// The gradients of the ids, in the same order: one for each id, or those of samples, which are then summed.
    pub gradients: Gradients<'a>,
}

/// Gradients that are to be applied exactly once.
#[derive(Debug, Clone, Copy)]
pub struct PushRequest<'a> {
    /// The token. A push is applied once, even if it is retried.
    pub token: Token,
    /// The global step, from 1. It is t in the formula of Adam.
    pub step: u64,
    /// The factor by which the learning rate of every optimizer is multiplied.
    pub lr_factor: f32,
    /// The tables, with their gradients.
    pub tables: &'a [TableGradients<'a>],
}

/// The outcome of a push. `rows_pushed == rows_applied + rows_missing + rows_nonfinite + rows_duplicate`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushReport {
    /// The number of rows in the request.
    pub rows_pushed: u64,
    /// The number of rows that were updated.
    pub rows_applied: u64,
    /// The number of rows that were skipped because their id has no row and was not admitted.
    pub rows_missing: u64,
    /// The number of rows that were skipped because an element of their gradient or of their weight decay is
    /// NaN, infinite, or at least 2^50 in magnitude
    /// ([`MAX_GRADIENT_EXPONENT`](crate::limits::MAX_GRADIENT_EXPONENT)).
    pub rows_nonfinite: u64,
    /// The number of rows that were skipped because the push had been applied before.
    pub rows_duplicate: u64,
    /// The number of rows that were inserted. They also count as applied, unless their gradient was skipped.
    #[serde(default)]
    pub rows_inserted: u64,
    /// The number of rows that were evicted.
    #[serde(default)]
    pub rows_evicted: u64,
    /// The number of expired rows that were removed, because they were pushed again, swept, or evicted.
    #[serde(default)]
    pub rows_expired: u64,
    /// The first row counted in `rows_nonfinite`: (table, id).
    pub first_nonfinite: Option<(usize, Id)>,
}

impl PushReport {
    /// Count a row that is skipped because of its gradient.
    pub fn add_nonfinite(&mut self, table: usize, id: Id) {
        self.rows_nonfinite += 1;
        self.first_nonfinite.get_or_insert((table, id));
    }

    /// Whether the counts add up to `rows`.
    pub fn accounts_for(&self, rows: u64) -> bool {
        let Self { rows_pushed, rows_applied, rows_missing, rows_nonfinite, rows_duplicate, .. } = *self;
        rows_pushed == rows && rows_applied + rows_missing + rows_nonfinite + rows_duplicate == rows
    }
}

counters!(PushReport {
    rows_pushed,
    rows_applied,
    rows_missing,
    rows_nonfinite,
    rows_duplicate,
    rows_inserted,
    rows_evicted,
    rows_expired;
    first_nonfinite
});

impl std::ops::AddAssign for PushReport {
    /// Add the counters, and keep the earlier `first_nonfinite`.
    fn add_assign(&mut self, more: Self) {
        self.add_counters(more);
        self.first_nonfinite = self.first_nonfinite.or(more.first_nonfinite);
    }
}

/// One file of a checkpoint, as its writer describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The name in the checkpoint.
    pub name: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The BLAKE3 hash of the content, in hexadecimal.
    pub blake3: String,
}

/// The files of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The files.
    pub files: Vec<FileEntry>,
    /// The number of rows of each table in the files, in schema order.
    pub rows: Vec<u64>,
}

/// The rows: the in-process store, or the network client.
///
/// Every method may be called from any thread, except that a thread that runs a tokio runtime must not call
/// the network client, which blocks. A failed call changes nothing, unless its documentation says otherwise.
/// The network client also returns errors of the connection, from every method: `Unreachable`, `Unable`,
/// `Recovering`, `Timeout`, `Lost`, `Refused`, `Incompatible` and `WrongShard`. After such an error, the call
/// may have taken effect. Once another run has begun, the client returns `StaleGeneration` from every method
/// that needs a run.
pub trait Tables: Send + Sync {
    /// Begin a run: drop older tokens, accept only the run's generation, and use its optimizer and
    /// initializer. Rows are kept unless [`Run::fresh`] is set.
    ///
    /// # Errors
    /// `BadRun` if the schema differs, the generation is not newer than the current one, a parameter is out of range,
    /// or existing rows have optimizer state that does not fit the new optimizer. `Lost` if a server does not have the
    /// rows of the generation that the run continues.
    fn begin(&self, run: &Run) -> Result<(), TablesError>;

    /// Whether the implementation should pool the samples of `bags`, which have `ids` unique ids
    /// ([`PerSample::Pooled`]). It should if rows are remote and the vectors of samples take fewer bytes than the
    /// rows. The result depends only on sizes.
    fn pools(&self, dim: usize, ids: usize, bags: &Bags<'_>) -> bool {
        let _ = (dim, ids, bags);
        false
    }

    /// Read rows. `rows[i]` receives the weights of `tables[i]`, with the shape `[ids, dim]`. If
    /// [`per_sample`](TableIds::per_sample) is set, it receives the vector of each sample, with the shape
    /// `[samples, dim]`.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`, `BadTable`, `BadShape` (a buffer of the wrong length), `NoOptimizer`,
    /// `OutOfMemory`.
    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError>;

    /// Apply gradients exactly once. The whole request is checked before the first row changes. A push whose
    /// token was applied before changes nothing, and its rows count as `rows_duplicate`.
    ///
    /// # Errors
    /// `NotBegun`, `StaleGeneration`, `BadTable`, `BadShape`, `NoOptimizer`. After these, the token stays
    /// unknown, so the push can be retried. `OutOfMemory`, after which some rows may have changed, so the
    /// push must not be retried.
    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError>;

    /// Hold the current rows for [`write_snapshot`](Self::write_snapshot). The numbers of the snapshots of a
    /// generation ascend. A repeated number changes nothing. Training continues. Each row is copied before its first
    /// change, so the memory for rows may double. The next snapshot replaces this one. An operation that drops or
    /// replaces all rows releases the held rows.
    ///
    /// # Errors
    /// `BadShape` for a number below that of the last prepared snapshot, or equal to it if its rows are no longer
    /// held; `Io` from a server that is still writing another snapshot. The in-process store waits for that snapshot
    /// instead.
    fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError>;

    /// Release the rows that are held for this snapshot.
    ///
    /// # Errors
    /// `Unreachable`.
    fn abort_snapshot(&self, number: u64) -> Result<(), TablesError>;

    /// Write the rows of all shards into `dir`, durably. They are the rows of the prepared snapshot `number`, or the
    /// current rows if it is None. Held rows are released, even on failure. The files become a checkpoint when a
    /// manifest lists them.
    ///
    /// # Errors
    /// `BadShape` if the rows of the snapshot are not held; `Io`.
    fn write_snapshot(&self, dir: &Path, number: Option<u64>) -> Result<Snapshot, TablesError>;

    /// Report that the written snapshot is now part of a checkpoint, as `files` in `dir`. A server with a log
    /// truncates the log to the snapshot, unless a newer snapshot has been prepared since.
    ///
    /// # Errors
    /// `Unreachable`; `Io`, after which the log is not truncated.
    fn commit_snapshot(&self, number: u64, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError> {
        let _ = (number, dir, files);
        Ok(())
    }

    /// Replace all rows by those in `files` in `dir`. All files are read and checked before any row changes.
    ///
    /// # Errors
    /// `NotBegun`, `Corrupt`, `Foreign`, `Io`, `OutOfMemory`.
    fn restore(&self, dir: &Path, files: &[FileEntry]) -> Result<(), TablesError>;

    /// Return the counters and gauges.
    ///
    /// # Errors
    /// `Unreachable`.
    fn stats(&self) -> Result<Stats, TablesError>;

    /// Drop all rows. Tokens are kept.
    ///
    /// # Errors
    /// `Unreachable`.
    fn clear(&self) -> Result<(), TablesError>;
}
