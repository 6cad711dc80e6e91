//! Counters and times of an engine.

use std::time::{Duration, Instant};

use persia_types::tables::{LookupReport, PushReport};

/// Counters, gauges and times since the engine started.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineStats {
    /// Training batches looked up.
    pub lookups: u64,
    /// Pushes acknowledged.
    pub pushes: u64,
    /// Sum over training look-ups.
    pub lookup_report: LookupReport,
    /// Sum over pushes; `first_nonfinite` is the first ever.
    pub push_report: PushReport,
    /// Training batches looked up whose gradients are not in the tables yet.
    pub staleness: u64,
    /// The most such batches when another was looked up; below K.
    pub max_staleness: u64,
    /// Per slot of the schema.
    pub slots: Vec<SlotStats>,
    /// Deduplication, in the thread that built the batch.
    pub deduplicate: StageTime,
    /// Planning: matching features with slots, merging those that share a table, divisors.
    pub plan: StageTime,
    /// Waiting for room in the staleness window with a batch planned.
    pub staleness_wait: StageTime,
    /// `Tables::lookup`.
    pub lookup: StageTime,
    /// Pooling.
    pub pool: StageTime,
    /// Segment sum of gradients.
    pub segment_sum: StageTime,
    /// `Tables::push`.
    pub push: StageTime,
}

/// Ids of one slot in training look-ups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Occurrences of ids, duplicates included.
    pub occurrences: u64,
    /// Unique ids, batch by batch.
    pub unique: u64,
    /// Ids of a raw feature that were truncated: their samples have more ids than places.
    pub truncated: u64,
}

/// The time of one stage, over all steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageTime {
    /// Times it ran.
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

/// Measures stages, one after the other.
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the last lap.
    pub(crate) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let spent = now - self.0;
        self.0 = now;
        spent
    }
}
