//! The look-up thread of one pipeline. It takes batches in order, waits for the staleness window, looks up rows
//! and pools them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use persia_types::tables::Mode;
use persia_types::token::Token;
use persia_types::trace::{self, Stage as TracedStage};

use crate::batch::Batch;
use crate::error::Error;
use crate::pipeline::scheduler::{QueueItem, Ready, Scheduler, StreamEnd, WorkerState};
use crate::pipeline::staleness::Stage;
use crate::pipeline::ticket::PooledBatch;
use crate::pipeline::worker::guarded;
use crate::stats::{EngineStats, Stopwatch};
use crate::step::output::Forward;
use crate::step::plan::Plan;
use crate::step::{forward, plan};

/// The times that a batch spent before its look-up.
struct Before {
    plan: Duration,
    staleness_wait: Duration,
}

/// Serve a queue until its stream ends, the queue is closed, or the engine fails.
pub(crate) fn run(scheduler: &Arc<Scheduler>, queue: u64) {
    while let Some(item) = take(scheduler, queue) {
        match item {
            QueueItem::End(end) => return end_stream(scheduler, queue, end),
            QueueItem::Batch(batch) => {
                if !serve(scheduler, queue, batch) {
                    return;
                }
            }
        }
    }
}

/// Wait for the next item that may be looked up. Returns None if the queue was closed or the engine has failed.
fn take(scheduler: &Scheduler, queue: u64) -> Option<QueueItem> {
    let mut state = scheduler.lock();
    loop {
        if state.failed.is_some() {
            return None;
        }
        let own = state.queues.get_mut(&queue)?;
        own.worker = WorkerState::Idle;
        let wanted = own.demand || !scheduler.options.reproducible;
        if wanted
            && own.ready.len() < scheduler.options.staleness
            && let Some(item) = own.fed.pop_front()
        {
            if matches!(item, QueueItem::Batch(_)) {
                own.worker = WorkerState::Planning;
            }
            drop(state);
            scheduler.wake_callers(); // there is space for another batch
            return Some(item);
        }
        scheduler.worker_waits(&mut state);
    }
}

/// Look up a batch. Returns false if the thread must end.
fn serve(scheduler: &Arc<Scheduler>, queue: u64, batch: Arc<Batch>) -> bool {
    let (started, mut watch) = (Instant::now(), Stopwatch::start());
    let next = scheduler.lock().next_seq;
    let plan = match guarded("look-up", next, || plan(&scheduler.context, &batch)) {
        Ok(plan) => plan,
        Err(error) => {
            end_stream(scheduler, queue, StreamEnd::Failed(error));
            return false;
        }
    };
    let plan_time = watch.lap();
    let Some(step) = admit(scheduler, queue, batch.requires_grad()) else { return false };
    let before = Before { plan: plan_time, staleness_wait: watch.lap() };
    let mode = if batch.requires_grad() { Mode::Train } else { Mode::Eval };
    let looked = guarded("look-up", step, || {
        let device = scheduler.context.device.as_deref();
        forward(&scheduler.context, device, (&batch, &plan), scheduler.context.token(step), mode)
    });
    let token = scheduler.context.token(step);
    tracing::debug!(%token, step, rank = token.rank, ?mode, failed = looked.is_err(), "looked up");
    if mode == Mode::Train {
        report(token, started, &before, &looked);
    }
    match looked {
        Ok(looked) => hand_over(scheduler, queue, step, batch, plan, before, looked),
        Err(error) => {
            scheduler.fail(error); // the step never leaves the window
            false
        }
    }
}

/// Report the times of a look-up, if its step is traced.
fn report(token: Token, started: Instant, before: &Before, looked: &Result<Forward, Error>) {
    let Some(recorder) = trace::recorder_of(token) else { return };
    let mut start = started;
    let mut stage = |stage, spent: Duration, failed| {
        recorder.record(token, stage, start, start + spent, failed);
        start += spent;
    };
    stage(TracedStage::Plan, before.plan, false);
    stage(TracedStage::StalenessWait, before.staleness_wait, false);
    match looked {
        Ok(done) => {
            stage(TracedStage::LookUp, done.lookup, false);
            stage(TracedStage::Pool, done.pool, false);
        }
        Err(_) => {
            let spent = started.elapsed().saturating_sub(before.plan + before.staleness_wait);
            stage(TracedStage::LookUp, spent, true);
        }
    }
}

/// Wait until the staleness window has space and look-ups are not paused. Returns the number of the next
/// step; None as for [`take`].
///
/// A batch that is not for training needs no space in the window, but in a reproducible run it waits until no push
/// is in flight.
fn admit(scheduler: &Scheduler, queue: u64, trains: bool) -> Option<u64> {
    let mut state = scheduler.lock();
    loop {
        if state.failed.is_some() {
            return None;
        }
        let free = if trains {
            state.window.has_room()
        } else {
            !scheduler.options.reproducible || state.window.oldest_at(Stage::Pushing).is_none()
        };
        let free = free && !state.paused;
        let step = state.next_seq;
        let own = state.queues.get_mut(&queue)?;
        if free {
            own.worker = WorkerState::LookingUp(step);
            if trains {
                state.window.enter(step);
                state.next_seq += 1;
            }
            return Some(step);
        }
        own.worker = WorkerState::AwaitingWindow;
        scheduler.worker_waits(&mut state);
    }
}

/// Pass a batch that was looked up to `next`. Returns false if the queue was closed in the meantime.
fn hand_over(
    scheduler: &Arc<Scheduler>,
    queue: u64,
    step: u64,
    batch: Arc<Batch>,
    plan: Plan,
    before: Before,
    done: Forward,
) -> bool {
    let trains = batch.requires_grad();
    let mut state = scheduler.lock();
    if trains {
        record(&mut state.stats, &batch, &plan, &before, &done);
        state.window.advance(step, Stage::Ready);
    }
    let Forward { outputs, on_device, report, .. } = done;
    let ready = Ready { step, batch, outputs, on_device, report, plan: trains.then_some(plan) };
    let Some(own) = state.queues.get_mut(&queue) else {
        drop(state);
        drop(PooledBatch::new(scheduler, ready)); // after the lock is released, because the ticket takes it
        return false;
    };
    own.ready.push_back(ready);
    own.worker = WorkerState::Idle;
    drop(state);
    scheduler.wake_callers();
    true
}

fn record(stats: &mut EngineStats, batch: &Batch, plan: &Plan, before: &Before, done: &Forward) {
    stats.lookups += 1;
    stats.lookup_report += done.report;
    for (index, (feature, slot)) in batch.id_features().iter().zip(plan.slots()).enumerate() {
        let slot = &mut stats.slots[*slot];
        slot.occurrences += feature.inverse().len() as u64;
        slot.unique += feature.unique().len() as u64;
        slot.truncated += plan.truncated(index) as u64;
    }
    stats.deduplicate.add(batch.deduplication());
    stats.plan.add(before.plan);
    stats.staleness_wait.add(before.staleness_wait);
    stats.lookup.add(done.lookup);
    stats.pool.add(done.pool);
}

fn end_stream(scheduler: &Scheduler, queue: u64, end: StreamEnd) {
    if let Some(own) = scheduler.lock().queues.get_mut(&queue) {
        own.closed = true;
        own.worker = WorkerState::Idle;
        own.end = Some(end);
    }
    scheduler.wake_callers();
}
