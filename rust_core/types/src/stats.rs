//! [`Stats`]: the counts and sizes of rows, in total and by table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::schema::Schema;
use crate::tables::{LookupReport, PushReport};

/// Counters and gauges since the run began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The number of rows of each table, in schema order.
    pub rows: Vec<u64>,
    /// The size of the weights and optimizer state in those rows, in bytes.
    pub payload_bytes: u64,
    /// The memory allocated for rows, ids, recency and indexes, in bytes.
    pub memory_bytes: u64,
    /// The total of all training look-ups. In an infer job, it is the total of all look-ups.
    pub lookups: LookupReport,
    /// The total of all pushes. `first_nonfinite` is the first nonfinite row since the run began.
    pub pushes: PushReport,
    /// The highest sequence number applied for each rank, for a checkpoint's token table.
    pub tokens: BTreeMap<u32, u64>,
    /// The generation of the run that began last; 0 before the first run.
    #[serde(default)]
    pub generation: u64,
    /// The generation of the run in progress; 0 if none has begun since the process started.
    #[serde(default)]
    pub begun: u64,
    /// The statistics of the tables, in schema order.
    #[serde(default)]
    pub tables: Vec<TableStats>,
    /// The checkpoint that a server of an infer job serves. `generation` then identifies its rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<ServedCheckpoint>,
}

/// The vocabulary of one table: which ids have rows, and how that changed since the run began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TableStats {
    /// The table's name.
    pub name: String,
    /// The number of rows.
    pub rows: u64,
    /// The size of the weights and optimizer state in those rows, in bytes.
    pub payload_bytes: u64,
    /// The memory allocated for the rows, their ids, recency and index, in bytes.
    pub memory_bytes: u64,
    /// Like [`Stats::lookups`], for this table.
    pub lookups: LookupReport,
    /// The number of rows inserted, which is the number of ids admitted.
    pub inserted: u64,
    /// The number of rows evicted.
    pub evicted: u64,
    /// The number of expired rows removed.
    pub expired: u64,
    /// The number of ids without a row that have been pushed, but need more pushes to get a row.
    pub waiting: u64,
    /// The number of those ids that have been pushed exactly once.
    pub seen_once: u64,
}

impl std::ops::AddAssign<&Self> for TableStats {
    /// Add the counts of two parts of one table.
    fn add_assign(&mut self, more: &Self) {
        self.rows += more.rows;
        self.payload_bytes += more.payload_bytes;
        self.memory_bytes += more.memory_bytes;
        self.lookups += more.lookups;
        self.inserted += more.inserted;
        self.evicted += more.evicted;
        self.expired += more.expired;
        self.waiting += more.waiting;
        self.seen_once += more.seen_once;
    }
}

/// The checkpoint that a server of an infer job serves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedCheckpoint {
    /// The name of the infer job.
    pub job: String,
    /// The directory of the checkpoint on the server, or its URL.
    pub path: String,
    /// The last step that the checkpoint contains.
    pub step: u64,
    /// The slots and tables of the checkpoint.
    pub schema: Schema,
    /// The names of the model's inputs in the model's order, as JSON; None if the checkpoint does not contain
    /// them.
    #[serde(default)]
    pub inputs: Option<String>,
}
