//! Compares the store's eviction, admission by count and time to live, in combination, with a simulation of
//! the same policy. Reports, hit rates and rows must be equal. `examples/soak_store` runs the same comparison
//! for any length of time.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../sample/mod.rs"]
mod sample;
mod simulation;

use std::collections::BTreeMap;

use persia_store::Store;
use persia_types::tables::{LookupReport, PushReport, Run};
use persia_types::{Dtype, Mode, Tables};
use sample::{all_rows, grouped, run, store_of, token, try_lookup, try_push};
use simulation::{Policy, Simulation, Traffic};

const DIM: usize = 3;

fn store(policy: Policy, dtype: Dtype) -> Store {
    let mut schema = sample::schema(&[DIM]);
    schema.tables[0].settings.ttl = Some(policy.ttl);
    schema.tables[0].settings.dtype = dtype;
    store_of(&Run { schema, admit_min_count: policy.min_count, ..run(&[DIM]) }, policy.capacity as u64)
}

/// Train the store and the simulation for `steps` steps, and compare every report and value, then all rows.
/// Returns the totals of the reports.
fn compare(policy: Policy, traffic: Traffic, steps: u64, dtype: Dtype) -> (LookupReport, PushReport) {
    let (store, mut simulation) = (store(policy, dtype), Simulation::new(policy));
    let (mut looked_up, mut pushed) = (LookupReport::default(), PushReport::default());
    for step in 1..=steps {
        let ids = grouped(&traffic.request(step));
        let parts = [(0, ids.clone())];
        let (found, rows) = try_lookup(&store, token(0, step), step, Mode::Train, &parts).unwrap();
        let (expected, values) = simulation.lookup(step as u32, &ids);
        assert_eq!(found, expected, "step {step}");
        for (at, value) in values.iter().enumerate() {
            assert_eq!(rows[0][at * DIM..][..DIM], [*value; DIM], "step {step}, id {}", ids.ids()[at]);
        }
        let report = try_push(&store, token(0, step), step, &parts, &[vec![1.0; ids.len() * DIM]]).unwrap();
        assert_eq!(report, simulation.push(step as u32, &ids), "step {step}");
        looked_up += found;
        pushed += report;
    }
    let held = all_rows(&store);
    let expected: BTreeMap<_, _> = simulation.rows().map(|(id, used, value)| (id, (used, value))).collect();
    assert_eq!(held.len(), expected.len());
    for ((_, id), (last_used, weights, _)) in &held {
        let (used, value) = expected[id];
        assert_eq!((*last_used, &weights[..]), (u64::from(used), &[value; DIM][..]), "id {id}");
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.lookups, stats.pushes), (looked_up, pushed));
    assert_eq!(pushed.rows_inserted - pushed.rows_evicted - pushed.rows_expired, stats.rows[0]);
    (looked_up, pushed)
}

/// The traffic has ten times as many ids as the store has rows, and a stream of new ids.
const TRAFFIC: Traffic = Traffic { ids: 40_960, batch: 3_000, drift: 60 };

fn hit_rate(all: &LookupReport) -> f64 {
    all.hits as f64 / (all.hits + all.initial + all.missing) as f64
}

#[test]
fn the_least_recently_used_rows_are_evicted() {
    let (all, pushed) = compare(Policy { capacity: 4_096, min_count: 2, ttl: 40 }, TRAFFIC, 100, Dtype::F32);
    assert!(pushed.rows_evicted > 1_000 && all.missing > 1_000, "rows are evicted and missing: {all:?}");
    assert!((0.1..0.9).contains(&hit_rate(&all)), "{}", hit_rate(&all));
}

/// 16-bit floats represent small integers exactly.
#[test]
fn expired_rows_leave_first() {
    let (all, pushed) = compare(Policy { capacity: 4_096, min_count: 2, ttl: 3 }, TRAFFIC, 100, Dtype::F16);
    assert!(pushed.rows_expired > 1_000, "{pushed:?}");
    let (long, pushed) = compare(Policy { capacity: 16_384, min_count: 1, ttl: 8 }, TRAFFIC, 60, Dtype::Bf16);
    assert!(pushed.rows_expired > 1_000 && hit_rate(&long) > hit_rate(&all), "{long:?}");
}

#[test]
fn a_table_of_one_row_per_shard_follows_the_policy() {
    compare(Policy { capacity: 256, min_count: 3, ttl: 3 }, TRAFFIC, 30, Dtype::F32);
}
