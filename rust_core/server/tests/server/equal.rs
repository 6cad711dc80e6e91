//! Tests that equal requests give bit-identical results: in memory, on one server, on three servers, and in
//! any order of arrival.

use std::sync::Arc;
use std::time::Duration;

use persia_kernels::half::{f16_to_f32, f32_to_f16};
use persia_store::{Store, StoreOptions};
use persia_types::tables::{LookupReport, PushReport, Run};
use persia_types::{
    Admission, Dtype, Id, Initializer, Mode, Optimizer, Rounding, Schema, TableSettings, Tables, TablesError,
};
use persia_wire::client::WireTables;

use crate::stack::{self, Plan, Stack, lookup, push, push_as, run_of, token};

const DIMS: [usize; 3] = [8, 1, 19];
const STEPS: u64 = 12;
/// The capacity. It is so small that rows are evicted constantly.
const CAPACITY: u64 = 2_000;

/// A schema whose tables together override all settings of the run.
fn schema() -> Schema {
    let mut schema = stack::schema(&DIMS);
    schema.tables[0].settings = TableSettings {
        dtype: Dtype::Bf16,
        rounding: Rounding::Stochastic,
        admission: Some(Admission { probability: 0.9, min_count: 2 }),
        ttl: Some(1),
        ..TableSettings::default()
    };
    schema.tables[1].settings = TableSettings {
        dtype: Dtype::F16,
        optimizer: Some(Optimizer::Adagrad {
            lr: 0.1,
            weight_decay: 0.01,
            initial_accumulator_value: 0.1,
            g_square_momentum: 1.0,
            eps: 1e-10,
            vectorwise_shared: true,
        }),
        initializer: Some(Initializer::Gamma { shape: 0.5, scale: 0.1 }),
        ..TableSettings::default()
    };
    schema
}

fn plan(servers: u32) -> Plan {
    Plan { schema: schema(), capacity: CAPACITY, ..Plan::new(servers) }
}

fn run(plan: &Plan, ranks: u32) -> Run {
    Run {
        optimizer: Some(Optimizer::Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.01, eps: 1e-8 }),
        initializer: Initializer::Normal { mean: 0.0, std: 0.1 },
        admit_probability: 0.9,
        world_size: ranks,
        reproducible: true,
        ..run_of(plan)
    }
}

/// The ids of a rank at one step: some repeat, some are new, and a table may have none.
fn ids(rank: u32, seq: u64) -> Vec<Vec<Id>> {
    let draw = |n: u64, range: u64| {
        let start = seq * 131 + u64::from(rank) * 57;
        let mut ids: Vec<Id> =
            (0..n).map(|i| ((start + i * 7).wrapping_mul(0x9E37_79B9) >> 3) % range).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    vec![draw(700, 5_000), draw(50 * (seq % 2), 300), draw(300, 900)]
}

type Step = (LookupReport, Vec<Vec<f32>>, PushReport);

fn step(tables: &dyn Tables, rank: u32, seq: u64) -> Step {
    let ids = ids(rank, seq);
    let (report, rows) = lookup(tables, token(rank, seq), Mode::Train, &DIMS, &ids).unwrap();
    let pushed = push(tables, token(rank, seq), &DIMS, &ids).unwrap();
    (report, rows, pushed)
}

fn bits(steps: &[Step]) -> Vec<(LookupReport, Vec<Vec<u32>>, PushReport)> {
    let of = |rows: &Vec<f32>| rows.iter().map(|value| value.to_bits()).collect();
    steps.iter().map(|(report, rows, pushed)| (*report, rows.iter().map(of).collect(), *pushed)).collect()
}

#[test]
fn any_number_of_servers_gives_the_bits_of_a_store_in_memory() {
    let reference = {
        let options = StoreOptions { capacity: CAPACITY, ..StoreOptions::default() };
        let store = Store::new(schema(), options).unwrap();
        store.begin(&run(&plan(1), 1)).unwrap();
        (1..=STEPS).map(|seq| step(&store, 0, seq)).collect::<Vec<_>>()
    };
    assert!(reference.iter().any(|(.., pushed)| pushed.rows_evicted > 0), "the test is to evict");
    assert!(reference.iter().any(|(.., pushed)| pushed.rows_expired > 0), "rows are to expire");
    for servers in [1, 3] {
        let stack = Stack::start(plan(servers));
        let client = stack.client();
        client.begin(&run(&stack.plan, 1)).unwrap();
        let steps: Vec<Step> = (1..=STEPS).map(|seq| step(&client, 0, seq)).collect();
        assert!(bits(&steps) == bits(&reference), "{servers} servers differ");
    }
}

pub(crate) fn sixteen_bits(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16_to_f32(f32_to_f16(value)),
        _ => f32::from_bits((value.to_bits() + 0x7FFF + (value.to_bits() >> 16 & 1)) & 0xFFFF_0000),
    }
}

#[test]
fn what_travels_as_sixteen_bits_is_rounded_once_each_way() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let options = StoreOptions { capacity: CAPACITY, ..StoreOptions::default() };
        let store = Store::new(schema(), options).unwrap();
        let stack = Stack::start(plan(3));
        let mut options = stack.options();
        options.wire_dtype = dtype;
        let client = WireTables::connect(options).unwrap();
        store.begin(&run(&stack.plan, 1)).unwrap();
        client.begin(&run(&stack.plan, 1)).unwrap();
        for seq in 1..=6 {
            let (ids, token) = (ids(0, seq), token(0, seq));
            let (report, rows) = lookup(&store, token, Mode::Train, &DIMS, &ids).unwrap();
            let rounded: Vec<Vec<f32>> = rows
                .iter()
                .map(|rows| rows.iter().map(|value| sixteen_bits(dtype, *value)).collect())
                .collect();
            assert!(
                lookup(&client, token, Mode::Train, &DIMS, &ids).unwrap() == (report, rounded),
                "{dtype:?}"
            );
            let pushed = push_as(&store, token, &DIMS, &ids, |value| sixteen_bits(dtype, value)).unwrap();
            assert_eq!(push(&client, token, &DIMS, &ids).unwrap(), pushed);
        }
        let infinite = |value: f32| if value < 0.3 { f32::INFINITY } else { value };
        let (ids, token) = (ids(0, 7), token(0, 7));
        let expected = {
            lookup(&store, token, Mode::Train, &DIMS, &ids).unwrap();
            push_as(&store, token, &DIMS, &ids, infinite).unwrap()
        };
        lookup(&client, token, Mode::Train, &DIMS, &ids).unwrap();
        assert!(expected.rows_nonfinite > 0);
        assert_eq!(push_as(&client, token, &DIMS, &ids, infinite).unwrap(), expected);
    }
}

/// Train with two ranks, each on its own thread, with different delays at every step.
fn two_ranks(servers: u32, haste: impl Fn(u32, u64) -> Duration + Copy + Send) -> Vec<Vec<Step>> {
    let stack = Stack::start(plan(servers));
    let zero = stack.client();
    zero.begin(&run(&stack.plan, 2)).unwrap();
    let one = WireTables::connect(stack.options()).unwrap();
    one.join(&stack.plan.job, 1);
    let ranks = [(0, zero), (1, one)];
    std::thread::scope(|scope| {
        let threads = ranks.iter().map(|(rank, client)| {
            scope.spawn(move || {
                let one_step = |seq| {
                    std::thread::sleep(haste(*rank, seq));
                    step(client, *rank, seq)
                };
                (1..=STEPS).map(one_step).collect::<Vec<_>>()
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn the_order_ranks_come_in_does_not_matter() {
    let millis = Duration::from_millis;
    let reference = two_ranks(1, |_, _| Duration::ZERO);
    let orders = [
        two_ranks(3, move |rank, _| millis(if rank == 0 { 15 } else { 0 })),
        two_ranks(2, move |rank, _| millis(if rank == 1 { 15 } else { 0 })),
        two_ranks(2, move |rank, seq| millis(if u64::from(rank) == seq % 2 { 15 } else { 0 })),
    ];
    for order in &orders {
        for (rank, (steps, expected)) in order.iter().zip(&reference).enumerate() {
            assert!(bits(steps) == bits(expected), "rank {rank} differs");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_and_may_still_come() {
    let stack = Stack::start(Plan { turn_timeout: Duration::from_millis(300), ..plan(2) });
    let mut options = stack.options();
    options.rpc_timeout = Duration::from_secs(2);
    let zero = WireTables::connect(options).unwrap();
    zero.begin(&run(&stack.plan, 2)).unwrap();
    let error = lookup(&zero, token(1, 1), Mode::Train, &DIMS, &ids(1, 1)).unwrap_err();
    assert!(matches!(error, TablesError::Timeout { .. }), "{error}");
    assert!(error.to_string().contains("missing: look-up of rank 0 for step 1"), "{error}");
    lookup(&zero, token(0, 1), Mode::Train, &DIMS, &ids(0, 1)).unwrap();
    lookup(&zero, token(1, 1), Mode::Train, &DIMS, &ids(1, 1)).unwrap();
    // Neither the retry of a served request nor an evaluation waits.
    lookup(&zero, token(0, 1), Mode::Train, &DIMS, &ids(0, 1)).unwrap();
    lookup(&zero, token(1, 7), Mode::Eval, &DIMS, &ids(1, 7)).unwrap();
    let error = lookup(&zero, token(2, 1), Mode::Train, &DIMS, &ids(0, 1)).unwrap_err();
    assert!(error.to_string().contains("the highest rank of the run is 1"), "{error}");
}

#[test]
fn several_servers_begin_and_restore_all_or_none() {
    let stack = Stack::start(plan(3));
    let client: Arc<WireTables> = Arc::new(stack.client());
    client.begin(&run(&stack.plan, 1)).unwrap();
    // There is one id, so two of the three servers hold no rows, and would accept another optimizer.
    let one = vec![vec![], vec![], vec![4]];
    push(client.as_ref(), token(0, 1), &DIMS, &one).unwrap();
    let sgd =
        Run { generation: 2, continues: 1, optimizer: run_of(&stack.plan).optimizer, ..run(&stack.plan, 1) };
    let error = client.begin(&sgd).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, TablesError::BadRun { .. }) && text.contains("of 3 at 127.0.0.1:"), "{text}");
    let generations: Vec<u64> =
        client.stats_by_server().unwrap().iter().map(|stats| stats.generation).collect();
    assert_eq!(generations, [1, 1, 1]);

    let ids = ids(0, 2);
    push(client.as_ref(), token(0, 2), &DIMS, &ids).unwrap();
    let snapshot = client.write_snapshot(stack.dir(), None).unwrap();
    push(client.as_ref(), token(0, 3), &DIMS, &ids).unwrap();
    let before = lookup(client.as_ref(), token(0, 3), Mode::Eval, &DIMS, &ids).unwrap();
    let path = stack.dir().join(&snapshot.files.last().unwrap().name);
    let mut damaged = std::fs::read(&path).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let error = client.restore(stack.dir(), &snapshot.files).unwrap_err();
    assert!(matches!(error, TablesError::Corrupt { .. }), "{error}");
    assert_eq!(lookup(client.as_ref(), token(0, 3), Mode::Eval, &DIMS, &ids).unwrap(), before);
}
