//! [`PooledBatch`]: a batch with its vectors, and the ticket with which its gradients are pushed.

use std::fmt;
use std::sync::Arc;

use persia_types::tables::LookupReport;

use crate::batch::Batch;
use crate::device::{DeviceGradients, OnDevice};
use crate::error::Error;
use crate::options::PushOptions;
use crate::pipeline::scheduler::{PushJob, Ready, Scheduler};
use crate::pipeline::staleness::Stage;
use crate::step::gradients::{Gradient, PushGradients};
use crate::step::output::Output;
use crate::step::plan::Plan;

/// A batch with its pooled rows.
#[derive(Debug)]
pub struct PooledBatch {
    /// The rank's step. For a batch that is not for training, it is the next training step.
    pub step: u64,
    /// The batch, which the ticket shares.
    pub batch: Arc<Batch>,
    /// The outputs, one for each id feature in the batch's order.
    pub outputs: Vec<Output>,
    /// The tensors on the device, if the look-up used one. The vectors of `outputs` are then empty.
    pub on_device: Option<OnDevice>,
    /// The report of the look-up.
    pub report: LookupReport,
    /// The ticket with which gradients are pushed; None for a batch that is not for training.
    pub ticket: Option<PushTicket>,
}

impl PooledBatch {
    pub(super) fn new(scheduler: &Arc<Scheduler>, ready: Ready) -> Self {
        let Ready { step, batch, outputs, on_device, report, plan } = ready;
        let ticket = plan.map(|plan| PushTicket {
            scheduler: Arc::clone(scheduler),
            step,
            work: Some((Arc::clone(&batch), plan)),
        });
        Self { step, batch, outputs, on_device, report, ticket }
    }
}

/// The permission to push the gradients of one step. The step is in the staleness window. If the ticket is dropped
/// unused, the step leaves the window.
///
/// If ranks take turns ([`EngineOptions::takes_turns`](crate::EngineOptions::takes_turns)), dropping a ticket unused
/// makes an empty push, because the next rank waits for the push. The step then leaves the window when that push is
/// acknowledged.
pub struct PushTicket {
    scheduler: Arc<Scheduler>,
    step: u64,
    /// The batch and its plan, which `push` takes.
    work: Option<(Arc<Batch>, Plan)>,
}

impl fmt::Debug for PushTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushTicket").field("step", &self.step).finish_non_exhaustive()
    }
}

impl PushTicket {
    /// The step of this ticket.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Queue gradients, one per id feature in the batch's order, without waiting for the push.
    ///
    /// A feature without a gradient is not updated. The step leaves the staleness window when the push is acknowledged.
    ///
    /// # Errors
    /// [`Error::BadGradient`] and [`Error::BadOption`], after which the ticket is dropped unused;
    /// [`Error::Closed`] if the engine was dropped; the failure that stopped the engine.
    pub fn push(self, gradients: Vec<Option<Gradient>>, options: PushOptions) -> Result<(), Error> {
        self.check(&gradients, options)?;
        self.hand_over(PushGradients::OnHost(gradients), options)
    }

    /// Like [`Self::push`], with gradients that the engine's device sums. Every id feature must have a gradient. The
    /// gradients must already be multiplied by [`Self::gradient_scale`]; `options.scale` is ignored.
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub fn push_summed(self, gradients: Box<dyn DeviceGradients>, options: PushOptions) -> Result<(), Error> {
        options.check()?;
        self.hand_over(PushGradients::OnDevice(gradients), options)
    }

    /// The factor of every summed gradient, in addition to [`PushOptions::scale`].
    pub fn gradient_scale(&self) -> f32 {
        self.scheduler.context.gradient_scale
    }

    fn hand_over(mut self, gradients: PushGradients, options: PushOptions) -> Result<(), Error> {
        let mut state = self.scheduler.lock();
        // Dropping the ticket takes the lock, so this function must not return with `?` while it holds the
        // lock.
        if let Some(error) = state.failed.clone() {
            drop(state);
            return Err(error);
        }
        if state.stopping {
            drop(state);
            return Err(Error::Closed { what: "the engine" });
        }
        if let Some((batch, plan)) = self.work.take() {
            state.window.advance(self.step, Stage::Pushing);
            state.pushes.push_back(PushJob { step: self.step, batch, plan, gradients, options });
        }
        drop(state);
        self.scheduler.wake_workers();
        Ok(())
    }

    fn check(&self, gradients: &[Option<Gradient>], options: PushOptions) -> Result<(), Error> {
        let Some((batch, plan)) = &self.work else { return Ok(()) };
        let bad = |what: String| Err(Error::BadGradient { step: self.step, what });
        let features = batch.id_features();
        if gradients.len() != features.len() {
            return bad(format!(
                "found {}, expected {}, one for each id feature",
                gradients.len(),
                features.len()
            ));
        }
        for (index, (slot, gradient)) in plan.slots().iter().zip(gradients).enumerate() {
            let dim = self.scheduler.context.dim_of_slot(*slot);
            let Some(gradient) = gradient else { continue };
            let (feature, found) = (plan.feature(batch, index), gradient.as_ref().as_ref().len());
            if found != feature.samples() * dim {
                let want = format!("{} × {dim} (samples × dim)", feature.samples());
                return bad(format!("id feature {:?} has {found} floats, expected {want}", feature.name()));
            }
        }
        options.check()
    }
}

impl Drop for PushTicket {
    fn drop(&mut self) {
        let Some((batch, plan)) = self.work.take() else { return };
        if !self.scheduler.options.takes_turns() {
            return self.scheduler.release(self.step);
        }
        let mut state = self.scheduler.lock();
        if state.failed.is_some() || state.stopping {
            drop(state);
            return self.scheduler.release(self.step);
        }
        let gradients = PushGradients::OnHost(batch.id_features().iter().map(|_| None).collect());
        let options = PushOptions::default();
        state.window.advance(self.step, Stage::Pushing);
        state.pushes.push_back(PushJob { step: self.step, batch, plan, gradients, options });
        drop(state);
        self.scheduler.wake_workers();
    }
}
