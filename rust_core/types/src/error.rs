//! [`TablesError`]: the errors of requests.

use std::path::PathBuf;

use persia_kernels::ShapeError;
use serde::{Deserialize, Serialize};

use crate::token::Token;

/// The errors of a request. Each error states the problem and, if they exist, its location and the invalid value.
///
/// A server sends the error in serialized form, so its caller gets the same variant with the same fields.
/// Long texts are truncated.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum TablesError {
    /// Another run has begun. A run that begins with an older generation fails with `BadRun`.
    #[error(
        "request {token} (job/generation/rank/step) belongs to another run: the current generation is {current}"
    )]
    StaleGeneration {
        /// The token of the request.
        token: Token,
        /// The accepted generation.
        current: u64,
    },
    /// No run has begun.
    #[error("no run has begun; a TrainCtx or an EmbeddingCollection begins a run")]
    NotBegun,
    /// The run cannot begin.
    #[error("cannot begin the run: {what}")]
    BadRun {
        /// The problem. If two values differ, it includes both values.
        what: String,
    },
    /// Lengths or values are inconsistent, unknown or out of range.
    #[error("malformed request: {what}")]
    BadShape {
        /// The mismatch, and what was expected.
        what: String,
    },
    /// The request has more ids than [`crate::limits::MAX_IDS_PER_REQUEST`].
    #[error("the request has {ids} unique ids, but the limit is {max}; use smaller batches")]
    TooManyIds {
        /// The number of unique ids in the request.
        ids: usize,
        /// The maximum.
        max: usize,
    },
    /// The schema does not have the table, or the request names it twice.
    #[error("table index {table}: {what} (the number of tables is {tables})")]
    BadTable {
        /// The index of the table.
        table: usize,
        /// The number of tables in the schema.
        tables: usize,
        /// The problem: unknown, or named twice.
        what: String,
    },
    /// A training request was sent, but no optimizer is configured.
    #[error(
        "no embedding optimizer is configured: training needs TrainCtx(embedding_optimizer=...) or \
         EmbeddingCollection(optimizer=...)"
    )]
    NoOptimizer,
    /// There is no memory for rows.
    #[error(
        "table {table}: no memory for {bytes} more bytes of rows; use more servers or more memory or, in a job that \
         trains, lower the capacity in global_config.yml"
    )]
    OutOfMemory {
        /// The table's name.
        table: String,
        /// The number of additional bytes.
        bytes: u64,
    },
    /// A file differs from its manifest, or is malformed.
    #[error("{path}: {what}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// A checkpoint is from a different configuration.
    #[error("{path} does not fit this run: {what}")]
    Foreign {
        /// The checkpoint.
        path: PathBuf,
        /// The values that differ.
        what: String,
    },
    /// A file or an object cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The path or URL.
        path: PathBuf,
        /// The error.
        #[serde(with = "io_error")]
        source: std::io::Error,
    },
    /// The request has ids that another server holds.
    #[error(
        "{peer} holds the shards {} to {}, but the request has ids of shard {shard}: start all processes with the same \
         number of servers", .held.start, .held.end.saturating_sub(1)
    )]
    WrongShard {
        /// The name of the peer.
        peer: String,
        /// The shards that the peer holds.
        held: std::ops::Range<usize>,
        /// The requested shard, which the peer does not hold.
        shard: usize,
    },
    /// A peer has a different version, protocol or configuration, or sent an invalid reply.
    #[error("{peer} is incompatible: {what}")]
    Incompatible {
        /// The name of the peer.
        peer: String,
        /// The values that differ, or the problem of the reply.
        what: String,
    },
    /// A peer refuses the credentials of this process, or this process refuses the certificate of a peer.
    #[error("access to {peer} was refused: {what}")]
    Refused {
        /// The name of the peer.
        peer: String,
        /// The reason, and the source of the credential.
        what: String,
    },
    /// The current run cannot continue: a server or all middlewares stayed unreachable, or a server restarted without
    /// its rows.
    #[error("{peer} is lost to this run: {what}")]
    Lost {
        /// The name of the peer.
        peer: String,
        /// What happened.
        what: String,
    },
    /// A wait exceeded its time limit.
    #[error("{peer}: {what}")]
    Timeout {
        /// The name of the peer.
        peer: String,
        /// What was waited for, and the time limit.
        what: String,
    },
    /// A server is still reading its log, or the checkpoint that it serves.
    #[error("{peer} is still reading its rows, {} % done", percent(*.done, *.total))]
    Recovering {
        /// The name of the peer.
        peer: String,
        /// The number of bytes read so far.
        done: u64,
        /// The total number of bytes to read.
        total: u64,
    },
    /// A peer responds, but cannot serve the request now, for example because its disk is full. It may soon be able to.
    #[error("{peer} cannot serve the request: {what}")]
    Unable {
        /// The name of the peer.
        peer: String,
        /// What it cannot do, and why.
        what: String,
    },
    /// A peer is not known, was not reached, or sent no intact reply.
    #[error("cannot communicate with {peer}: {what}")]
    Unreachable {
        /// The name of the peer.
        peer: String,
        /// The operation that failed, and how.
        what: String,
    },
}

/// The percentage done, rounded down and at most 99, because a server that is done is not recovering.
fn percent(done: u64, total: u64) -> u64 {
    (u128::from(done) * 100 / u128::from(total.max(1))).min(99) as u64
}

impl From<ShapeError> for TablesError {
    fn from(ShapeError(what): ShapeError) -> Self {
        Self::BadShape { what }
    }
}

/// Serializes an I/O error as its message and, if it has one, its operating system error code. With a code,
/// the error is restored from the code, otherwise from the message.
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
