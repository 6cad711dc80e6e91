//! The push thread: pushes gradients in the order of their steps, and waits for each acknowledgement.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use persia_types::tables::PushReport;
use persia_types::token::Token;
use persia_types::trace::{self, Stage};

use crate::context::Context;
use crate::error::Error;
use crate::options::EngineOptions;
use crate::pipeline::scheduler::{PushJob, Scheduler};
use crate::pipeline::worker::{guarded, join, spawn};
use crate::step::backward;
use crate::step::gradients::Backward;

/// The push thread of one engine. When this is dropped, the thread pushes the queued gradients and ends. After a
/// failure of the engine, it discards them instead.
pub(crate) struct PushThread {
    pub(crate) scheduler: Arc<Scheduler>,
    handle: Option<JoinHandle<()>>,
}

impl PushThread {
    pub(crate) fn start(context: Context, options: EngineOptions) -> Result<Self, Error> {
        let scheduler = Arc::new(Scheduler::new(context, options));
        let for_thread = Arc::clone(&scheduler);
        let handle = spawn("push", move || run(&for_thread))?;
        Ok(Self { scheduler, handle: Some(handle) })
    }
}

impl Drop for PushThread {
    fn drop(&mut self) {
        self.scheduler.lock().stopping = true;
        self.scheduler.wake_workers();
        join(self.handle.take());
    }
}

/// The loop of the push thread: one push after another, in the order of the queue.
fn run(scheduler: &Scheduler) {
    let mut overflows = Overflows::default();
    while let Some(job) = next_job(scheduler) {
        let (step, started) = (job.step, Instant::now());
        let token = scheduler.context.token(step);
        let result = guarded("push", step, || {
            let PushJob { batch, plan, gradients, options, .. } = job;
            backward(&scheduler.context, (&batch, &plan), token, gradients, options)
        });
        report(token, started, &result);
        match result {
            Ok(done) => {
                tracing::debug!(%token, step, rank = token.rank, rows = done.report.rows_applied, "pushed");
                overflows.log(&scheduler.context, step, &done.report);
                acknowledge(scheduler, step, &done);
            }
            Err(error) => scheduler.fail(error), // the step never leaves the window
        }
    }
    // The gradients left by a failed engine may own objects that must not be dropped under the lock.
    let left: VecDeque<PushJob> = std::mem::take(&mut scheduler.lock().pushes);
    drop(left);
}

/// Report the times of a push, if its step is traced.
fn report(token: Token, started: Instant, result: &Result<Backward, Error>) {
    let Some(recorder) = trace::recorder_of(token) else { return };
    match result {
        Ok(done) => {
            let summed = started + done.segment_sum;
            recorder.record(token, Stage::SegmentSum, started, summed, false);
            recorder.record(token, Stage::Push, summed, summed + done.push, false);
        }
        Err(_) => recorder.record(token, Stage::Push, started, Instant::now(), true),
    }
}

/// The number of steps at which rows were skipped because the sum of an id's gradients was too large or not finite.
#[derive(Default)]
struct Overflows(u64);

impl Overflows {
    /// Log the first step with skipped rows, and again each time the number of these steps has doubled. Not
    /// every such step is logged, because rows may be skipped at every step.
    fn log(&mut self, context: &Context, step: u64, report: &PushReport) {
        let Some((table, id)) = report.first_nonfinite else { return };
        self.0 += 1;
        if self.0.is_power_of_two() {
            let table = context.schema.tables.get(table).map(|table| &table.name);
            tracing::warn!(
                step,
                table,
                id,
                rows = report.rows_nonfinite,
                steps_so_far = self.0,
                "rows were not updated, because the sum of their gradients is not finite, or is 2^50 or larger; table and \
                 id name the first of these rows"
            );
        }
    }
}

fn next_job(scheduler: &Scheduler) -> Option<PushJob> {
    let mut state = scheduler.lock();
    loop {
        if state.failed.is_some() {
            return None;
        }
        if let Some(job) = state.pushes.pop_front() {
            return Some(job);
        }
        if state.stopping {
            return None;
        }
        scheduler.worker_waits(&mut state);
    }
}

fn acknowledge(scheduler: &Scheduler, step: u64, done: &Backward) {
    let mut state = scheduler.lock();
    state.stats.pushes += 1;
    state.stats.push_report += done.report;
    state.stats.segment_sum.add(done.segment_sum);
    state.stats.push.add(done.push);
    drop(state);
    scheduler.release(step);
}
