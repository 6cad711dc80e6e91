//! The counters and times of an engine.

use std::time::{Duration, Instant};

use persia_types::tables::{LookupReport, PushReport};

/// Counters, gauges and times since the engine started.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineStats {
    /// The number of training batches that were looked up.
    pub lookups: u64,
    /// The number of acknowledged pushes.
    pub pushes: u64,
    /// The total of the reports of training look-ups.
    pub lookup_report: LookupReport,
    /// The total of the reports of pushes; `first_nonfinite` is the first row that was skipped for its
    /// gradient since the engine started.
    pub push_report: PushReport,
    /// The number of training batches that were looked up but whose gradients are not in the tables yet.
    pub staleness: u64,
    /// The maximum of `staleness` at the times when another batch was looked up. It is below K.
    pub max_staleness: u64,
    /// The counters of each slot of the schema.
    pub slots: Vec<SlotStats>,
    /// The time spent deduplicating, on the thread that created the batch.
    pub deduplicate: StageTime,
    /// The time spent planning: matching features with slots, merging features that share a table, computing
    /// divisors.
    pub plan: StageTime,
    /// The time for which planned batches waited for space in the staleness window.
    pub staleness_wait: StageTime,
    /// The time spent in `Tables::lookup`.
    pub lookup: StageTime,
    /// The time spent pooling. On a device, this is only the time to start the pooling.
    pub pool: StageTime,
    /// The time spent summing gradients before the push. A device sums all gradients. The CPU sums those of
    /// tables that several features share, and the tables sum the others during the push.
    pub segment_sum: StageTime,
    /// The time spent in `Tables::push`.
    pub push: StageTime,
}

/// The counters of one slot over all training look-ups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// The number of occurrences of ids, including duplicates.
    pub occurrences: u64,
    /// The number of unique ids, added up over batches.
    pub unique: u64,
    /// The number of ids of a raw feature that were truncated, because their samples have more ids than
    /// positions.
    pub truncated: u64,
}

/// The times of one stage over all steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageTime {
    /// The number of times that the stage ran.
    pub count: u64,
    /// The sum of the times of all executions.
    pub total: Duration,
    /// The time of the latest execution.
    pub last: Duration,
    /// The time of the longest execution.
    pub max: Duration,
}

impl StageTime {
    pub(crate) fn add(&mut self, spent: Duration) {
        self.count += 1;
        self.total += spent;
        self.last = spent;
        self.max = self.max.max(spent);
    }
}

/// Measures the time of consecutive stages.
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the previous call.
    pub(crate) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let spent = now - self.0;
        self.0 = now;
        spent
    }
}
