//! B7: memory per row, and the cost of look-ups in tables of different sizes.

use persia_types::{Dtype, Mode, Optimizer, Table, TableSettings, Tables};

use crate::Size;
use crate::batches::{BATCH, Bench, Random, group};
use crate::figures::{Samples, print};
use crate::machine::cpu_ns;

const DIM: usize = 8;
const ROW_WISE: Optimizer = Optimizer::Adagrad {
    lr: 0.01,
    weight_decay: 0.0,
    initial_accumulator_value: 0.1,
    g_square_momentum: 1.0,
    eps: 1e-10,
    vectorwise_shared: true,
};

/// Measure the overhead, the memory (compared with 8 GiB for 10⁸ rows) and the cost of look-ups at every
/// size.
pub(crate) fn measure(size: &Size) {
    let mut at_a_million = None;
    for rows in size.scales {
        let start = cpu_ns();
        let settings = TableSettings { dtype: Dtype::F16, ..TableSettings::default() };
        let bench = Bench::of(Table { settings, ..Table::new("bench", DIM) }, *rows, ROW_WISE);
        let insertion = (cpu_ns() - start) / *rows as f64;
        let stats = bench.store.stats().expect("counters in memory");
        let overhead = (stats.memory_bytes - stats.payload_bytes) as f64 / *rows as f64;
        let case = format!("dim {DIM}, f16, row-wise adagrad, {rows} rows");
        print("B7", &format!("overhead, {case}"), "bytes a row", overhead, 40.0, 1.0, 0.0);
        let gib = stats.memory_bytes as f64 / f64::from(1 << 30);
        print("B7", &format!("memory, {case}"), "GiB", gib, 8.0 * *rows as f64 / 1e8, 1.0, 0.0);
        let times = time_lookups(&bench, *rows, size.repetitions);
        let lookup = times.median();
        if *rows == 1_000_000 {
            at_a_million = Some((lookup, insertion));
        }
        if let Some((lookup_then, insertion_then)) = at_a_million {
            print(
                "B7",
                &format!("look-up, {case}"),
                "CPU ns a row",
                lookup,
                lookup_then,
                0.5,
                times.spread(),
            );
            print("B7", &format!("insertion, {case}"), "CPU ns a row", insertion, insertion_then, 0.5, 0.0);
        }
    }
}

fn time_lookups(bench: &Bench, rows: usize, repetitions: usize) -> Samples {
    let mut random = Random(5);
    let mut out = vec![0.0; BATCH * DIM];
    let mut times = Samples::default();
    for repetition in 0..repetitions + 2 {
        let ids = group(&random.distinct(BATCH, rows));
        let start = cpu_ns();
        let seq = bench.next();
        bench.lookup(seq, Mode::Train, &ids, &mut out[..ids.len() * DIM]);
        let time = (cpu_ns() - start) / ids.len() as f64;
        bench.push(seq, &group(&[]), &[]);
        if repetition >= 2 {
            times.add(time);
        }
    }
    times
}
