//! The look-up thread of one pipeline: takes batches in order, waits for a permit, looks up, pools.

use std::sync::Arc;
use std::time::Duration;

use persia_types::tables::Mode;

use crate::batch::Batch;
use crate::pipeline::PooledBatch;
use crate::pipeline::permits::Stage;
use crate::pipeline::push::PushTicket;
use crate::pipeline::shared::{Doing, Finish, Item, Shared, guarded};
use crate::stats::{EngineStats, Stopwatch};
use crate::step::forward::{Forward, forward};
use crate::step::plan::Plan;

/// Times of one batch before its look-up.
struct Before {
    plan: Duration,
    permit_wait: Duration,
}

/// Serve `line` until it ends, is closed, or the engine fails.
pub(crate) fn run(shared: &Arc<Shared>, line: u64) {
    while let Some(item) = take(shared, line) {
        match item {
            Item::Finish(finish) => return finish_line(shared, line, finish),
            Item::Batch(batch) => {
                if !serve(shared, line, batch) {
                    return;
                }
            }
        }
    }
}

/// The next item, once it may be looked at; `None` when the line is over.
fn take(shared: &Shared, line: u64) -> Option<Item> {
    let mut state = shared.lock();
    loop {
        if state.failed.is_some() {
            return None;
        }
        let queue = state.lines.get_mut(&line)?;
        queue.doing = Doing::Idle;
        let wanted = queue.demand || !shared.options.reproducible;
        if wanted
            && queue.ready.len() < shared.options.staleness
            && let Some(item) = queue.fed.pop_front()
        {
            if matches!(item, Item::Batch(_)) {
                queue.doing = Doing::Planning;
            }
            drop(state);
            shared.wake_callers(); // there is room for another
            return Some(item);
        }
        shared.worker_waits(&mut state);
    }
}

/// Look one batch up; false when the thread should end.
fn serve(shared: &Arc<Shared>, line: u64, batch: Arc<Batch>) -> bool {
    let mut watch = Stopwatch::start();
    let next = shared.lock().next_seq;
    let plan = match guarded("look-up", next, || Plan::new(&batch, &shared.context.schema)) {
        Ok(plan) => plan,
        Err(error) => {
            finish_line(shared, line, Finish::Failed(error));
            return false;
        }
    };
    let plan_time = watch.lap();
    let Some(step) = admit(shared, line, batch.requires_grad()) else { return false };
    let before = Before { plan: plan_time, permit_wait: watch.lap() };
    let mode = if batch.requires_grad() { Mode::Train } else { Mode::Eval };
    let looked = guarded("look-up", step, || {
        let device = shared.context.device.as_deref();
        forward(&shared.context, device, (&batch, &plan), shared.context.token(step), mode)
    });
    match looked {
        Ok(looked) => hand_over(shared, line, step, batch, plan, before, looked),
        Err(error) => {
            shared.fail(error); // the permit stays taken: nothing more is looked up
            false
        }
    }
}

/// Wait for a permit and take the next step's number; `None` when the line is over.
///
/// A batch that does not train needs none, but in a reproducible run it waits until no push is on its way.
fn admit(shared: &Shared, line: u64, trains: bool) -> Option<u64> {
    let mut state = shared.lock();
    loop {
        if state.failed.is_some() {
            return None;
        }
        let free = if trains {
            state.permits.available()
        } else {
            !shared.options.reproducible || state.permits.oldest_at(Stage::Pushing).is_none()
        };
        let free = free && !state.paused;
        let step = state.next_seq;
        let queue = state.lines.get_mut(&line)?;
        if free {
            queue.doing = Doing::Looking(step);
            if trains {
                state.permits.acquire(step);
                state.next_seq += 1;
            }
            return Some(step);
        }
        queue.doing = Doing::Permit;
        shared.worker_waits(&mut state);
    }
}

/// Put a looked-up batch where `next` finds it; false when the line was closed meanwhile.
fn hand_over(
    shared: &Arc<Shared>,
    line: u64,
    step: u64,
    batch: Arc<Batch>,
    plan: Plan,
    before: Before,
    done: Forward,
) -> bool {
    let trains = batch.requires_grad();
    let mut state = shared.lock();
    if trains {
        record(&mut state.stats, &batch, &plan, &before, &done);
        state.permits.advance(step, Stage::Ready);
    }
    let ticket = trains.then(|| PushTicket::new(Arc::clone(shared), step, Arc::clone(&batch), plan));
    let Forward { outputs, on_device, report, .. } = done;
    let looked = PooledBatch { step, batch, outputs, on_device, report, ticket };
    let Some(queue) = state.lines.get_mut(&line) else {
        drop(state);
        drop(looked); // unlocked, because its ticket gives the permit back
        return false;
    };
    queue.ready.push_back(looked);
    queue.doing = Doing::Idle;
    drop(state);
    shared.wake_callers();
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
    stats.permit_wait.add(before.permit_wait);
    stats.lookup.add(done.lookup);
    stats.pool.add(done.pool);
}

fn finish_line(shared: &Shared, line: u64, finish: Finish) {
    if let Some(queue) = shared.lock().lines.get_mut(&line) {
        queue.ended = true;
        queue.doing = Doing::Idle;
        queue.finish = Some(finish);
    }
    shared.wake_callers();
}
