//! [`Scheduler`]: the state with which callers and worker threads agree on the next step, and its lock.
//!
//! Every pipeline has a queue of batches. The staleness window, the pushes and the first failure belong to the engine,
//! so a ticket may outlive its pipeline, and K applies to all pipelines together.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use persia_types::tables::LookupReport;

use crate::batch::Batch;
use crate::context::Context;
use crate::device::OnDevice;
use crate::error::Error;
use crate::options::{EngineOptions, PushOptions};
use crate::pipeline::staleness::{Stage, StalenessWindow};
use crate::pipeline::wait::Wait;
use crate::stats::EngineStats;
use crate::step::gradients::PushGradients;
use crate::step::output::Output;
use crate::step::plan::Plan;

/// The state that callers, look-up threads and the push thread share.
pub(crate) struct Scheduler {
    pub(crate) context: Context,
    pub(crate) options: EngineOptions,
    state: Mutex<State>,
    /// The condition on which look-up and push threads wait.
    workers: Condvar,
    /// The condition on which all other threads wait.
    callers: Condvar,
}

/// The state that the lock protects.
pub(crate) struct State {
    pub(crate) window: StalenessWindow,
    /// The sequence number of the next training look-up.
    pub(crate) next_seq: u64,
    /// The latest training step that was returned to the caller.
    pub(crate) step: u64,
    pub(crate) pushes: VecDeque<PushJob>,
    pub(crate) queues: BTreeMap<u64, BatchQueue>,
    pub(crate) next_queue: u64,
    /// The first failure of a worker, which every later call returns.
    pub(crate) failed: Option<Error>,
    /// Whether no look-up may start.
    pub(crate) paused: bool,
    /// Whether the engine was dropped. Queued gradients are then still pushed, but no more are accepted.
    pub(crate) stopping: bool,
    pub(crate) stats: EngineStats,
}

/// The batches of one pipeline.
#[derive(Default)]
pub(crate) struct BatchQueue {
    pub(crate) fed: VecDeque<QueueItem>,
    pub(crate) ready: VecDeque<Ready>,
    /// The result of `next` when `ready` is empty.
    pub(crate) end: Option<StreamEnd>,
    /// Whether no more batches are accepted.
    pub(crate) closed: bool,
    /// Whether `next` was called since it last returned a batch.
    pub(crate) demand: bool,
    pub(crate) worker: WorkerState,
}

pub(crate) enum QueueItem {
    Batch(Arc<Batch>),
    End(StreamEnd),
}

#[derive(Clone)]
pub(crate) enum StreamEnd {
    Done,
    Failed(Error),
}

/// The state of a queue's look-up thread.
#[derive(Default, Clone, Copy)]
pub(crate) enum WorkerState {
    #[default]
    Idle,
    /// The thread has a batch and plans its look-up.
    Planning,
    /// The thread has a batch and waits for space in the staleness window, or for [`crate::Engine::resume`].
    AwaitingWindow,
    LookingUp(u64),
}

/// A batch that was looked up.
pub(crate) struct Ready {
    pub(crate) step: u64,
    pub(crate) batch: Arc<Batch>,
    pub(crate) outputs: Vec<Output>,
    pub(crate) on_device: Option<OnDevice>,
    pub(crate) report: LookupReport,
    /// For a training batch, the plan, which the push of its gradients needs.
    pub(crate) plan: Option<Plan>,
}

/// The gradients that wait for the push thread.
pub(crate) struct PushJob {
    pub(crate) step: u64,
    pub(crate) batch: Arc<Batch>,
    pub(crate) plan: Plan,
    pub(crate) gradients: PushGradients,
    pub(crate) options: PushOptions,
}

impl Scheduler {
    pub(crate) fn new(context: Context, options: EngineOptions) -> Self {
        let state = State {
            window: StalenessWindow::new(options.staleness),
            next_seq: options.first_seq,
            step: options.first_seq - 1,
            pushes: VecDeque::new(),
            queues: BTreeMap::new(),
            next_queue: 0,
            failed: None,
            paused: false,
            stopping: false,
            stats: EngineStats {
                slots: vec![Default::default(); context.schema.slots.len()],
                ..Default::default()
            },
        };
        Self { context, options, state: Mutex::new(state), workers: Condvar::new(), callers: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn wake_workers(&self) {
        self.workers.notify_all();
    }

    pub(crate) fn wake_callers(&self) {
        self.callers.notify_all();
    }

    /// Block a worker until a caller, another worker or the engine's end wakes it.
    pub(crate) fn worker_waits(&self, state: &mut MutexGuard<'_, State>) {
        self.workers.wait(state);
    }

    /// Block a caller. Returns false once the deadline has passed.
    pub(crate) fn caller_waits(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> bool {
        !self.callers.wait_until(state, deadline).timed_out()
    }

    /// Stop the engine. Only the first failure is recorded.
    pub(crate) fn fail(&self, error: Error) {
        self.lock().failed.get_or_insert(error);
        self.wake_workers();
        self.wake_callers();
    }

    /// Remove a step from the staleness window.
    pub(crate) fn release(&self, step: u64) {
        self.lock().window.leave(step);
        self.wake_workers();
        self.wake_callers();
    }
}

impl State {
    /// Return the first failure of a worker, if any.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// What a drain waits for: a push or, while look-ups are paused, a look-up that has started.
    pub(crate) fn in_flight(&self) -> Option<Wait> {
        let push = self.window.oldest_at(Stage::Pushing).map(|step| Wait::Push { step });
        let looking = || self.window.oldest_at(Stage::LookingUp).filter(|_| self.paused);
        push.or_else(|| looking().map(|step| Wait::Lookup { step }))
    }

    /// What `next` of a pipeline waits for.
    pub(crate) fn waiting_for(&self, queue: u64) -> Wait {
        let Some(queue) = self.queues.get(&queue) else { return Wait::Batch };
        match queue.worker {
            WorkerState::LookingUp(step) => Wait::Lookup { step },
            WorkerState::Idle if queue.fed.is_empty() => Wait::Batch,
            WorkerState::Idle | WorkerState::Planning => Wait::Lookup { step: self.next_seq },
            WorkerState::AwaitingWindow => self.window_waits_for(),
        }
    }

    /// What the window waits for: the step that will leave it next. A step that waits for the caller is returned only
    /// if no other step makes progress.
    fn window_waits_for(&self) -> Wait {
        if let Some(step) = self.window.oldest_at(Stage::Pushing) {
            Wait::Push { step }
        } else if let Some(step) = self.window.oldest_at(Stage::LookingUp) {
            Wait::Lookup { step }
        } else if let Some(step) = self.window.oldest_at(Stage::Taken) {
            Wait::Gradients { step }
        } else if let Some(step) = self.window.oldest_at(Stage::Ready) {
            Wait::Taking { step }
        } else {
            Wait::Lookup { step: self.next_seq }
        }
    }
}

/// The deadline of a wait that may take as long as `timeout`.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(24 * 3600); // a longer one could overflow; callers can wait again
    Instant::now() + timeout.min(LONGEST)
}
