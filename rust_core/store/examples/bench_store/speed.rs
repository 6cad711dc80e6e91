//! B1 and B2: compares look-ups and updates with raw reads and writes of the same number of rows.

use persia_types::{Mode, Optimizer, VIRTUAL_SHARDS};

use crate::Size;
use crate::batches::{BATCH, Bench, Random, group};
use crate::figures::{Figure, Samples};
use crate::machine::cpu_ns;
use crate::raw::RawRows;

const ADAGRAD: Optimizer = adagrad(false);
const ROW_WISE: Optimizer = adagrad(true);
const ADAM: Optimizer = Optimizer::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8 };

const fn adagrad(vectorwise_shared: bool) -> Optimizer {
    Optimizer::Adagrad {
        lr: 0.01,
        weight_decay: 0.0,
        initial_accumulator_value: 0.1,
        g_square_momentum: 1.0,
        eps: 1e-10,
        vectorwise_shared,
    }
}

/// Measure rows of `dim` weights.
pub(crate) fn measure(dim: usize, size: &Size, lookups: bool, updates: bool) {
    for (name, optimizer) in [("adagrad", ADAGRAD), ("row-wise adagrad", ROW_WISE), ("adam", ADAM)] {
        let first = name == "adagrad";
        if !first && !updates {
            continue;
        }
        let stride = dim + optimizer.state_len(dim);
        let rows = (size.rows)(stride);
        let bench = Bench::new(dim, rows, optimizer);
        let mut random = Random(7);
        let slots: Vec<Vec<u32>> = (0..5).map(|_| random.distinct(BATCH, rows)).collect();
        let raw = RawRows::new(rows, dim, &optimizer, &slots);
        let case = format!("dim {dim}, {rows} rows");
        if lookups && first {
            let target = if dim == 16 {
                0.3
            } else if dim == 64 {
                0.6
            } else {
                0.7
            };
            for (kind, mode, threads) in [
                ("eval", Mode::Eval, 1),
                ("eval", Mode::Eval, 2),
                ("train", Mode::Train, 1),
                ("train", Mode::Train, 2),
            ] {
                let (own, limit) = time_lookups(&bench, &raw, rows, size.repetitions, mode, threads);
                report("B1", &format!("look-up {kind}, {case}, {threads} threads"), &own, &limit, target);
            }
        }
        if updates {
            let mut raw = raw;
            let (known, searched) = match dim {
                16 => (0.8, 0.35),
                64 => (0.9, 0.65),
                _ => (0.9, 0.75),
            };
            for (kind, target) in [("row indices known", known), ("with the probe", searched)] {
                let known = kind == "row indices known";
                let [own, limit, same] = time_updates(&bench, &mut raw, &optimizer, size.repetitions, known);
                report("B2", &format!("{name}, {kind}, {case}, 1 threads"), &own, &limit, target);
                if known {
                    let target = if dim == 16 { 0.6 } else { 0.8 };
                    report("accesses", &format!("{name}, {case}, 1 threads"), &own, &same, target);
                }
            }
        }
    }
}

fn report(id: &str, case: &str, own: &Samples, limit: &Samples, target: f64) {
    let (value, peer, spread) = (own.median(), limit.median(), own.spread());
    Figure { id, case, unit: "CPU ns a row", value, peer, limited: true, target, spread }.print();
}

/// The CPU nanoseconds per row of the store and of the raw gather, measured alternately, with all threads
/// running.
fn time_lookups(
    bench: &Bench,
    raw: &RawRows,
    rows: usize,
    repetitions: usize,
    mode: Mode,
    threads: usize,
) -> (Samples, Samples) {
    let one = |thread: usize| {
        let mut random = Random(thread as u64);
        let mut out = vec![0.0; BATCH * bench.dim];
        let (mut own, mut limit) = (vec![], vec![]);
        for _ in 0..repetitions + 2 {
            let ids = group(&random.distinct(BATCH, rows));
            let slots = random.distinct(BATCH, rows);
            let out = &mut out[..ids.len() * bench.dim];
            let start = cpu_ns();
            raw.gather(&slots, out, bench.dim);
            let between = cpu_ns();
            let seq = bench.next();
            let report = bench.lookup(seq, mode, &ids, out);
            let end = cpu_ns();
            assert_eq!(report.hits, ids.len() as u64);
            bench.push(seq, &group(&[]), &[]);
            limit.push((between - start) / slots.len() as f64);
            own.push((end - between) / ids.len() as f64);
        }
        (own, limit)
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("a thread that measures")).collect()
    });
    let (mut own, mut limit) = (Samples::default(), Samples::default());
    for (own_times, limit_times) in results {
        own_times.iter().skip(2).for_each(|time| own.add(*time));
        limit_times.iter().skip(2).for_each(|time| limit.add(*time));
    }
    (own, limit)
}

/// Like [`time_lookups`], for pushes, raw read-modify-write, and [`RawRows::train`].
fn time_updates(
    bench: &Bench,
    raw: &mut RawRows,
    optimizer: &Optimizer,
    repetitions: usize,
    known: bool,
) -> [Samples; 3] {
    let mut random = Random(99);
    let gradients = vec![1e-3; BATCH * bench.dim];
    let mut out = vec![0.0; BATCH * bench.dim];
    let mut times = [(); 3].map(|()| Samples::default());
    for repetition in 0..repetitions + 2 {
        let rows = bench.rows;
        let ids = group(&random.distinct(BATCH, rows));
        let [slots, mut grouped, other] = [(); 3].map(|()| random.distinct(BATCH, rows));
        // The store processes a request by shard, each of which has its own memory.
        grouped.sort_by_key(|slot| *slot as usize * VIRTUAL_SHARDS / rows);
        let floats = ids.len() * bench.dim;
        let seq = bench.next();
        if known {
            bench.lookup(seq, Mode::Train, &ids, &mut out[..floats]);
        }
        // Evict the look-up's data from the caches, because a push comes several steps later.
        raw.gather(&other, &mut out, bench.dim);
        let mut clock = [cpu_ns(); 4];
        raw.update(&slots, &gradients, bench.dim);
        clock[1] = cpu_ns();
        let report = bench.push(seq, &ids, &gradients[..floats]);
        clock[2] = cpu_ns();
        raw.train(&grouped, &gradients, optimizer, bench.dim, repetition as f32);
        clock[3] = cpu_ns();
        assert_eq!(report.rows_applied, ids.len() as u64);
        if repetition >= 2 {
            times[0].add((clock[2] - clock[1]) / ids.len() as f64);
            times[1].add((clock[1] - clock[0]) / slots.len() as f64);
            times[2].add((clock[3] - clock[2]) / grouped.len() as f64);
        }
    }
    times
}
