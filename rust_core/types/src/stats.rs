//! [`Stats`]: the state of the rows in numbers, all together and by table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::schema::Schema;
use crate::tables::{LookupReport, PushReport};

/// Counters and gauges since the run began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The number of rows of each table, in the schema's order.
    pub rows: Vec<u64>,
    /// The number of bytes of weights and optimizer state in those rows.
    pub payload_bytes: u64,
    /// The number of bytes allocated for rows, ids, recency and indexes.
    pub memory_bytes: u64,
    /// The sum over all training look-ups; of an infer job, over all look-ups.
    pub lookups: LookupReport,
    /// The sum over all pushes; `first_nonfinite` is the first since the run began.
    pub pushes: PushReport,
    /// The highest push of every rank, for a checkpoint's token table.
    pub tokens: BTreeMap<u32, u64>,
    /// The generation of the run that began last; 0 before the first run.
    #[serde(default)]
    pub generation: u64,
    /// The generation of the run in progress; 0 if none has begun since the process started.
    #[serde(default)]
    pub begun: u64,
    /// The tables, in the schema's order.
    #[serde(default)]
    pub tables: Vec<TableStats>,
    /// The checkpoint that a server of an infer job serves; `generation` identifies its rows.
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
    /// The number of bytes of weights and optimizer state in them.
    pub payload_bytes: u64,
    /// The number of bytes allocated for them, with ids, recency and index.
    pub memory_bytes: u64,
    /// As [`Stats::lookups`], of this table.
    pub lookups: LookupReport,
    /// The number of rows that were inserted: ids that were admitted.
    pub inserted: u64,
    /// The number of rows that were evicted.
    pub evicted: u64,
    /// The number of expired rows that were removed.
    pub expired: u64,
    /// The number of ids that have been pushed, and wait for more pushes until they get a row.
    pub waiting: u64,
    /// The number of ids among them that were pushed once.
    pub seen_once: u64,
}

impl std::ops::AddAssign<&Self> for TableStats {
    /// Sums the numbers of two parts of one table.
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

/// What a server of an infer job serves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedCheckpoint {
    /// The name of the infer job.
    pub job: String,
    /// The folder of the checkpoint on the server.
    pub path: String,
    /// The last step that it holds.
    pub step: u64,
    /// Its slots and tables.
    pub schema: Schema,
    /// The names of the model's inputs in its order, as JSON; None if the checkpoint does not have them.
    #[serde(default)]
    pub inputs: Option<String>,
}
