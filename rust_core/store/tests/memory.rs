//! Tests the memory of rows beyond their payload, as counted by the store and by the operating system.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use std::path::Path;

use persia_types::tables::Run;
use persia_types::{Id, Optimizer, Tables};
use sample::{insert, run, store_of};

const ROW_WISE: Optimizer = Optimizer::Adagrad {
    lr: 0.1,
    weight_decay: 0.0,
    initial_accumulator_value: 0.1,
    g_square_momentum: 1.0,
    eps: 1e-10,
    vectorwise_shared: true,
};

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string(Path::new("/proc/self/statm")).unwrap();
    status.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// This is the only test in this program, because the operating system counts the memory of the whole
/// process.
#[test]
fn a_row_of_a_large_table_costs_at_most_40_bytes_beyond_its_payload_and_a_small_table_is_small() {
    let store = store_of(&Run { optimizer: Some(ROW_WISE), ..run(&[8, 8, 8]) }, 1_000_000_000);
    let before = (store.stats().unwrap().memory_bytes, resident_bytes());
    let sizes = [256u64, 20_000, 500_000].into_iter().chain((1_000_000..=3_000_000).step_by(50_000));
    let (mut rows, mut seq) = (0, 0);
    for size in sizes {
        while rows < size {
            let ids: Vec<Id> = (rows..size.min(rows + 50_000)).collect();
            (rows, seq) = (rows + ids.len() as u64, seq + 1);
            insert(&store, seq, 0, &ids);
        }
        let stats = store.stats().unwrap();
        assert_eq!(stats.payload_bytes, rows * 9 * 4);
        let overhead = stats.memory_bytes - before.0 - stats.payload_bytes;
        if rows < 1_000_000 {
            assert!(
                overhead <= 256 * (16 << 10) || overhead <= 40 * rows,
                "{overhead} bytes in addition to {rows} rows"
            );
        } else {
            assert!(
                overhead <= 40 * rows,
                "{} bytes per row in addition to its payload at {rows}",
                overhead as f64 / rows as f64
            );
        }
    }
    let resident = resident_bytes() - before.1;
    let counted = store.stats().unwrap().memory_bytes - before.0;
    // Resident memory that is not counted consists of buffers of the request and memory that the allocator
    // keeps.
    assert!(resident < counted + (48 << 20), "{resident} bytes resident, {counted} counted");
    store.clear().unwrap();
    assert!(store.stats().unwrap().memory_bytes <= before.0);
    assert!(resident_bytes() < before.1 + counted / 2, "cleared tables free their memory");
}
