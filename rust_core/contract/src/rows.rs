//! Cases about the content of rows: each row gets its own gradients and no others.

use persia_kernels::Gradients;
use persia_types::id::ShardedIds;
use persia_types::schema::Initializer;
use persia_types::tables::{LookupRequest, Mode, PushReport, PushRequest, Run, TableGradients, TableIds};

use crate::fixture::{begun, begun_with, distinct_gradients, ids, pushed, run, token};
use crate::{Case, Make, schema};

pub(super) const CASES: &[Case] = &[
    ("a missing id shifts no other", a_missing_id_shifts_no_other),
    ("a row with a non-finite or huge gradient is skipped alone", a_nonfinite_row_is_skipped_alone),
    ("evaluation changes nothing and reads zeros", evaluation_changes_nothing),
    ("tables do not mix", tables_do_not_mix),
    ("a part of the ids may be pushed", a_part_may_be_pushed),
    ("an empty request is answered", an_empty_request_is_answered),
    ("new rows depend on seed and id alone", new_rows_depend_on_seed_and_id),
    ("ids that are not admitted read as zeros", not_admitted),
    ("the learning-rate factor multiplies", the_factor_multiplies),
    ("weights stay within their bound", weights_stay_within_their_bound),
];

fn a_missing_id_shifts_no_other(make: Make<'_>) {
    let initializer = Initializer::Uniform { low: 1.0, high: 2.0 };
    let fixture = begun_with(make, &Run { admit_probability: 0.5, initializer, ..run() });
    let all = ids(200);
    // An id that is not admitted reads as zeros.
    let (mut rows, found) = fixture.train(1, 1, &all);
    assert!((60..140).contains(&found.missing), "{found:?}");
    let gradients = distinct_gradients(1, &all);
    let report = fixture.push(1, 1, &all, &gradients);
    let expected = PushReport {
        rows_pushed: 200,
        rows_applied: found.initial,
        rows_inserted: found.initial,
        rows_missing: found.missing,
        ..Default::default()
    };
    assert_eq!(report, expected);
    for (row, gradient) in rows.iter_mut().zip(&gradients).filter(|(row, _)| row[0] != 0.0) {
        row.iter_mut().zip(gradient).for_each(|(weight, g)| *weight -= g);
    }
    assert_eq!(fixture.read(1, &all), rows);
    assert_eq!(fixture.rows_held(), [0, found.initial]);
}

fn a_nonfinite_row_is_skipped_alone(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(60);
    fixture.train(1, 1, &ids);
    let mut gradients = distinct_gradients(1, &ids);
    let first_bad = *ShardedIds::group(&[ids[7], ids[20], ids[40], ids[59]]).unwrap().ids().first().unwrap();
    gradients[7][0] = f32::NAN;
    gradients[40][18] = f32::INFINITY;
    gradients[59][9] = f32::NEG_INFINITY;
    gradients[20][3] = 1e20; // its square would be infinite
    let report = fixture.push(1, 1, &ids, &gradients);
    let expected = PushReport {
        rows_pushed: 60,
        rows_applied: 56,
        rows_nonfinite: 4,
        rows_inserted: 60,
        first_nonfinite: Some((1, first_bad)),
        ..Default::default()
    };
    assert_eq!(report, expected);
    let mut rows = pushed(1, &ids, 1.0);
    for bad in [7, 20, 40, 59] {
        rows[bad].fill(0.0);
    }
    assert_eq!(fixture.read(1, &ids), rows);
}

fn evaluation_changes_nothing(make: Make<'_>) {
    let initializer = Initializer::Uniform { low: 1.0, high: 2.0 };
    let fixture = begun_with(make, &Run { initializer, ..run() });
    let (known, unknown) = (ids(30), [1u64, 2, 3]);
    let (rows, _) = fixture.train(1, 0, &known);
    fixture.insert(1, 0, &known);
    let before = fixture.0.stats().unwrap();
    for mode in [Mode::Eval, Mode::Infer] {
        let both = [&known[..], &unknown].concat();
        let (read, report) = fixture.try_lookup(token(0, 2), mode, 0, &both).unwrap();
        assert_eq!(read[..30], rows);
        assert_eq!(read[30..], vec![vec![0.0; 4]; 3]);
        assert_eq!((report.hits, report.missing, report.initial), (30, 3, 0));
    }
    assert_eq!(fixture.0.stats().unwrap(), before);
    let (_, report) = fixture.train(2, 0, &unknown); // the evaluation look-ups did not use up the token
    assert_eq!(report.initial, 3);
}

fn tables_do_not_mix(make: Make<'_>) {
    let fixture = begun(make);
    let grouped = ShardedIds::group(&ids(80)).unwrap();
    let dims: Vec<usize> = schema().tables.iter().map(|table| table.dim).collect();
    let mut rows: Vec<Vec<f32>> = dims.iter().map(|dim| vec![f32::NAN; 80 * dim]).collect();
    let tables: Vec<TableIds<'_>> =
        (0..2).map(|table| TableIds { table, ids: &grouped, per_sample: None }).collect();
    let request = LookupRequest { token: token(0, 1), step: 1, mode: Mode::Train, tables: &tables };
    let mut targets: Vec<&mut [f32]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
    assert_eq!(fixture.0.lookup(&request, &mut targets).unwrap().initial, 160);
    assert_eq!(fixture.rows_held(), [0, 0]);

    let gradients: Vec<Vec<f32>> =
        dims.iter().enumerate().map(|(table, dim)| vec![1.0 + table as f32; 80 * dim]).collect();
    let tables: Vec<TableGradients<'_>> = (0..2)
        .rev() // the order of the tables does not matter
        .map(|table| TableGradients { table, ids: &grouped, gradients: Gradients::Rows(&gradients[table]) })
        .collect();
    let push = PushRequest { token: token(0, 1), step: 1, lr_factor: 1.0, tables: &tables };
    assert_eq!(fixture.0.push(&push).unwrap().rows_applied, 160);
    assert_eq!(fixture.rows_held(), [80, 80]);
    assert_eq!(fixture.read(0, grouped.ids()), vec![vec![-1.0; 4]; 80]);
    assert_eq!(fixture.read(1, grouped.ids()), vec![vec![-2.0; 19]; 80]);
}

fn a_part_may_be_pushed(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(90);
    fixture.train(1, 0, &ids);
    fixture.push(1, 0, &ids[30..60], &distinct_gradients(0, &ids[30..60]));
    assert_eq!(fixture.rows_held(), [30, 0]);
    assert_eq!(fixture.read(0, &ids[30..60]), pushed(0, &ids[30..60], 1.0));
    assert_eq!(fixture.read(0, &ids[..30]), pushed(0, &ids[..30], 0.0));
    assert_eq!(fixture.read(0, &ids[60..]), pushed(0, &ids[60..], 0.0));
}

fn an_empty_request_is_answered(make: Make<'_>) {
    let fixture = begun(make);
    let (rows, report) = fixture.train(1, 0, &[]);
    assert!(rows.is_empty());
    assert_eq!(report.initial, 0);
    assert_eq!(fixture.push(1, 0, &[], &[]), PushReport::default());
    let nothing = PushRequest { token: token(0, 2), step: 2, lr_factor: 1.0, tables: &[] };
    assert_eq!(fixture.0.push(&nothing).unwrap(), PushReport::default());
    assert_eq!(fixture.0.stats().unwrap().tokens[&0], 2);
}

fn new_rows_depend_on_seed_and_id(make: Make<'_>) {
    let ids = ids(64);
    let with_seed = |seed, initializer| Run { seed, initializer, ..run() };
    for initializer in
        [Initializer::Uniform { low: -0.5, high: 0.5 }, Initializer::Normal { mean: 0.0, std: 1.0 }]
    {
        let one = begun_with(make, &with_seed(1, initializer)).train(1, 1, &ids).0;
        let fixture = begun_with(make, &with_seed(1, initializer));
        let mut singly: Vec<Vec<f32>> = Vec::new();
        for (seq, id) in (1..).zip(ids.iter().rev()) {
            singly.insert(0, fixture.train(seq, 1, &[*id]).0.remove(0));
        }
        assert_eq!(one, singly);
        let other = begun_with(make, &with_seed(2, initializer)).train(1, 1, &ids).0;
        assert_ne!(one, other);
        assert_ne!(one[0], one[1]);
        assert!(one.iter().flatten().all(|weight| weight.is_finite()));
        if let Initializer::Uniform { low, high } = initializer {
            assert!(one.iter().flatten().all(|weight| (low..high).contains(weight)));
        }
    }
}

fn not_admitted(make: Make<'_>) {
    let initializer = Initializer::Uniform { low: 1.0, high: 2.0 };
    let fixture = begun_with(make, &Run { admit_probability: 0.0, initializer, ..run() });
    let ids = ids(40);
    let (rows, report) = fixture.train(1, 0, &ids);
    assert_eq!(rows, vec![vec![0.0; 4]; 40]);
    assert_eq!((report.missing, report.initial), (40, 0));
    assert_eq!(fixture.push(1, 0, &ids, &distinct_gradients(0, &ids)).rows_missing, 40);
    assert_eq!(fixture.rows_held(), [0, 0]);

    let half = begun_with(make, &Run { admit_probability: 0.5, initializer, ..run() });
    let many: Vec<u64> = (0..2000).collect();
    let (_, report) = half.train(1, 0, &many);
    assert_eq!(report.initial + report.missing, 2000);
    assert!((800..1200).contains(&report.initial), "{report:?}");
    let pushed = half.push(1, 0, &many, &distinct_gradients(0, &many));
    assert_eq!((pushed.rows_inserted, pushed.rows_missing), (report.initial, report.missing));
}

fn the_factor_multiplies(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(10);
    fixture.train(1, 0, &ids);
    for (seq, factor) in [(1, 0.0), (2, 0.5), (3, 2.0)] {
        fixture.try_push(token(0, seq), 0, &ids, &distinct_gradients(0, &ids), factor).unwrap();
    }
    assert_eq!(fixture.read(0, &ids), pushed(0, &ids, 2.5));
}

fn weights_stay_within_their_bound(make: Make<'_>) {
    let fixture = begun_with(make, &Run { weight_bound: 2.5, ..run() });
    let ids = ids(12);
    fixture.train(1, 0, &ids);
    fixture.push(1, 0, &ids, &distinct_gradients(0, &ids));
    let clamped: Vec<Vec<f32>> = pushed(0, &ids, 1.0)
        .into_iter()
        .map(|row| row.into_iter().map(|weight| weight.clamp(-2.5, 2.5)).collect())
        .collect();
    assert_eq!(fixture.read(0, &ids), clamped);
}
