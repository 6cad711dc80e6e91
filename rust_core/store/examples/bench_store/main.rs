//! Compares the store with the limits of memory and disk: B1, B2, B6 and B7 of the performance goals.
//! `threads` compares several threads with one. `accesses`, which B2 also prints, compares a push with a loop over one
//! array that makes the same accesses and the same computation.
//!
//! `cargo run --release -p persia-store --example bench_store -- [--quick] [B1] [B2] [B6] [B7] [threads]
//! [DIM...]` prints one line of JSON per figure. `DIM` selects dimensions of B1 and B2.
//!
//! Each time is the median of many requests. Times are CPU nanoseconds per row, summed over all threads. In
//! `threads`, they are elapsed nanoseconds. `peer` is the raw operation on the same number of rows of the
//! same size, measured alternately with the store. In B7, `peer` is the limit or the smaller size. A higher
//! `ratio` is better. `spread` is half the interquartile range divided by the median. A figure with the key
//! `invalid` is not a result; the value is the reason.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, reason = "a program that measures")]

mod batches;
mod durable;
mod figures;
mod machine;
mod raw;
mod scale;
mod speed;
mod threads;

/// The size of a measurement.
pub(crate) struct Size {
    /// The number of rows, given the number of floats per row.
    rows: fn(usize) -> usize,
    /// The number of requests for each figure.
    repetitions: usize,
    /// The numbers of rows of B7, in ascending order.
    scales: &'static [usize],
}

const FULL: Size = Size {
    // The store and its peer are both in memory: at most 4 GiB each.
    rows: |floats| 10_000_000.min((4 << 30) / (floats * 4)),
    repetitions: 60,
    scales: &[100_000, 1_000_000, 10_000_000, 100_000_000],
};
const QUICK: Size = Size {
    rows: |floats| 2_000_000.min((512 << 20) / (floats * 4)),
    repetitions: 15,
    scales: &[100_000, 1_000_000, 4_000_000],
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let size = if arguments.iter().any(|argument| argument == "--quick") { QUICK } else { FULL };
    let named = |argument: &&String| argument.starts_with('B') || *argument == "threads";
    let chosen: Vec<&String> = arguments.iter().filter(named).collect();
    let wanted = |id: &str| chosen.is_empty() || chosen.iter().any(|chosen| *chosen == id);
    if wanted("B1") || wanted("B2") {
        let dims: Vec<usize> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
        for dim in [16, 64, 128].into_iter().filter(|dim| dims.is_empty() || dims.contains(dim)) {
            speed::measure(dim, &size, wanted("B1"), wanted("B2"));
        }
    }
    if wanted("B6") {
        durable::measure(&size);
    }
    if wanted("B7") {
        scale::measure(&size);
    }
    if wanted("threads") {
        threads::measure(&size);
    }
}
