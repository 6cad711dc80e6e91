//! Tests of the statistics of each table: inserted and removed rows, ids with an admission count, look-ups.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use persia_store::{Store, StoreOptions};
use persia_types::tables::{Run, TableStats};
use persia_types::{Id, Mode, Tables};
use sample::{grouped, ids_of_shard, push, run, store_of, token, train, try_lookup};

fn tables(store: &Store) -> Vec<TableStats> {
    store.stats().unwrap().tables
}

#[test]
fn look_ups_and_rows_are_counted_by_table() {
    let store = store_of(&run(&[4, 7]), 1 << 20);
    let (few, many): (Vec<Id>, Vec<Id>) = ((0..10).collect(), (0..100).collect());
    train(&store, 1, 0, &few);
    push(&store, 1, 0, &few, 1.0);
    train(&store, 2, 1, &many);
    push(&store, 2, 1, &many, 1.0);
    train(&store, 3, 1, &many);
    let [first, second] = tables(&store).try_into().unwrap();
    assert_eq!((first.name.as_str(), first.rows, first.inserted), ("table_0", 10, 10));
    assert_eq!((second.name.as_str(), second.rows, second.inserted), ("table_1", 100, 100));
    assert_eq!((first.lookups.hits, first.lookups.initial), (0, 10));
    assert_eq!((second.lookups.hits, second.lookups.initial), (100, 100));
    let all = store.stats().unwrap();
    assert_eq!(all.payload_bytes, first.payload_bytes + second.payload_bytes);
    assert_eq!(all.lookups.hits, 100);
    // The counters start at 0 with the run. The numbers of rows and ids are those that the tables hold.
    store.begin(&Run { generation: 2, ..run(&[4, 7]) }).unwrap();
    let [_, second] = tables(&store).try_into().unwrap();
    assert_eq!((second.rows, second.inserted, second.lookups.hits), (100, 0, 0));
}

#[test]
fn evicted_rows_count_in_their_own_table() {
    // There is room for one row per shard, so a row of the second table evicts that of the first.
    let store = store_of(&run(&[4, 4]), 256);
    let ids = ids_of_shard(3, 2);
    push(&store, 1, 0, &ids[..1], 1.0);
    push(&store, 2, 1, &ids[1..], 1.0);
    let [first, second] = tables(&store).try_into().unwrap();
    assert_eq!((first.rows, first.inserted, first.evicted), (0, 1, 1));
    assert_eq!((second.rows, second.inserted, second.evicted), (1, 1, 0));
}

#[test]
fn ids_that_were_seen_once_are_counted() {
    let store = store_of(&Run { admit_min_count: 3, ..run(&[4]) }, 1 << 20);
    let ids: Vec<Id> = (0..100).collect();
    let waiting = |store: &Store| {
        let [table] = tables(store).try_into().unwrap();
        (table.rows, table.waiting, table.seen_once)
    };
    push(&store, 1, 0, &ids, 1.0);
    assert_eq!(waiting(&store), (0, 100, 100));
    push(&store, 2, 0, &ids[..40], 1.0);
    assert_eq!(waiting(&store), (0, 100, 60));
    push(&store, 3, 0, &ids[..30], 1.0);
    assert_eq!(waiting(&store), (30, 70, 60));
    let dir = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(dir.path(), None).unwrap().files;
    let other = store_of(&Run { admit_min_count: 3, ..run(&[4]) }, 1 << 20);
    other.restore(dir.path(), &files).unwrap();
    assert_eq!(waiting(&other), (30, 70, 60), "restored");
    // An id with an admission count gets its row at its first push after the rule was relaxed.
    other.begin(&Run { generation: 2, ..run(&[4]) }).unwrap();
    sample::try_push(
        &other,
        persia_types::Token { generation: 2, ..token(0, 1) },
        1,
        &[(0, grouped(&ids[99..]))],
        &[vec![1.0; 4]],
    )
    .unwrap();
    assert_eq!(waiting(&other), (31, 69, 59));
    store.clear().unwrap();
    assert_eq!(waiting(&store), (0, 0, 0));
}

#[test]
fn halved_counts_are_counted_as_they_are_now() {
    // A shard counts at least 1,024 ids.
    let store = store_of(&Run { admit_min_count: 9, ..run(&[4]) }, 256);
    let ids = ids_of_shard(5, 1_030);
    for step in 1..=3 {
        push(&store, step, 0, &ids[..1_000], 1.0); // each id is pushed 3 times
    }
    push(&store, 4, 0, &ids[1_000..], 1.0); // the 25th id halves all counts and so drops the 24 before it
    let [table] = tables(&store).try_into().unwrap();
    let counts = store.export_shard(5).tables.remove(0).admission_counts;
    assert_eq!(table.waiting, counts.len() as u64);
    assert_eq!(table.seen_once, counts.iter().filter(|(_, count)| *count == 1).count() as u64);
    assert_eq!((table.waiting, table.seen_once), (1_006, 1_006));
}

#[test]
fn a_store_that_serves_counts_all_look_ups() {
    for serves in [false, true] {
        let options = StoreOptions { serves, ..StoreOptions::default() };
        let store = Store::new(run(&[4]).schema, options).unwrap();
        store.begin(&run(&[4])).unwrap();
        push(&store, 1, 0, &[1, 2], 1.0);
        try_lookup(&store, token(0, 1), 1, Mode::Infer, &[(0, grouped(&[1, 2, 3]))]).unwrap();
        let lookups = store.stats().unwrap().lookups;
        assert_eq!((lookups.hits, lookups.missing), if serves { (2, 1) } else { (0, 0) });
    }
}
