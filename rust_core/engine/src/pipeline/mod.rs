//! [`Pipeline`]: one stream of batches, with the methods feed, next and close.

mod lookup;
pub(crate) mod push;
pub(crate) mod scheduler;
mod staleness;
pub(crate) mod ticket;
pub(crate) mod wait;
pub(crate) mod worker;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::batch::Batch;
use crate::error::Error;
use crate::pipeline::push::PushThread;
use crate::pipeline::scheduler::{BatchQueue, QueueItem, Scheduler, State, StreamEnd, WorkerState, deadline};
use crate::pipeline::staleness::Stage;
use crate::pipeline::ticket::PooledBatch;
use crate::pipeline::wait::Wait;
use crate::pipeline::worker::{join, spawn};

/// The result of [`Pipeline::feed`].
#[derive(Debug)]
pub enum FeedOutcome {
    /// The batch is in the queue.
    Accepted,
    /// The queue was full until the timeout. The batch is returned.
    Pending {
        /// The batch, which can be fed again.
        batch: Arc<Batch>,
        /// What the call was waiting for.
        wait: Wait,
    },
}

/// The result of [`Pipeline::next`].
#[derive(Debug)]
pub enum Next {
    /// The next batch, after its look-up.
    Ready(Box<PooledBatch>),
    /// The source has ended, and all batches were returned.
    End,
    /// The timeout passed. The value says what the call was waiting for.
    Pending(Wait),
}

/// One stream of batches. One thread feeds batches, another takes them, and the pipeline's look-up thread looks them
/// up in between.
///
/// Dropping a pipeline closes it: batches that were not taken are dropped, and the look-up thread is joined.
pub struct Pipeline {
    /// The push thread, which the pipeline keeps alive.
    pusher: Arc<PushThread>,
    queue: u64,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Pipeline {
    pub(crate) fn open(pusher: Arc<PushThread>) -> Result<Self, Error> {
        let scheduler = Arc::clone(&pusher.scheduler);
        let queue = {
            let mut state = scheduler.lock();
            state.check()?;
            let queue = state.next_queue;
            state.next_queue += 1;
            state.queues.insert(queue, BatchQueue::default());
            queue
        };
        // From here on, a failure drops the pipeline, which removes the queue.
        let pipeline = Self { pusher, queue, worker: Mutex::new(None) };
        *pipeline.worker.lock() = Some(spawn("look-up", move || lookup::run(&scheduler, queue))?);
        Ok(pipeline)
    }

    /// Queue a batch. Waits while the queue is full.
    ///
    /// # Errors
    /// [`Error::Closed`] after the end of the data or [`Self::close`]; the failure that stopped the pipeline
    /// or the engine.
    pub fn feed(&self, batch: impl Into<Arc<Batch>>, timeout: Duration) -> Result<FeedOutcome, Error> {
        let batch = batch.into();
        let scheduler = self.scheduler();
        let deadline = deadline(timeout);
        let mut state = scheduler.lock();
        loop {
            let queue = self.open_queue(&mut state)?;
            if queue.fed.len() < scheduler.options.forward_buffer {
                queue.fed.push_back(QueueItem::Batch(batch));
                drop(state);
                scheduler.wake_workers();
                scheduler.wake_callers(); // `has_next` may wait for a batch
                return Ok(FeedOutcome::Accepted);
            }
            if !scheduler.caller_waits(&mut state, deadline) {
                let wait = self.full_waits_for(&state);
                return Ok(FeedOutcome::Pending { batch, wait });
            }
        }
    }

    /// Report the end of the source. After the queued batches, `next` returns [`Next::End`].
    pub fn end_of_data(&self) {
        self.end(StreamEnd::Done);
    }

    /// Report a failure of the source. After the queued batches, `next` returns this error.
    pub fn fail(&self, error: Arc<dyn std::error::Error + Send + Sync>) {
        self.end(StreamEnd::Failed(Error::Source(error)));
    }

    /// Return the next batch, in the order in which batches were fed. In a reproducible run, this call starts
    /// the look-up of the batch.
    ///
    /// # Errors
    /// [`Error::Closed`] after [`Self::close`]; the failure that stopped the source, the pipeline or the
    /// engine.
    pub fn next(&self, timeout: Duration) -> Result<Next, Error> {
        let scheduler = self.scheduler();
        let deadline = deadline(timeout);
        let mut state = scheduler.lock();
        loop {
            state.check()?;
            let queue = state.queues.get_mut(&self.queue).ok_or(CLOSED)?;
            if let Some(ready) = queue.ready.pop_front() {
                queue.demand = false;
                if ready.plan.is_some() {
                    state.window.advance(ready.step, Stage::Taken);
                    state.step = ready.step;
                }
                drop(state);
                scheduler.wake_workers();
                return Ok(Next::Ready(Box::new(PooledBatch::new(scheduler, ready))));
            }
            match &queue.end {
                Some(StreamEnd::Done) => return Ok(Next::End),
                Some(StreamEnd::Failed(error)) => return Err(error.clone()),
                None => {}
            }
            if !queue.demand {
                queue.demand = true;
                scheduler.wake_workers();
            }
            if !scheduler.caller_waits(&mut state, deadline) {
                return Ok(Next::Pending(state.waiting_for(self.queue)));
            }
        }
    }

    /// Whether `next` will return a batch. This starts no look-up, so that ranks that take turns can agree on a step
    /// before any of them starts it. Returns None if the timeout passed before the source provided a batch or ended.
    ///
    /// # Errors
    /// Those of [`Self::next`].
    pub fn has_next(&self, timeout: Duration) -> Result<Option<bool>, Error> {
        let scheduler = self.scheduler();
        let deadline = deadline(timeout);
        let mut state = scheduler.lock();
        loop {
            state.check()?;
            let queue = state.queues.get(&self.queue).ok_or(CLOSED)?;
            if !queue.ready.is_empty() || !matches!(queue.worker, WorkerState::Idle) {
                return Ok(Some(true));
            }
            let end = match queue.fed.front() {
                Some(QueueItem::Batch(_)) => return Ok(Some(true)),
                Some(QueueItem::End(end)) => Some(end),
                None => queue.end.as_ref(),
            };
            match end {
                Some(StreamEnd::Done) => return Ok(Some(false)),
                Some(StreamEnd::Failed(error)) => return Err(error.clone()),
                None => {}
            }
            if !scheduler.caller_waits(&mut state, deadline) {
                return Ok(None);
            }
        }
    }

    /// Close the pipeline early. Waits for a look-up that has started. Batches that were not taken are dropped, and
    /// their steps leave the staleness window. Tickets that were returned stay valid.
    pub fn close(&self) {
        let queue = self.scheduler().lock().queues.remove(&self.queue);
        // Drop the batches without the lock, because their tickets take the lock.
        for ready in queue.into_iter().flat_map(|queue| queue.ready) {
            drop(PooledBatch::new(self.scheduler(), ready));
        }
        self.scheduler().wake_workers();
        self.scheduler().wake_callers();
        join(self.worker.lock().take());
    }

    fn scheduler(&self) -> &Arc<Scheduler> {
        &self.pusher.scheduler
    }

    /// This pipeline's queue, if it accepts batches.
    fn open_queue<'a>(&self, state: &'a mut State) -> Result<&'a mut BatchQueue, Error> {
        state.check()?;
        let queue = state.queues.get_mut(&self.queue).ok_or(CLOSED)?;
        match &queue.end {
            Some(StreamEnd::Failed(error)) => Err(error.clone()),
            _ if queue.closed => Err(CLOSED),
            _ => Ok(queue),
        }
    }

    fn end(&self, end: StreamEnd) {
        let mut state = self.scheduler().lock();
        if let Some(queue) = state.queues.get_mut(&self.queue)
            && !queue.closed
        {
            queue.closed = true;
            queue.fed.push_back(QueueItem::End(end));
            drop(state);
            self.scheduler().wake_workers();
            self.scheduler().wake_callers();
        }
    }

    fn full_waits_for(&self, state: &State) -> Wait {
        let ready = state.queues.get(&self.queue).and_then(|queue| queue.ready.front());
        ready.map_or_else(|| state.waiting_for(self.queue), |ready| Wait::Taking { step: ready.step })
    }
}

const CLOSED: Error = Error::Closed { what: "the pipeline" };

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.close();
    }
}
