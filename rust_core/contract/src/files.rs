//! Cases about snapshots and restoring: either all state is restored or nothing changes.

use std::fs;

use persia_types::schema::{Initializer, Optimizer};
use persia_types::tables::{FileEntry, Run, TablesError};
use persia_types::token::Token;

use crate::fixture::{
    Fixture, GENERATION, begun, begun_with, distinct_gradients, ids, next_run, pushed, run, token,
};
use crate::{Case, Make};

pub(super) const CASES: &[Case] = &[
    ("a snapshot comes back, optimizer state included", a_snapshot_comes_back),
    ("a prepared snapshot keeps its rows", a_prepared_snapshot_keeps_its_rows),
    ("restore replaces rows that came later", restore_replaces),
    ("a damaged snapshot changes nothing", a_damaged_snapshot_changes_nothing),
    ("counts add up", counts_add_up),
];

/// A run with momentum, so that a row that lost its state would be updated differently.
fn with_state() -> Run {
    let optimizer = Some(Optimizer::Sgd { lr: 0.5, momentum: 0.9, weight_decay: 0.01 });
    Run { optimizer, initializer: Initializer::Uniform { low: -1.0, high: 1.0 }, ..run() }
}

fn snapshot(fixture: &Fixture, dir: &std::path::Path) -> Vec<FileEntry> {
    let snapshot = fixture.0.write_snapshot(dir, None).unwrap();
    assert_eq!(snapshot.rows, fixture.0.stats().unwrap().rows);
    let files = snapshot.files;
    assert!(!files.is_empty());
    for file in &files {
        let bytes = fs::metadata(dir.join(&file.name)).unwrap().len();
        assert_eq!(bytes, file.bytes, "{}", file.name);
    }
    files
}

fn a_snapshot_comes_back(make: Make<'_>) {
    let fixture = begun_with(make, &with_state());
    let ids = ids(300);
    for seq in 1..=3 {
        fixture.train(seq, 1, &ids);
        fixture.push(seq, 1, &ids, &distinct_gradients(1, &ids));
    }
    let dir = tempfile::tempdir().unwrap();
    let files = snapshot(&fixture, dir.path());
    let rows = fixture.read(1, &ids);

    let fresh = begun_with(make, &with_state());
    fresh.0.restore(dir.path(), &files).unwrap();
    assert_eq!(fresh.rows_held(), [0, 300]);
    assert_eq!(fresh.read(1, &ids), rows);
    fixture.push(4, 1, &ids, &distinct_gradients(1, &ids));
    fresh.push(4, 1, &ids, &distinct_gradients(1, &ids));
    assert_eq!(fresh.read(1, &ids), fixture.read(1, &ids));
}

fn a_prepared_snapshot_keeps_its_rows(make: Make<'_>) {
    let fixture = begun_with(make, &with_state());
    let (early, late) = (ids(300), [9_001u64, 9_002]);
    fixture.train(1, 1, &early);
    fixture.push(1, 1, &early, &distinct_gradients(1, &early));
    let rows = fixture.read(1, &early);
    fixture.0.prepare_snapshot(1).unwrap();
    fixture.insert(2, 1, &late);
    fixture.push(2, 1, &early[..100], &distinct_gradients(1, &early[..100]));
    let (prepared, of_now) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let saved = fixture.0.write_snapshot(prepared.path(), Some(1)).unwrap();
    assert_eq!(saved.rows, [0, 300]);
    // The prepared snapshot has been written. The next one has the current rows.
    let later = fixture.read(1, &early);
    assert_ne!(later, rows);
    let files = snapshot(&fixture, of_now.path());
    fixture.0.restore(prepared.path(), &saved.files).unwrap();
    assert_eq!((fixture.rows_held(), fixture.read(1, &early)), (vec![0, 300], rows));
    fixture.0.restore(of_now.path(), &files).unwrap();
    assert_eq!((fixture.rows_held(), fixture.read(1, &early)), (vec![0, 302], later));
    // An operation that replaces or drops all rows releases a prepared snapshot.
    fixture.0.prepare_snapshot(2).unwrap();
    fixture.0.clear().unwrap();
    let refused = |cut| {
        let error = fixture.0.write_snapshot(tempfile::tempdir().unwrap().path(), Some(cut)).unwrap_err();
        assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    };
    refused(2);
    fixture.0.prepare_snapshot(3).unwrap();
    fixture.0.abort_snapshot(3).unwrap();
    refused(3);
    let error = fixture.0.prepare_snapshot(3).unwrap_err();
    assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    assert_eq!(fixture.0.write_snapshot(tempfile::tempdir().unwrap().path(), None).unwrap().rows, [0, 0]);
}

fn restore_replaces(make: Make<'_>) {
    let fixture = begun(make);
    let (early, late) = (ids(50), [1u64, 2, 3]);
    fixture.train(1, 0, &early);
    fixture.push(1, 0, &early, &distinct_gradients(0, &early));
    let dir = tempfile::tempdir().unwrap();
    let files = snapshot(&fixture, dir.path());
    fixture.insert(2, 0, &late);
    fixture.push(2, 0, &early, &distinct_gradients(0, &early));
    fixture.0.restore(dir.path(), &files).unwrap();
    assert_eq!(fixture.rows_held(), [50, 0]);
    assert_eq!(fixture.read(0, &early), pushed(0, &early, 1.0));
    fixture.0.begin(&next_run()).unwrap();
    let next = Token { generation: GENERATION + 1, ..token(0, 1) };
    let report = fixture.try_push(next, 0, &early, &distinct_gradients(0, &early), 1.0).unwrap();
    assert_eq!(report.rows_applied, 50);
}

fn a_damaged_snapshot_changes_nothing(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(50);
    fixture.insert(1, 0, &ids);
    let dir = tempfile::tempdir().unwrap();
    let files = snapshot(&fixture, dir.path());
    fixture.push(1, 0, &ids, &distinct_gradients(0, &ids));
    let check = |damage: &str| {
        let error = fixture.0.restore(dir.path(), &files).expect_err(damage);
        let named = matches!(
            error,
            TablesError::Corrupt { .. } | TablesError::Foreign { .. } | TablesError::Io { .. }
        );
        assert!(named, "{damage}: {error}");
        assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 1.0), "{damage}");
    };
    let largest = files.iter().max_by_key(|file| file.bytes).unwrap();
    let path = dir.path().join(&largest.name);
    let good = fs::read(&path).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    fs::write(&path, &flipped).unwrap();
    check("a flipped bit");
    fs::write(&path, &good[..good.len() - 1]).unwrap();
    check("a lost byte");
    fs::remove_file(&path).unwrap();
    check("a lost file");
    fs::write(&path, &good).unwrap();
    fixture.0.restore(dir.path(), &files).expect("the file is whole again");
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 0.0));
}

fn counts_add_up(make: Make<'_>) {
    let initializer = Initializer::Uniform { low: 1.0, high: 2.0 };
    let fixture = begun_with(make, &Run { admit_probability: 0.5, initializer, ..run() });
    let ids = ids(100);
    let (rows, found) = fixture.train(1, 0, &ids);
    let mut gradients = distinct_gradients(0, &ids);
    let admitted = rows.iter().position(|row| row[0] != 0.0).unwrap();
    gradients[admitted][0] = f32::NAN;
    fixture.push(1, 0, &ids, &gradients);
    fixture.push(1, 0, &ids, &gradients);
    let stats = fixture.0.stats().unwrap();
    let sum = stats.pushes;
    assert_eq!(sum.rows_pushed, 200);
    assert_eq!(
        (sum.rows_applied, sum.rows_missing, sum.rows_nonfinite, sum.rows_duplicate),
        (found.initial - 1, found.missing, 1, 100)
    );
    assert_eq!(sum.rows_inserted, found.initial);
    assert_eq!(stats.rows, [found.initial, 0]);
    assert!(stats.payload_bytes >= found.initial * 4 * 4);
    assert!(stats.memory_bytes >= stats.payload_bytes);
}
