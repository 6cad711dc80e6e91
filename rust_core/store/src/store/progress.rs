//! [`Progress`]: the pushes applied since a run began.

use persia_types::tables::{LookupReport, PushReport};
use persia_types::token::SeenTokens;
use serde::{Deserialize, Serialize};

/// The sums over all training look-ups and pushes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) lookups: LookupReport,
    pub(super) pushes: PushReport,
}

impl Counters {
    /// The number of rows that were looked up and pushed.
    pub(super) fn rows(&self) -> u64 {
        let Self { lookups, pushes } = self;
        lookups.hits + lookups.initial + lookups.missing + pushes.rows_pushed
    }
}

/// The state of a run without its rows: the applied pushes, and their sum in [`Stats`](persia_types::tables::Stats).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub(super) pushes: SeenTokens,
    pub(super) counted: PushReport,
}

impl Progress {
    /// Whether no push was applied since the run began: the rows are those of its start.
    pub fn is_empty(&self) -> bool {
        self.pushes.is_empty()
    }
}
