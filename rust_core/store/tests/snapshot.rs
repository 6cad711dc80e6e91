//! Tests that a snapshot is consistent, whatever is trained, evicted and counted while it is written.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sample;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use persia_store::checkpoint::read_shard;
use persia_store::{Store, StoreOptions};
use persia_types::id::hash_id;
use persia_types::tables::Run;
use persia_types::{Dtype, Id, Initializer, Mode, Optimizer, Tables, Token};
use sample::{export, grouped, run, store_of, token, try_lookup, try_push};

const DIMS: [usize; 2] = [8, 5];
const IDS: u64 = 60_000;
const CAPACITY: u64 = 40_000;

fn settings() -> Run {
    let optimizer = Optimizer::Adagrad {
        lr: 0.1,
        weight_decay: 0.0,
        initial_accumulator_value: 0.1,
        g_square_momentum: 1.0,
        eps: 1e-10,
        vectorwise_shared: false,
    };
    let initializer = Initializer::Normal { mean: 0.0, std: 1.0 };
    let mut run = Run { optimizer: Some(optimizer), initializer, admit_min_count: 2, ..run(&DIMS) };
    run.schema.tables[1].settings.dtype = Dtype::F16;
    run.schema.tables[1].settings.ttl = Some(40);
    run
}

/// One step of a rank: ids of both tables are looked up and pushed.
fn step(store: &Store, rank: u32, seq: u64) {
    let random = |of: u64| hash_id(of ^ seq << 20 ^ u64::from(rank) << 50) % IDS;
    let parts = [0, 1].map(|table| {
        let ids: Vec<Id> = (0..600).map(|at| random(at + 1_000 * table as u64)).collect();
        let unique = ids.iter().copied().collect::<std::collections::BTreeSet<_>>();
        (table, grouped(&unique.into_iter().collect::<Vec<_>>()))
    });
    let (token, ids) = (token(rank, seq), |part: usize| parts[part].1.len());
    try_lookup(store, token, seq, Mode::Train, &parts).unwrap();
    let gradients = [0, 1].map(|part| vec![0.25 + seq as f32 / 64.0; ids(part) * DIMS[part]]);
    try_push(store, token, seq, &parts, &gradients).unwrap();
}

#[test]
fn a_snapshot_does_not_contain_what_is_trained_while_it_is_written() {
    let store = store_of(&settings(), CAPACITY);
    let steps = [AtomicU64::new(0), AtomicU64::new(0)];
    let next = |rank: usize| step(&store, rank as u32, steps[rank].fetch_add(1, Ordering::Relaxed) + 1);
    (0..150).for_each(|at| next(at % 2));
    for round in 0..6 {
        let expected = export(&store);
        assert!(
            expected.iter().flat_map(|shard| &shard.tables).any(|table| !table.admission_counts.is_empty())
        );
        store.prepare_snapshot(round as u64 + 1).unwrap();
        // Also train before the first shard is written, because a fast disk would leave no time for it later.
        (0..10 * round).for_each(|at| next(at % 2));
        let dir = tempfile::tempdir().unwrap();
        let written = AtomicBool::new(false);
        let before = steps.each_ref().map(|steps| steps.load(Ordering::Relaxed));
        let files = std::thread::scope(|threads| {
            for rank in 0..2 {
                let (written, next) = (&written, &next);
                threads.spawn(move || {
                    while !written.load(Ordering::Relaxed) {
                        next(rank);
                    }
                });
            }
            let files = store.write_snapshot(dir.path(), Some(round as u64 + 1));
            written.store(true, Ordering::Relaxed);
            files.unwrap()
        });
        assert!(steps.iter().zip(before).any(|(steps, before)| steps.load(Ordering::Relaxed) > before));
        let found: Vec<_> = files.files.iter().map(|file| read_shard(dir.path(), file).unwrap()).collect();
        assert_eq!(found, expected, "round {round}");
        assert_ne!(export(&store), expected);
    }
    let pushes = store.stats().unwrap().pushes;
    assert!(pushes.rows_evicted > 0 && pushes.rows_expired > 0);
}

#[test]
fn copies_for_a_snapshot_are_freed() {
    let store = store_of(&settings(), CAPACITY);
    (1..=100).for_each(|seq| step(&store, 0, seq));
    let before = store.stats().unwrap().memory_bytes;
    store.prepare_snapshot(1).unwrap();
    let cut = store.stats().unwrap().memory_bytes;
    (101..=110).for_each(|seq| step(&store, 0, seq));
    let trained = store.stats().unwrap().memory_bytes;
    assert!(before < cut && cut < trained, "{before} {cut} {trained}");
    let dir = tempfile::tempdir().unwrap();
    store.write_snapshot(dir.path(), Some(1)).unwrap();
    let after = store.stats().unwrap().memory_bytes;
    assert!(after < trained, "{after} {trained}");
    // The same happens if the snapshot is aborted or its files cannot be written.
    let aborted = |store: &Store| store.abort_snapshot(2).unwrap();
    let failed = |store: &Store| drop(store.write_snapshot(&dir.path().join("absent"), Some(3)).unwrap_err());
    for (cut, end) in [(2, &aborted as &dyn Fn(&Store)), (3, &failed)] {
        store.prepare_snapshot(cut).unwrap();
        (111..=120).for_each(|seq| step(&store, 0, seq + 10 * cut));
        let trained = store.stats().unwrap().memory_bytes;
        end(&store);
        let after = store.stats().unwrap().memory_bytes;
        assert!(after < trained, "{after} {trained}");
    }
}

#[test]
fn training_waits_while_the_copy_budget_is_used_up() {
    let settings = settings();
    let options = StoreOptions { capacity: CAPACITY, max_copy_bytes: 1, ..StoreOptions::default() };
    let store = Store::new(settings.schema.clone(), options).unwrap();
    store.begin(&settings).unwrap();
    step(&store, 0, 1);
    let dir = tempfile::tempdir().unwrap();
    let written = |store: &Store| drop(store.write_snapshot(dir.path(), Some(1)).unwrap());
    let aborted = |store: &Store| store.abort_snapshot(2).unwrap();
    for (cut, end) in [(1, &written as &(dyn Fn(&Store) + Sync)), (2, &aborted)] {
        let seq = 2 * cut;
        store.prepare_snapshot(cut).unwrap();
        let start = Instant::now();
        std::thread::scope(|threads| {
            let next = threads.spawn(|| (seq..seq + 2).for_each(|seq| step(&store, 0, seq)));
            while !next.is_finished() && start.elapsed() < Duration::from_millis(300) {
                std::thread::yield_now();
            }
            assert!(!next.is_finished(), "cut {cut}");
            end(&store);
        });
        assert!(start.elapsed() < Duration::from_secs(10), "cut {cut}");
    }
    // A snapshot of an older generation does not block, because it will not be written.
    store.prepare_snapshot(3).unwrap();
    let (start, parts) = (Instant::now(), [(0, grouped(&[1, 2, 3]))]);
    let zeros = [vec![0.0; 3 * DIMS[0]]];
    try_push(&store, token(0, 8), 8, &parts, &zeros).unwrap();
    store.begin(&Run { generation: 2, fresh: false, ..settings }).unwrap();
    let token = Token { generation: 2, ..token(0, 9) };
    try_push(&store, token, 9, &parts, &zeros).unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "a snapshot of an older generation");
}

#[test]
fn only_the_prepared_snapshot_can_be_written() {
    let store = store_of(&settings(), CAPACITY);
    let dir = tempfile::tempdir().unwrap();
    let save = |cut| store.write_snapshot(dir.path(), cut).map(drop).map_err(|error| error.to_string());
    let late = |result: Result<(), String>| {
        let error = result.unwrap_err();
        assert!(error.contains("snapshot"), "{error}");
    };
    step(&store, 0, 1);
    late(save(Some(1)));
    store.prepare_snapshot(5).unwrap();
    store.prepare_snapshot(5).unwrap();
    // A late request has no effect.
    late(store.prepare_snapshot(4).map_err(|error| error.to_string()));
    store.abort_snapshot(4).unwrap();
    save(Some(5)).unwrap();
    late(store.prepare_snapshot(5).map_err(|error| error.to_string()));
    late(save(Some(5)));
    store.prepare_snapshot(6).unwrap();
    late(save(Some(5)));
    // The failed write released the snapshot.
    late(save(Some(6)));
    store.prepare_snapshot(7).unwrap();
    store.clear().unwrap();
    late(save(Some(7)));
    save(None).unwrap();
    // In another generation, lower numbers are allowed again.
    store.begin(&Run { generation: 2, ..settings() }).unwrap();
    store.prepare_snapshot(1).unwrap();
    save(Some(1)).unwrap();
}
