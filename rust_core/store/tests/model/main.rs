//! Compares the store with a plain map, for random sequences of requests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod reference;
#[path = "../sample/mod.rs"]
mod sample;

use std::collections::{BTreeMap, BTreeSet};

use persia_store::Store;
use persia_types::tables::{PushReport, Run};
use persia_types::{Id, Initializer, Mode, Optimizer, Tables, VIRTUAL_SHARDS, shard_of};
use proptest::prelude::*;
use reference::{AdmissionCounts, DECAY, DIMS, Drawn, Initial, MOMENTUM, Model, Policy, Row, Rows, Sent};
use sample::{Ids, all_rows, export, grouped, run, store_of, token, try_lookup, try_push};

const STEPS: usize = 40;
/// The step before the first one. It is chosen so that shard 200 is swept during the test.
const BEFORE: u64 = 180;

#[derive(Debug, Clone)]
enum Op {
    /// A look-up of ids, given per table as positions in the universe. Tables may be in reverse order, and the step
    /// may be an older one.
    Lookup {
        ids: [Vec<usize>; 2],
        reversed: bool,
        mode: Mode,
        back: u64,
    },
    /// Push gradients for the look-up `ago` requests earlier, for every `keep`-th id. `bad` is the position of an id
    /// whose gradient is not finite.
    Push {
        ago: usize,
        keep: usize,
        bad: Option<usize>,
        value: f32,
    },
    Clear,
    /// Prepare the next snapshot.
    Prepare,
    /// Write a snapshot to files and restore from them.
    Restore,
}

fn op() -> impl Strategy<Value = Op> {
    let ids = || prop::collection::vec(0usize..30, 0..12);
    let mode = prop_oneof![6 => Just(Mode::Train), 1 => Just(Mode::Eval), 1 => Just(Mode::Infer)];
    let push = (0usize..6, 1usize..3, prop::option::weighted(0.3, 0usize..12), -2.0f32..2.0);
    prop_oneof![
        10 => (ids(), ids(), any::<bool>(), mode, 0u64..4)
            .prop_map(|(a, b, reversed, mode, back)| Op::Lookup { ids: [a, b], reversed, mode, back }),
        8 => push.prop_map(|(ago, keep, bad, value)| Op::Push { ago, keep, bad, value }),
        1 => Just(Op::Clear),
        1 => Just(Op::Prepare),
        1 => Just(Op::Restore),
    ]
}

/// The ids of the test: those of a few shards, so that these shards fill up, and the smallest and largest id.
fn universe() -> Vec<Id> {
    let mut ids: Vec<Id> = (0u64..).filter(|id| [3, 200].contains(&shard_of(*id))).take(27).collect();
    ids.extend([0, u64::MAX, u64::MAX - 1]);
    ids
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

/// The weights of new rows, computed with empty stores, and the steps at which their ids are admitted.
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
    let (rows, counts) = (BTreeMap::new(), BTreeMap::new());
    let mut model = Model { policy, rows, counts, drawn, initial, pushed: BTreeSet::new(), prepared: None };
    let mut sent: Vec<Sent> = vec![];
    let mut pushes = PushReport::default();
    let mut snapshot = 0;
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
                check_lookup(&store, &model, &request, *mode);
                if *mode == Mode::Train {
                    sent.push(request);
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
                model.counts.clear();
                model.prepared = None;
            }
            Op::Prepare => {
                snapshot += 1;
                store.prepare_snapshot(snapshot).unwrap();
                model.prepared = Some((model.rows.clone(), model.counts.clone()));
            }
            Op::Restore => {
                let dir = tempfile::tempdir().unwrap();
                let files = store
                    .write_snapshot(dir.path(), model.prepared.as_ref().map(|_| snapshot))
                    .unwrap()
                    .files;
                store.restore(dir.path(), &files).unwrap();
                if let Some((rows, counts)) = model.prepared.take() {
                    (model.rows, model.counts) = (rows, counts);
                }
            }
        }
        assert_eq!(rows_of(&store), model.rows, "after request {number}: {op:?}");
        assert_eq!(counts_of(&store), model.counts, "after request {number}: {op:?}");
    }
    let counted = store.stats().unwrap().pushes;
    assert_eq!((counted.rows_pushed, counted.rows_applied), (pushes.rows_pushed, pushes.rows_applied));
    let accounted =
        counted.rows_applied + counted.rows_missing + counted.rows_nonfinite + counted.rows_duplicate;
    assert_eq!(counted.rows_pushed, accounted);
}

fn check_lookup(store: &Store, model: &Model, request: &Sent, mode: Mode) {
    let expected = model.lookup(request, mode);
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

fn counts_of(store: &Store) -> AdmissionCounts {
    let mut counts = BTreeMap::new();
    for table in export(store).iter().flat_map(|shard| &shard.tables) {
        let number = store.schema().tables.iter().position(|known| known.name == table.name).unwrap();
        counts.extend(table.admission_counts.iter().map(|(id, count)| ((number, *id), *count)));
    }
    counts
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
