//! Counters and times of an engine.

use std::time::{Duration, Instant};

use persia_types::tables::{LookupReport, PushReport};

/// Counters, gauges and times since the engine started.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineStats {
    /// The number of training batches that were looked up.
    pub lookups: u64,
    /// Pushes acknowledged.
    pub pushes: u64,
    /// The sum of the reports of training look-ups.
    pub lookup_report: LookupReport,
    /// The sum of the reports of pushes; `first_nonfinite` is the first since the engine started.
    pub push_report: PushReport,
    /// The number of training batches that were looked up and whose gradients are not in the tables yet.
    pub staleness: u64,
    /// The largest number of such batches when another one was looked up; it is below K.
    pub max_staleness: u64,
    /// The counters of each slot of the schema.
    pub slots: Vec<SlotStats>,
    /// The time of deduplication, in the thread that built the batch.
    pub deduplicate: StageTime,
    /// The time of planning: matching features with slots, merging those that share a table, computing divisors.
    pub plan: StageTime,
    /// The time of waiting for space in the staleness window with a planned batch.
    pub staleness_wait: StageTime,
    /// `Tables::lookup`.
    pub lookup: StageTime,
    /// Pooling.
    pub pool: StageTime,
    /// The time of the segment sum of gradients.
    pub segment_sum: StageTime,
    /// `Tables::push`.
    pub push: StageTime,
}

/// Ids of one slot in training look-ups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// The number of occurrences of ids, including duplicates.
    pub occurrences: u64,
    /// The sum over batches of the number of unique ids.
    pub unique: u64,
    /// The number of ids of a raw feature that were truncated because their samples have more ids than positions.
    pub truncated: u64,
}

/// The time of one stage, over all steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageTime {
    /// How often the stage ran.
    pub count: u64,
    /// Sum.
    pub total: Duration,
    /// The latest.
    pub last: Duration,
    /// The longest.
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
