//! Tests of snapshots and restoring. All rows are restored. Rows that do not fit the run are refused and
//! change nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use std::path::Path;

use persia_store::Store;
use persia_store::checkpoint::{ShardRows, TableRows, write_shard};
use persia_types::tables::{FileEntry, Run};
use persia_types::{Id, Initializer, Optimizer, Tables, TablesError};
use sample::{all_rows, export, ids_of_shard, insert, push, read, run, store_of, train};

const ADAGRAD: Optimizer = Optimizer::Adagrad {
    lr: 0.1,
    weight_decay: 0.0,
    initial_accumulator_value: 0.1,
    g_square_momentum: 1.0,
    eps: 1e-10,
    vectorwise_shared: false,
};

fn settings(dims: &[usize]) -> Run {
    Run { optimizer: Some(ADAGRAD), initializer: Initializer::Normal { mean: 0.0, std: 1.0 }, ..run(dims) }
}

fn trained() -> Store {
    let store = store_of(&settings(&[4, 7]), 1 << 30);
    for seq in 1..=6u64 {
        let table = seq as usize % 2;
        let ids: Vec<Id> = (seq * 100..seq * 100 + 700).collect();
        train(&store, seq, table, &ids);
        push(&store, seq, table, &ids, 0.5);
    }
    store
}

fn saved(store: &Store) -> (tempfile::TempDir, Vec<FileEntry>) {
    let dir = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(dir.path(), None).unwrap().files;
    (dir, files)
}

/// Restore, check that this fails and changes nothing, and return the error.
fn refusal(run: &Run, dir: &Path, files: &[FileEntry]) -> TablesError {
    let store = store_of(run, 1 << 30);
    insert(&store, 1, 0, &[1, 2, 3]);
    let before = export(&store);
    let error = store.restore(dir, files).unwrap_err();
    assert_eq!(export(&store), before);
    assert_eq!(push(&store, 1, 0, &[1, 2, 3], 1.0).rows_applied, 3);
    error
}

#[test]
fn a_restore_replaces_all_rows() {
    let store = trained();
    let (dir, files) = saved(&store);
    let other = store_of(&settings(&[4, 7]), 1 << 30);
    insert(&other, 1, 0, &(50_000..50_500).collect::<Vec<_>>());
    other.restore(dir.path(), &files).unwrap();
    assert_eq!(export(&other), export(&store));
    assert_eq!(other.stats().unwrap().rows, store.stats().unwrap().rows);
    // The stores must also remain equal after further training.
    for store in [&store, &other] {
        train(store, 7, 0, &(0..2_000).collect::<Vec<_>>());
        push(store, 7, 0, &(0..2_000).collect::<Vec<_>>(), -1.0);
    }
    assert_eq!(export(&other), export(&store));
}

#[test]
fn slots_cached_before_a_restore_are_not_used_after_it() {
    let store = trained();
    let (dir, files) = saved(&store);
    let ids: Vec<Id> = (900_000..900_100).collect();
    insert(&store, 7, 0, &ids);
    assert_eq!(train(&store, 8, 0, &ids).0.hits, 100);
    store.restore(dir.path(), &files).unwrap();
    let before = all_rows(&store);
    let report = push(&store, 8, 0, &ids, 1.0);
    assert_eq!((report.rows_applied, report.rows_inserted), (100, 100));
    let mut after = all_rows(&store);
    after.retain(|key, _| before.contains_key(key));
    assert_eq!(after, before);
}

#[test]
fn equal_rows_give_equal_files_whatever_their_history() {
    let (forwards, backwards) = (store_of(&settings(&[4]), 1 << 30), store_of(&settings(&[4]), 1 << 30));
    let ids: Vec<Id> = (0..3_000).collect();
    for (seq, part) in ids.chunks(100).enumerate() {
        insert_at_step_1(&forwards, 1 + seq as u64, part);
    }
    for (seq, part) in ids.chunks(170).rev().enumerate() {
        insert_at_step_1(&backwards, 1 + seq as u64, part);
    }
    assert_eq!(saved(&forwards).1, saved(&backwards).1);
}

fn insert_at_step_1(store: &Store, seq: u64, ids: &[Id]) {
    let (parts, zeros) = ([(0, sample::grouped(ids))], [vec![0.0; ids.len() * 4]]);
    sample::try_push(store, sample::token(0, seq), 1, &parts, &zeros).unwrap();
}

#[test]
fn a_smaller_capacity_keeps_the_most_recently_used_rows() {
    let store = store_of(&settings(&[4]), 1 << 30);
    let ids = ids_of_shard(8, 10);
    for (seq, id) in ids.iter().enumerate() {
        insert(&store, seq as u64 + 1, 0, &[*id]);
    }
    let (dir, files) = saved(&store);
    let small = store_of(&settings(&[4]), 256 * 4);
    small.restore(dir.path(), &files).unwrap();
    assert_eq!(all_rows(&small).keys().map(|(_, id)| *id).collect::<Vec<_>>(), ids[6..]);
}

#[test]
fn without_optimizer_state_is_dropped() {
    let store = trained();
    let (dir, files) = saved(&store);
    let evaluation = store_of(&Run { optimizer: None, ..settings(&[4, 7]) }, 1 << 30);
    evaluation.restore(dir.path(), &files).unwrap();
    let (rows, kept) = (all_rows(&store), all_rows(&evaluation));
    assert!(kept.iter().all(|(key, row)| row.1 == rows[key].1 && row.2.is_empty()));
    assert_eq!(kept.len(), rows.len());
    let floats: u64 = kept.values().map(|row| row.1.len() as u64).sum();
    assert_eq!(evaluation.stats().unwrap().payload_bytes, 4 * floats);
    // These rows cannot be trained, because they have no state.
    let begun = evaluation.begin(&Run { generation: 2, ..settings(&[4, 7]) });
    assert!(matches!(begun, Err(TablesError::BadRun { .. })));
}

#[test]
fn evaluation_keeps_the_state_of_rows() {
    let store = trained();
    let before = export(&store);
    store.begin(&Run { generation: 2, optimizer: None, ..settings(&[4, 7]) }).unwrap();
    assert_eq!(read(&store, 0, 350).len(), 4);
    store.begin(&Run { generation: 3, ..settings(&[4, 7]) }).unwrap();
    assert_eq!(export(&store), before);
}

#[test]
fn tables_dims_and_state_that_do_not_fit_are_reported_with_both_values() {
    let (dir, files) = saved(&trained());
    let refuse = |run: &Run| {
        let error = refusal(run, dir.path(), &files);
        assert!(matches!(error, TablesError::Foreign { .. }), "{error}");
        error.to_string()
    };
    let error = refuse(&settings(&[4]));
    assert!(error.contains("it has a table table_1, but the configured tables are table_0"), "{error}");
    assert!(refuse(&settings(&[4, 8])).contains("its table table_1 has dim 7, but dim 8 is configured"));
    let sgd = refuse(&Run { optimizer: Some(sample::LEDGER), ..settings(&[4, 7]) });
    assert!(sgd.contains(" per row, but the configured optimizer needs size 0"), "{sgd}");
}

#[test]
fn damage_anywhere_leaves_all_rows_unchanged() {
    let (dir, files) = saved(&trained());
    let last = dir.path().join(&files.last().unwrap().name);
    let mut bytes = std::fs::read(&last).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&last, bytes).unwrap();
    assert!(matches!(refusal(&settings(&[4, 7]), dir.path(), &files), TablesError::Corrupt { .. }));
    std::fs::remove_file(&last).unwrap();
    let missing = refusal(&settings(&[4, 7]), dir.path(), &files);
    assert!(missing.to_string().contains(&files.last().unwrap().name), "{missing}");
}

#[test]
fn rows_that_are_not_finite_are_corrupt() {
    let numbers = |bad: Option<f32>| vec![1.0, 1.0, bad.unwrap_or(1.0), 1.0];
    for (bad, state) in
        [(f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, false), (f32::NAN, false)]
    {
        let dir = tempfile::tempdir().unwrap();
        let ids = ids_of_shard(5, 2);
        let rows = TableRows {
            name: "table_0".into(),
            dim: 4,
            state_len: 4,
            ids: ids.clone(),
            last_used: vec![1; 2],
            weights: [numbers(None), numbers(Some(bad).filter(|_| !state))].concat(),
            state: [numbers(None), numbers(Some(bad).filter(|_| state))].concat(),
            admission_counts: vec![],
        };
        let file = write_shard(dir.path(), &ShardRows { shard: 5, tables: vec![rows] }).unwrap();
        let error = refusal(&settings(&[4, 7]), dir.path(), std::slice::from_ref(&file)).to_string();
        assert!(
            error.contains(&file.name) && error.contains(&format!("table_0: id {} has NaN", ids[1])),
            "{error}"
        );
        // Evaluation reads no state.
        let evaluation = store_of(&Run { optimizer: None, ..settings(&[4, 7]) }, 1 << 30);
        assert_eq!(evaluation.restore(dir.path(), &[file]).is_ok(), state);
    }
}

#[test]
fn a_repeated_shard_and_an_impossible_step_are_corrupt() {
    let (dir, files) = saved(&trained());
    let mut twice = files.clone();
    twice.push(files[0].clone());
    let error = refusal(&settings(&[4, 7]), dir.path(), &twice);
    assert!(error.to_string().contains("listed twice"), "{error}");
    for step in [0, 1 << 32] {
        let dir = tempfile::tempdir().unwrap();
        let rows = TableRows {
            name: "table_0".into(),
            dim: 4,
            state_len: 4,
            ids: ids_of_shard(5, 1),
            last_used: vec![step],
            weights: vec![0.0; 4],
            state: vec![0.0; 4],
            admission_counts: vec![],
        };
        let file = write_shard(dir.path(), &ShardRows { shard: 5, tables: vec![rows] }).unwrap();
        let error = refusal(&settings(&[4, 7]), dir.path(), &[file]);
        assert!(error.to_string().contains(&format!("last used at step {step}")), "{error}");
    }
}

/// Imported rows have no state either: the optimizer starts as for a new row.
#[test]
fn rows_without_state_get_the_initial_state() {
    let shard = 3;
    let ids = ids_of_shard(shard, 5);
    let table = TableRows {
        name: "table_0".into(),
        dim: 4,
        last_used: vec![1; ids.len()],
        weights: vec![0.25; 4 * ids.len()],
        ids,
        ..TableRows::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let file = write_shard(dir.path(), &ShardRows { shard, tables: vec![table] }).unwrap();
    let store = store_of(&settings(&[4, 7]), 1 << 30);
    store.restore(dir.path(), &[file]).unwrap();
    let restored = &export(&store)[0].tables[0];
    assert_eq!((restored.dim, restored.state_len, restored.ids.len()), (4, 4, 5));
    assert_eq!(restored.weights, vec![0.25; 20]);
    assert_eq!(restored.state, vec![0.1; 20]);
}
