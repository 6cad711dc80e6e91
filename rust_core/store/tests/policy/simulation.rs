//! Simulates eviction, admission and time to live of one table as documented, on plain maps. The value of each row
//! is minus the number of its updates.

use std::collections::HashMap;

use persia_types::limits::COUNTED_IDS_PER_SHARD;
use persia_types::tables::{LookupReport, PushReport};
use persia_types::{Id, ShardedIds, VIRTUAL_SHARDS};

/// The limits of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    pub(crate) capacity: usize,
    pub(crate) min_count: u32,
    pub(crate) ttl: u32,
}

#[derive(Default)]
struct Shard {
    /// The `(last_used, value)` of each row.
    rows: HashMap<Id, (u32, f32)>,
    admission_counts: HashMap<Id, u32>,
}

/// Simulates a table with a policy.
pub(crate) struct Simulation {
    policy: Policy,
    budget: usize,
    shards: Vec<Shard>,
}

impl Simulation {
    pub(crate) fn new(policy: Policy) -> Self {
        let shards = (0..VIRTUAL_SHARDS).map(|_| Shard::default()).collect();
        Self { policy, budget: policy.capacity.div_ceil(VIRTUAL_SHARDS), shards }
    }

    /// A training look-up. Returns the report and the values read. New rows read as zeros.
    pub(crate) fn lookup(&self, step: u32, ids: &ShardedIds) -> (LookupReport, Vec<f32>) {
        let oldest = step.saturating_sub(self.policy.ttl);
        let (mut report, mut values) = (LookupReport::default(), vec![0.0; ids.len()]);
        for (shard, number) in self.shards.iter().zip(0..) {
            for at in ids.range(number) {
                let id = &ids.ids()[at];
                match shard.rows.get(id) {
                    Some((last_used, value)) if *last_used >= oldest => {
                        values[at] = *value;
                        report.hits += 1;
                    }
                    _ => {
                        let count = shard.admission_counts.get(id).copied().unwrap_or_default() + 1;
                        let seen = if count >= self.policy.min_count {
                            &mut report.initial
                        } else {
                            &mut report.missing
                        };
                        *seen += 1;
                    }
                }
            }
        }
        (report, values)
    }

    /// Admit ids, and update every id that has a row.
    pub(crate) fn push(&mut self, step: u32, ids: &ShardedIds) -> PushReport {
        let oldest = step.saturating_sub(self.policy.ttl);
        let mut report = PushReport { rows_pushed: ids.len() as u64, ..PushReport::default() };
        let due = step as usize % VIRTUAL_SHARDS;
        if !ids.range(due).is_empty() {
            report.rows_expired += self.shards[due].sweep(oldest);
        }
        for (shard, number) in self.shards.iter_mut().zip(0..) {
            let mut missing = Vec::new();
            for at in ids.range(number) {
                match shard.rows.get_mut(&ids.ids()[at]) {
                    Some((last_used, value)) if *last_used >= oldest => {
                        *last_used = step.max(*last_used);
                        *value -= 1.0;
                        report.rows_applied += 1;
                    }
                    _ => missing.push(ids.ids()[at]),
                }
            }
            for id in missing {
                report.rows_expired += u64::from(shard.rows.remove(&id).is_some());
                if !shard.has_min_count(id, self.policy.min_count, self.budget) {
                    report.rows_missing += 1;
                    continue;
                }
                if shard.rows.len() >= self.budget {
                    let expired = shard.sweep(oldest);
                    report.rows_expired += expired;
                    report.rows_evicted +=
                        shard.evict((self.budget / 16).max(1).saturating_sub(expired as usize));
                }
                shard.admission_counts.remove(&id);
                shard.rows.insert(id, (step, -1.0));
                report.rows_inserted += 1;
                report.rows_applied += 1;
            }
        }
        report
    }

    /// Every row's `(id, last_used, value)`.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (Id, u32, f32)> {
        self.shards
            .iter()
            .flat_map(|shard| shard.rows.iter().map(|(id, (last_used, value))| (*id, *last_used, *value)))
    }
}

impl Shard {
    fn sweep(&mut self, oldest: u32) -> u64 {
        let before = self.rows.len();
        self.rows.retain(|_, (last_used, _)| *last_used >= oldest);
        (before - self.rows.len()) as u64
    }

    fn evict(&mut self, count: usize) -> u64 {
        let mut order: Vec<(u32, Id)> =
            self.rows.iter().map(|(id, (last_used, _))| (*last_used, *id)).collect();
        order.sort_unstable();
        order.truncate(count);
        for (_, id) in &order {
            self.rows.remove(id);
        }
        order.len() as u64
    }

    fn has_min_count(&mut self, id: Id, min_count: u32, budget: usize) -> bool {
        if min_count == 1 {
            return true;
        }
        if !self.admission_counts.contains_key(&id) {
            let (least, most) = COUNTED_IDS_PER_SHARD.into_inner();
            while self.admission_counts.len() >= (2 * budget).clamp(least, most) {
                self.admission_counts.values_mut().for_each(|count| *count /= 2);
                self.admission_counts.retain(|_, count| *count > 0);
            }
        }
        let count = self.admission_counts.entry(id).or_default();
        *count = (*count + 1).min(min_count);
        *count == min_count
    }
}

/// Ids as in real features: few ids make up most of the traffic, and they drift from step to step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Traffic {
    /// The number of distinct ids at a time.
    pub(crate) ids: u64,
    /// The number of draws per request. Equal draws count once.
    pub(crate) batch: usize,
    /// The number of ids that are replaced by new ids at each step.
    pub(crate) drift: u64,
}

impl Traffic {
    pub(crate) fn request(&self, step: u64) -> Vec<Id> {
        let mut random = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut ids: Vec<Id> = (0..self.batch)
            .map(|_| {
                random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
                let unit = (random >> 11) as f64 / (1u64 << 53) as f64;
                // The cube of a uniform number makes a tenth of all draws fall on a thousandth of the ids.
                let rank = (unit * unit * unit * self.ids as f64) as u64;
                (rank + step * self.drift).wrapping_mul(0xD6E8_FEB8_6659_FD93)
            })
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
