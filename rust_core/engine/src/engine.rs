//! The engine: one rank's access to the tables, for all its pipelines.

use std::sync::Arc;
use std::time::Duration;

use persia_types::schema::Schema;
use persia_types::tables::{LookupReport, Mode, Tables};

use crate::batch::Batch;
use crate::context::Context;
use crate::device::{Device, OnDevice};
use crate::error::Error;
use crate::options::EngineOptions;
use crate::pipeline::Pipeline;
use crate::pipeline::push::PushThread;
use crate::pipeline::scheduler::{Scheduler, deadline};
use crate::pipeline::wait::Wait;
use crate::pipeline::worker::guarded;
use crate::stats::EngineStats;
use crate::step::output::Output;
use crate::step::{forward, missing, plan};

/// The result of [`Engine::drain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainOutcome {
    /// All pushed gradients are in the tables.
    Done,
    /// The timeout passed. The value says what the call was waiting for.
    Pending(Wait),
}

/// The result of [`Engine::lookup_now`] and [`Engine::lookup_on`].
#[derive(Debug)]
pub struct EvalResult {
    /// The outputs, one for each id feature in the batch's order.
    pub outputs: Vec<Output>,
    /// The tensors on the device, if the look-up used one. The vectors of `outputs` are then empty.
    pub on_device: Option<OnDevice>,
    /// The report of the look-up.
    pub report: LookupReport,
}

/// One rank's engine. Clones refer to the same engine. When the last clone and the last pipeline are dropped, the
/// push thread pushes the queued gradients and ends.
#[derive(Clone)]
pub struct Engine {
    pusher: Arc<PushThread>,
}

impl Engine {
    /// Create an engine over `tables`, on which the run has begun.
    ///
    /// # Errors
    /// [`Error::BadOption`], [`Error::Spawn`].
    pub fn new(tables: Arc<dyn Tables>, schema: Schema, options: EngineOptions) -> Result<Self, Error> {
        Self::with_device(tables, schema, options, None)
    }

    /// Like [`Self::new`], but look-ups are pooled on `device`, if there is one.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn with_device(
        tables: Arc<dyn Tables>,
        schema: Schema,
        mut options: EngineOptions,
        device: Option<Arc<dyn Device>>,
    ) -> Result<Self, Error> {
        options.check()?;
        if options.reproducible {
            options.staleness = 1;
        }
        let context = Context::new(tables, schema, &options, device);
        Ok(Self { pusher: Arc::new(PushThread::start(context, options)?) })
    }

    /// Create a pipeline for the batches of one data loader. Several pipelines may be open. Staleness and steps are
    /// counted over all of them.
    ///
    /// # Errors
    /// [`Error::Spawn`]; the failure that stopped the engine.
    pub fn pipeline(&self) -> Result<Pipeline, Error> {
        Pipeline::open(Arc::clone(&self.pusher))
    }

    /// Look up a batch outside any pipeline, and change nothing. The result may or may not include pushes in flight:
    /// call [`Self::drain`] first if that matters.
    ///
    /// # Errors
    /// [`Error::BadOption`] for [`Mode::Train`], [`Error::FeatureMismatch`], [`Error::BadFeature`],
    /// [`Error::TooLarge`], [`Error::Lookup`], [`Error::Device`], [`Error::Panicked`]; the failure that
    /// stopped the engine.
    pub fn lookup_now(&self, batch: &Batch, mode: Mode) -> Result<EvalResult, Error> {
        self.lookup_on(self.scheduler().context.device.as_deref(), batch, mode)
    }

    /// Like [`Self::lookup_now`], but on `device` instead of the engine's device. If `device` is None, the
    /// CPU pools.
    ///
    /// # Errors
    /// Those of [`Self::lookup_now`].
    pub fn lookup_on(
        &self,
        device: Option<&dyn Device>,
        batch: &Batch,
        mode: Mode,
    ) -> Result<EvalResult, Error> {
        if mode == Mode::Train {
            let what = "is Train, which counts towards the staleness: feed the batch to a pipeline".into();
            return Err(Error::BadOption { option: "mode", what });
        }
        let scheduler = self.scheduler();
        let step = self.running_step()?;
        let plan = plan(&scheduler.context, batch)?;
        let done = guarded("look-up", step, || {
            forward(&scheduler.context, device, (batch, &plan), scheduler.context.token(step), mode)
        })?;
        Ok(EvalResult { outputs: done.outputs, on_device: done.on_device, report: done.report })
    }

    /// For each id feature, the number of its unique ids, and how many of these have no row. Each feature is
    /// looked up separately, and nothing is changed. For a hash stack, buckets are counted. Ids that a raw
    /// feature truncates are not counted.
    ///
    /// # Errors
    /// [`Error::FeatureMismatch`], [`Error::BadFeature`], [`Error::TooLarge`], [`Error::Lookup`],
    /// [`Error::Panicked`]; the failure that stopped the engine.
    pub fn missing(&self, batch: &Batch) -> Result<Vec<(u64, u64)>, Error> {
        let scheduler = self.scheduler();
        let step = self.running_step()?;
        let plan = plan(&scheduler.context, batch)?;
        let token = scheduler.context.token(step);
        guarded("look-up", step, || missing(&scheduler.context, (batch, &plan), token))
    }

    /// The latest step, or the failure of the engine.
    fn running_step(&self) -> Result<u64, Error> {
        let state = self.scheduler().lock();
        state.check()?;
        Ok(state.step)
    }

    /// Wait until every push is acknowledged, as is needed before a checkpoint. Tickets that have not been
    /// pushed are ignored. While look-ups are paused, this also waits for look-ups that have started.
    ///
    /// # Errors
    /// The failure that stopped the engine, because a failed push is never acknowledged.
    pub fn drain(&self, timeout: Duration) -> Result<DrainOutcome, Error> {
        let scheduler = self.scheduler();
        let deadline = deadline(timeout);
        let mut state = scheduler.lock();
        loop {
            state.check()?;
            let Some(wait) = state.in_flight() else { return Ok(DrainOutcome::Done) };
            if !scheduler.caller_waits(&mut state, deadline) {
                return Ok(DrainOutcome::Pending(wait));
            }
        }
    }

    /// Prevent all pipelines from starting look-ups until [`Engine::resume`]. If every rank pauses and
    /// drains, the rows are those of one step and do not change.
    pub fn pause(&self) {
        self.scheduler().lock().paused = true;
    }

    /// Start look-ups again.
    pub fn resume(&self) {
        self.scheduler().lock().paused = false;
        self.scheduler().wake_workers();
    }

    /// The latest training step that a pipeline has returned; `first_seq - 1` before the first one.
    pub fn step(&self) -> u64 {
        self.scheduler().lock().step
    }

    /// The options in effect.
    pub fn options(&self) -> &EngineOptions {
        &self.scheduler().options
    }

    /// The schema of the tables.
    pub fn schema(&self) -> &Schema {
        &self.scheduler().context.schema
    }

    /// The failure that stopped the engine, if any.
    pub fn failure(&self) -> Option<Error> {
        self.scheduler().lock().failed.clone()
    }

    /// The counters and times since the engine started.
    pub fn stats(&self) -> EngineStats {
        let state = self.scheduler().lock();
        let staleness = state.window.len() as u64;
        let max_staleness = state.window.max_staleness() as u64;
        EngineStats { staleness, max_staleness, ..state.stats.clone() }
    }

    fn scheduler(&self) -> &Scheduler {
        &self.pusher.scheduler
    }
}
