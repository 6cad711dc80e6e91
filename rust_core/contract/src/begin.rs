//! Cases about beginning a run, and about the requests that a run refuses.

use persia_types::schema::Optimizer;
use persia_types::tables::{Mode, Run, TablesError};
use persia_types::token::{JobId, Token};

use crate::fixture::{
    Fixture, GENERATION, LEDGER, begun, begun_with, distinct_gradients, ids, next_run, pushed, run, token,
};
use crate::{Case, Make};

pub(super) const CASES: &[Case] = &[
    ("nothing works before begin", nothing_works_before_begin),
    ("a generation must be above the current one", a_generation_must_be_above),
    ("another generation or job is stale", another_generation_or_job_is_stale),
    ("a new generation keeps rows and forgets tokens", a_new_generation_keeps_rows),
    ("a foreign schema or a bad number is refused", bad_runs_are_refused),
    ("without an optimizer only evaluation works", no_optimizer),
    ("rows with other optimizer state are not taken over", other_state_is_refused),
];

fn nothing_works_before_begin(make: Make<'_>) {
    let fixture = Fixture(make());
    for mode in [Mode::Train, Mode::Eval] {
        let error = fixture.try_lookup(token(0, 1), mode, 0, &[1]).unwrap_err();
        assert!(matches!(error, TablesError::NotBegun), "{error}");
    }
    let error = fixture.try_push(token(0, 1), 0, &[1], &distinct_gradients(0, &[1]), 1.0).unwrap_err();
    assert!(matches!(error, TablesError::NotBegun), "{error}");
}

fn a_generation_must_be_above(make: Make<'_>) {
    let fixture = begun(make);
    for generation in [GENERATION, GENERATION - 1] {
        let error = fixture.0.begin(&Run { generation, ..run() }).unwrap_err();
        assert!(matches!(error, TablesError::BadRun { .. }), "{error}");
    }
    fixture.train(1, 0, &[1]); // refused requests changed nothing
    fixture.0.begin(&next_run()).unwrap();
}

fn another_generation_or_job_is_stale(make: Make<'_>) {
    let fixture = begun(make);
    fixture.insert(1, 0, &[1]);
    let stale = [
        Token { generation: GENERATION - 1, ..token(0, 1) },
        Token { generation: GENERATION + 1, ..token(0, 1) },
        Token { job: JobId::from_name("another"), ..token(0, 1) },
    ];
    for token_of_another in stale {
        let error = fixture.try_lookup(token_of_another, Mode::Train, 0, &[2]).unwrap_err();
        assert!(matches!(error, TablesError::StaleGeneration { .. }), "{error}");
        let error =
            fixture.try_push(token_of_another, 0, &[1], &distinct_gradients(0, &[1]), 1.0).unwrap_err();
        assert!(matches!(error, TablesError::StaleGeneration { .. }), "{error}");
    }
    assert_eq!(fixture.rows_held(), [1, 0]);
    assert_eq!(fixture.read(0, &[1]), [vec![0.0; 4]]);
}

fn a_new_generation_keeps_rows(make: Make<'_>) {
    let fixture = begun(make);
    let ids = ids(40);
    fixture.train(1, 0, &ids);
    fixture.push(1, 0, &ids, &distinct_gradients(0, &ids));
    fixture.0.begin(&next_run()).unwrap();
    let again = Token { generation: GENERATION + 1, ..token(0, 1) };
    let read = || fixture.try_lookup(again, Mode::Eval, 0, &ids).expect("an eval look-up").0;
    assert_eq!(read(), pushed(0, &ids, 1.0));
    let report = fixture.try_push(again, 0, &ids, &distinct_gradients(0, &ids), 1.0).unwrap();
    assert_eq!(report.rows_applied, 40);
    assert_eq!(read(), pushed(0, &ids, 2.0));
}

fn bad_runs_are_refused(make: Make<'_>) {
    let mut foreign = run();
    foreign.schema.tables[1].dim += 1;
    let sgd = |lr, weight_decay| Some(Optimizer::Sgd { lr, momentum: 0.0, weight_decay });
    let bad = [
        foreign,
        Run { admit_probability: 1.5, ..run() },
        Run { admit_probability: f32::NAN, ..run() },
        Run { weight_bound: -1.0, ..run() },
        Run { weight_bound: f32::NAN, ..run() },
        Run { optimizer: sgd(f32::NAN, 0.0), ..run() },
        Run { optimizer: sgd(1.0, f32::INFINITY), ..run() },
    ];
    let tables = make();
    for run in bad {
        let error = tables.begin(&run).expect_err("a bad run");
        assert!(matches!(error, TablesError::BadRun { .. }), "{error}");
    }
    tables.begin(&run()).expect("a good run after bad ones");
}

fn no_optimizer(make: Make<'_>) {
    let fixture = begun_with(make, &Run { optimizer: None, ..run() });
    let error = fixture.try_lookup(token(0, 1), Mode::Train, 0, &[1]).unwrap_err();
    assert!(matches!(error, TablesError::NoOptimizer), "{error}");
    let error = fixture.try_push(token(0, 1), 0, &[1], &distinct_gradients(0, &[1]), 1.0).unwrap_err();
    assert!(matches!(error, TablesError::NoOptimizer), "{error}");
    assert_eq!(fixture.read(0, &[1]), [vec![0.0; 4]]);
}

fn other_state_is_refused(make: Make<'_>) {
    let momentum = Optimizer::Sgd { lr: 1.0, momentum: 0.5, weight_decay: 0.0 };
    let fixture = begun_with(make, &Run { optimizer: Some(momentum), ..run() });
    fixture.insert(1, 0, &[1]);
    let next = Run { optimizer: Some(LEDGER), ..next_run() };
    let error = fixture.0.begin(&next).unwrap_err();
    assert!(matches!(error, TablesError::BadRun { .. }), "{error}");
    fixture.0.clear().unwrap();
    fixture.0.begin(&next).expect("without rows any optimizer fits");
}
