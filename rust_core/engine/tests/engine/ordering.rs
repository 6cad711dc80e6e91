//! Tests of order, determinism, steps over several pipelines, and all ways in which a pipeline ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use persia_engine::{DrainOutcome, Engine, EngineOptions, Error, Next, Wait};
use persia_store::{Store, StoreOptions};
use persia_types::{Mode, Tables};

use crate::plain::PlainTables;
use crate::support::{
    LONG, Rigged, SHORT, batch, engine, feed, one_slot, plain, push, ready, reproducible, run, waits_for,
    with_staleness,
};

#[test]
fn a_reproducible_look_up_waits_for_next_and_sees_every_push() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let engine = engine(tables.clone(), &one_slot(), reproducible());
    assert_eq!(engine.options().staleness, 1);
    let pipeline = engine.pipeline().unwrap();
    for _ in 0..4 {
        feed(&pipeline, batch(&[7], true));
    }
    for step in 1..=4 {
        let looked = ready(&pipeline);
        assert_eq!(looked.outputs[0].as_ref(), [1.0 - step as f32; 2]); // every earlier push and no later one is visible
        push(looked, 1.0);
        assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
        // Nothing is looked up ahead, so exactly the steps up to this one have been looked up.
        assert_eq!(tables.looked_up(), (1..=step).collect::<Vec<_>>());
        assert_eq!(tables.plain.weights(0)[&7], [-(step as f32); 2]);
    }
}

#[test]
fn reproducible_evaluation_waits_for_pushes_in_flight() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    tables.open_until(0);
    let engine = engine(tables.clone(), &one_slot(), reproducible());
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[7], true));
    feed(&pipeline, batch(&[7], false));
    push(ready(&pipeline), 1.0);
    waits_for(&pipeline, Wait::Push { step: 1 });
    tables.open();
    assert_eq!(ready(&pipeline).outputs[0].as_ref(), [-1.0; 2]);
}

/// Train on ids that repeat between batches, so that the weights depend on the order of all requests.
fn train(tables: Arc<dyn Tables>, options: EngineOptions, steps: u64) -> (Vec<u64>, Vec<f32>) {
    let engine = engine(tables, &one_slot(), options);
    let pipeline = engine.pipeline().unwrap();
    let mut seen = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for step in 0..steps {
                feed(&pipeline, batch(&[step % 5, step % 3, step % 5], true));
            }
            pipeline.end_of_data();
        });
        while let Next::Ready(looked) = pipeline.next(LONG).unwrap() {
            seen.extend(looked.batch.id_features()[0].unique().ids());
            let value = looked.outputs[0].as_ref().iter().sum::<f32>() * 0.3 + 0.1;
            push(*looked, value);
        }
    });
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    let rows = engine.lookup_now(&batch(&[0, 1, 2, 3, 4], false), Mode::Eval).unwrap();
    (seen, rows.outputs[0].as_ref().to_vec())
}

#[test]
fn reproducible_runs_are_bit_equal_on_any_tables() {
    let on_plain = || Arc::new(plain(&one_slot())) as Arc<dyn Tables>;
    let on_store = || {
        let store = Store::new(one_slot(), StoreOptions::default()).unwrap();
        store.begin(&run(&one_slot())).unwrap();
        Arc::new(store) as Arc<dyn Tables>
    };
    let first = train(on_plain(), reproducible(), 60);
    assert!(first.1.iter().all(|weight| *weight != 0.0));
    for _ in 0..3 {
        assert_eq!(train(on_plain(), reproducible(), 60), first);
        assert_eq!(train(on_store(), reproducible(), 60), first);
    }
}

#[test]
fn batches_come_in_the_order_they_were_fed() {
    let engine = engine(Arc::new(plain(&one_slot())), &one_slot(), with_staleness(8));
    let pipeline = engine.pipeline().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for step in 0..100 {
                feed(&pipeline, batch(&[step], step % 4 != 3));
            }
            pipeline.end_of_data();
        });
        for step in 0..100 {
            let looked = ready(&pipeline);
            assert_eq!(looked.batch.id_features()[0].unique().ids(), [step]);
        }
    });
    assert!(matches!(pipeline.next(LONG).unwrap(), Next::End));
    assert!(matches!(pipeline.next(LONG).unwrap(), Next::End));
    assert_eq!(engine.step(), 75);
}

#[test]
fn steps_continue_over_pipelines_and_start_at_first_seq() {
    let options = EngineOptions { first_seq: 41, ..with_staleness(2) };
    let engine = engine(Arc::new(plain(&one_slot())), &one_slot(), options);
    assert_eq!(engine.step(), 40);
    for generation in 0..3 {
        let pipeline = engine.pipeline().unwrap();
        feed(&pipeline, batch(&[1], true));
        feed(&pipeline, batch(&[2], true));
        pipeline.end_of_data();
        for step in 1..=2 {
            let looked = ready(&pipeline);
            assert_eq!(looked.step, 40 + generation * 2 + step);
            push(looked, 1.0);
        }
        assert!(matches!(pipeline.next(LONG).unwrap(), Next::End));
        assert!(matches!(pipeline.feed(batch(&[3], true), LONG), Err(Error::Closed { .. })));
    }
    assert_eq!(engine.step(), 46);
}

#[test]
fn closing_early_empties_the_window_and_the_next_pipeline_works() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let engine = engine(tables.clone(), &one_slot(), with_staleness(3));
    let mut kept = Vec::new();
    for _ in 0..20 {
        let pipeline = engine.pipeline().unwrap();
        for step in 0..8 {
            feed(&pipeline, batch(&[step], true));
        }
        kept.push(ready(&pipeline));
        drop(pipeline); // it still has batches that were fed or looked up but not taken
        push(kept.pop().unwrap(), 1.0); // a ticket outlives its pipeline
    }
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    assert_eq!(engine.stats().staleness, 0);
    assert_eq!(engine.stats().pushes, 20);
    let mut steps = tables.looked_up();
    let count = steps.len();
    steps.dedup();
    assert_eq!(steps.len(), count, "a step was looked up twice");
    assert!(steps.is_sorted());
}

#[test]
fn closing_wakes_a_feeder_and_a_taker() {
    let engine = engine(Arc::new(plain(&one_slot())), &one_slot(), with_staleness(1));
    let empty = engine.pipeline().unwrap();
    let full = engine.pipeline().unwrap();
    std::thread::scope(|scope| {
        let taker = scope.spawn(|| empty.next(LONG));
        let feeder = scope.spawn(|| {
            (0..100).find_map(|step| full.feed(batch(&[step], true), LONG).err()).expect("the queue fills up")
        });
        assert!(matches!(full.next(LONG).unwrap(), Next::Ready(_)));
        empty.close();
        full.close();
        assert!(matches!(taker.join().unwrap(), Err(Error::Closed { .. })));
        assert!(matches!(feeder.join().unwrap(), Error::Closed { .. }));
    });
    assert!(matches!(full.next(SHORT), Err(Error::Closed { .. })));
}

#[test]
fn waiting_for_the_source_is_named_and_ends_with_its_batch() {
    let engine = engine(Arc::new(plain(&one_slot())), &one_slot(), with_staleness(1));
    let pipeline = engine.pipeline().unwrap();
    let start = Instant::now();
    let next = pipeline.next(SHORT).unwrap();
    assert!(matches!(next, Next::Pending(Wait::Batch)), "{next:?}");
    assert!(start.elapsed() >= SHORT);
    feed(&pipeline, batch(&[1], true));
    assert_eq!(ready(&pipeline).step, 1);
    assert_eq!(Wait::Batch.to_string(), "a batch from the source");
    assert!(matches!(pipeline.next(Duration::ZERO).unwrap(), Next::Pending(Wait::Batch)));
}

#[test]
fn evaluation_works_from_many_threads_during_training() {
    let tables = Arc::new(plain(&one_slot()));
    tables.set(0, 5, vec![3.0, 4.0]);
    let engine = engine(tables, &one_slot(), with_staleness(4));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let found = engine.lookup_now(&batch(&[5, 1_000_000], false), Mode::Infer).unwrap();
                    assert_eq!(found.outputs[0].as_ref(), [3.0, 4.0, 0.0, 0.0]);
                    assert_eq!(found.report.missing, 1);
                }
            });
        }
        let pipeline = engine.pipeline().unwrap();
        for step in 0..50 {
            feed(&pipeline, batch(&[step + 10], true));
            push(ready(&pipeline), 1.0);
        }
    });
    let error = engine.lookup_now(&batch(&[5], false), Mode::Train).unwrap_err();
    assert!(matches!(error, Error::BadOption { option: "mode", .. }), "{error}");
}

/// The threads of this process whose names start with `persia-`. Other tests have such threads too.
#[cfg(target_os = "linux")]
#[test]
fn no_thread_is_leaked_and_queued_pushes_are_applied() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    tables.open_until(0);
    let weak = {
        let engine: Engine = engine(tables.clone(), &one_slot(), with_staleness(4));
        let pipeline = engine.pipeline().unwrap();
        for _ in 0..6 {
            feed(&pipeline, batch(&[3], true));
        }
        for _ in 0..3 {
            push(ready(&pipeline), 1.0);
        }
        drop(pipeline);
        let releaser = {
            let tables = tables.clone();
            std::thread::spawn(move || {
                tables.wait_for_push(1);
                tables.open();
            })
        };
        drop(engine); // waits for the look-up threads and the push thread
        releaser.join().unwrap();
        Arc::downgrade(&tables)
    };
    assert_eq!(tables.pushed(), [1, 2, 3]);
    // Every worker thread holds a reference to the tables until it ends, so all workers have ended.
    assert_eq!(weak.strong_count(), 1);
    assert_eq!(tables.plain.weights(0)[&3], [-3.0; 2]);
}

#[test]
fn a_pipeline_keeps_its_engine_alive() {
    let tables: Arc<PlainTables> = Arc::new(plain(&one_slot()));
    let pipeline = engine(tables.clone(), &one_slot(), with_staleness(1)).pipeline().unwrap();
    feed(&pipeline, batch(&[3], true));
    push(ready(&pipeline), 2.0);
    feed(&pipeline, batch(&[3], true)); // with K = 1, this is looked up after the first push
    let looked = ready(&pipeline);
    assert_eq!(looked.outputs[0].as_ref(), [-2.0; 2]);
    drop(pipeline);
    let mut looked = looked;
    let gradients = crate::support::gradients(&looked, 1.0);
    let error = looked.ticket.take().unwrap().push(gradients, Default::default()).unwrap_err();
    assert!(matches!(error, Error::Closed { what: "the engine" }), "{error}");
}
