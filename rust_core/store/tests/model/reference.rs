//! A model of the store that follows its documentation literally, on plain maps.

use std::collections::{BTreeMap, BTreeSet};

use persia_types::tables::{LookupReport, PushReport};
use persia_types::{Id, Mode, VIRTUAL_SHARDS, shard_of};

use crate::sample::Ids;

pub(crate) const DIMS: [usize; 2] = [3, 21];
pub(crate) const MOMENTUM: f32 = 0.5;
pub(crate) const DECAY: f32 = 0.125;

/// The `(step, table, id)` of the ids that are admitted by probability.
pub(crate) type Drawn = BTreeSet<(u64, usize, Id)>;
/// The weights of new rows by `(table, id)`.
pub(crate) type Initial = BTreeMap<(usize, Id), Vec<f32>>;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) last_used: u64,
    pub(crate) weights: Vec<f32>,
    pub(crate) velocity: Vec<f32>,
}

pub(crate) type Rows = BTreeMap<(usize, Id), Row>;
pub(crate) type AdmissionCounts = BTreeMap<(usize, Id), u32>;

#[derive(Clone)]
pub(crate) struct Sent {
    pub(crate) seq: u64,
    pub(crate) step: u64,
    pub(crate) parts: Vec<Ids>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// The budget of a shard, in rows.
    pub(crate) budget: usize,
    pub(crate) admit_probability: f32,
    pub(crate) min_count: u32,
    /// The time to live of the second table. Rows of the first table do not expire.
    pub(crate) ttl: Option<u32>,
}

/// A model of a store with two tables.
pub(crate) struct Model {
    pub(crate) policy: Policy,
    pub(crate) rows: Rows,
    /// The numbers of pushes of ids without a row.
    pub(crate) counts: AdmissionCounts,
    /// The steps at which each missing id is admitted, once it has its minimum count.
    pub(crate) drawn: Drawn,
    /// The weights of new rows.
    pub(crate) initial: Initial,
    pub(crate) pushed: BTreeSet<u64>,
    /// `rows` and `counts` of the prepared snapshot.
    pub(crate) prepared: Option<(Rows, AdmissionCounts)>,
}

impl Model {
    /// The report and the rows of a look-up. A look-up changes nothing.
    pub(crate) fn lookup(&self, sent: &Sent, mode: Mode) -> (LookupReport, Vec<Vec<f32>>) {
        let mut report = LookupReport::default();
        let mut read = |table: usize, id: Id| {
            let key = (table, id);
            if self.is_alive(key, sent.step) {
                report.hits += 1;
                return self.rows[&key].weights.clone();
            }
            let count = self.counts.get(&key).map_or(1, |count| count + 1);
            let enough = count >= self.policy.min_count;
            if mode == Mode::Train && enough && self.drawn.contains(&(sent.step, table, id)) {
                report.initial += 1;
                return self.initial[&key].clone();
            }
            report.missing += 1;
            vec![0.0; DIMS[table]]
        };
        let rows = sent
            .parts
            .iter()
            .map(|(table, ids)| ids.ids().iter().flat_map(|id| read(*table, *id)).collect())
            .collect();
        (report, rows)
    }

    fn is_alive(&self, key: (usize, Id), step: u64) -> bool {
        let ttl = if key.0 == 1 { self.policy.ttl.map_or(u64::MAX, u64::from) } else { u64::MAX };
        self.rows.get(&key).is_some_and(|row| row.last_used.saturating_add(ttl) >= step)
    }

    /// Remove the expired rows of a shard.
    fn sweep(&mut self, shard: usize, step: u64) -> u64 {
        let keys: Vec<_> = self.rows.keys().copied().filter(|(_, id)| shard_of(*id) == shard).collect();
        let expired: Vec<_> = keys.into_iter().filter(|key| !self.is_alive(*key, step)).collect();
        expired.iter().for_each(|key| drop(self.rows.remove(key)));
        expired.len() as u64
    }

    /// Count a push of a missing id. Returns whether the id has reached the minimum count.
    fn has_min_count(&mut self, key: (usize, Id)) -> bool {
        if self.policy.min_count == 1 {
            return true;
        }
        let count = self.counts.entry(key).or_default();
        *count = (*count + 1).min(self.policy.min_count);
        *count == self.policy.min_count
    }

    fn insert(&mut self, table: usize, id: Id, step: u64, weights: &[f32]) -> (u64, u64) {
        let shard = shard_of(id);
        let in_shard = self.rows.keys().filter(|(_, id)| shard_of(*id) == shard).count();
        let full = in_shard >= self.policy.budget;
        let expired = if full { self.sweep(shard, step) } else { 0 };
        let mut held: Vec<(u64, usize, Id)> = self
            .rows
            .iter()
            .filter(|((_, id), _)| shard_of(*id) == shard)
            .map(|((table, id), row)| (row.last_used, *table, *id))
            .collect();
        held.sort_unstable();
        let leaving =
            if full { (self.policy.budget / 16).max(1).saturating_sub(expired as usize) } else { 0 };
        let leaving = leaving.min(held.len());
        for (_, table, id) in &held[..leaving] {
            self.rows.remove(&(*table, *id));
        }
        let velocity = vec![0.0; weights.len()];
        self.rows.insert((table, id), Row { last_used: step, weights: weights.to_vec(), velocity });
        self.counts.remove(&(table, id));
        (leaving as u64, expired)
    }

    pub(crate) fn push(&mut self, seq: u64, step: u64, parts: &[Ids], gradients: &[Vec<f32>]) -> PushReport {
        let rows_pushed = parts.iter().map(|(_, ids)| ids.len() as u64).sum();
        let mut report = PushReport { rows_pushed, ..PushReport::default() };
        if !self.pushed.insert(seq) {
            report.rows_duplicate = rows_pushed;
            return report;
        }
        let due = step as usize % VIRTUAL_SHARDS;
        if parts.iter().any(|(_, ids)| !ids.range(due).is_empty()) {
            report.rows_expired += self.sweep(due, step);
        }
        let mut missing = vec![];
        for ((table, ids), gradients) in parts.iter().zip(gradients) {
            for (id, gradient) in ids.ids().iter().zip(gradients.chunks(DIMS[*table])) {
                if self.is_alive((*table, *id), step) {
                    self.update((*table, *id), step, gradient, &mut report);
                } else {
                    missing.push(((*table, *id), gradient));
                }
            }
        }
        for ((table, id), gradient) in missing {
            if self.is_alive((table, id), step) {
                self.update((table, id), step, gradient, &mut report); // the request contains the id twice
                continue;
            }
            report.rows_expired += u64::from(self.rows.remove(&(table, id)).is_some());
            if !self.has_min_count((table, id)) || !self.drawn.contains(&(step, table, id)) {
                report.rows_missing += 1;
                continue;
            }
            let weights = self.initial[&(table, id)].clone();
            let (evicted, expired) = self.insert(table, id, step, &weights);
            report.rows_inserted += 1;
            report.rows_evicted += evicted;
            report.rows_expired += expired;
            self.update((table, id), step, gradient, &mut report);
        }
        report
    }

    fn update(&mut self, key: (usize, Id), step: u64, gradient: &[f32], report: &mut PushReport) {
        let row = self.rows.get_mut(&key).unwrap();
        row.last_used = row.last_used.max(step);
        if gradient.iter().any(|g| !g.is_finite()) {
            report.rows_nonfinite += 1;
            report.first_nonfinite = report.first_nonfinite.or(Some(key));
            return;
        }
        report.rows_applied += 1;
        for ((w, v), g) in row.weights.iter_mut().zip(&mut row.velocity).zip(gradient) {
            *v = MOMENTUM * *v + *g;
            *w -= *v + DECAY * *w;
        }
    }
}
