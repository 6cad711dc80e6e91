//! [`Progress`]: the pushes applied since a run began.

use persia_types::tables::{LookupReport, PushReport, TableIds};
use persia_types::token::SeenTokens;
use serde::{Deserialize, Serialize};

/// The totals of look-ups and pushes since the run began. Of look-ups, only those of training are counted,
/// unless the store serves a trained model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) lookups: LookupReport,
    pub(super) pushes: PushReport,
    /// The look-ups of each table. Tables at the end that had no look-up may be omitted.
    pub(super) by_table: Vec<LookupReport>,
}

impl Counters {
    /// Count a look-up. `reports` has one report for each of its tables.
    pub(super) fn add_lookup(&mut self, tables: &[TableIds<'_>], reports: &[LookupReport]) {
        for (part, report) in tables.iter().zip(reports) {
            self.lookups += *report;
            if self.by_table.len() <= part.table {
                self.by_table.resize(part.table + 1, LookupReport::default());
            }
            self.by_table[part.table] += *report;
        }
    }

    /// The number of counted rows that were looked up or pushed.
    pub(super) fn rows(&self) -> u64 {
        let Self { lookups, pushes, .. } = self;
        lookups.hits + lookups.initial + lookups.missing + pushes.rows_pushed
    }
}

/// The state of a run without its rows: the applied pushes, and their totals in
/// [`Stats`](persia_types::tables::Stats).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub(super) pushes: SeenTokens,
    pub(super) counted: PushReport,
}

impl Progress {
    /// Whether no push has been applied since the run began, so that the rows are those of its start.
    pub fn is_empty(&self) -> bool {
        self.pushes.is_empty()
    }
}
