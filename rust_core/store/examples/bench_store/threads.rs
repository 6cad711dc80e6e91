//! Compares requests that several threads divide with the same requests on one thread, by elapsed time.

use std::time::Instant;

use persia_types::{Mode, Optimizer};

use crate::Size;
use crate::batches::{BATCH, Bench, Random, group};
use crate::figures::{Samples, print};

const DIM: usize = 16;
const ADAM: Optimizer = Optimizer::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8 };

/// Measure with 2, 4, ... threads, up to the number of processors.
pub(crate) fn measure(size: &Size) {
    let rows = (size.rows)(3 * DIM);
    let alone = Bench::new(DIM, rows, ADAM);
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    for threads in (1..).map(|power| 1 << power).take_while(|threads| *threads <= processors) {
        let divided = Bench::divided(DIM, rows, ADAM, threads);
        let mut times = [(); 2].map(|()| [Samples::default(), Samples::default()]);
        let mut random = Random(11);
        for repetition in 0..size.repetitions + 2 {
            let ids = group(&random.distinct(BATCH, rows));
            for (bench, times) in [&divided, &alone].into_iter().zip(&mut times) {
                let elapsed = one(bench, &ids);
                if repetition >= 2 {
                    times.iter_mut().zip(elapsed).for_each(|(times, ns)| times.add(ns / ids.len() as f64));
                }
            }
        }
        let [own, one] = times;
        for ((kind, own), one) in ["look-up train", "adam, row indices known"].into_iter().zip(own).zip(one) {
            let case = format!("{kind}, dim {DIM}, {rows} rows, {threads} threads");
            let target = 0.8 * threads as f64;
            print("threads", &case, "ns a row", own.median(), one.median(), target, own.spread());
        }
    }
}

/// The nanoseconds of a look-up and of its push.
fn one(bench: &Bench, ids: &persia_types::ShardedIds) -> [f64; 2] {
    let mut out = vec![0.0; ids.len() * bench.dim];
    let seq = bench.next();
    let start = Instant::now();
    bench.lookup(seq, Mode::Train, ids, &mut out);
    let between = Instant::now();
    bench.push(seq, ids, &out);
    let end = Instant::now();
    [between - start, end - between].map(|time| time.as_nanos() as f64)
}
