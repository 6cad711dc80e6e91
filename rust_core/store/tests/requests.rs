//! Tests the messages of refused requests, and that refused requests change nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod sample;

use persia_kernels::Gradients;
use persia_store::{Store, StoreOptions};
use persia_types::limits::MAX_IDS_PER_REQUEST;
use persia_types::tables::{LookupRequest, PushRequest, Run, TableGradients};
use persia_types::{Id, Initializer, Mode, Optimizer, ShardedIds, Tables, TablesError, Token};
use sample::{
    all_rows, grouped, insert, push, read, run, schema, store_of, token, train, try_lookup, try_push,
};

fn refused<T>(result: Result<T, TablesError>) -> String {
    result.err().expect("a refusal").to_string()
}

#[test]
fn nothing_works_before_a_run_begins() {
    let store = Store::new(schema(&[2]), StoreOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let parts = [(0, grouped(&[1]))];
    for mode in [Mode::Train, Mode::Eval] {
        assert!(matches!(try_lookup(&store, token(0, 1), 1, mode, &parts), Err(TablesError::NotBegun)));
    }
    let pushed = try_push(&store, token(0, 1), 1, &parts, &[vec![0.0; 2]]);
    assert!(matches!(pushed, Err(TablesError::NotBegun)));
    assert!(matches!(store.restore(dir.path(), &[]), Err(TablesError::NotBegun)));
}

#[test]
fn invalid_options_and_schemas_are_refused() {
    let refuse = |dims: &[usize], options| refused(Store::new(schema(dims), options));
    let options = StoreOptions::default();
    assert!(refuse(&[2], StoreOptions { capacity: 0, ..options.clone() }).contains("capacity is 0"));
    let error = refuse(&[2], StoreOptions { snapshot_threads: 0, ..options.clone() });
    assert!(error.contains("snapshot_threads is 0; each must be at least 1"), "{error}");
    let error = refuse(&[2], StoreOptions { request_threads: 0, ..options.clone() });
    assert!(error.contains("request_threads is 0"), "{error}");
    assert!(refuse(&[2], StoreOptions { shards: 0..257, ..options.clone() }).contains("0..257"));
    assert!(refuse(&[2], StoreOptions { shards: 7..7, ..options.clone() }).contains("7..7"));
    assert!(refuse(&[2, 0], options.clone()).contains("table table_1 has dim 0"));
    let mut twice = schema(&[2, 2]);
    twice.tables[1].name = "table_0".into();
    assert!(refused(Store::new(twice, options)).contains("two tables have the name table_0"));
}

#[test]
fn a_run_that_does_not_fit_is_refused_and_the_old_one_continues() {
    let store = store_of(&run(&[2]), 1 << 20);
    insert(&store, 1, 0, &[1, 2, 3]);
    let begin = |run: Run| refused(store.begin(&run));
    assert!(begin(run(&[2])).contains("generation 1 is not above the current generation 1"));
    assert!(
        begin(Run { generation: 2, ..run(&[3]) })
            .contains("the configuration has table table_0 of dim 2, but the run has table table_0 of dim 3")
    );
    let message = begin(Run { generation: 2, ..run(&[2, 2]) });
    assert!(message.contains("the number of configured tables is 1"), "{message}");
    let adam = Optimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.9, weight_decay: 0.0, eps: 1e-8 };
    let message = begin(Run { generation: 2, optimizer: Some(adam), ..run(&[2]) });
    assert!(
        message.contains("table table_0 has rows (3) with optimizer state of size 0")
            && message.contains("needs size 4"),
        "{message}"
    );
    assert_eq!(push(&store, 1, 0, &[1, 2, 3], 1.0).rows_applied, 3);
    store.clear().unwrap();
    store.begin(&Run { generation: 2, optimizer: Some(adam), ..run(&[2]) }).unwrap();
}

#[test]
fn rows_stay_in_a_new_generation_and_tokens_do_not() {
    let store = store_of(&run(&[2]), 1 << 20);
    train(&store, 1, 0, &[1]);
    push(&store, 1, 0, &[1], 1.0);
    store.begin(&Run { generation: 5, ..run(&[2]) }).unwrap();
    assert_eq!(store.stats().unwrap().pushes.rows_pushed, 0);
    let stale = try_push(&store, token(0, 2), 2, &[(0, grouped(&[1]))], &[vec![1.0; 2]]);
    assert!(matches!(stale, Err(TablesError::StaleGeneration { current: 5, .. })));
    let parts = [(0, grouped(&[1]))];
    let stale = try_lookup(&store, token(0, 2), 2, Mode::Train, &parts);
    assert!(matches!(stale, Err(TablesError::StaleGeneration { current: 5, .. })));
    let new = Token { generation: 5, ..token(0, 1) };
    assert_eq!(try_push(&store, new, 1, &parts, &[vec![1.0; 2]]).unwrap().rows_applied, 1);
    assert_eq!(read(&store, 0, 1), [-2.0; 2]);
}

#[test]
fn evaluation_changes_nothing_and_needs_no_optimizer() {
    let store = store_of(&Run { optimizer: None, ..run(&[2]) }, 1 << 20);
    let parts = [(0, grouped(&[1, 2]))];
    for mode in [Mode::Eval, Mode::Infer] {
        let (report, rows) = try_lookup(&store, token(9, 0), 0, mode, &parts).unwrap();
        assert_eq!((report.missing, rows[0].as_slice()), (2, &[0.0; 4][..]));
    }
    assert!(matches!(try_lookup(&store, token(0, 1), 1, Mode::Train, &parts), Err(TablesError::NoOptimizer)));
    let pushed = try_push(&store, token(0, 1), 1, &parts, &[vec![0.0; 4]]);
    assert!(matches!(pushed, Err(TablesError::NoOptimizer)));
    assert_eq!(store.stats().unwrap().rows, [0]);
}

#[test]
fn malformed_look_ups_are_refused_whole() {
    let store = store_of(&run(&[2, 3]), 1 << 20);
    let ids = |ids: &[Id]| grouped(ids);
    let look = |parts: &[(usize, ShardedIds)], floats: &[usize], step: u64| {
        let tables: Vec<_> = parts
            .iter()
            .map(|(table, ids)| persia_types::tables::TableIds { table: *table, ids, per_sample: None })
            .collect();
        let mut rows: Vec<Vec<f32>> = floats.iter().map(|floats| vec![0.0; *floats]).collect();
        let mut buffers: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
        let request = LookupRequest { token: token(0, 1), step, mode: Mode::Train, tables: &tables };
        refused(store.lookup(&request, &mut buffers))
    };
    assert!(look(&[(0, ids(&[1])), (2, ids(&[1]))], &[2, 3], 1).contains("table index 2: unknown"));
    assert!(look(&[(0, ids(&[1])), (0, ids(&[1]))], &[2, 2], 1).contains("named twice"));
    let error = look(&[(0, ids(&[1])), (1, ids(&[1]))], &[2, 2], 1);
    assert!(error.contains("a buffer of 2 floats, but dim is 3 and the number of ids is 1"), "{error}");
    let error = look(&[(0, ids(&[1]))], &[2, 3], 1);
    assert!(error.contains("the number of buffers is 2, but the number of tables is 1"), "{error}");
    assert!(look(&[(0, ids(&[1]))], &[2], 0).contains("step is 0"));
    assert!(look(&[(0, ids(&[1]))], &[2], 1 << 32).contains("step is 4294967296"));
    assert!(all_rows(&store).is_empty());
    assert_eq!(train(&store, 1, 0, &[1]).0.initial, 1);
}

#[test]
fn the_limit_of_ids_counts_all_tables() {
    let store = store_of(&run(&[1, 1]), 1 << 20);
    let half: Vec<Id> = (0..MAX_IDS_PER_REQUEST as u64 / 2 + 1).collect();
    let parts = [(0, grouped(&half)), (1, grouped(&half))];
    let refused = try_lookup(&store, token(0, 1), 1, Mode::Train, &parts);
    assert!(matches!(refused, Err(TablesError::TooManyIds { ids: 2_000_002, .. })));
}

#[test]
fn malformed_pushes_are_refused_whole_and_the_token_stays_unknown() {
    let store = store_of(&run(&[2, 2]), 1 << 20);
    insert(&store, 1, 0, &[1, 2]);
    let ids = grouped(&[1, 2]);
    let push_of = |tables: &[(usize, usize)], step, lr_factor| {
        let gradients = [1.0; 8];
        let tables: Vec<TableGradients<'_>> = tables
            .iter()
            .map(|(table, floats)| TableGradients {
                table: *table,
                ids: &ids,
                gradients: Gradients::Rows(&gradients[..*floats]),
            })
            .collect();
        store.push(&PushRequest { token: token(0, 1), step, lr_factor, tables: &tables })
    };
    assert!(refused(push_of(&[(0, 4), (7, 4)], 1, 1.0)).contains("table index 7: unknown"));
    assert!(
        refused(push_of(&[(0, 4), (1, 3)], 1, 1.0))
            .contains("found 3 floats of gradients, expected 2 ids * 2")
    );
    assert!(refused(push_of(&[(0, 4), (0, 4)], 1, 1.0)).contains("named twice"));
    assert!(refused(push_of(&[(0, 4)], 0, 1.0)).contains("step is 0"));
    for factor in [f32::NAN, f32::INFINITY, -1.0] {
        assert!(refused(push_of(&[(0, 4)], 1, factor)).contains("lr_factor"));
    }
    assert_eq!(read(&store, 0, 1), [0.0; 2]);
    assert_eq!(push_of(&[(0, 4)], 1, 0.5).unwrap().rows_applied, 2);
    assert_eq!(push_of(&[(0, 4)], 1, 0.5).unwrap().rows_duplicate, 2);
    assert_eq!(read(&store, 0, 1), [-0.5; 2]);
}

#[test]
fn an_id_reads_as_zeros_until_it_is_admitted() {
    let random = Initializer::Uniform { low: 1.0, high: 2.0 };
    let store = store_of(&Run { admit_probability: 0.2, initializer: random, ..run(&[1]) }, 1 << 20);
    let ids: Vec<Id> = (0..500).collect();
    let mut held = 0;
    for seq in 1..=20 {
        let (report, rows) = train(&store, seq, 0, &ids);
        assert_eq!(report.hits, held);
        assert_eq!(rows.iter().filter(|row| **row == 0.0).count() as u64, report.missing);
        let pushed = push(&store, seq, 0, &ids, 0.0);
        assert_eq!((pushed.rows_inserted, pushed.rows_missing), (report.initial, report.missing));
        held += pushed.rows_inserted;
    }
    assert!(held > 450 && store.stats().unwrap().rows == [held], "{held}");
}

#[test]
fn the_first_row_with_a_bad_gradient_is_reported_in_the_order_of_the_request() {
    let store = store_of(&run(&[1, 1]), 1 << 20);
    let parts = [(1, grouped(&(0..600).collect::<Vec<_>>())), (0, grouped(&(0..600).collect::<Vec<_>>()))];
    try_lookup(&store, token(0, 1), 1, Mode::Train, &parts).unwrap();
    let mut gradients = [vec![1.0; 600], vec![1.0; 600]];
    gradients[1][0] = f32::NAN;
    gradients[0][599] = f32::NEG_INFINITY;
    gradients[0][598] = f32::NAN;
    let report = try_push(&store, token(0, 1), 1, &parts, &gradients).unwrap();
    assert_eq!((report.rows_nonfinite, report.rows_applied), (3, 1_197));
    assert_eq!(report.first_nonfinite, Some((1, parts[0].1.ids()[598])));
    assert_eq!(store.stats().unwrap().pushes.first_nonfinite, report.first_nonfinite);
}
