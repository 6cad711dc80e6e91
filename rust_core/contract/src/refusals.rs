//! Cases about malformed requests: nothing changes, and not even their valid parts are applied.

use persia_kernels::Gradients;
use persia_types::id::ShardedIds;
use persia_types::tables::{LookupRequest, Mode, PushRequest, TableGradients, TableIds, Tables, TablesError};

use crate::fixture::{begun, distinct_gradients, ids, pushed, token};
use crate::{Case, Make};

pub(super) const CASES: &[Case] = &[
    ("an unknown table is refused", an_unknown_table_is_refused),
    ("a table named twice is refused", a_table_named_twice_is_refused),
    ("buffers of the wrong length are refused", wrong_buffers_are_refused),
    ("one bad table spoils the whole push", one_bad_table_spoils_the_push),
];

fn lookup(tables: &dyn Tables, request: &[TableIds<'_>], buffers: &mut [&mut [f32]]) -> TablesError {
    let request = LookupRequest { token: token(0, 1), step: 1, mode: Mode::Train, tables: request };
    tables.lookup(&request, buffers).expect_err("a malformed look-up")
}

fn push(tables: &dyn Tables, request: &[TableGradients<'_>]) -> TablesError {
    let request = PushRequest { token: token(0, 1), step: 1, lr_factor: 1.0, tables: request };
    tables.push(&request).expect_err("a malformed push")
}

fn an_unknown_table_is_refused(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ShardedIds::group(&[1]).unwrap();
    let error = lookup(
        fixture.0.as_ref(),
        &[TableIds { table: 2, ids: &ids, per_sample: None }],
        &mut [&mut [0.0; 4]],
    );
    assert!(matches!(error, TablesError::BadTable { table: 2, .. }), "{error}");
    let gradients = TableGradients { table: 2, ids: &ids, gradients: Gradients::Rows(&[0.0; 4]) };
    let error = push(fixture.0.as_ref(), &[gradients]);
    assert!(matches!(error, TablesError::BadTable { table: 2, .. }), "{error}");
    assert_eq!(fixture.rows_held(), [0, 0]);
}

fn a_table_named_twice_is_refused(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ShardedIds::group(&[1]).unwrap();
    let table = TableIds { table: 0, ids: &ids, per_sample: None };
    let error = lookup(fixture.0.as_ref(), &[table, table], &mut [&mut [0.0; 4], &mut [0.0; 4]]);
    assert!(matches!(error, TablesError::BadTable { table: 0, .. }), "{error}");
    assert_eq!(fixture.rows_held(), [0, 0]);
    fixture.insert(1, 0, &[1]);
    let gradients = TableGradients { table: 0, ids: &ids, gradients: Gradients::Rows(&[1.0; 4]) };
    let error = push(fixture.0.as_ref(), &[gradients, gradients]);
    assert!(matches!(error, TablesError::BadTable { table: 0, .. }), "{error}");
    assert_eq!(fixture.read(0, &[1]), [[0.0; 4]]);
}

fn wrong_buffers_are_refused(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ShardedIds::group(&[1, 2]).unwrap();
    let table = TableIds { table: 0, ids: &ids, per_sample: None };
    for length in [0, 4, 7, 9] {
        let error = lookup(fixture.0.as_ref(), &[table], &mut [&mut vec![0.0; length]]);
        assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
        let gradients =
            TableGradients { table: 0, ids: &ids, gradients: Gradients::Rows(&vec![0.0; length]) };
        let error = push(fixture.0.as_ref(), &[gradients]);
        assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    }
    let error = lookup(fixture.0.as_ref(), &[table], &mut []);
    assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    assert_eq!(fixture.rows_held(), [0, 0]);
}

fn one_bad_table_spoils_the_push(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(20);
    fixture.insert(1, 0, &ids);
    let grouped = ShardedIds::group(&ids).unwrap();
    let good = TableGradients { table: 0, ids: &grouped, gradients: Gradients::Rows(&[1.0; 80]) };
    let bad = TableGradients { table: 1, ids: &grouped, gradients: Gradients::Rows(&[1.0; 80]) };
    let error = push(fixture.0.as_ref(), &[good, bad]);
    assert!(matches!(error, TablesError::BadShape { .. }), "{error}");
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 0.0));
    assert_eq!(fixture.push(1, 0, &ids, &distinct_gradients(0, &ids)).rows_applied, 20);
}
