//! Tickets, and the push thread that turns gradients into acknowledged pushes.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use persia_types::tables::PushReport;

use crate::batch::Batch;
use crate::device::DeviceGradients;
use crate::error::Error;
use crate::pipeline::permits::Stage;
use crate::pipeline::shared::{Context, Shared, guarded};
use crate::step::backward::{Backward, backward};
use crate::step::plan::Plan;

/// The gradient of one id feature's output, of the same shape, wherever the floats live.
pub type Gradient = Box<dyn AsRef<[f32]> + Send>;

/// The gradients of one push, wherever they are summed.
pub(crate) enum PushGradients {
    /// One per id feature.
    Here(Vec<Option<Gradient>>),
    /// Summed already.
    OnDevice(Box<dyn DeviceGradients>),
}

/// What travels with a push.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PushOptions {
    /// Multiplies the optimizer's learning rate; finite, at least 0.
    pub lr_factor: f32,
    /// Multiplies every gradient, for example 1 / loss scale; finite, above 0.
    pub scale: f32,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { lr_factor: 1.0, scale: 1.0 }
    }
}

/// The right to push the gradients of one step. It holds a staleness permit; dropped unused, the permit returns.
///
/// Where ranks take turns ([`EngineOptions::takes_turns`](crate::EngineOptions::takes_turns)) a ticket dropped unused
/// pushes nothing by that name, because the ranks behind this one wait for it; the permit then returns with the
/// acknowledgement.
pub struct PushTicket {
    shared: Arc<Shared>,
    step: u64,
    /// Taken by `push`.
    work: Option<(Arc<Batch>, Plan)>,
}

impl fmt::Debug for PushTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushTicket").field("step", &self.step).finish_non_exhaustive()
    }
}

impl PushTicket {
    pub(crate) fn new(shared: Arc<Shared>, step: u64, batch: Arc<Batch>, plan: Plan) -> Self {
        Self { shared, step, work: Some((batch, plan)) }
    }

    /// The step it belongs to.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Hand gradients over, one per id feature in the batch's order, and return at once.
    ///
    /// A feature without a gradient is not updated. The permit returns when the push is acknowledged.
    ///
    /// # Errors
    /// [`Error::BadGradient`] and [`Error::BadOption`] (nothing is pushed, the permit returns),
    /// [`Error::Closed`] when the engine is gone, or the failure that stopped it.
    pub fn push(self, gradients: Vec<Option<Gradient>>, options: PushOptions) -> Result<(), Error> {
        self.check(&gradients, options)?;
        self.hand_over(PushGradients::Here(gradients), options)
    }

    /// As [`Self::push`], with gradients that the engine's device sums; every id feature has one. They are multiplied by
    /// [`Self::gradient_scale`] already; `options.scale` means nothing.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_summed(self, gradients: Box<dyn DeviceGradients>, options: PushOptions) -> Result<(), Error> {
        check_options(options)?;
        self.hand_over(PushGradients::OnDevice(gradients), options)
    }

    /// What every summed gradient is multiplied by, whatever the options say.
    pub fn gradient_scale(&self) -> f32 {
        self.shared.context.gradient_scale
    }

    fn hand_over(mut self, gradients: PushGradients, options: PushOptions) -> Result<(), Error> {
        let mut state = self.shared.lock();
        // The ticket is dropped with the error, and its drop locks again: hence no early `?` under the lock.
        if let Some(error) = state.failed.clone() {
            drop(state);
            return Err(error);
        }
        if state.stopping {
            drop(state);
            return Err(Error::Closed { what: "the engine" });
        }
        if let Some((batch, plan)) = self.work.take() {
            state.permits.advance(self.step, Stage::Pushing);
            state.pushes.push_back(PushJob { step: self.step, batch, plan, gradients, options });
        }
        drop(state);
        self.shared.wake_workers();
        Ok(())
    }

    fn check(&self, gradients: &[Option<Gradient>], options: PushOptions) -> Result<(), Error> {
        let Some((batch, plan)) = &self.work else { return Ok(()) };
        let bad = |what: String| Err(Error::BadGradient { step: self.step, what });
        let features = batch.id_features();
        if gradients.len() != features.len() {
            return bad(format!("{} gradients for {} id features", gradients.len(), features.len()));
        }
        let schema = &self.shared.context.schema;
        for (index, (slot, gradient)) in plan.slots().iter().zip(gradients).enumerate() {
            let dim = schema.tables[schema.slots[*slot].table].dim;
            let Some(gradient) = gradient else { continue };
            let (feature, found) = (plan.feature(batch, index), gradient.as_ref().as_ref().len());
            if found != feature.samples() * dim {
                let want = format!("{} samples or places of {dim}", feature.samples());
                return bad(format!("{:?} has {found} floats, want {want}", feature.name()));
            }
        }
        check_options(options)
    }
}

fn check_options(options: PushOptions) -> Result<(), Error> {
    if !(options.lr_factor.is_finite() && options.lr_factor >= 0.0) {
        let what = format!("{} is not a number of at least 0", options.lr_factor);
        return Err(Error::BadOption { option: "lr_factor", what });
    }
    if !(options.scale.is_finite() && options.scale > 0.0) {
        return Err(Error::BadOption { option: "scale", what: format!("{} is not above 0", options.scale) });
    }
    Ok(())
}

impl Drop for PushTicket {
    fn drop(&mut self) {
        let Some((batch, plan)) = self.work.take() else { return };
        if !self.shared.options.takes_turns() {
            return self.shared.release(self.step);
        }
        let mut state = self.shared.lock();
        if state.failed.is_some() || state.stopping {
            drop(state);
            return self.shared.release(self.step);
        }
        let gradients = PushGradients::Here(batch.id_features().iter().map(|_| None).collect());
        state.permits.advance(self.step, Stage::Pushing);
        state.pushes.push_back(PushJob {
            step: self.step,
            batch,
            plan,
            gradients,
            options: PushOptions::default(),
        });
        drop(state);
        self.shared.wake_workers();
    }
}

/// Gradients on their way.
pub(crate) struct PushJob {
    step: u64,
    batch: Arc<Batch>,
    plan: Plan,
    gradients: PushGradients,
    options: PushOptions,
}

/// The push thread: one push after the other, in the order they were handed over.
pub(crate) fn run(shared: &Shared) {
    let mut untouched = Untouched::default();
    while let Some(job) = next_job(shared) {
        let step = job.step;
        let result = guarded("push", step, || {
            let PushJob { batch, plan, gradients, options, .. } = job;
            backward(&shared.context, &batch, &plan, shared.context.token(step), gradients, options)
        });
        match result {
            Ok(done) => {
                untouched.tell(&shared.context, step, &done.report);
                acknowledge(shared, step, &done);
            }
            Err(error) => shared.fail(error), // its permit never returns
        }
    }
    // Gradients of a failed engine may own things that must not be dropped under the lock.
    let left: VecDeque<PushJob> = std::mem::take(&mut shared.lock().pushes);
    drop(left);
}

/// Steps in which rows were left as they were, because the sum of an id's gradients overflowed.
#[derive(Default)]
struct Untouched(u64);

impl Untouched {
    /// Log it the first time, and whenever there are twice as many: every step may be one.
    fn tell(&mut self, context: &Context, step: u64, report: &PushReport) {
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
                "rows were left as they were: the sum of the gradients of an id is not finite; this is the first such id"
            );
        }
    }
}

fn next_job(shared: &Shared) -> Option<PushJob> {
    let mut state = shared.lock();
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
        shared.worker_waits(&mut state);
    }
}

fn acknowledge(shared: &Shared, step: u64, done: &Backward) {
    let mut state = shared.lock();
    state.stats.pushes += 1;
    state.stats.push_report += done.report;
    state.stats.segment_sum.add(done.segment_sum);
    state.stats.push.add(done.push);
    drop(state);
    shared.release(step);
}
