//! One test for each defect of PersiaML's store. Each test is named after the correct behavior.

mod sample;

use persia_store::checkpoint::read_shard;
use persia_store::{Store, StoreOptions};
use persia_types::tables::Run;
use persia_types::{Id, Initializer, Mode, Optimizer, Tables, TablesError, shard_of};
use sample::{
    LEDGER, all_rows, grouped, ids_of_shard, insert, push, read, run, schema, store_of, token, train,
    try_lookup, try_push,
};

fn tagged(dims: &[usize]) -> Run {
    Run { initializer: Initializer::Uniform { low: 1.0, high: 2.0 }, ..run(dims) }
}

/// Defect 1: after an eviction, a live row was overwritten and the embeddings of other ids were returned.
#[test]
fn eviction_never_overwrites_or_returns_another_row() {
    let unbounded = store_of(&tagged(&[4]), 1 << 40);
    let small = store_of(&tagged(&[4]), 256 * 20);
    for seq in 1..=200 {
        let ids: Vec<Id> = ids_of_shard(9, 60).into_iter().cycle().skip(seq as usize * 7).take(15).collect();
        let (report, rows) = train(&small, seq, 0, &ids);
        assert_eq!(rows, train(&unbounded, seq, 0, &ids).1, "look-up {seq}");
        assert_eq!(report.hits + report.initial, 15);
        insert(&small, seq, 0, &ids);
        insert(&unbounded, seq, 0, &ids);
    }
    let held = all_rows(&small);
    assert_eq!(held.len(), 20);
    let every = all_rows(&unbounded);
    assert!(held.iter().all(|(key, row)| every[key].1 == row.1));
}

/// Defect 2: an id without a row shifted all following gradients to the wrong ids.
#[test]
fn a_missing_id_never_shifts_a_neighbour() {
    let ids: Vec<Id> = (0..1_000).collect();
    // A push with the token of its look-up uses cached row indices. A push with another token searches for
    // its rows.
    for seq in [1, 2] {
        let store = store_of(&Run { admit_probability: 0.5, ..tagged(&[3]) }, 1 << 20);
        let (found, rows) = train(&store, 1, 0, &ids);
        let admitted = found.initial;
        let parts = [(0, grouped(&ids))];
        let gradients = vec![parts[0].1.ids().iter().flat_map(|id| [*id as f32; 3]).collect()];
        let report = try_push(&store, token(0, seq), 1, &parts, &gradients).unwrap();
        assert_eq!((report.rows_applied, report.rows_missing), (admitted, 1_000 - admitted));
        assert!((400..600).contains(&admitted));
        for (id, row) in parts[0].1.ids().iter().zip(rows.chunks(3)) {
            // An id that is not admitted reads as zeros.
            let gradient = if row[0] == 0.0 { 0.0 } else { *id as f32 };
            let expected: Vec<f32> = row.iter().map(|weight| weight - gradient).collect();
            assert_eq!(read(&store, 0, *id), expected);
        }
    }
}

/// Defect 2, with rows that are removed between look-up and push (F29 of the fault matrix).
#[test]
fn rows_evicted_before_their_push_are_inserted_again_and_move_nothing() {
    let store = store_of(&run(&[2]), 256 * 10);
    let (first, second) = (ids_of_shard(4, 16)[..8].to_vec(), ids_of_shard(4, 16)[8..].to_vec());
    push(&store, 1, 0, &first, 4.0);
    train(&store, 3, 0, &first);
    assert_eq!(push(&store, 2, 0, &second, 2.0).rows_evicted, 6);
    let report = push(&store, 3, 0, &first, 1.0);
    assert_eq!((report.rows_applied, report.rows_inserted, report.rows_evicted), (8, 6, 6));
    assert!(first[6..].iter().all(|id| read(&store, 0, *id) == [-5.0; 2]));
    assert!(first[..6].iter().all(|id| read(&store, 0, *id) == [-1.0; 2]));
    assert!(second[6..].iter().all(|id| read(&store, 0, *id) == [-2.0; 2]));
    assert!(second[..6].iter().all(|id| read(&store, 0, *id) == [0.0; 2]));
}

/// Defect 4: Adam's powers were counted per request and lost on a restart. They are now functions of the step.
#[test]
fn adam_does_not_depend_on_requests_per_step_or_restarts() {
    let adam = Optimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8 };
    let run = Run { optimizer: Some(adam), ..run(&[4]) };
    let ids: Vec<Id> = (0..40).collect();
    let (whole, split) = (store_of(&run, 1 << 20), store_of(&run, 1 << 20));
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=6u64 {
        let answer = |store: &Store, rank: u32, ids: &[Id]| {
            let parts = [(0, grouped(ids))];
            let gradients = [vec![step as f32 - 3.5; ids.len() * 4]];
            try_lookup(store, token(rank, step), step, Mode::Train, &parts).unwrap();
            try_push(store, token(rank, step), step, &parts, &gradients).unwrap();
        };
        answer(&whole, 0, &ids);
        ids.chunks(7).enumerate().for_each(|(rank, ids)| answer(&split, rank as u32, ids));
        if step == 3 {
            let files = split.write_snapshot(dir.path(), None).unwrap().files;
            split.clear().unwrap();
            split.restore(dir.path(), &files).unwrap();
        }
    }
    assert_eq!(all_rows(&whole), all_rows(&split));
}

/// Defect 5: weight decay and momentum were accepted and ignored. The size of their effect is tested with the
/// optimizers.
#[test]
fn weight_decay_and_momentum_change_rows_or_are_refused() {
    let rows_with = |optimizer| {
        let store = store_of(&Run { optimizer: Some(optimizer), ..tagged(&[2]) }, 1 << 20);
        for step in 1..=3 {
            train(&store, step, 0, &[5]);
            push(&store, step, 0, &[5], step as f32);
        }
        read(&store, 0, 5)
    };
    let adagrad = |weight_decay| Optimizer::Adagrad {
        lr: 0.1,
        weight_decay,
        initial_accumulator_value: 0.1,
        g_square_momentum: 1.0,
        eps: 1e-10,
        vectorwise_shared: false,
    };
    let adam = |weight_decay| Optimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.9, weight_decay, eps: 1e-8 };
    let sgd = |momentum, weight_decay| Optimizer::Sgd { lr: 0.1, momentum, weight_decay };
    assert_ne!(rows_with(adagrad(0.0)), rows_with(adagrad(0.5)));
    assert_ne!(rows_with(adam(0.0)), rows_with(adam(0.5)));
    assert_ne!(rows_with(sgd(0.0, 0.0)), rows_with(sgd(0.0, 0.5)));
    assert_ne!(rows_with(sgd(0.0, 0.0)), rows_with(sgd(0.5, 0.0)));
    let store = Store::new(schema(&[2]), StoreOptions::default()).unwrap();
    let refused = store.begin(&Run { optimizer: Some(sgd(f32::NAN, 0.0)), ..run(&[2]) });
    assert!(matches!(refused, Err(TablesError::BadRun { .. })));
}

/// Defect 9: ids were taken modulo 2^k - 1, which merged two ids, and group numbers that exceeded the prefix
/// bits wrapped silently.
#[test]
fn all_64_bits_of_an_id_count_and_tables_are_separate() {
    let dims = vec![1; 300];
    let store = store_of(&run(&dims), 1 << 20);
    let mut ids: Vec<Id> = vec![0, u64::MAX, u64::MAX - 1, 1 << 63, (1 << 56) - 1, (1 << 55) - 1];
    ids.extend((0..64).map(|bit| 1 << bit));
    ids.sort_unstable();
    ids.dedup();
    for table in 0..300 {
        let seq = 1 + table as u64;
        train(&store, seq, table, &ids);
        for (at, id) in ids.iter().enumerate() {
            let value = vec![vec![(1000 * table + at) as f32]];
            let token = token(1 + at as u32, seq);
            assert_eq!(
                try_push(&store, token, seq, &[(table, grouped(&[*id]))], &value).unwrap().rows_applied,
                1
            );
        }
    }
    for table in 0..300 {
        for (at, id) in ids.iter().enumerate() {
            assert_eq!(read(&store, table, *id), [-((1000 * table + at) as f32)], "table {table} id {id}");
        }
    }
}

/// Defect 11: counters of samples and ids wrapped at 65,536.
#[test]
fn requests_may_have_more_than_65_536_ids_of_one_table_or_shard() {
    let spread: Vec<Id> = (0..200_000).collect();
    let store = store_of(&run(&[1]), 1 << 40);
    assert_eq!(train(&store, 1, 0, &spread).0.initial, 200_000);
    assert_eq!(push(&store, 1, 0, &spread, 1.0).rows_applied, 200_000);
    let crowded: Vec<Id> = (200_000..).filter(|id| shard_of(*id) == 77).take(70_000).collect();
    assert_eq!(train(&store, 2, 0, &crowded).0.initial, 70_000);
    assert_eq!(push(&store, 2, 0, &crowded, 2.0).rows_applied, 70_000);
    let rows = all_rows(&store);
    assert_eq!(rows.len(), 270_000);
    assert!(rows.iter().all(|((_, id), row)| row.1 == [if *id < 200_000 { -1.0 } else { -2.0 }]));
}

/// Defect 16: the default capacity allocated a billion entries.
#[test]
fn the_default_capacity_allocates_no_memory_for_rows() {
    let store = Store::new(schema(&[64; 26]), StoreOptions::default()).unwrap();
    store.begin(&Run { optimizer: Some(LEDGER), ..run(&[64; 26]) }).unwrap();
    assert_eq!(StoreOptions::default().capacity, 1_000_000_000);
    let empty = store.stats().unwrap().memory_bytes;
    assert!(empty < 4 << 20, "{empty} bytes for 26 empty tables");
    insert(&store, 1, 0, &[1]);
    let one = store.stats().unwrap().memory_bytes - empty;
    assert!(one <= 16 << 10, "{one} bytes for one row");
}

/// The file of each shard must contain the rows of the shard, sorted.
#[test]
fn a_snapshot_has_every_row_and_no_file_for_an_empty_shard() {
    let store = store_of(&tagged(&[4]), 1 << 20);
    insert(&store, 1, 0, &ids_of_shard(3, 5));
    insert(&store, 2, 0, &ids_of_shard(250, 1));
    let dir = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(dir.path(), None).unwrap().files;
    assert_eq!(
        files.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(),
        ["shard-003.arrow", "shard-250.arrow"]
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    for file in &files {
        let rows = read_shard(dir.path(), file).unwrap();
        assert_eq!(rows, store.export_shard(rows.shard));
    }
}
