//! Tests of the staleness K: at most K - 1 of the rank's pushes are unacknowledged when a look-up is served.

use std::sync::Arc;
use std::time::Instant;

use persia_engine::{DrainOutcome, FeedOutcome, Next, Wait};

use crate::support::{
    LONG, Rigged, SHORT, batch, engine, feed, one_slot, push, ready, waits_for, with_staleness,
};

#[test]
fn look_ups_wait_at_k_while_no_push_is_acknowledged() {
    for k in [1, 2, 8] {
        let tables = Arc::new(Rigged::new(&one_slot()));
        tables.open_until(0);
        let engine = engine(tables.clone(), &one_slot(), with_staleness(k));
        let pipeline = engine.pipeline().unwrap();
        for step in 0..10 {
            feed(&pipeline, batch(&[step], true));
        }
        for _ in 0..k {
            push(ready(&pipeline), 1.0);
        }
        tables.wait_for_push(1);
        waits_for(&pipeline, Wait::Push { step: 1 });
        assert_eq!(tables.looked_up(), (1..=k as u64).collect::<Vec<_>>());
        assert_eq!(engine.stats().staleness, k as u64);

        tables.open_until(1); // each acknowledgement allows one more look-up
        assert_eq!(ready(&pipeline).step, k as u64 + 1);
        tables.wait_for_lookups(k + 1);
        tables.open();
    }
}

#[test]
fn the_bound_holds_over_many_steps_and_is_reached() {
    for k in [1, 2, 8] {
        let tables = Arc::new(Rigged::new(&one_slot()));
        let engine = engine(tables.clone(), &one_slot(), with_staleness(k));
        let pipeline = engine.pipeline().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for step in 0..200 {
                    feed(&pipeline, batch(&[step % 7, step % 3], true));
                }
                pipeline.end_of_data();
            });
            for step in 1..=200 {
                let looked = ready(&pipeline);
                assert_eq!(looked.step, step);
                push(looked, 1.0);
            }
        });
        assert!(matches!(pipeline.next(LONG).unwrap(), Next::End));
        assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
        let most = tables.staleness().into_iter().max().unwrap();
        assert!(most < k as u64, "K={k}: {most} earlier steps were missing");
        let stats = engine.stats();
        assert!(stats.max_staleness < k as u64);
        assert_eq!((stats.lookups, stats.pushes, stats.staleness), (200, 200, 0));
        assert_eq!(stats.push_report.rows_applied, stats.push_report.rows_pushed);
        assert_eq!(stats.slots[0].occurrences, 400);
    }
}

#[test]
fn without_backward_the_wait_names_the_caller() {
    let engine = engine(Arc::new(Rigged::new(&one_slot())), &one_slot(), with_staleness(2));
    let pipeline = engine.pipeline().unwrap();
    for step in 0..4 {
        feed(&pipeline, batch(&[step], true));
    }
    let (first, second) = (ready(&pipeline), ready(&pipeline));
    waits_for(&pipeline, Wait::Gradients { step: 1 });
    drop(first); // the step of a dropped ticket leaves the window
    assert_eq!(ready(&pipeline).step, 3);
    drop(second);
    assert_eq!(ready(&pipeline).step, 4);
    assert_eq!(engine.stats().staleness, 0);
    assert_eq!(engine.stats().pushes, 0);
}

#[test]
fn a_full_queue_gives_the_batch_back_and_says_why() {
    let engine = engine(
        Arc::new(Rigged::new(&one_slot())),
        &one_slot(),
        persia_engine::EngineOptions { forward_buffer: 1, ..with_staleness(1) },
    );
    let pipeline = engine.pipeline().unwrap();
    let start = Instant::now();
    let mut offered = Arc::new(batch(&[0], true));
    let mut accepted = 0;
    loop {
        match pipeline.feed(offered, SHORT).unwrap() {
            FeedOutcome::Accepted => {
                accepted += 1;
                offered = Arc::new(batch(&[accepted], true));
            }
            FeedOutcome::Pending { batch: returned, wait } => {
                assert_eq!(returned.id_features()[0].unique().ids(), [accepted]);
                if wait == (Wait::Taking { step: 1 }) {
                    break;
                }
                assert!(start.elapsed() < LONG, "{wait:?}"); // the look-up of step 1 is not complete yet
                offered = returned;
            }
        }
    }
    // One batch is looked up, one is in the look-up thread, and one is queued.
    assert!((2..=3).contains(&accepted), "{accepted}");
    assert!(matches!(pipeline.next(LONG).unwrap(), Next::Ready(_)));
    assert!(matches!(pipeline.feed(batch(&[9], true), LONG).unwrap(), FeedOutcome::Accepted));
}

#[test]
fn batches_that_do_not_train_need_no_room() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    tables.open_until(0);
    let engine = engine(tables.clone(), &one_slot(), with_staleness(1));
    let training = engine.pipeline().unwrap();
    feed(&training, batch(&[1], true));
    push(ready(&training), 1.0);
    tables.wait_for_push(1);
    let evaluation = engine.pipeline().unwrap(); // the step of `training` is in the window
    for _ in 0..5 {
        feed(&evaluation, batch(&[1, 2], false));
    }
    for _ in 0..5 {
        let looked = ready(&evaluation);
        assert!(looked.ticket.is_none());
        assert_eq!((looked.report.hits, looked.report.missing), (0, 2)); // the push is in flight
    }
    assert_eq!(engine.step(), 1);
    tables.open();
}

#[test]
fn paused_nothing_is_looked_up_and_a_drain_leaves_nothing_in_flight() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let engine = engine(tables.clone(), &one_slot(), with_staleness(4));
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[1], true));
    push(ready(&pipeline), 1.0);
    engine.pause();
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    feed(&pipeline, batch(&[2], true));
    assert!(matches!(pipeline.next(SHORT).unwrap(), Next::Pending(_)));
    assert_eq!(tables.looked_up(), [1]);
    engine.resume();
    assert_eq!(ready(&pipeline).step, 2);
}
