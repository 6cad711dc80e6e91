//! Compares eviction, admission by count and time to live under load with a simulation of the same policy.
//!
//! `cargo run --release -p persia-store --example soak_store -- [LOOK-UPS] [CAPACITY]` trains on a drifting
//! set of ids that is ten times as large as the capacity. The defaults are look-ups of 10⁸ ids and a capacity
//! of 10⁶ rows. The program compares each report with that of the simulation, and all rows at the end. It
//! prints ten lines of progress, and panics at the first difference.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, reason = "a program that measures")]

#[path = "../../tests/policy/simulation.rs"]
mod simulation;

use std::collections::HashMap;

use persia_kernels::Gradients;
use persia_store::{Store, StoreOptions};
use persia_types::tables::{
    LookupReport, LookupRequest, PushReport, PushRequest, Run, TableGradients, TableIds, Tables,
};
use persia_types::{
    Id, Initializer, JobId, Mode, Optimizer, Schema, ShardedIds, Table, Token, VIRTUAL_SHARDS,
};
use simulation::{Policy, Simulation, Traffic};

const DIM: usize = 8;
const BATCH: usize = 200_000;

fn main() {
    let number = |at| std::env::args().nth(at).map(|text| text.parse::<u64>().expect("a whole number"));
    let (lookups, capacity) = (number(1).unwrap_or(100_000_000), number(2).unwrap_or(1_000_000));
    let policy = Policy { capacity: capacity as usize, min_count: 2, ttl: 28 };
    let traffic = Traffic { ids: 10 * capacity, batch: BATCH, drift: capacity / 1_000 };
    let (store, mut simulation) = (begun(policy), Simulation::new(policy));
    let (mut asked, mut step, mut printed) = (0, 0, 0);
    let mut rows = vec![0.0; BATCH * DIM];
    let gradients = vec![1.0; BATCH * DIM];
    while asked < lookups {
        step += 1;
        let ids = ShardedIds::group(&traffic.request(step)).unwrap();
        let token = Token { job: JobId::from_name("soak"), generation: 1, rank: 0, seq: step };
        let rows = &mut rows[..ids.len() * DIM];
        let tables = [TableIds { table: 0, ids: &ids, per_sample: None }];
        let request = LookupRequest { token, step, mode: Mode::Train, tables: &tables };
        let report = store.lookup(&request, &mut [&mut rows[..]]).unwrap();
        let (expected, values) = simulation.lookup(step as u32, &ids);
        assert_eq!(report, expected, "step {step}");
        for ((row, value), id) in rows.chunks_exact(DIM).zip(values).zip(ids.ids()) {
            assert_eq!(row, [value; DIM], "step {step}, id {id}");
        }
        let tables = [TableGradients {
            table: 0,
            ids: &ids,
            gradients: Gradients::Rows(&gradients[..ids.len() * DIM]),
        }];
        let report = store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables }).unwrap();
        assert_eq!(report, simulation.push(step as u32, &ids), "step {step}");
        asked += ids.len() as u64;
        if asked * 10 / lookups > printed || asked >= lookups {
            printed = asked * 10 / lookups;
            print(&store, asked, step);
        }
    }
    check_rows(&store, &simulation);
    println!("all rows as simulated");
}

fn begun(policy: Policy) -> Store {
    let mut table = Table::new("soak", DIM);
    table.settings.ttl = Some(policy.ttl);
    let schema = Schema { slots: vec![], tables: vec![table] };
    let options = StoreOptions { capacity: policy.capacity as u64, ..StoreOptions::default() };
    let store = Store::new(schema.clone(), options).unwrap();
    let run = Run {
        job: "soak".into(),
        generation: 1,
        schema,
        seed: 1,
        optimizer: Some(Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 }),
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: policy.min_count,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    };
    store.begin(&run).unwrap();
    store
}

fn print(store: &Store, asked: u64, step: u64) {
    let stats = store.stats().unwrap();
    let LookupReport { hits, initial, missing } = stats.lookups;
    let PushReport { rows_inserted, rows_evicted, rows_expired, .. } = stats.pushes;
    println!(
        "{asked} look-ups in {step} steps: hit rate {:.4}, initial {initial}, missing {missing}; inserted \
         {rows_inserted}, evicted {rows_evicted}, expired {rows_expired}; {} rows, {:.1} MiB",
        hits as f64 / (hits + initial + missing) as f64,
        stats.rows[0],
        stats.memory_bytes as f64 / f64::from(1 << 20),
    );
}

fn check_rows(store: &Store, simulation: &Simulation) {
    let expected: HashMap<Id, (u32, f32)> =
        simulation.rows().map(|(id, last_used, value)| (id, (last_used, value))).collect();
    let mut held = 0;
    for shard in 0..VIRTUAL_SHARDS {
        for table in store.export_shard(shard).tables {
            held += table.ids.len();
            for (at, id) in table.ids.iter().enumerate() {
                let (last_used, value) = expected[id];
                assert_eq!(table.last_used[at], u64::from(last_used), "id {id}");
                assert_eq!(table.weights[at * DIM..][..DIM], [value; DIM], "id {id}");
            }
        }
    }
    assert_eq!(held, expected.len());
}
