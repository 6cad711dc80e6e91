//! Cases about tokens: a push is applied once per token, in any order and from any thread. A token that is
//! 128 or more behind the highest one of its rank counts as applied.

use std::collections::BTreeMap;

use persia_types::tables::{LookupReport, Mode, PushReport, TablesError};

use crate::fixture::{begun, distinct_gradients, ids, pushed, token};
use crate::{Case, Make};

pub(super) const CASES: &[Case] = &[
    ("a push counts once", a_push_counts_once),
    ("a look-up changes nothing, and reads again", a_lookup_changes_nothing),
    ("pushes may arrive out of order and from several ranks", out_of_order),
    ("a failed push leaves its token unknown", a_failed_push_leaves_its_token_unknown),
    ("an old token counts as seen", an_old_token_counts_as_seen),
    ("tokens survive a clear", tokens_survive_a_clear),
    ("the highest push of every rank is reported", highest_pushes_are_reported),
    ("threads lose no update", threads_lose_no_update),
];

fn a_push_counts_once(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(100);
    fixture.train(1, 1, &ids);
    let first = fixture.push(1, 1, &ids, &distinct_gradients(1, &ids));
    assert_eq!(
        first,
        PushReport { rows_pushed: 100, rows_applied: 100, rows_inserted: 100, ..Default::default() }
    );
    for _ in 0..2 {
        let again = fixture.push(1, 1, &ids, &distinct_gradients(1, &ids));
        assert_eq!(again, PushReport { rows_pushed: 100, rows_duplicate: 100, ..Default::default() });
    }
    assert_eq!(fixture.read(1, &ids), pushed(1, &ids, 1.0));
    let sum = fixture.0.stats().unwrap().pushes;
    assert_eq!((sum.rows_pushed, sum.rows_applied, sum.rows_duplicate), (300, 100, 200));
}

fn a_lookup_changes_nothing(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(50);
    let (_, report) = fixture.train(1, 0, &ids);
    assert_eq!(report, LookupReport { initial: 50, ..Default::default() });
    let (_, report) = fixture.train(2, 0, &ids); // the first push is in flight
    assert_eq!(report, LookupReport { initial: 50, ..Default::default() });
    assert_eq!(fixture.rows_held(), [0, 0]);
    fixture.push(1, 0, &ids, &distinct_gradients(0, &ids));
    let (rows, report) = fixture.train(1, 0, &ids); // the reply was lost, so the same token is sent again
    assert_eq!(report.initial, 0);
    assert_eq!(rows, pushed(0, &ids, 1.0));
    let (_, report) = fixture.train(3, 0, &ids);
    assert_eq!(report, LookupReport { hits: 50, ..Default::default() });
    assert_eq!(fixture.rows_held(), [50, 0]);
}

fn out_of_order(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(10);
    fixture.train(1, 0, &ids);
    for (rank, seq) in [(0, 3), (1, 1), (0, 1), (1, 2), (0, 2), (0, 3), (1, 1)] {
        fixture.try_push(token(rank, seq), 0, &ids, &distinct_gradients(0, &ids), 1.0).unwrap();
    }
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 5.0));
}

fn a_failed_push_leaves_its_token_unknown(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(10);
    fixture.train(1, 0, &ids);
    let short = vec![vec![1.0; 3]; 10];
    let error = fixture.try_push(token(0, 1), 0, &ids, &short, 1.0).unwrap_err();
    assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    let report = fixture.push(1, 0, &ids, &distinct_gradients(0, &ids));
    assert_eq!(report.rows_applied, 10);
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 1.0));
}

fn an_old_token_counts_as_seen(make: Make<'_>) {
    let fixture = begun(make);
    fixture.train(1, 0, &[1]);
    fixture.push(500, 0, &[1], &distinct_gradients(0, &[1]));
    let report = fixture.push(500 - 128, 0, &[1], &distinct_gradients(0, &[1]));
    assert_eq!(report.rows_duplicate, 1);
    let report = fixture.push(500 - 127, 0, &[1], &distinct_gradients(0, &[1]));
    assert_eq!(report.rows_applied, 1);
}

fn tokens_survive_a_clear(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(20);
    fixture.train(1, 0, &ids);
    fixture.push(1, 0, &ids, &distinct_gradients(0, &ids));
    fixture.0.clear().unwrap();
    assert_eq!(fixture.rows_held(), [0, 0]);
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 0.0));
    fixture.train(2, 0, &ids);
    assert_eq!(fixture.push(1, 0, &ids, &distinct_gradients(0, &ids)).rows_duplicate, 20);
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 0.0));
}

fn highest_pushes_are_reported(make: Make<'_>) {
    let fixture = begun(make);
    fixture.train(9, 0, &[1]);
    assert_eq!(fixture.0.stats().unwrap().tokens, BTreeMap::new());
    for (rank, seq) in [(0, 2), (1, 7), (0, 1)] {
        fixture.try_push(token(rank, seq), 0, &[1], &distinct_gradients(0, &[1]), 1.0).unwrap();
    }
    assert_eq!(fixture.0.stats().unwrap().tokens, BTreeMap::from([(0, 2), (1, 7)]));
}

fn threads_lose_no_update(make: Make<'_>) {
    const STEPS: u64 = 50;
    let fixture = begun(make);
    let ids = ids(64);
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let (fixture, ids) = (&fixture, &ids);
            scope.spawn(move || {
                for seq in 1..=STEPS {
                    fixture.try_lookup(token(rank, seq), Mode::Train, 0, ids).unwrap();
                    fixture.try_push(token(rank, seq), 0, ids, &distinct_gradients(0, ids), 1.0).unwrap();
                }
            });
        }
    });
    assert_eq!(fixture.rows_held(), [64, 0]);
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 4.0 * STEPS as f32));
}
