//! Measures the engine's loops, and then whole embedding steps on the store. The workload is that of the
//! benchmarks: 26 features with ids below 100,000, batches of 4,096 samples, 1 or 10 ids per sample, uniform and
//! Zipf distributions, and the dimensions 16, 64 and 128.
//!
//! `cargo run --release -p persia-engine --example bench_engine [-- DIM [L]]`
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints its result and stops at the first error"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use persia_engine::{
    Batch, BatchParts, DrainOutcome, Engine, EngineOptions, FeedOutcome, Gradient, IdFeature, Next,
    PushOptions, StageTime,
};
use persia_kernels::{Bags, Pool, SegmentSum};
use persia_store::{Store, StoreOptions};
use persia_types::id::hash_id;
use persia_types::schema::{Initializer, Optimizer, Schema, Slot, Table};
use persia_types::tables::{Run, Tables};
use rustix::time::{ClockId, clock_gettime};

const FEATURES: usize = 26;
const IDS: usize = 100_000;
const BATCH: usize = 4_096;
const ZIPF_EXPONENT: f64 = 1.05;
const WAIT: Duration = Duration::from_secs(60);

/// A small random number generator, because the benchmark must draw the same ids on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        hash_id(self.0)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The fraction of draws at or below each rank of the Zipf distribution.
fn zipf() -> Vec<f64> {
    let mut sum = 0.0;
    let mut shares: Vec<f64> = (1..=IDS)
        .map(|rank| {
            sum += (rank as f64).powf(-ZIPF_EXPONENT);
            sum
        })
        .collect();
    shares.iter_mut().for_each(|share| *share /= sum);
    shares
}

/// Draw the ids of one feature of one batch. They are scrambled so that frequent ids are not adjacent.
fn draw(random: &mut Random, zipf: Option<&[f64]>, feature: usize, count: usize) -> Vec<u64> {
    let one = |random: &mut Random| {
        let rank = match zipf {
            None => (random.next() % IDS as u64) as usize,
            Some(shares) => {
                let unit = random.unit();
                shares.partition_point(|share| *share < unit).min(IDS - 1)
            }
        };
        hash_id((feature * IDS + rank) as u64)
    };
    (0..count).map(|_| one(random)).collect()
}

fn build(name: String, ids: &[u64], per_sample: usize) -> IdFeature {
    if per_sample == 1 {
        return IdFeature::single(name, ids).unwrap();
    }
    let offsets: Vec<usize> = (0..=BATCH).map(|sample| sample * per_sample).collect();
    IdFeature::lists(name, ids, &offsets).unwrap()
}

/// The processor time in nanoseconds. Other load on the machine influences it less than wall time.
fn processor_time(of: ClockId) -> f64 {
    let time = clock_gettime(of);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// The processor time of this thread so far.
fn now() -> f64 {
    processor_time(ClockId::ThreadCPUTime)
}

/// Format the median and the best time. Other load on the machine changes the best time least.
fn summary(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    format!("{:5.1} ({:5.1})", values[values.len() / 2], values[0])
}

fn batches(zipf: Option<&[f64]>, per_sample: usize, count: usize) -> Vec<Vec<Vec<u64>>> {
    let mut random = Random(1);
    (0..count)
        .map(|_| (0..FEATURES).map(|f| draw(&mut random, zipf, f, BATCH * per_sample)).collect())
        .collect()
}

fn case(dim: usize, per_sample: usize, name: &str, batches: &[Vec<Vec<u64>>], repeats: usize) {
    let ids = (FEATURES * BATCH * per_sample) as f64;
    // As in the engine, the rows and outputs of all features are in memory at the same time.
    let rows: Vec<Vec<f32>> = (0..FEATURES).map(|_| vec![0.5; BATCH * per_sample * dim]).collect();
    let mut outputs: Vec<Vec<f32>> = (0..FEATURES).map(|_| vec![0.5; BATCH * dim]).collect();
    let mut sums = rows.clone();
    let [mut dedup, mut pool, mut segment, mut codec] = [const { Vec::new() }; 4];
    let mut unique = 0;
    for repeat in 0..repeats {
        let batch = &batches[repeat % batches.len()];
        let start = now();
        let id_features: Vec<IdFeature> =
            batch.iter().enumerate().map(|(i, ids)| build(format!("f{i}"), ids, per_sample)).collect();
        dedup.push((now() - start) / ids);
        let batch = Batch::new(BatchParts { id_features, ..Default::default() }).unwrap();

        let start = now();
        for ((feature, rows), out) in batch.id_features().iter().zip(&rows).zip(&mut outputs) {
            let (indices, offsets) = (feature.inverse(), feature.offsets());
            let bags = Bags { indices, offsets, per_sample_weights: None, divisors: None };
            persia_kernels::pool(&Pool { rows, dim, bags }, out);
        }
        pool.push((now() - start) / ids);

        let start = now();
        for ((feature, gradients), sum) in batch.id_features().iter().zip(&outputs).zip(&mut sums) {
            let input = SegmentSum {
                gradients,
                dim,
                csr: feature.csr(),
                factors: None,
                per_sample_weights: None,
                scale: 1.0,
            };
            persia_kernels::segment_sum(&input, 0, &mut sum[..feature.unique().len() * dim]);
        }
        segment.push((now() - start) / ids);
        unique = batch.id_features().iter().map(|feature| feature.unique().len()).sum();

        let start = now();
        black_box(Batch::from_bytes(&batch.to_bytes().unwrap()).unwrap());
        codec.push((now() - start) / ids);
    }
    black_box((&outputs, &sums));
    let [dedup, pool, segment, codec] = [dedup, pool, segment, codec].map(summary);
    println!(
        "{dim:3}  {per_sample:2}  {name:7}  {:6.2}  {dedup}  {pool}  {segment}  {codec}",
        unique as f64 / ids
    );
}

fn schema(dim: usize) -> Schema {
    let name = |i: usize| format!("f{i}");
    let slot = |i| Slot { name: name(i), table: i, ..Slot::default() };
    Schema {
        slots: (0..FEATURES).map(slot).collect(),
        tables: (0..FEATURES).map(|i| Table::new(name(i), dim)).collect(),
    }
}

fn begun_store(dim: usize, vectorwise_shared: bool) -> Arc<Store> {
    let store = Store::new(schema(dim), StoreOptions::default()).unwrap();
    let optimizer = Optimizer::Adagrad {
        lr: 0.01,
        weight_decay: 0.0,
        initial_accumulator_value: 0.01,
        g_square_momentum: 1.0,
        eps: 1e-10,
        vectorwise_shared,
    };
    let run = Run {
        job: "persia".into(),
        generation: 1,
        schema: schema(dim),
        seed: 1,
        optimizer: Some(optimizer),
        initializer: Initializer::Uniform { low: -0.01, high: 0.01 },
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 10.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    };
    store.begin(&run).unwrap();
    Arc::new(store)
}

/// The gradient of one feature, shared between steps.
struct Shared(Arc<Vec<f32>>);

impl AsRef<[f32]> for Shared {
    fn as_ref(&self) -> &[f32] {
        &self.0
    }
}

/// Measure whole steps on the store, without a model: deduplicate, look up, pool, sum gradients, update.
fn steps(dim: usize, per_sample: usize, name: &str, batches: &[Vec<Vec<u64>>], repeats: usize) {
    for (optimizer, row_wise) in [("adagrad", false), ("row-wise", true)] {
        let engine = Engine::new(begun_store(dim, row_wise), schema(dim), EngineOptions::default()).unwrap();
        let pipeline = engine.pipeline().unwrap();
        let gradients: Vec<_> = (0..FEATURES).map(|_| Arc::new(vec![1e-3; BATCH * dim])).collect();
        let step = |batch: &Vec<Vec<u64>>| {
            let id_features =
                batch.iter().enumerate().map(|(i, ids)| build(format!("f{i}"), ids, per_sample)).collect();
            let parts = BatchParts { id_features, requires_grad: true, ..Default::default() };
            assert!(matches!(pipeline.feed(Batch::new(parts).unwrap(), WAIT), Ok(FeedOutcome::Accepted)));
            let Next::Ready(looked) = pipeline.next(WAIT).unwrap() else { panic!("no batch in {WAIT:?}") };
            let shared =
                gradients.iter().map(|gradient| Some(Box::new(Shared(gradient.clone())) as Gradient));
            looked.ticket.unwrap().push(shared.collect(), PushOptions::default()).unwrap();
            assert_eq!(engine.drain(WAIT).unwrap(), DrainOutcome::Done);
        };
        batches.iter().for_each(step); // after this, every id has a row and every buffer has been used
        let before = engine.stats();
        let ids = (FEATURES * BATCH * per_sample) as f64;
        let mut spent = Vec::new();
        for repeat in 0..repeats {
            let start = processor_time(ClockId::ProcessCPUTime);
            step(&batches[repeat % batches.len()]);
            spent.push((processor_time(ClockId::ProcessCPUTime) - start) / ids);
        }
        let stats = engine.stats();
        let clock = |after: StageTime, before: StageTime| {
            (after.total - before.total).as_nanos() as f64 / (ids * repeats as f64)
        };
        println!(
            "{dim:3}  {per_sample:2}  {name:7}  {optimizer:8}  {}  {:11.1}  {:7.1}  {:4.1}  {:11.1}  {:4.1}",
            summary(spent),
            clock(stats.deduplicate, before.deduplicate),
            clock(stats.lookup, before.lookup),
            clock(stats.pool, before.pool),
            clock(stats.segment_sum, before.segment_sum),
            clock(stats.push, before.push),
        );
    }
}

fn main() {
    let only: Vec<usize> = std::env::args().skip(1).map(|argument| argument.parse().unwrap()).collect();
    let chosen = |place: usize, value: usize| only.get(place).is_none_or(|only| *only == value);
    let shares = zipf();
    for whole in [false, true] {
        if whole {
            println!("whole steps, nanoseconds per id: processor time, median (best); then wall-clock time");
            println!(
                "dim   L  ids      optimizer  whole step     deduplicate  look up  pool  segment sum  push"
            );
        } else {
            println!("nanoseconds of processor time per id, median (best)");
            println!(
                "dim   L  ids      unique  deduplicate    pool           segment sum    encode + decode"
            );
        }
        for per_sample in [1, 10].into_iter().filter(|per_sample| chosen(1, *per_sample)) {
            let (count, repeats) = if per_sample == 1 { (32, 100) } else { (6, 24) };
            for (name, zipf) in [("uniform", None), ("zipf", Some(shares.as_slice()))] {
                let batches = batches(zipf, per_sample, count);
                for dim in [16, 64, 128].into_iter().filter(|dim| chosen(0, *dim)) {
                    let run = if whole { steps } else { case };
                    run(dim, per_sample, name, &batches, repeats);
                }
            }
        }
    }
}
