//! Tests of several ranks that take turns: they agree on every step before it starts, and all of them look up
//! and push at every step.

use std::sync::Arc;

use persia_engine::{DrainOutcome, EngineOptions};

use crate::support::{LONG, Rigged, SHORT, batch, engine, feed, one_slot, push, ready};

fn one_of_two() -> EngineOptions {
    EngineOptions { reproducible: true, world_size: 2, ..Default::default() }
}

#[test]
fn a_ticket_dropped_unused_makes_an_empty_push() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let engine = engine(tables.clone(), &one_slot(), one_of_two());
    let pipeline = engine.pipeline().unwrap();
    for _ in 0..3 {
        feed(&pipeline, batch(&[7], true));
    }
    push(ready(&pipeline), 1.0);
    drop(ready(&pipeline));
    push(ready(&pipeline), 1.0);
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    assert_eq!(tables.pushed(), [1, 2, 3]);
    assert_eq!(tables.plain.weights(0)[&7], [-2.0; 2]);
}

#[test]
fn a_rank_alone_pushes_only_what_it_was_given() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let options = EngineOptions { world_size: 1, ..one_of_two() };
    let engine = engine(tables.clone(), &one_slot(), options);
    let pipeline = engine.pipeline().unwrap();
    feed(&pipeline, batch(&[7], true));
    drop(ready(&pipeline));
    assert_eq!(engine.drain(LONG).unwrap(), DrainOutcome::Done);
    assert!(tables.pushed().is_empty());
}

#[test]
fn whether_there_is_a_next_batch_is_known_before_its_look_up() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let engine = engine(tables.clone(), &one_slot(), one_of_two());
    let pipeline = engine.pipeline().unwrap();
    assert_eq!(pipeline.has_next(SHORT).unwrap(), None);
    feed(&pipeline, batch(&[7], true));
    assert_eq!(pipeline.has_next(LONG).unwrap(), Some(true));
    assert!(tables.looked_up().is_empty());
    push(ready(&pipeline), 1.0);
    pipeline.end_of_data();
    assert_eq!(pipeline.has_next(LONG).unwrap(), Some(false));
}

#[test]
fn a_next_batch_is_known_at_every_stage_of_a_look_up_ahead() {
    let tables = Arc::new(Rigged::new(&one_slot()));
    let engine = engine(tables.clone(), &one_slot(), EngineOptions::default());
    let pipeline = engine.pipeline().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                feed(&pipeline, batch(&[7], true));
            }
            pipeline.end_of_data();
        });
        let mut steps = 0;
        while pipeline.has_next(LONG).unwrap().unwrap() {
            push(ready(&pipeline), 0.0);
            steps += 1;
        }
        assert_eq!(steps, 200);
    });
}
