//! The store against a plain map, for any sequence of requests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on panics")]

mod sample;

use std::collections::{BTreeMap, BTreeSet};

use persia_store::Store;
use persia_types::tables::{LookupReport, PushReport, Run};
use persia_types::{Id, Initializer, Mode, Optimizer, Tables, VIRTUAL_SHARDS, shard_of};
use proptest::prelude::*;
use sample::{Ids, all_rows, export, grouped, run, store_of, token, try_lookup, try_push};

const DIMS: [usize; 2] = [3, 21];
const MOMENTUM: f32 = 0.5;
const DECAY: f32 = 0.125;
const STEPS: usize = 40;
/// The step before the first: the hand that sweeps meets shard 200 on the way.
const BEFORE: u64 = 180;

#[derive(Debug, Clone)]
enum Op {
    /// Ids as positions in the universe, per table; tables in reverse order if asked; steps may go back.
    Lookup {
        ids: [Vec<usize>; 2],
        reversed: bool,
        mode: Mode,
        back: u64,
    },
    /// The look-up `ago` requests before, with the same token.
    RepeatLookup {
        ago: usize,
    },
    /// Answer that look-up, wholly or for every `keep`-th id; `bad` is the position of a NaN.
    Push {
        ago: usize,
        keep: usize,
        bad: Option<usize>,
        value: f32,
    },
    Clear,
    /// Let the next snapshot be of now.
    Cut,
    /// Snapshot into files and restore from them.
    Restore,
}

fn op() -> impl Strategy<Value = Op> {
    let ids = || prop::collection::vec(0usize..30, 0..12);
    let mode = prop_oneof![6 => Just(Mode::Train), 1 => Just(Mode::Eval), 1 => Just(Mode::Infer)];
    let push = (0usize..6, 1usize..3, prop::option::weighted(0.3, 0usize..12), -2.0f32..2.0);
    prop_oneof![
        10 => (ids(), ids(), any::<bool>(), mode, 0u64..4)
            .prop_map(|(a, b, reversed, mode, back)| Op::Lookup { ids: [a, b], reversed, mode, back }),
        1 => (0usize..6).prop_map(|ago| Op::RepeatLookup { ago }),
        8 => push.prop_map(|(ago, keep, bad, value)| Op::Push { ago, keep, bad, value }),
        1 => Just(Op::Clear),
        1 => Just(Op::Cut),
        1 => Just(Op::Restore),
    ]
}

/// Few shards, so that they fill up; the ends of the range among them.
fn universe() -> Vec<Id> {
    let mut ids: Vec<Id> = (0u64..).filter(|id| [3, 200].contains(&shard_of(*id))).take(27).collect();
    ids.extend([0, u64::MAX, u64::MAX - 1]);
    ids
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    last_used: u64,
    weights: Vec<f32>,
    velocity: Vec<f32>,
}

type Rows = BTreeMap<(usize, Id), Row>;
type Waiting = BTreeMap<(usize, Id), u32>;

#[derive(Clone)]
struct Sent {
    seq: u64,
    step: u64,
    parts: Vec<Ids>,
}

#[derive(Debug, Clone, Copy)]
struct Policy {
    /// Rows of a shard.
    budget: usize,
    admit_probability: f32,
    min_count: u32,
    /// Of the second table; rows of the first live for ever.
    ttl: Option<u32>,
}

/// What the documentation of the store says, word by word and slowly.
struct Model {
    policy: Policy,
    rows: Rows,
    /// Look-ups counted of ids without row.
    waiting: Waiting,
    /// The steps at which each missing id would be admitted, if it was asked for often enough.
    drawn: Drawn,
    /// What it would be given.
    initial: Initial,
    /// Of look-ups that were not answered yet: which ids, by part and position, had or got a row.
    given: BTreeMap<u64, Vec<Vec<bool>>>,
    pushed: BTreeSet<u64>,
    /// `rows` and `waiting` of the last cut that no snapshot was made of.
    cut: Option<(Rows, Waiting)>,
}

impl Model {
    fn lookup(&mut self, sent: &Sent, mode: Mode, repeated: bool) -> (LookupReport, Vec<Vec<f32>>) {
        let mut report = LookupReport::default();
        let mut rows: Vec<Vec<Vec<f32>>> =
            sent.parts.iter().map(|(_, ids)| vec![vec![]; ids.len()]).collect();
        let admits = mode == Mode::Train && !repeated;
        let first = self.given.get(&sent.seq).filter(|_| repeated).cloned();
        let mut given: Vec<Vec<bool>> = sent.parts.iter().map(|(_, ids)| vec![true; ids.len()]).collect();
        let due = sent.step as usize % VIRTUAL_SHARDS;
        if admits && sent.parts.iter().any(|(_, ids)| !ids.range(due).is_empty()) {
            report.expired += self.sweep(due, sent.step);
        }
        for shard in 0..VIRTUAL_SHARDS {
            let mut absent = vec![];
            for (part, (table, ids)) in sent.parts.iter().enumerate() {
                for at in ids.range(shard) {
                    let key = (*table, ids.ids()[at]);
                    if !self.is_alive(key, sent.step) {
                        absent.push((part, *table, at));
                        continue;
                    }
                    let row = self.rows.get_mut(&key).unwrap();
                    report.hits += 1;
                    rows[part][at] = row.weights.clone();
                    if admits {
                        row.last_used = row.last_used.max(sent.step);
                    }
                }
            }
            for (part, table, at) in absent {
                let id = sent.parts[part].1.ids()[at];
                let zeros = vec![0.0; DIMS[table]];
                let weights = self.initial[&(table, id)].clone();
                let alive = self.is_alive((table, id), sent.step);
                if admits && !alive {
                    report.expired += u64::from(self.rows.remove(&(table, id)).is_some());
                }
                let comes = match &first {
                    _ if mode != Mode::Train || alive => false,
                    Some(first) => first[part][at],
                    None => {
                        self.asked_enough((table, id), admits) && self.drawn.contains(&(sent.step, table, id))
                    }
                };
                given[part][at] = alive || comes;
                rows[part][at] = match (mode, alive, comes) {
                    (Mode::Train, true, _) => {
                        report.hits += 1;
                        self.rows[&(table, id)].weights.clone()
                    }
                    (Mode::Train, false, true) => {
                        if admits {
                            let (evicted, expired) = self.insert(table, id, sent.step, &weights);
                            report.evicted += evicted;
                            report.expired += expired;
                            report.inserted += 1;
                        } else {
                            report.missing += 1;
                        }
                        weights
                    }
                    _ => {
                        report.missing += 1;
                        zeros
                    }
                };
            }
        }
        if admits {
            self.given.insert(sent.seq, given);
        }
        (report, rows.into_iter().map(|rows| rows.concat()).collect())
    }

    fn is_alive(&self, key: (usize, Id), step: u64) -> bool {
        let ttl = if key.0 == 1 { self.policy.ttl.map_or(u64::MAX, u64::from) } else { u64::MAX };
        self.rows.get(&key).is_some_and(|row| row.last_used.saturating_add(ttl) >= step)
    }

    /// Drop the expired rows of a shard.
    fn sweep(&mut self, shard: usize, step: u64) -> u64 {
        let keys: Vec<_> = self.rows.keys().copied().filter(|(_, id)| shard_of(*id) == shard).collect();
        let expired: Vec<_> = keys.into_iter().filter(|key| !self.is_alive(*key, step)).collect();
        expired.iter().for_each(|key| drop(self.rows.remove(key)));
        expired.len() as u64
    }

    fn asked_enough(&mut self, key: (usize, Id), counts: bool) -> bool {
        if !counts || self.policy.min_count == 1 {
            return !self.waiting.contains_key(&key);
        }
        let count = self.waiting.entry(key).or_default();
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
        self.waiting.remove(&(table, id));
        (leaving as u64, expired)
    }

    fn push(&mut self, seq: u64, step: u64, parts: &[Ids], gradients: &[Vec<f32>]) -> PushReport {
        let mut report = PushReport::default();
        let duplicate = !self.pushed.insert(seq);
        self.given.remove(&seq);
        for ((table, ids), gradients) in parts.iter().zip(gradients) {
            for (id, gradient) in ids.ids().iter().zip(gradients.chunks(DIMS[*table])) {
                report.rows_pushed += 1;
                if duplicate {
                    report.rows_duplicate += 1;
                } else if gradient.iter().any(|g| !g.is_finite()) {
                    report.rows_nonfinite += 1;
                    report.first_nonfinite = report.first_nonfinite.or(Some((*table, *id)));
                } else if self.is_alive((*table, *id), step) {
                    let row = self.rows.get_mut(&(*table, *id)).unwrap();
                    report.rows_applied += 1;
                    for ((w, v), g) in row.weights.iter_mut().zip(&mut row.velocity).zip(gradient) {
                        *v = MOMENTUM * *v + *g;
                        *w -= *v + DECAY * *w;
                    }
                } else {
                    report.rows_missing += 1;
                }
            }
        }
        report
    }
}

fn settings(policy: Policy) -> Run {
    let mut schema = sample::schema(&DIMS);
    schema.tables[1].settings.ttl = policy.ttl;
    Run {
        schema,
        optimizer: Some(Optimizer::Sgd { lr: 1.0, momentum: MOMENTUM, weight_decay: DECAY }),
        initializer: Initializer::Uniform { low: 0.5, high: 1.0 },
        admit_probability: policy.admit_probability,
        admit_min_count: policy.min_count,
        ..run(&DIMS)
    }
}

/// `(step, table, id)` of ids that are drawn for admission.
type Drawn = BTreeSet<(u64, usize, Id)>;
/// Weights of new rows by `(table, id)`.
type Initial = BTreeMap<(usize, Id), Vec<f32>>;

/// Rows that are new, from stores that have seen nothing else, and the steps at which their ids are admitted.
fn initial(run: &Run, universe: &[Id]) -> (Drawn, Initial) {
    let (mut drawn, mut initial) = (BTreeSet::new(), BTreeMap::new());
    let run = &Run { admit_min_count: 1, ..run.clone() };
    let all = &Run { admit_probability: 1.0, ..run.clone() };
    for step in BEFORE + 1..=BEFORE + STEPS as u64 {
        let parts = [(0, grouped(universe)), (1, grouped(universe))];
        let rows_of =
            |run| try_lookup(&store_of(run, 1 << 30), token(0, 1), step, Mode::Train, &parts).unwrap().1;
        for ((table, ids), (rows, all)) in parts.iter().zip(rows_of(run).into_iter().zip(rows_of(all))) {
            let rows = rows.chunks(DIMS[*table]).zip(all.chunks(DIMS[*table]));
            for (id, (row, weights)) in ids.ids().iter().zip(rows) {
                initial.insert((*table, *id), weights.to_vec());
                if row[0] != 0.0 {
                    drawn.insert((step, *table, *id));
                }
            }
        }
    }
    (drawn, initial)
}

fn replay(ops: &[Op], policy: Policy) {
    let universe = universe();
    let run = settings(policy);
    let store = store_of(&run, (policy.budget * VIRTUAL_SHARDS) as u64);
    let (drawn, initial) = initial(&run, &universe);
    let (rows, waiting, given) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut model =
        Model { policy, rows, waiting, drawn, initial, given, pushed: BTreeSet::new(), cut: None };
    let mut sent: Vec<Sent> = vec![];
    let mut pushes = PushReport::default();
    let mut cut = 0;
    for (number, op) in ops.iter().enumerate() {
        let (seq, step) = (number as u64 + 1, BEFORE + number as u64 + 1);
        match op {
            Op::Lookup { ids, reversed, mode, back } => {
                let ids_of = |table: usize| ids[table].iter().map(|at| universe[*at]).collect::<Vec<_>>();
                let mut parts: Vec<Ids> = (0..2).map(|table| (table, grouped(&ids_of(table)))).collect();
                if *reversed {
                    parts.reverse();
                }
                let request = Sent { seq, step: (step - back).max(BEFORE + 1), parts };
                check_lookup(&store, &mut model, &request, *mode, false);
                if *mode == Mode::Train {
                    sent.push(request);
                }
            }
            Op::RepeatLookup { ago } => {
                if let Some(request) = sent.iter().rev().nth(*ago).cloned() {
                    check_lookup(&store, &mut model, &request, Mode::Train, true);
                }
            }
            Op::Push { ago, keep, bad, value } => {
                if let Some(request) = sent.iter().rev().nth(*ago).cloned() {
                    let (parts, gradients) = answer(&request, *keep, *bad, *value);
                    let expected = model.push(request.seq, step, &parts, &gradients);
                    let report = try_push(&store, token(0, request.seq), step, &parts, &gradients).unwrap();
                    assert_eq!(report, expected, "push {number}");
                    pushes.rows_pushed += report.rows_pushed;
                    pushes.rows_applied += report.rows_applied;
                }
            }
            Op::Clear => {
                store.clear().unwrap();
                model.rows.clear();
                model.waiting.clear();
                model.given.clear();
                model.cut = None;
            }
            Op::Cut => {
                cut += 1;
                store.prepare_snapshot(cut).unwrap();
                model.cut = Some((model.rows.clone(), model.waiting.clone()));
            }
            Op::Restore => {
                let dir = tempfile::tempdir().unwrap();
                let files = store.write_snapshot(dir.path(), model.cut.as_ref().map(|_| cut)).unwrap().files;
                store.restore(dir.path(), &files).unwrap();
                if let Some((rows, waiting)) = model.cut.take() {
                    (model.rows, model.waiting) = (rows, waiting);
                }
                model.given.clear();
            }
        }
        assert_eq!(rows_of(&store), model.rows, "after request {number}: {op:?}");
        assert_eq!(waiting_of(&store), model.waiting, "after request {number}: {op:?}");
    }
    let counted = store.stats().unwrap().pushes;
    assert_eq!((counted.rows_pushed, counted.rows_applied), (pushes.rows_pushed, pushes.rows_applied));
    let accounted =
        counted.rows_applied + counted.rows_missing + counted.rows_nonfinite + counted.rows_duplicate;
    assert_eq!(counted.rows_pushed, accounted);
}

fn check_lookup(store: &Store, model: &mut Model, request: &Sent, mode: Mode, repeated: bool) {
    let expected = model.lookup(request, mode, repeated);
    let found = try_lookup(store, token(0, request.seq), request.step, mode, &request.parts).unwrap();
    assert_eq!(found, expected, "look-up {}", request.seq);
}

/// Gradients that differ by id, for every `keep`-th id of a look-up.
fn answer(request: &Sent, keep: usize, bad: Option<usize>, value: f32) -> (Vec<Ids>, Vec<Vec<f32>>) {
    let kept = |ids: &[Id]| grouped(&ids.iter().step_by(keep).copied().collect::<Vec<_>>());
    let parts: Vec<Ids> = request.parts.iter().map(|(table, ids)| (*table, kept(ids.ids()))).collect();
    let mut gradients: Vec<Vec<f32>> = vec![];
    for (table, ids) in &parts {
        let numbers = ids
            .ids()
            .iter()
            .flat_map(|id| (0..DIMS[*table]).map(move |i| value + (id % 64) as f32 / 64.0 + i as f32 / 16.0));
        gradients.push(numbers.collect());
    }
    if let Some(bad) = bad {
        for (gradients, (table, _)) in gradients.iter_mut().zip(&parts) {
            if let Some(place) = gradients.get_mut(bad * DIMS[*table] + bad % DIMS[*table]) {
                *place = if bad % 2 == 0 { f32::NAN } else { f32::INFINITY };
            }
        }
    }
    (parts, gradients)
}

fn rows_of(store: &Store) -> Rows {
    all_rows(store)
        .into_iter()
        .map(|(key, (last_used, weights, velocity))| (key, Row { last_used, weights, velocity }))
        .collect()
}

fn waiting_of(store: &Store) -> Waiting {
    let mut waiting = BTreeMap::new();
    for table in export(store).iter().flat_map(|shard| &shard.tables) {
        let number = store.schema().tables.iter().position(|known| known.name == table.name).unwrap();
        waiting.extend(table.waiting.iter().map(|(id, count)| ((number, *id), *count)));
    }
    waiting
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_requests_is_as_in_a_plain_map(
        ops in prop::collection::vec(op(), 1..STEPS),
        budget in prop::sample::select(vec![1usize, 2, 5, 33, 1_000]),
        admit_probability in prop::sample::select(vec![1.0f32, 1.0, 0.5, 0.0]),
        min_count in prop::sample::select(vec![1u32, 1, 2, 3]),
        ttl in prop::sample::select(vec![None, Some(1u32), Some(3), Some(10)]),
    ) {
        replay(&ops, Policy { budget, admit_probability, min_count, ttl });
    }
}
