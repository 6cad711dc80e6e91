//! The engine: one rank's access to the tables, over all its pipelines.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use persia_types::limits::MAX_STALENESS;
use persia_types::schema::Schema;
use persia_types::tables::{LookupReport, Mode, Tables};
use persia_types::token::JobId;

use crate::batch::Batch;
use crate::device::{Device, OnDevice};
use crate::error::Error;
use crate::pipeline::push;
use crate::pipeline::shared::{Context, Shared, deadline, guarded, join, spawn};
use crate::pipeline::{Pipeline, Wait};
use crate::stats::EngineStats;
use crate::step::buffer::BufferPool;
use crate::step::forward::{Output, forward};
use crate::step::plan::Plan;

/// How an engine runs. Every field has a range, checked by [`Engine::new`].
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// The job's name, part of every token.
    pub job: String,
    /// The run's generation, part of every token.
    pub generation: u64,
    /// This trainer's rank, below `world_size`.
    pub rank: u32,
    /// Trainer ranks of the run.
    pub world_size: u32,
    /// K, 1 to 64: at most K - 1 own pushes are unacknowledged when a look-up is served. 1 when `reproducible`.
    pub staleness: usize,
    /// Look up a batch only when it is asked for and every push before it is acknowledged.
    pub reproducible: bool,
    /// Batches a pipeline holds before `feed` waits, at least 1.
    pub forward_buffer: usize,
    /// The first step, from 1; a resumed run goes on with the step after its checkpoint's.
    pub first_seq: u64,
    /// Multiplies every summed gradient: 1 / world size, or 1 for a sum over ranks.
    pub gradient_scale: f32,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            job: "persia".into(),
            generation: 1,
            rank: 0,
            world_size: 1,
            staleness: 8,
            reproducible: false,
            forward_buffer: 10,
            first_seq: 1,
            gradient_scale: 1.0,
        }
    }
}

impl EngineOptions {
    /// Whether every rank's look-up and push of every step is waited for by those of the ranks behind it.
    pub fn takes_turns(&self) -> bool {
        self.reproducible && self.world_size > 1
    }

    fn check(&self) -> Result<(), Error> {
        let bad = |option, what: String| Err(Error::BadOption { option, what });
        if !(1..=MAX_STALENESS).contains(&self.staleness) {
            return bad("staleness", format!("{} is outside 1..={MAX_STALENESS}", self.staleness));
        }
        if self.rank >= self.world_size {
            return bad("rank", format!("{} is not below the world size {}", self.rank, self.world_size));
        }
        if self.forward_buffer == 0 {
            return bad("forward_buffer", "0 batches; at least 1 is needed".into());
        }
        if self.first_seq == 0 {
            return bad("first_seq", "0; steps count from 1".into());
        }
        if !(self.gradient_scale.is_finite() && self.gradient_scale > 0.0) {
            return bad("gradient_scale", format!("{} is not a positive number", self.gradient_scale));
        }
        Ok(())
    }
}

/// Whether all pushes are acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// None is queued or on its way: the tables hold every gradient that was pushed.
    Done,
    /// The timeout passed first.
    Pending(Wait),
}

/// Result of [`Engine::lookup_now`].
#[derive(Debug)]
pub struct EvalResult {
    /// One per id feature, in the batch's order.
    pub outputs: Vec<Output>,
    /// The vectors, where the engine has a device; those of `outputs` are empty then.
    pub on_device: Option<OnDevice>,
    /// What was found.
    pub report: LookupReport,
}

/// One rank's engine. Clones are the same engine; its push thread ends, after what is queued, with the last of
/// them and their pipelines.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

/// Owns the push thread.
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    pusher: Option<JoinHandle<()>>,
}

impl Engine {
    /// An engine over `tables`, on which the run has begun.
    ///
    /// # Errors
    /// [`Error::BadOption`], [`Error::Spawn`].
    pub fn new(tables: Arc<dyn Tables>, schema: Schema, options: EngineOptions) -> Result<Self, Error> {
        Self::with_device(tables, schema, options, None)
    }

    /// As [`Self::new`]; look-ups are pooled on the `device`, where there is one.
    ///
    /// # Errors
    /// As [`Self::new`].
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
        let buffers = (options.staleness + 2) * schema.slots.len() + 4 * schema.tables.len();
        let context = Context {
            tables,
            schema,
            buffers: BufferPool::new(buffers),
            job: JobId::from_name(&options.job),
            generation: options.generation,
            rank: options.rank,
            gradient_scale: options.gradient_scale,
            device,
        };
        let shared = Arc::new(Shared::new(context, options));
        let for_thread = Arc::clone(&shared);
        let pusher = spawn("push", move || push::run(&for_thread))?;
        Ok(Self { inner: Arc::new(Inner { shared, pusher: Some(pusher) }) })
    }

    /// A new pipeline: the batches of one data loader, from its first to its end or until it is closed.
    /// Several may be open; permits and steps are the engine's.
    ///
    /// # Errors
    /// [`Error::Spawn`], or the failure that stopped the engine.
    pub fn pipeline(&self) -> Result<Pipeline, Error> {
        Pipeline::open(Arc::clone(&self.inner))
    }

    /// Look a batch up at once, outside any pipeline; nothing is changed. Pushes on their way may or may not be
    /// seen: [`Self::drain`] first where that matters.
    ///
    /// # Errors
    /// [`Error::BadOption`] for [`Mode::Train`], [`Error::FeatureMismatch`], [`Error::Lookup`].
    pub fn lookup_now(&self, batch: &Batch, mode: Mode) -> Result<EvalResult, Error> {
        self.lookup_on(self.inner.shared.context.device.as_deref(), batch, mode)
    }

    /// As [`Self::lookup_now`], on another device than the engine's, or on the CPU.
    ///
    /// # Errors
    /// As [`Self::lookup_now`], and [`Error::Device`].
    pub fn lookup_on(
        &self,
        device: Option<&dyn Device>,
        batch: &Batch,
        mode: Mode,
    ) -> Result<EvalResult, Error> {
        if mode == Mode::Train {
            let what = "Train needs a permit: feed the batch to a pipeline".into();
            return Err(Error::BadOption { option: "mode", what });
        }
        let shared = &self.inner.shared;
        let step = {
            let state = shared.lock();
            state.check()?;
            state.step
        };
        let plan = Plan::new(batch, &shared.context.schema)?;
        let done = guarded("look-up", step, || {
            forward(&shared.context, device, (batch, &plan), shared.context.token(step), mode)
        })?;
        Ok(EvalResult { outputs: done.outputs, on_device: done.on_device, report: done.report })
    }

    /// Wait until every push is acknowledged: the consistent cut. Tickets not yet pushed do not count.
    ///
    /// # Errors
    /// The failure that stopped the engine; a failed push is never acknowledged.
    pub fn drain(&self, timeout: Duration) -> Result<Drained, Error> {
        let shared = &self.inner.shared;
        let deadline = deadline(timeout);
        let mut state = shared.lock();
        loop {
            state.check()?;
            let Some(wait) = state.on_its_way() else { return Ok(Drained::Done) };
            if !shared.caller_waits(&mut state, deadline) {
                return Ok(Drained::Pending(wait));
            }
        }
    }

    /// Begin no more look-ups until [`Engine::resume`], so that a drain leaves nothing under way: the rows are of one step
    /// then, and stay so.
    pub fn pause(&self) {
        self.inner.shared.lock().paused = true;
    }

    /// End what [`Engine::pause`] began.
    pub fn resume(&self) {
        self.inner.shared.lock().paused = false;
        self.inner.shared.wake_workers();
    }

    /// The latest training step handed out by a pipeline; `first_seq - 1` before any.
    pub fn step(&self) -> u64 {
        self.inner.shared.lock().step
    }

    /// The options in effect.
    pub fn options(&self) -> &EngineOptions {
        &self.inner.shared.options
    }

    /// The schema.
    pub fn schema(&self) -> &Schema {
        &self.inner.shared.context.schema
    }

    /// The failure that stopped the engine, if one did.
    pub fn failure(&self) -> Option<Error> {
        self.inner.shared.lock().failed.clone()
    }

    /// Counters and times so far.
    pub fn stats(&self) -> EngineStats {
        let state = self.inner.shared.lock();
        let staleness = state.permits.held() as u64;
        let max_staleness = state.permits.most_before() as u64;
        EngineStats { staleness, max_staleness, ..state.stats.clone() }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.wake_workers();
        join(self.pusher.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let cases = [
            ("staleness", EngineOptions { staleness: 0, ..Default::default() }),
            ("staleness", EngineOptions { staleness: 65, ..Default::default() }),
            ("rank", EngineOptions { rank: 2, world_size: 2, ..Default::default() }),
            ("forward_buffer", EngineOptions { forward_buffer: 0, ..Default::default() }),
            ("first_seq", EngineOptions { first_seq: 0, ..Default::default() }),
            ("gradient_scale", EngineOptions { gradient_scale: f32::NAN, ..Default::default() }),
        ];
        for (name, options) in cases {
            let error = options.check().unwrap_err();
            assert!(matches!(error, Error::BadOption { option, .. } if option == name), "{error}");
        }
        EngineOptions::default().check().unwrap();
    }
}
