//! [`TablesError`]: all errors of a request.

use std::path::PathBuf;

use persia_kernels::ShapeError;
use serde::{Deserialize, Serialize};

use crate::token::Token;

/// The errors of a request. Each names the problem, its place and the wrong value.
///
/// A server sends the serialized error, so that its caller gets the same variant with the same fields.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum TablesError {
    /// Another run has begun. A run that begins with an older generation is refused by `BadRun`.
    #[error(
        "request {token} belongs to another run: generation {current} is current; start the trainer again"
    )]
    StaleGeneration {
        /// The token of the request.
        token: Token,
        /// The accepted generation.
        current: u64,
    },
    /// No run has begun.
    #[error("no run has begun: call begin first")]
    NotBegun,
    /// A run that cannot begin.
    #[error("cannot begin the run: {what}")]
    BadRun {
        /// Both values, if two differ.
        what: String,
    },
    /// Lengths or values that do not fit together.
    #[error("malformed request: {what}")]
    BadShape {
        /// The mismatch, and what was expected.
        what: String,
    },
    /// Beyond [`crate::limits::MAX_IDS_PER_REQUEST`].
    #[error("{ids} unique ids in one request, the limit is {max}: use smaller batches")]
    TooManyIds {
        /// The number of unique ids in the request.
        ids: usize,
        /// Allowed.
        max: usize,
    },
    /// A table that the schema does not have, or one that is named twice.
    #[error("table {table}: {what} (the schema has {tables} tables)")]
    BadTable {
        /// The index of the table.
        table: usize,
        /// The number of tables in the schema.
        tables: usize,
        /// The problem: unknown, or named twice.
        what: String,
    },
    /// A training request while no optimizer is configured.
    #[error("no embedding optimizer is configured: training needs TrainCtx(embedding_optimizer=...)")]
    NoOptimizer,
    /// There is no memory for rows.
    #[error(
        "table {table}: no memory for {bytes} more bytes of rows; lower the capacity in global_config.yml"
    )]
    OutOfMemory {
        /// The table's name.
        table: String,
        /// The additional bytes.
        bytes: u64,
    },
    /// A file that differs from its manifest.
    #[error("{path}: {what}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// A checkpoint of another configuration.
    #[error("{path} does not fit this run: {what}")]
    Foreign {
        /// The checkpoint.
        path: PathBuf,
        /// Both values.
        what: String,
    },
    /// An error of the operating system.
    #[error("{path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The error.
        #[serde(with = "io_error")]
        source: std::io::Error,
    },
    /// Ids that another server holds.
    #[error(
        "{peer} holds shards {held:?}, the request has ids of shard {shard}: the number of servers differs"
    )]
    WrongShard {
        /// The name of the peer.
        peer: String,
        /// Its shards.
        held: std::ops::Range<usize>,
        /// The shard that it does not hold.
        shard: usize,
    },
    /// A peer of another version, protocol or configuration.
    #[error("{peer} does not fit: {what}")]
    Incompatible {
        /// The name of the peer.
        peer: String,
        /// Both values.
        what: String,
    },
    /// A peer that refuses our credentials, or whose certificate we refuse.
    #[error("{peer} refused: {what}")]
    Refused {
        /// The name of the peer.
        peer: String,
        /// The reason, and the source of the credential.
        what: String,
    },
    /// The current run cannot continue: a server or all middlewares stayed unreachable, or a server restarted without
    /// its rows.
    #[error("{peer} is lost to this run: {what}; start the trainer again")]
    Lost {
        /// The name of the peer.
        peer: String,
        /// The event.
        what: String,
    },
    /// A wait that exceeded its time limit.
    #[error("{peer}: {what}")]
    Timeout {
        /// The name of the peer.
        peer: String,
        /// The awaited event, and the time limit.
        what: String,
    },
    /// A server that still reads its log, or the checkpoint that it serves.
    #[error("{peer} reads its rows from disk, {} %: wait for it", percent(*.done, *.total))]
    Recovering {
        /// The name of the peer.
        peer: String,
        /// The number of bytes that it has read.
        done: u64,
        /// The number of bytes that it has to read.
        total: u64,
    },
    /// A peer that does not answer.
    #[error("{peer} cannot be reached: {what}")]
    Unreachable {
        /// The name of the peer.
        peer: String,
        /// The failed operation, and its outcome.
        what: String,
    },
}

/// The percentage that is done, rounded down; below 100 until the end.
fn percent(done: u64, total: u64) -> u64 {
    (u128::from(done) * 100 / u128::from(total.max(1))).min(99) as u64
}

impl From<ShapeError> for TablesError {
    fn from(ShapeError(what): ShapeError) -> Self {
        Self::BadShape { what }
    }
}

/// An I/O error as the operating system's error code, or as its message if it has no code.
mod io_error {
    use std::io;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Described {
        code: Option<i32>,
        text: String,
    }

    pub(super) fn serialize<S: Serializer>(error: &io::Error, serializer: S) -> Result<S::Ok, S::Error> {
        Described { code: error.raw_os_error(), text: error.to_string() }.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<io::Error, D::Error> {
        let Described { code, text } = Described::deserialize(deserializer)?;
        Ok(code.map_or_else(|| io::Error::other(text), io::Error::from_raw_os_error))
    }
}
