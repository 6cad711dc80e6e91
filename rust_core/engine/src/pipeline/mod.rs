//! The public face of one stream of batches: feed, next, close.

mod lookup;
pub(crate) mod permits;
pub(crate) mod push;
pub(crate) mod shared;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use persia_types::tables::LookupReport;

use crate::batch::Batch;
use crate::device::OnDevice;
use crate::engine::Inner;
use crate::error::Error;
use crate::pipeline::permits::Stage;
use crate::pipeline::push::PushTicket;
use crate::pipeline::shared::{Doing, Finish, Item, Line, Shared, State, deadline, join, spawn};
use crate::step::forward::Output;

/// What a wait is for. Steps are this rank's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// A batch from the source.
    Batch,
    /// The look-up of a step.
    Lookup {
        /// Which.
        step: u64,
    },
    /// The acknowledgement of a step's push.
    Push {
        /// Which.
        step: u64,
    },
    /// The caller: it holds the ticket of this step, and nothing goes on until that is pushed or dropped.
    Gradients {
        /// Which.
        step: u64,
    },
    /// The caller: this step was looked up and nobody has called `next` for it.
    Taking {
        /// Which.
        step: u64,
    },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Batch => write!(f, "a batch from the source"),
            Self::Lookup { step } => write!(f, "the look-up of step {step}"),
            Self::Push { step } => write!(f, "the push of step {step} to be acknowledged"),
            Self::Gradients { step } => write!(f, "backward of step {step}, or its batch to be dropped"),
            Self::Taking { step } => {
                write!(f, "step {step} to be taken by its data loader, or that to be closed")
            }
        }
    }
}

/// What became of a batch offered to [`Pipeline::feed`].
#[derive(Debug)]
pub enum Fed {
    /// It is in the queue.
    Accepted,
    /// The queue stayed full for the whole timeout; here is the batch again.
    Pending {
        /// To be offered again.
        batch: Arc<Batch>,
        /// What has to happen first.
        wait: Wait,
    },
}

/// What [`Pipeline::next`] has to say.
#[derive(Debug)]
pub enum Next {
    /// The next batch, looked up.
    Ready(Box<PooledBatch>),
    /// The source has ended and every batch was handed out.
    End,
    /// The timeout passed first.
    Pending(Wait),
}

/// A batch with its pooled rows.
#[derive(Debug)]
pub struct PooledBatch {
    /// The rank's step; for a batch that does not train, the step that would come next.
    pub step: u64,
    /// Shared with the ticket.
    pub batch: Arc<Batch>,
    /// One per id feature, in the batch's order.
    pub outputs: Vec<Output>,
    /// The vectors, where the engine has a device; those of `outputs` are empty then.
    pub on_device: Option<OnDevice>,
    /// What the look-up found.
    pub report: LookupReport,
    /// The right to push gradients; `None` for a batch that does not train.
    pub ticket: Option<PushTicket>,
}

/// One stream of batches: fed by one thread, taken by another, looked up in between by its own.
///
/// Dropping it closes it: batches in flight are dropped, their permits come back, and its thread is waited for.
pub struct Pipeline {
    /// Keeps the push thread alive.
    inner: Arc<Inner>,
    line: u64,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Pipeline {
    pub(crate) fn open(inner: Arc<Inner>) -> Result<Self, Error> {
        let shared = Arc::clone(&inner.shared);
        let line = {
            let mut state = shared.lock();
            state.check()?;
            let line = state.next_line;
            state.next_line += 1;
            state.lines.insert(line, Line::default());
            line
        };
        // From here on a failure drops the pipeline, which removes the line.
        let pipeline = Self { inner, line, worker: Mutex::new(None) };
        *pipeline.worker.lock() = Some(spawn("look-up", move || lookup::run(&shared, line))?);
        Ok(pipeline)
    }

    /// Queue a batch; waits while the queue is full.
    ///
    /// # Errors
    /// [`Error::Closed`] after the end, or what stopped the pipeline or the engine.
    pub fn feed(&self, batch: impl Into<Arc<Batch>>, timeout: Duration) -> Result<Fed, Error> {
        let batch = batch.into();
        let shared = self.shared();
        let deadline = deadline(timeout);
        let mut state = shared.lock();
        loop {
            let line = self.open_line(&mut state)?;
            if line.fed.len() < shared.options.forward_buffer {
                line.fed.push_back(Item::Batch(batch));
                drop(state);
                shared.wake_workers();
                shared.wake_callers(); // `has_next` may wait for it
                return Ok(Fed::Accepted);
            }
            if !shared.caller_waits(&mut state, deadline) {
                let wait = self.full_waits_for(&state);
                return Ok(Fed::Pending { batch, wait });
            }
        }
    }

    /// Say that the source has ended: after the batches before it, `next` returns [`Next::End`].
    pub fn end_of_data(&self) {
        self.finish(Finish::End);
    }

    /// Say that the source has failed: after the batches before it, `next` returns this error.
    pub fn fail(&self, error: Arc<dyn std::error::Error + Send + Sync>) {
        self.finish(Finish::Failed(Error::Source(error)));
    }

    /// The next batch, in the order they were fed. When `reproducible`, its look-up starts only now.
    ///
    /// # Errors
    /// What stopped the source, the pipeline or the engine; [`Error::Closed`].
    pub fn next(&self, timeout: Duration) -> Result<Next, Error> {
        let shared = self.shared();
        let deadline = deadline(timeout);
        let mut state = shared.lock();
        loop {
            state.check()?;
            let line = state.lines.get_mut(&self.line).ok_or(CLOSED)?;
            if let Some(looked) = line.ready.pop_front() {
                line.demand = false;
                if looked.ticket.is_some() {
                    state.permits.advance(looked.step, Stage::Taken);
                    state.step = looked.step;
                }
                drop(state);
                shared.wake_workers();
                return Ok(Next::Ready(Box::new(looked)));
            }
            match &line.finish {
                Some(Finish::End) => return Ok(Next::End),
                Some(Finish::Failed(error)) => return Err(error.clone()),
                None => {}
            }
            if !line.demand {
                line.demand = true;
                shared.wake_workers();
            }
            if !shared.caller_waits(&mut state, deadline) {
                return Ok(Next::Pending(state.waiting_for(self.line)));
            }
        }
    }

    /// Whether `next` has a batch to give, now or after its look-up; false after the last. It asks for no look-up, so
    /// that ranks which take turns can agree on a step before any of them begins it. `None` when the timeout passed
    /// before the source gave a batch or ended.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub fn has_next(&self, timeout: Duration) -> Result<Option<bool>, Error> {
        let shared = self.shared();
        let deadline = deadline(timeout);
        let mut state = shared.lock();
        loop {
            state.check()?;
            let line = state.lines.get(&self.line).ok_or(CLOSED)?;
            if !line.ready.is_empty() || !matches!(line.doing, Doing::Idle) {
                return Ok(Some(true));
            }
            let finish = match line.fed.front() {
                Some(Item::Batch(_)) => return Ok(Some(true)),
                Some(Item::Finish(finish)) => Some(finish),
                None => line.finish.as_ref(),
            };
            match finish {
                Some(Finish::End) => return Ok(Some(false)),
                Some(Finish::Failed(error)) => return Err(error.clone()),
                None => {}
            }
            if !shared.caller_waits(&mut state, deadline) {
                return Ok(None);
            }
        }
    }

    /// Close early. Batches that were not taken are dropped and their permits come back; a look-up on its way
    /// is waited for. Tickets already handed out stay good.
    pub fn close(&self) {
        let line = self.shared().lock().lines.remove(&self.line);
        drop(line); // outside the lock: its tickets give their permits back
        self.shared().wake_workers();
        self.shared().wake_callers();
        join(self.worker.lock().take());
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// This pipeline's line while it takes batches.
    fn open_line<'a>(&self, state: &'a mut State) -> Result<&'a mut Line, Error> {
        state.check()?;
        let line = state.lines.get_mut(&self.line).ok_or(CLOSED)?;
        match &line.finish {
            Some(Finish::Failed(error)) => Err(error.clone()),
            _ if line.ended => Err(CLOSED),
            _ => Ok(line),
        }
    }

    fn finish(&self, finish: Finish) {
        let mut state = self.shared().lock();
        if let Some(line) = state.lines.get_mut(&self.line)
            && !line.ended
        {
            line.ended = true;
            line.fed.push_back(Item::Finish(finish));
            drop(state);
            self.shared().wake_workers();
            self.shared().wake_callers();
        }
    }

    fn full_waits_for(&self, state: &State) -> Wait {
        let ready = state.lines.get(&self.line).and_then(|line| line.ready.front());
        ready.map_or_else(|| state.waiting_for(self.line), |looked| Wait::Taking { step: looked.step })
    }
}

const CLOSED: Error = Error::Closed { what: "the pipeline" };

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.close();
    }
}
