//! Tests that several stores, each with some of the shards, behave like one store with all shards.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sample;

use persia_store::{Store, StoreOptions};
use persia_types::tables::{FileEntry, Run};
use persia_types::{Id, Initializer, Mode, Optimizer, Tables, TablesError, server_shards, shard_of};
use sample::{all_rows, grouped, push, read, run, store_of, token, train, try_lookup, try_push};

const DIMS: [usize; 2] = [4, 7];
const CAPACITY: u64 = 256 * 6; // so few that rows are evicted
const SERVERS: usize = 3;

fn settings() -> Run {
    let optimizer = Optimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, eps: 1e-8 };
    let initializer = Initializer::Normal { mean: 0.0, std: 1.0 };
    Run { optimizer: Some(optimizer), initializer, ..run(&DIMS) }
}

fn parts() -> Vec<Store> {
    let store = |index| {
        let shards = server_shards(index, SERVERS);
        let options = StoreOptions { capacity: CAPACITY, shards, ..StoreOptions::default() };
        let store = Store::new(settings().schema, options).unwrap();
        store.begin(&settings()).unwrap();
        store
    };
    (0..SERVERS).map(store).collect()
}

fn own(ids: &[Id], index: usize) -> Vec<Id> {
    let held = server_shards(index, SERVERS);
    ids.iter().copied().filter(|id| held.contains(&shard_of(*id))).collect()
}

/// Train on the ids that `part` selects.
fn trained(store: &Store, part: impl Fn(&[Id]) -> Vec<Id>) {
    for seq in 1..=12u64 {
        let table = seq as usize % 2;
        let ids = part(&(seq * 150..seq * 150 + 1200).collect::<Vec<Id>>());
        train(store, seq, table, &ids);
        push(store, seq, table, &ids, 0.5);
    }
}

fn files(store: &Store) -> (tempfile::TempDir, Vec<FileEntry>) {
    let dir = tempfile::tempdir().unwrap();
    let files = store.write_snapshot(dir.path(), None).unwrap().files;
    (dir, files)
}

#[test]
fn rows_and_files_equal_those_of_one_store_under_eviction() {
    let whole = store_of(&settings(), CAPACITY);
    trained(&whole, <[Id]>::to_vec);
    assert!(whole.stats().unwrap().pushes.rows_evicted > 0);
    let mut rows = Default::default();
    let mut entries = Vec::new();
    for (index, store) in parts().iter().enumerate() {
        trained(store, |ids| own(ids, index));
        all_rows(store).into_iter().for_each(|(key, row)| {
            let before: Option<_> = std::collections::BTreeMap::insert(&mut rows, key, row);
            assert!(before.is_none(), "two stores hold {key:?}");
        });
        entries.extend(files(store).1);
    }
    assert_eq!(rows, all_rows(&whole));
    assert_eq!(entries, files(&whole).1);
}

#[test]
fn several_stores_load_a_checkpoint_of_one() {
    let whole = store_of(&settings(), CAPACITY);
    trained(&whole, <[Id]>::to_vec);
    let (dir, entries) = files(&whole);
    let mut rows = std::collections::BTreeMap::new();
    for store in parts() {
        store.restore(dir.path(), &entries).unwrap();
        rows.extend(all_rows(&store));
    }
    assert_eq!(rows, all_rows(&whole));
}

#[test]
fn ids_of_a_shard_that_is_not_held_are_refused_and_change_nothing() {
    let stores = parts();
    for (index, store) in stores.iter().enumerate() {
        let held = server_shards(index, SERVERS);
        for shard in [held.start.checked_sub(1), (held.end < 256).then_some(held.end)].into_iter().flatten() {
            let mut ids = sample::ids_of_shard(held.start, 3);
            ids.extend(sample::ids_of_shard(shard, 1));
            let part = [(0, grouped(&ids))];
            let looked_up = try_lookup(store, token(0, 1), 1, Mode::Train, &part).unwrap_err();
            assert!(matches!(looked_up, TablesError::WrongShard { shard: named, .. } if named == shard));
            let gradients = [vec![1.0; ids.len() * DIMS[0]]];
            let pushed = try_push(store, token(0, 1), 1, &part, &gradients).unwrap_err();
            assert!(matches!(pushed, TablesError::WrongShard { shard: named, .. } if named == shard));
        }
        assert!(all_rows(store).is_empty());
    }
}

#[test]
fn a_fresh_run_drops_all_rows_and_may_have_another_optimizer() {
    let store = store_of(&settings(), CAPACITY);
    push(&store, 1, 0, &[1, 2, 3], 0.0);
    let other = Run { generation: 2, optimizer: run(&DIMS).optimizer, ..settings() };
    assert!(matches!(store.begin(&other), Err(TablesError::BadRun { .. })));
    assert_ne!(read(&store, 0, 1), [0.0; 4]);
    store.begin(&Run { fresh: true, ..other }).unwrap();
    assert!(all_rows(&store).is_empty());
    assert_eq!(store.stats().unwrap().generation, 2);
    let too_many = Run { generation: 3, world_size: 0, ..settings() };
    assert!(store.begin(&too_many).unwrap_err().to_string().contains("world_size is 0"));
}

#[test]
fn a_file_of_no_shard_is_refused() {
    let store = parts().remove(0);
    let (dir, mut entries) = files(&store_of(&settings(), CAPACITY));
    entries.push(FileEntry { name: "shard-999.arrow".into(), bytes: 1, blake3: "0".repeat(64) });
    assert!(store.restore(dir.path(), &entries).is_err());
}
