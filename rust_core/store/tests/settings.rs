//! Tests of the settings of a table: dtype, rounding, optimizer, initializer, admission, time to live.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use persia_kernels::Gradients;
use persia_store::{Store, StoreOptions};
use persia_types::tables::{LookupReport, Run};
use persia_types::{
    Admission, Dtype, Id, Initializer, Mode, Optimizer, Rounding, TableSettings, Tables, TablesError,
};
use sample::{
    all_rows, export, grouped, insert, push, read, run, store_of, token, train, try_lookup, try_push,
};

const ROW_WISE: Optimizer = Optimizer::Adagrad {
    lr: 0.1,
    weight_decay: 0.0,
    initial_accumulator_value: 0.25,
    g_square_momentum: 1.0,
    eps: 1e-10,
    vectorwise_shared: true,
};

fn with(settings: &[TableSettings], dims: &[usize]) -> Run {
    let mut run = run(dims);
    for (table, settings) in run.schema.tables.iter_mut().zip(settings) {
        table.settings = *settings;
    }
    run
}

fn halves(dtype: Dtype, rounding: Rounding) -> TableSettings {
    TableSettings { dtype, rounding, ..TableSettings::default() }
}

#[test]
fn every_table_has_its_own_optimizer_and_initialiser() {
    let own = TableSettings {
        optimizer: Some(ROW_WISE),
        initializer: Some(Initializer::Uniform { low: 2.0, high: 2.0 }),
        ..TableSettings::default()
    };
    let store = store_of(&with(&[TableSettings::default(), own], &[2, 3]), 1 << 20);
    for table in [0, 1] {
        train(&store, 1 + table as u64, table, &[5]);
        push(&store, 1 + table as u64, table, &[5], 0.5);
    }
    let rows = all_rows(&store);
    assert_eq!(rows[&(0, 5)], (1, vec![-0.5; 2], vec![]));
    let (_, weights, state) = &rows[&(1, 5)];
    assert_eq!((&weights[..], &state[..]), (&[2.0 - 0.1 * 0.5 / 0.5; 3][..], &[0.5][..]));
    // The factor of a push multiplies both learning rates.
    for table in [0, 1] {
        train(&store, 3 + table as u64, table, &[5]);
    }
    let gradients = [vec![1.0; 2], vec![1.0; 3]];
    let parts = [(0, grouped(&[5])), (1, grouped(&[5]))];
    let tables: Vec<_> = parts
        .iter()
        .zip(&gradients)
        .map(|((table, ids), gradients)| persia_types::tables::TableGradients {
            table: *table,
            ids,
            gradients: Gradients::Rows(gradients),
        })
        .collect();
    let request =
        persia_types::tables::PushRequest { token: token(0, 3), step: 3, lr_factor: 0.0, tables: &tables };
    assert_eq!(store.push(&request).unwrap().rows_applied, 2);
    assert_eq!(all_rows(&store)[&(0, 5)].1, [-0.5; 2]);
    assert_eq!(all_rows(&store)[&(1, 5)].1, *weights);
}

#[test]
fn evaluation_trains_no_table_whatever_its_settings_say() {
    let own = TableSettings { optimizer: Some(ROW_WISE), ..TableSettings::default() };
    let store = store_of(&Run { optimizer: None, ..with(&[own], &[2]) }, 1 << 20);
    let error = try_lookup(&store, token(0, 1), 1, Mode::Train, &[(0, grouped(&[1]))]).unwrap_err();
    assert!(matches!(error, TablesError::NoOptimizer), "{error}");
    let error = try_push(&store, token(0, 1), 1, &[(0, grouped(&[1]))], &[vec![0.0; 2]]).unwrap_err();
    assert!(matches!(error, TablesError::NoOptimizer), "{error}");
}

/// The result equals that of an f32 row that is rounded after each update, for even and odd dimensions.
#[test]
fn a_row_of_halves_is_updated_in_f32_and_rounded_once() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for dim in [1, 2, 7, 8, 16, 33] {
            let initializer = Some(Initializer::Normal { mean: 0.0, std: 1.0 });
            let optimizer = Some(ROW_WISE);
            let own = TableSettings { initializer, optimizer, ..halves(dtype, Rounding::Nearest) };
            let store = store_of(&with(&[own], &[dim]), 1 << 20);
            let ids: Vec<Id> = (0..500).collect();
            let (_, first) = train(&store, 1, 0, &ids);
            let mut expected: Vec<f32> = first.clone();
            assert!(
                first.iter().all(|weight| rounded(dtype, *weight) == *weight),
                "look-ups return rounded weights"
            );
            let mut sums = vec![0.25f32; ids.len()];
            for seq in 1..=3 {
                push(&store, seq, 0, &ids, 0.375);
                for (row, sum) in expected.chunks_mut(dim).zip(&mut sums) {
                    let root = (*sum + 1e-10).sqrt();
                    row.iter_mut().for_each(|w| *w = rounded(dtype, *w - 0.1 * 0.375 / root));
                    *sum += 0.375 * 0.375;
                }
                let (_, rows) = train(&store, seq + 1, 0, &ids);
                assert_eq!(rows, expected, "{dtype:?} of dim {dim}, step {seq}");
            }
            let payload = store.stats().unwrap().payload_bytes;
            assert_eq!(payload, ids.len() as u64 * (2 * dim as u64 + 4));
        }
    }
}

/// The nearest value of the type, computed in f64. The distance between neighboring values is a power of two.
fn rounded(dtype: Dtype, number: f32) -> f32 {
    let (bits, least) = if dtype == Dtype::F16 { (10, -14) } else { (7, -126) };
    let exponent = (f64::from(number).abs().log2().floor() as i32).max(least);
    let distance = 2f64.powi(exponent - bits);
    ((f64::from(number) / distance).round_ties_even() * distance) as f32
}

#[test]
fn nearest_rounding_loses_small_updates_and_stochastic_rounding_keeps_their_mean() {
    const STEPS: u64 = 50;
    let ids: Vec<Id> = (0..2_000).collect();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let mean = |rounding| {
            let initializer = Some(Initializer::Uniform { low: 1.0, high: 1.0 });
            let own = TableSettings { initializer, ..halves(dtype, rounding) };
            let store = store_of(&with(&[own], &[8]), 1 << 20);
            for seq in 1..=STEPS {
                train(&store, seq, 0, &ids);
                push(&store, seq, 0, &ids, -1e-4);
            }
            let rows = all_rows(&store);
            let sum: f64 = rows.values().flat_map(|row| &row.1).map(|weight| f64::from(*weight)).sum();
            sum / (8 * ids.len()) as f64
        };
        assert_eq!(mean(Rounding::Nearest), 1.0);
        let drifted = mean(Rounding::Stochastic) - 1.0;
        assert!((drifted - 1e-4 * STEPS as f64).abs() < 2e-4, "{dtype:?}: {drifted}");
    }
}

#[test]
fn stochastic_rounding_does_not_depend_on_the_order_of_requests() {
    let own = TableSettings {
        initializer: Some(Initializer::Normal { mean: 0.0, std: 1.0 }),
        ..halves(Dtype::F16, Rounding::Stochastic)
    };
    let run = with(&[own], &[9]);
    let ids: Vec<Id> = (0..3_000).collect();
    let whole = store_of(&run, 1 << 20);
    // This store gets the same ids in several requests, in reverse order.
    let parts = store_of(&run, 1 << 20);
    for step in 1..=3u64 {
        train(&whole, step, 0, &ids);
        push(&whole, step, 0, &ids, 0.01);
        for (part, chunk) in ids.chunks(371).rev().enumerate() {
            let token = token(0, 100 * step + part as u64);
            let part = [(0, grouped(chunk))];
            try_lookup(&parts, token, step, Mode::Train, &part).unwrap();
            try_push(&parts, token, step, &part, &[vec![0.01; chunk.len() * 9]]).unwrap();
        }
    }
    assert_eq!(export(&whole), export(&parts));
    let other = store_of(&Run { seed: 8, ..run }, 1 << 20);
    for step in 1..=3 {
        push(&other, step, 0, &ids, 0.01);
    }
    assert_ne!(export(&whole), export(&other));
}

#[test]
fn a_checkpoint_fits_tables_of_every_dtype() {
    let of = |dtype| {
        let initializer = Some(Initializer::Normal { mean: 0.0, std: 1.0 });
        let optimizer = Some(ROW_WISE);
        with(&[TableSettings { initializer, optimizer, ..halves(dtype, Rounding::Nearest) }], &[5])
    };
    let ids: Vec<Id> = (0..1_000).collect();
    for from in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let store = store_of(&of(from), 1 << 20);
        train(&store, 1, 0, &ids);
        push(&store, 1, 0, &ids, 0.5);
        let dir = tempfile::tempdir().unwrap();
        let files = store.write_snapshot(dir.path(), None).unwrap().files;
        for to in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let loaded = store_of(&of(to), 1 << 20);
            loaded.restore(dir.path(), &files).unwrap();
            let before = all_rows(&store);
            for (key, (last_used, weights, state)) in all_rows(&loaded) {
                let (used, held, kept) = &before[&key];
                assert_eq!((last_used, &state), (*used, kept));
                let expected: Vec<f32> = match to {
                    Dtype::F32 => held.clone(),
                    _ => held.iter().map(|weight| rounded(to, *weight)).collect(),
                };
                assert_eq!(weights, expected, "{from:?} to {to:?}");
            }
            assert_eq!(loaded.stats().unwrap().rows, [1_000]);
        }
    }
}

#[test]
fn counts_and_ages_survive_a_restore() {
    let own = TableSettings {
        admission: Some(Admission { probability: 1.0, min_count: 3 }),
        ttl: Some(10),
        ..TableSettings::default()
    };
    let run = with(&[own], &[2]);
    let store = store_of(&run, 1 << 20);
    for seq in 1..=3 {
        let ids: Vec<Id> = (0..100 * seq).collect();
        insert(&store, seq, 0, &ids);
    }
    assert_eq!(store.stats().unwrap().rows, [100]);
    let dir = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(dir.path(), None).unwrap().files;
    let loaded = store_of(&run, 1 << 20);
    loaded.restore(dir.path(), &files).unwrap();
    assert_eq!(export(&loaded), export(&store));
    // Ids 100 to 199 were pushed at steps 2 and 3. The third push inserts their rows.
    let ids: Vec<Id> = (0..200).collect();
    for store in [&store, &loaded] {
        assert_eq!(train(store, 4, 0, &ids).0, LookupReport { hits: 100, initial: 100, missing: 0 });
        let report = insert(store, 4, 0, &ids);
        assert_eq!((report.rows_applied, report.rows_inserted), (200, 100));
        // All rows are now expired, and pushes of their ids are counted from 1 again.
        let report = insert(store, 15, 0, &ids);
        assert_eq!((report.rows_applied, report.rows_missing, report.rows_expired), (0, 200, 200));
    }
    assert_eq!(export(&loaded), export(&store));
}

#[test]
fn an_expired_row_reads_as_missing_and_its_next_push_inserts_another() {
    let own = TableSettings { ttl: Some(5), ..TableSettings::default() };
    let run = Run { initializer: Initializer::Uniform { low: 1.0, high: 2.0 }, ..with(&[own], &[1]) };
    let store = store_of(&run, 1 << 20);
    let (_, first) = train(&store, 1, 0, &[7]);
    push(&store, 1, 0, &[7], 0.25);
    let at =
        |step| try_lookup(&store, token(0, 99), step, Mode::Eval, &[(0, grouped(&[7]))]).unwrap().1[0][0];
    assert_eq!((at(1), at(6), at(7)), (first[0] - 0.25, first[0] - 0.25, 0.0));
    // A push renews a row that has not expired. A look-up does not.
    assert_eq!(train(&store, 4, 0, &[7]).0.hits, 1);
    assert_eq!(at(7), 0.0);
    push(&store, 6, 0, &[7], 0.0);
    assert_eq!((at(11), at(12)), (first[0] - 0.25, 0.0));
    let (report, row) = train(&store, 12, 0, &[7]);
    assert_eq!(report, LookupReport { initial: 1, ..LookupReport::default() });
    assert_eq!(row, first);
    let report = push(&store, 12, 0, &[7], 0.5);
    assert_eq!((report.rows_applied, report.rows_inserted, report.rows_expired), (1, 1, 1));
    assert_eq!((at(12), at(17), at(18)), (first[0] - 0.5, first[0] - 0.5, 0.0));
}

#[test]
fn expired_rows_are_freed_within_256_steps() {
    let own = TableSettings { ttl: Some(3), ..TableSettings::default() };
    let store = store_of(&with(&[own], &[4]), 1 << 20);
    insert(&store, 1, 0, &(0..50_000).collect::<Vec<_>>());
    // Push ids of every shard until each shard has been swept.
    for step in 2..=261 {
        insert(&store, step, 0, &(1 << 40..(1 << 40) + 3_000).collect::<Vec<_>>());
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.rows[0], stats.pushes.rows_expired, stats.pushes.rows_evicted), (3_000, 50_000, 0));
}

/// The payload is 20 bytes. The overhead is at most 40 bytes at 10⁶ rows, and less with more rows.
#[test]
fn a_small_row_of_halves_costs_its_payload_and_at_most_40_bytes() {
    let own = TableSettings { optimizer: Some(ROW_WISE), ..halves(Dtype::F16, Rounding::Nearest) };
    let run = with(&[own], &[8]);
    let store = Store::new(run.schema.clone(), StoreOptions::default()).unwrap();
    store.begin(&run).unwrap();
    const ROWS: u64 = 1_000_000;
    for (seq, start) in (1..).zip((0..ROWS).step_by(50_000)) {
        insert(&store, seq, 0, &(start..start + 50_000).collect::<Vec<_>>());
    }
    let stats = store.stats().unwrap();
    assert_eq!(stats.payload_bytes, 20 * ROWS);
    assert!(stats.memory_bytes <= 60 * ROWS, "{} bytes a row", stats.memory_bytes as f64 / ROWS as f64);
    assert_eq!(read(&store, 0, 77).len(), 8);
}

#[test]
fn a_manifest_without_settings_is_read() {
    let mut old = serde_json::to_value(run(&[4])).unwrap();
    old.as_object_mut().unwrap().remove("admit_min_count").unwrap();
    for table in old["schema"]["tables"].as_array_mut().unwrap() {
        table.as_object_mut().unwrap().remove("settings").unwrap();
    }
    assert_eq!(serde_json::from_value::<Run>(old).unwrap(), run(&[4]));
    let kept = with(&[halves(Dtype::Bf16, Rounding::Stochastic)], &[4]);
    let text = serde_json::to_string(&kept).unwrap();
    assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), kept);
}
