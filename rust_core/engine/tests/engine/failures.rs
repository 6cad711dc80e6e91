//! Tests that after a failure every later call reports it, and that nothing is lost silently.

use std::sync::Arc;

use persia_engine::{
    Batch, BatchParts, DrainOutcome, Engine, Error, Gradient, IdFeature, Next, Pipeline, PushOptions,
};
use persia_types::Mode;
use persia_types::tables::{LookupReport, LookupRequest, PushReport, PushRequest, Tables, TablesError};

use crate::plain::PlainTables;
use crate::support::{
    LONG, Rigged, SHORT, Wrapped, batch, engine, feed, gradients, one_slot, plain, push, ready, reproducible,
    tables_by_wrapping, with_staleness,
};

fn rigged(rig: impl FnOnce(&mut Rigged)) -> (Arc<Rigged>, Engine) {
    let mut tables = Rigged::new(&one_slot());
    rig(&mut tables);
    let tables = Arc::new(tables);
    let engine = engine(tables.clone(), &one_slot(), with_staleness(2));
    (tables, engine)
}

/// The first error that `next` returns. Earlier batches are pushed.
fn next_error(pipeline: &Pipeline) -> Error {
    loop {
        match pipeline.next(LONG) {
            Ok(Next::Ready(mut looked)) => {
                let gradients = gradients(&looked, 1.0);
                if let Err(error) = looked.ticket.take().unwrap().push(gradients, Default::default()) {
                    return error;
                }
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => return error,
        }
    }
}

/// Check that every call returns the same error.
fn assert_sticky(engine: &Engine, pipeline: &Pipeline, is_it: fn(&Error) -> bool) {
    for _ in 0..2 {
        assert!(is_it(&pipeline.next(LONG).unwrap_err()));
        assert!(is_it(&pipeline.feed(batch(&[1], true), LONG).unwrap_err()));
        assert!(is_it(&engine.drain(LONG).unwrap_err()));
        assert!(is_it(&engine.lookup_now(&batch(&[1], false), Mode::Eval).unwrap_err()));
        assert!(is_it(&engine.pipeline().err().unwrap()));
        assert!(is_it(&engine.failure().unwrap()));
    }
}

#[test]
fn a_failed_look_up_stops_the_engine() {
    let (tables, engine) = rigged(|tables| tables.fail_lookup_at = Some(3));
    let pipeline = engine.pipeline().unwrap();
    for step in 0..5 {
        feed(&pipeline, batch(&[step], true));
    }
    let is_it = |error: &Error| matches!(error, Error::Lookup { step: 3, .. });
    let error = next_error(&pipeline);
    assert!(is_it(&error), "{error}");
    assert!(error.to_string().contains("server 1"), "{error}");
    assert_sticky(&engine, &pipeline, is_it);
    assert_eq!(tables.looked_up().last(), Some(&3));
}

#[test]
fn a_failed_push_is_reported_and_its_step_stays_in_the_window() {
    let (tables, engine) = rigged(|tables| tables.fail_push_at = Some(2));
    let pipeline = engine.pipeline().unwrap();
    for step in 0..8 {
        feed(&pipeline, batch(&[step], true));
    }
    let is_it = |error: &Error| matches!(error, Error::Push { step: 2, .. });
    assert!(is_it(&next_error(&pipeline)));
    assert_sticky(&engine, &pipeline, is_it);
    assert_eq!(tables.pushed(), [1]);
    assert!(engine.stats().staleness >= 1);
    // With K = 2 and push 2 lost, step 4 was never looked up.
    assert!(tables.looked_up().iter().all(|step| *step <= 3), "{:?}", tables.looked_up());
}

#[test]
fn a_failed_push_reaches_a_ticket_that_is_still_out() {
    let (_, engine) = rigged(|tables| tables.fail_push_at = Some(1));
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    feed(&pipeline, batch(&[2], true));
    let (first, mut second) = (ready(&pipeline), ready(&pipeline));
    push(first, 1.0);
    assert!(matches!(engine.drain(LONG), Err(Error::Push { step: 1, .. })));
    let gradients = gradients(&second, 1.0);
    let error = second.ticket.take().unwrap().push(gradients, Default::default()).unwrap_err();
    assert!(matches!(error, Error::Push { step: 1, .. }), "{error}");
}

#[test]
fn a_panic_in_the_tables_becomes_an_error() {
    let (_, engine) = rigged(|tables| tables.panic_push_at = Some(1));
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    push(ready(&pipeline), 1.0);
    let error = engine.drain(LONG).unwrap_err();
    assert!(
        matches!(&error, Error::Panicked { worker: "push", step: 1, what } if what.contains("rigged")),
        "{error}"
    );
}

#[test]
fn a_failing_source_is_reported_after_the_batches_before_it() {
    let (_, engine) = rigged(|_| {});
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    feed(&pipeline, batch(&[2], true));
    pipeline.fail(Arc::new(std::io::Error::other("row 17 of train.csv has 3 columns")));
    push(ready(&pipeline), 1.0);
    push(ready(&pipeline), 1.0);
    for _ in 0..2 {
        let error = pipeline.next(LONG).unwrap_err();
        let Error::Source(source) = &error else { panic!("{error}") };
        assert!(source.downcast_ref::<std::io::Error>().is_some());
        assert!(error.to_string().contains("row 17"), "{error}");
    }
    assert!(engine.failure().is_none());
    let again = engine.pipeline().unwrap(); // the engine has not failed
    feed(&again, batch(&[3], true));
    push(ready(&again), 1.0);
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
}

#[test]
fn a_batch_that_does_not_fit_is_reported_in_order_and_ends_its_pipeline_only() {
    let (_, engine) = rigged(|_| {});
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    let id_features = vec![IdFeature::single("unknown", &[1]).unwrap()];
    feed(&pipeline, Batch::new(BatchParts { id_features, ..Default::default() }).unwrap());
    push(ready(&pipeline), 1.0);
    for _ in 0..2 {
        let error = pipeline.next(LONG).unwrap_err();
        assert!(matches!(error, Error::FeatureMismatch { .. }), "{error}");
        assert!(matches!(pipeline.feed(batch(&[1], true), LONG), Err(Error::FeatureMismatch { .. })));
    }
    assert!(engine.pipeline().is_ok());
}

#[test]
fn bad_gradients_are_refused_and_their_step_leaves_the_window() {
    let (tables, engine) = rigged(|_| {});
    let pipeline = engine.pipeline().unwrap();
    let floats = |count: usize| Some(Box::new(vec![1.0f32; count]) as Gradient);
    let bad: Vec<(Vec<Option<Gradient>>, PushOptions)> = vec![
        (vec![], PushOptions::default()),
        (vec![floats(2), floats(2)], PushOptions::default()),
        (vec![floats(3)], PushOptions::default()),
        (vec![floats(2)], PushOptions { lr_factor: f32::NAN, ..Default::default() }),
        (vec![floats(2)], PushOptions { lr_factor: -1.0, ..Default::default() }),
        (vec![floats(2)], PushOptions { scale: 0.0, ..Default::default() }),
        (vec![floats(2)], PushOptions { scale: f32::INFINITY, ..Default::default() }),
    ];
    for (gradients, options) in bad {
        feed(&pipeline, batch(&[1], true));
        let error = ready(&pipeline).ticket.unwrap().push(gradients, options).unwrap_err();
        assert!(matches!(error, Error::BadGradient { .. } | Error::BadOption { .. }), "{error}");
    }
    assert_eq!(engine.stats().staleness, 0);
    assert!(tables.pushed().is_empty());
    feed(&pipeline, batch(&[1], true));
    push(ready(&pipeline), 1.0);
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
}

#[test]
fn drain_names_the_push_it_waits_for() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    tables.open_until(0);
    let engine = engine(tables.clone(), &one_slot(), reproducible());
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    push(ready(&pipeline), 1.0);
    let DrainOutcome::Pending(wait) = engine.drain(SHORT).unwrap() else { panic!("drained") };
    assert_eq!(wait.to_string(), "the push of step 1 to be acknowledged");
    tables.open();
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
}

/// A gradient whose destructor drops the last handle of the engine, on the push thread itself.
#[test]
fn the_engine_may_be_dropped_by_its_own_push_thread() {
    struct Owner(Vec<f32>, #[allow(dead_code)] Engine);
    impl AsRef<[f32]> for Owner {
        fn as_ref(&self) -> &[f32] {
            &self.0
        }
    }
    let (tables, engine) = rigged(|_| {});
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    let looked = ready(&pipeline);
    tables.open_until(0);
    pipeline.close();
    drop(pipeline);
    let gradient = Box::new(Owner(vec![1.0; 2], engine)) as Gradient;
    looked.ticket.unwrap().push(vec![Some(gradient)], PushOptions::default()).unwrap();
    tables.open();
    tables.wait_for_push(1);
}

#[test]
fn a_report_that_omits_rows_is_no_acknowledgement() {
    struct Forgetful(PlainTables);
    tables_by_wrapping!(Forgetful);
    impl Wrapped for Forgetful {
        fn inner(&self) -> &dyn Tables {
            &self.0
        }
        fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
            let report = self.0.push(request)?;
            Ok(PushReport { rows_applied: report.rows_applied - 1, ..report })
        }
    }
    let tables = Arc::new(Forgetful(plain(&one_slot())));
    let engine = engine(tables, &one_slot(), with_staleness(2));
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1, 2, 3], true));
    push(ready(&pipeline), 1.0);
    let error = engine.drain(LONG).unwrap_err();
    assert!(error.to_string().contains("was given 3 rows and reported 3 rows: 2 applied"), "{error}");
}
