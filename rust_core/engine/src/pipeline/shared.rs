//! What the callers and the two kinds of worker thread share: one lock, and every change under it.
//!
//! A *line* is one pipeline's queue of batches. Permits, pushes and the sticky error belong to the engine, so
//! that a ticket outlives its pipeline and K holds over all of them.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use persia_types::schema::Schema;
use persia_types::tables::Tables;
use persia_types::token::{JobId, Token};

use crate::batch::Batch;
use crate::device::Device;
use crate::engine::EngineOptions;
use crate::error::Error;
use crate::pipeline::permits::{Permits, Stage};
use crate::pipeline::push::PushJob;
use crate::pipeline::{PooledBatch, Wait};
use crate::stats::EngineStats;
use crate::step::buffer::BufferPool;

/// What look-ups and pushes need and nothing changes.
pub(crate) struct Context {
    pub(crate) tables: Arc<dyn Tables>,
    pub(crate) schema: Schema,
    pub(crate) buffers: Arc<BufferPool>,
    pub(crate) job: JobId,
    pub(crate) generation: u64,
    pub(crate) rank: u32,
    pub(crate) gradient_scale: f32,
    /// Pools in the place of the CPU.
    pub(crate) device: Option<Arc<dyn Device>>,
}

impl Context {
    /// The name of this rank's step.
    pub(crate) fn token(&self, seq: u64) -> Token {
        Token { job: self.job, generation: self.generation, rank: self.rank, seq }
    }
}

pub(crate) struct Shared {
    pub(crate) context: Context,
    pub(crate) options: EngineOptions,
    state: Mutex<State>,
    /// Look-up and push threads wait here.
    workers: Condvar,
    /// Everybody else waits here.
    callers: Condvar,
}

/// Everything that changes.
pub(crate) struct State {
    pub(crate) permits: Permits,
    /// Sequence number of the next training look-up.
    pub(crate) next_seq: u64,
    /// The latest step that was handed out.
    pub(crate) step: u64,
    pub(crate) pushes: VecDeque<PushJob>,
    pub(crate) lines: BTreeMap<u64, Line>,
    pub(crate) next_line: u64,
    /// The first failure of a worker; everybody is told from then on.
    pub(crate) failed: Option<Error>,
    /// No look-up begins.
    pub(crate) paused: bool,
    /// The engine is gone: what is queued is still pushed, nothing is accepted.
    pub(crate) stopping: bool,
    pub(crate) stats: EngineStats,
}

/// One pipeline's batches.
#[derive(Default)]
pub(crate) struct Line {
    pub(crate) fed: VecDeque<Item>,
    pub(crate) ready: VecDeque<PooledBatch>,
    /// What `next` says once `ready` is empty.
    pub(crate) finish: Option<Finish>,
    /// No more is accepted.
    pub(crate) ended: bool,
    /// `next` was called and has got nothing yet.
    pub(crate) demand: bool,
    pub(crate) doing: Doing,
}

pub(crate) enum Item {
    Batch(Arc<Batch>),
    Finish(Finish),
}

#[derive(Clone)]
pub(crate) enum Finish {
    End,
    Failed(Error),
}

/// What a line's look-up thread is at.
#[derive(Default, Clone, Copy)]
pub(crate) enum Doing {
    #[default]
    Idle,
    /// Has a batch, and finds out which rows it needs.
    Planning,
    /// Has a batch, waits for a permit.
    Permit,
    Looking(u64),
}

impl Shared {
    pub(crate) fn new(context: Context, options: EngineOptions) -> Self {
        let state = State {
            permits: Permits::new(options.staleness),
            next_seq: options.first_seq,
            step: options.first_seq - 1,
            pushes: VecDeque::new(),
            lines: BTreeMap::new(),
            next_line: 0,
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

    /// A worker waits; callers, other workers and the engine's end wake it.
    pub(crate) fn worker_waits(&self, state: &mut MutexGuard<'_, State>) {
        self.workers.wait(state);
    }

    /// A caller waits; false once the deadline has passed.
    pub(crate) fn caller_waits(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> bool {
        !self.callers.wait_until(state, deadline).timed_out()
    }

    /// Stop the engine with the first failure; tell everybody.
    pub(crate) fn fail(&self, error: Error) {
        self.lock().failed.get_or_insert(error);
        self.wake_workers();
        self.wake_callers();
    }

    /// Give a permit back.
    pub(crate) fn release(&self, step: u64) {
        self.lock().permits.release(step);
        self.wake_workers();
        self.wake_callers();
    }
}

impl State {
    /// The sticky error, if a worker failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// What a drain waits for: a push, and a look-up where none is to follow.
    pub(crate) fn on_its_way(&self) -> Option<Wait> {
        let push = self.permits.oldest_at(Stage::Pushing).map(|step| Wait::Push { step });
        let looking = || self.permits.oldest_at(Stage::LookingUp).filter(|_| self.paused);
        push.or_else(|| looking().map(|step| Wait::Lookup { step }))
    }

    /// What a pipeline's `next` waits for, by name.
    pub(crate) fn waiting_for(&self, line: u64) -> Wait {
        let Some(line) = self.lines.get(&line) else { return Wait::Batch };
        match line.doing {
            Doing::Looking(step) => Wait::Lookup { step },
            Doing::Idle if line.fed.is_empty() => Wait::Batch,
            Doing::Idle | Doing::Planning => Wait::Lookup { step: self.next_seq },
            Doing::Permit => self.permit_waits_for(),
        }
    }

    /// Which holder will give a permit back; one that needs the caller only when no other is on its way.
    fn permit_waits_for(&self) -> Wait {
        if let Some(step) = self.permits.oldest_at(Stage::Pushing) {
            Wait::Push { step }
        } else if let Some(step) = self.permits.oldest_at(Stage::LookingUp) {
            Wait::Lookup { step }
        } else if let Some(step) = self.permits.oldest_at(Stage::Taken) {
            Wait::Gradients { step }
        } else if let Some(step) = self.permits.oldest_at(Stage::Ready) {
            Wait::Taking { step }
        } else {
            Wait::Lookup { step: self.next_seq }
        }
    }
}

/// When a wait of `timeout` ends.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(24 * 3600); // an Instant overflows, a caller may wait again
    Instant::now() + timeout.min(LONGEST)
}

/// Run `work`; a panic becomes an error instead of a thread that is silently gone.
pub(crate) fn guarded<T>(
    worker: &'static str,
    step: u64,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::Panicked { worker, step, what: panic_message(panic.as_ref()) }))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Start a named worker thread.
pub(crate) fn spawn(
    worker: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name(format!("persia-{worker}"))
        .spawn(work)
        .map_err(|source| Error::Spawn { worker, source: source.into() })
}

/// Wait for a worker's end, unless this *is* the worker: a gradient's destructor may drop the engine.
pub(crate) fn join(worker: Option<JoinHandle<()>>) {
    if let Some(worker) = worker
        && worker.thread().id() != std::thread::current().id()
    {
        // Panics of the work itself were caught and told by `guarded`.
        let _ = worker.join();
    }
}
