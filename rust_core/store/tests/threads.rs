//! Tests that requests give the same bits for every number of threads that divide them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sample;

use persia_kernels::{Csr, Gradients, SegmentSum};
use persia_store::checkpoint::ShardRows;
use persia_store::{Store, StoreOptions};
use persia_types::tables::{
    LookupReport, LookupRequest, PerSample, PushReport, PushRequest, Run, TableGradients, TableIds,
};
use persia_types::{
    Admission, Dtype, Id, Initializer, Mode, Optimizer, Rounding, Schema, ShardedIds, TableSettings, Tables,
    TablesError, VIRTUAL_SHARDS,
};
use sample::{grouped, run, schema, token};

const DIMS: [usize; 3] = [4, 19, 8];
/// The number of samples of a request, which is enough for several parts.
const SAMPLES: usize = 24_000;
const STEPS: u64 = 6;

/// Tables with everything that depends on a row's shard: 16-bit rows with stochastic rounding, admission by
/// probability and by count, expiry, and fewer rows than ids.
fn configured() -> Run {
    let mut schema: Schema = schema(&DIMS);
    schema.tables[1].settings = TableSettings {
        dtype: Dtype::Bf16,
        rounding: Rounding::Stochastic,
        admission: Some(Admission { probability: 0.7, min_count: 2 }),
        ..TableSettings::default()
    };
    schema.tables[2].settings.ttl = Some(2);
    let optimizer = Optimizer::Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.01, eps: 1e-8 };
    Run {
        schema,
        optimizer: Some(optimizer),
        initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
        ..run(&[])
    }
}

fn store_of(threads: usize, capacity: u64) -> Store {
    let run = configured();
    let options = StoreOptions { capacity, request_threads: threads, ..StoreOptions::default() };
    let store = Store::new(run.schema.clone(), options).unwrap();
    store.begin(&run).unwrap();
    store
}

/// The ids of a step, of which every seventh occurs twice, and the samples that use each id.
fn used(step: u64) -> (ShardedIds, Vec<u32>, Vec<u32>) {
    let of_samples: Vec<Id> =
        (0..SAMPLES as u64).map(|sample| (sample - sample % 8 / 7) * 31 + step % 3 * 9_000).collect();
    let mut unique = of_samples.clone();
    unique.sort_unstable();
    unique.dedup();
    let ids = grouped(&unique);
    let mut of_ids = std::collections::HashMap::<Id, Vec<u32>>::new();
    for (sample, id) in of_samples.iter().enumerate() {
        of_ids.entry(*id).or_default().push(sample as u32);
    }
    let (mut starts, mut samples) = (vec![0], Vec::new());
    for id in ids.ids() {
        samples.extend(&of_ids[id]);
        starts.push(samples.len() as u32);
    }
    (ids, starts, samples)
}

/// The gradient at a position and step. A few gradients are NaN and therefore not applied.
fn gradient(place: usize, step: u64) -> f32 {
    match (place as u64 * 7_919 + step * 104_729) % 100_003 {
        0 => f32::NAN,
        number => number as f32 / 5e4 - 1.0,
    }
}

/// The results of some steps of training: the bits of all rows read, the reports, and the content of the
/// store.
type Shown = (Vec<Vec<u32>>, Vec<LookupReport>, Vec<PushReport>, Vec<ShardRows>);

fn trained(threads: usize, capacity: u64, by_sample: bool) -> Shown {
    let store = store_of(threads, capacity);
    let (mut bits, mut lookups, mut pushes) = (vec![], vec![], vec![]);
    for step in 1..=STEPS {
        let (ids, starts, samples) = used(step);
        let csr = Csr { offsets: &starts, indices: &samples };
        let per_sample = by_sample.then_some(PerSample::Gathered(csr));
        let rows = if by_sample { SAMPLES } else { ids.len() };
        let mut outs = DIMS.map(|dim| vec![f32::NAN; rows * dim]);
        let tables = [0, 1, 2].map(|table| TableIds { table, ids: &ids, per_sample });
        let request = LookupRequest { token: token(0, step), step, mode: Mode::Train, tables: &tables };
        lookups.push(store.lookup(&request, &mut outs.each_mut().map(Vec::as_mut_slice)).unwrap());
        bits.extend(outs.iter().map(|out| out.iter().map(|weight| weight.to_bits()).collect()));

        let floats = if by_sample { SAMPLES } else { ids.len() };
        let gradients =
            DIMS.map(|dim| (0..floats * dim).map(|place| gradient(place, step)).collect::<Vec<_>>());
        let tables = [0, 1, 2].map(|table| {
            let (dim, gradients) = (DIMS[table], &gradients[table]);
            let sums =
                SegmentSum { gradients, dim, csr, factors: None, per_sample_weights: None, scale: 0.5 };
            let gradients = if by_sample { Gradients::Samples(sums) } else { Gradients::Rows(gradients) };
            TableGradients { table, ids: &ids, gradients }
        });
        // Every other push has another token than its look-up, so that it searches for its rows.
        let token = token((step % 2) as u32, step);
        pushes.push(store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables }).unwrap());
    }
    (bits, lookups, pushes, (0..VIRTUAL_SHARDS).map(|shard| store.export_shard(shard)).collect())
}

#[test]
fn every_number_of_threads_gives_the_same_bits() {
    for (capacity, by_sample) in [(1 << 30, false), (1 << 30, true), (40_000, false)] {
        let one = trained(1, capacity, by_sample);
        let mut sum = PushReport::default();
        one.2.iter().for_each(|report| sum += *report);
        let full = capacity == 40_000;
        assert!(sum.rows_inserted > 0 && sum.rows_missing > 0 && sum.rows_nonfinite > 0, "{sum:?}");
        assert!(if full { sum.rows_evicted > 0 } else { sum.rows_expired > 0 }, "{sum:?}");
        for threads in [2, 3, 8] {
            assert!(
                trained(threads, capacity, by_sample) == one,
                "{threads} threads, {capacity}, {by_sample}"
            );
        }
    }
}

#[test]
fn a_sample_with_two_rows_is_refused() {
    let store = store_of(2, 1 << 30);
    let (ids, starts, mut samples) = used(1);
    samples[7] = samples[9_000];
    let per_sample = Some(PerSample::Gathered(Csr { offsets: &starts, indices: &samples }));
    let tables = [TableIds { table: 0, ids: &ids, per_sample }];
    let request = LookupRequest { token: token(0, 1), step: 1, mode: Mode::Train, tables: &tables };
    let refused = store.lookup(&request, &mut [&mut vec![0.0; SAMPLES * DIMS[0]]]);
    let message = format!("table table_0: sample {} occurs twice", samples[7]);
    assert!(matches!(&refused, Err(TablesError::BadShape { what }) if *what == message), "{refused:?}");
}

#[test]
fn threads_that_divide_requests_lose_no_update() {
    let store =
        Store::new(schema(&[2]), StoreOptions { request_threads: 3, ..StoreOptions::default() }).unwrap();
    store.begin(&run(&[2])).unwrap();
    let ids = grouped(&(0..20_000).collect::<Vec<_>>());
    let gradients = vec![1.0; ids.len() * 2];
    std::thread::scope(|threads| {
        for rank in 0..4 {
            let (store, ids, gradients) = (&store, &ids, &gradients);
            threads.spawn(move || {
                let mut out = vec![0.0; ids.len() * 2];
                for step in 1..=10 {
                    let tables = [TableIds { table: 0, ids, per_sample: None }];
                    let token = token(rank, step);
                    let request = LookupRequest { token, step, mode: Mode::Train, tables: &tables };
                    store.lookup(&request, &mut [&mut out]).unwrap();
                    let tables = [TableGradients { table: 0, ids, gradients: Gradients::Rows(gradients) }];
                    store.push(&PushRequest { token, step, lr_factor: 1.0, tables: &tables }).unwrap();
                }
            });
        }
    });
    let rows = sample::all_rows(&store);
    assert_eq!(rows.len(), ids.len());
    assert!(
        rows.values().all(|row| row.1.iter().all(|weight| *weight == -40.0)),
        "4 ranks, 10 steps, gradient 1"
    );
}
