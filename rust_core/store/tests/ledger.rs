//! The ledger test. With SGD, a learning rate of 1, gradients of 1 and rows that start at 0, the value of
//! every row is minus the number of its gradients.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use persia_store::Store;
use persia_types::{Id, Mode, ShardedIds, Tables};
use sample::{all_rows, grouped, run, store_of, token, try_lookup, try_push};

const DIM: usize = 5;
const THREADS: u32 = 4;
const STEPS: u64 = 60;

/// The ids of one step of one rank. Some are shared by all ranks, some have occurred before, and some are
/// new.
fn ids(rank: u32, seq: u64) -> ShardedIds {
    let mut ids: Vec<Id> = (0..40).collect();
    ids.extend((0..60).map(|i| 1_000 + (seq * 37 + i * 11 + u64::from(rank)) % 500));
    ids.extend((0..20).map(|i| (u64::from(rank) << 40) + seq * 100 + i));
    ids.sort_unstable();
    ids.dedup();
    grouped(&ids)
}

fn step(store: &Store, rank: u32, seq: u64, applied: &Mutex<BTreeMap<Id, u32>>) {
    let parts = [(0, ids(rank, seq))];
    try_lookup(store, token(rank, seq), seq, Mode::Train, &parts).unwrap();
    let gradients = [vec![1.0; parts[0].1.len() * DIM]];
    // Every push is sent twice, by two threads concurrently.
    let reports = std::thread::scope(|scope| {
        let twice = || try_push(store, token(rank, seq), seq, &parts, &gradients).unwrap();
        let first = scope.spawn(twice);
        [twice(), first.join().unwrap()]
    });
    let ids = parts[0].1.len() as u64;
    assert_eq!(reports[0].rows_applied + reports[1].rows_applied, ids);
    assert_eq!(reports[0].rows_duplicate + reports[1].rows_duplicate, ids);
    let mut applied = applied.lock().unwrap();
    parts[0].1.ids().iter().for_each(|id| *applied.entry(*id).or_default() += 1);
}

#[test]
fn threads_lose_repeat_and_misplace_no_gradient() {
    let store = store_of(&run(&[DIM]), 1 << 30);
    let applied = Mutex::new(BTreeMap::new());
    let training = AtomicBool::new(true);
    std::thread::scope(|scope| {
        // Readers run concurrently.
        scope.spawn(|| {
            while training.load(Ordering::Relaxed) {
                let (_, rows) =
                    try_lookup(&store, token(0, 1), 1, Mode::Eval, &[(0, grouped(&[7, 1_001]))]).unwrap();
                assert!(rows[0].chunks(DIM).all(|row| row.iter().all(|value| *value == row[0])));
                store.stats().unwrap();
            }
        });
        let ranks: Vec<_> = (0..THREADS)
            .map(|rank| {
                let (store, applied) = (&store, &applied);
                scope.spawn(move || (1..=STEPS).for_each(|seq| step(store, rank, seq, applied)))
            })
            .collect();
        let ended: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        training.store(false, Ordering::Relaxed);
        ended.into_iter().for_each(|rank| rank.unwrap());
    });
    let applied = applied.into_inner().unwrap();
    let rows = all_rows(&store);
    assert_eq!(rows.len(), applied.len());
    for ((_, id), (_, weights, _)) in rows {
        assert_eq!(weights, [-(applied[&id] as f32); DIM], "id {id}");
    }
    let stats = store.stats().unwrap();
    assert_eq!(stats.tokens, (0..THREADS).map(|rank| (rank, STEPS)).collect());
    assert_eq!(stats.pushes.rows_inserted, stats.rows[0]);
}

#[test]
fn under_eviction_every_gradient_is_applied() {
    let store = store_of(&run(&[DIM]), 400);
    std::thread::scope(|scope| {
        for rank in 0..THREADS {
            let store = &store;
            scope.spawn(move || {
                for seq in 1..=STEPS {
                    let parts = [(0, ids(rank, seq))];
                    try_lookup(store, token(rank, seq), seq, Mode::Train, &parts).unwrap();
                    let gradients = [vec![1.0; parts[0].1.len() * DIM]];
                    try_push(store, token(rank, seq), seq, &parts, &gradients).unwrap();
                }
            });
        }
    });
    let stats = store.stats().unwrap();
    assert!(stats.pushes.rows_evicted > 0);
    assert_eq!(stats.pushes.rows_pushed, stats.pushes.rows_applied);
    assert_eq!(stats.pushes.rows_inserted - stats.pushes.rows_evicted, stats.rows[0]);
    assert!(stats.rows[0] <= 512);
    for (_, (_, weights, _)) in all_rows(&store) {
        assert!(weights[0] <= 0.0 && weights.iter().all(|weight| *weight == weights[0]));
    }
}
