//! Schemas, batches, and tables that block or fail on request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use persia_engine::{
    Batch, BatchParts, Engine, EngineOptions, FeedOutcome, Gradient, IdFeature, Next, Pipeline, PooledBatch,
    PushOptions, Wait,
};
use persia_types::schema::{Initializer, Optimizer, Pooling, Schema, Slot, Table};
use persia_types::tables::{LookupReport, LookupRequest, PushReport, PushRequest, Run, Tables, TablesError};

use crate::plain::PlainTables;

/// A time limit longer than any operation takes. Reaching it is a failure.
pub(crate) const LONG: Duration = Duration::from_secs(30);
/// How long to wait for an event that must *not* happen.
pub(crate) const SHORT: Duration = Duration::from_millis(30);

/// Create a schema with one slot per entry: name, table, pooling, sqrt scaling.
pub(crate) fn schema(slots: &[(&str, usize, Pooling, bool)], dims: &[usize]) -> Schema {
    let slot = |(name, table, pooling, sqrt_scaling): &(&str, usize, Pooling, bool)| Slot {
        name: (*name).into(),
        table: *table,
        pooling: *pooling,
        sqrt_scaling: *sqrt_scaling,
        ..Slot::default()
    };
    Schema {
        slots: slots.iter().map(slot).collect(),
        tables: dims.iter().enumerate().map(|(i, dim)| Table::new(format!("t{i}"), *dim)).collect(),
    }
}

/// A schema with one slot `a` and a table of dimension 2.
pub(crate) fn one_slot() -> Schema {
    schema(&[("a", 0, Pooling::Sum, false)], &[2])
}

pub(crate) fn run(schema: &Schema) -> Run {
    Run {
        job: "persia".into(),
        generation: 1,
        schema: schema.clone(),
        seed: 1,
        optimizer: Some(Optimizer::Sgd { lr: 1.0, momentum: 0.0, weight_decay: 0.0 }),
        initializer: Initializer::Zero,
        admit_probability: 1.0,
        admit_min_count: 1,
        weight_bound: 0.0,
        fresh: false,
        continues: 0,
        world_size: 1,
        reproducible: false,
    }
}

/// Plain tables on which a run has begun.
pub(crate) fn plain(schema: &Schema) -> PlainTables {
    let tables = PlainTables::new(schema.clone());
    tables.begin(&run(schema)).unwrap();
    tables
}

pub(crate) fn engine(tables: Arc<dyn Tables>, schema: &Schema, options: EngineOptions) -> Engine {
    Engine::new(tables, schema.clone(), options).unwrap()
}

pub(crate) fn with_staleness(staleness: usize) -> EngineOptions {
    EngineOptions { staleness, ..Default::default() }
}

pub(crate) fn reproducible() -> EngineOptions {
    EngineOptions { reproducible: true, ..Default::default() }
}

/// A batch with one feature `a`, which has one id per sample.
pub(crate) fn batch(ids: &[u64], requires_grad: bool) -> Batch {
    let id_features = vec![IdFeature::single("a", ids).unwrap()];
    Batch::new(BatchParts { id_features, requires_grad, ..Default::default() }).unwrap()
}

pub(crate) fn feed(pipeline: &Pipeline, batch: Batch) {
    let fed = pipeline.feed(batch, LONG).unwrap();
    assert!(matches!(fed, FeedOutcome::Accepted), "{fed:?}");
}

pub(crate) fn ready(pipeline: &Pipeline) -> PooledBatch {
    match pipeline.next(LONG).unwrap() {
        Next::Ready(looked) => *looked,
        other => panic!("{other:?}"),
    }
}

/// Call `next` until it waits for `expected`. The look-up thread may take some time to reach this state.
pub(crate) fn waits_for(pipeline: &Pipeline, expected: Wait) {
    let start = Instant::now();
    loop {
        match pipeline.next(SHORT).unwrap() {
            Next::Pending(wait) if wait == expected => return,
            Next::Pending(wait) => assert!(start.elapsed() < LONG, "{wait:?}, expected {expected:?}"),
            other => panic!("{other:?}, expected {expected:?}"),
        }
    }
}

/// Gradients with the same value for every output of the batch.
pub(crate) fn gradients(looked: &PooledBatch, value: f32) -> Vec<Option<Gradient>> {
    let gradient = |floats: usize| Some(Box::new(vec![value; floats]) as Gradient);
    looked.outputs.iter().map(|output| gradient(output.as_ref().len())).collect()
}

pub(crate) fn push(mut looked: PooledBatch, value: f32) {
    let gradients = gradients(&looked, value);
    looked.ticket.take().unwrap().push(gradients, PushOptions::default()).unwrap();
}

/// Tables that change one behavior of other tables.
pub(crate) trait Wrapped: Send + Sync {
    fn inner(&self) -> &dyn Tables;

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        self.inner().lookup(request, rows)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        self.inner().push(request)
    }
}

/// Implements `Tables` for a type that is [`Wrapped`].
macro_rules! tables_by_wrapping {
    ($name:ty) => {
        impl Tables for $name {
            fn begin(&self, run: &persia_types::tables::Run) -> Result<(), TablesError> {
                self.inner().begin(run)
            }
            fn lookup(
                &self,
                request: &LookupRequest<'_>,
                rows: &mut [&mut [f32]],
            ) -> Result<LookupReport, TablesError> {
                Wrapped::lookup(self, request, rows)
            }
            fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
                Wrapped::push(self, request)
            }
            fn prepare_snapshot(&self, number: u64) -> Result<(), TablesError> {
                self.inner().prepare_snapshot(number)
            }
            fn abort_snapshot(&self, number: u64) -> Result<(), TablesError> {
                self.inner().abort_snapshot(number)
            }
            fn write_snapshot(
                &self,
                dir: &std::path::Path,
                number: Option<u64>,
            ) -> Result<persia_types::tables::Snapshot, TablesError> {
                self.inner().write_snapshot(dir, number)
            }
            fn restore(
                &self,
                dir: &std::path::Path,
                files: &[persia_types::tables::FileEntry],
            ) -> Result<(), TablesError> {
                self.inner().restore(dir, files)
            }
            fn stats(&self) -> Result<persia_types::tables::Stats, TablesError> {
                self.inner().stats()
            }
            fn clear(&self) -> Result<(), TablesError> {
                self.inner().clear()
            }
        }
    };
}
pub(crate) use tables_by_wrapping;

/// Tables whose pushes wait at a gate, and which can fail or panic at a given step.
pub(crate) struct Rigged {
    pub(crate) plain: PlainTables,
    gate: Mutex<Gate>,
    moved: Condvar,
    pub(crate) fail_lookup_at: Option<u64>,
    pub(crate) fail_push_at: Option<u64>,
    pub(crate) panic_push_at: Option<u64>,
}

#[derive(Default)]
struct Gate {
    /// The last step whose push may pass the gate; None if all may pass.
    closed_after: Option<u64>,
    looked_up: Vec<u64>,
    arrived: Vec<u64>,
    pushed: Vec<u64>,
    /// For each look-up, the number of earlier steps that were not applied when it was served.
    staleness: Vec<u64>,
}

impl Rigged {
    pub(crate) fn new(schema: &Schema) -> Self {
        Self {
            plain: plain(schema),
            gate: Mutex::default(),
            moved: Condvar::new(),
            fail_lookup_at: None,
            fail_push_at: None,
            panic_push_at: None,
        }
    }

    /// Let pushes up to `step` pass, and hold the others.
    pub(crate) fn open_until(&self, step: u64) {
        self.gate.lock().closed_after = Some(step);
        self.moved.notify_all();
    }

    pub(crate) fn open(&self) {
        self.gate.lock().closed_after = None;
        self.moved.notify_all();
    }

    pub(crate) fn looked_up(&self) -> Vec<u64> {
        self.gate.lock().looked_up.clone()
    }

    pub(crate) fn pushed(&self) -> Vec<u64> {
        self.gate.lock().pushed.clone()
    }

    pub(crate) fn staleness(&self) -> Vec<u64> {
        self.gate.lock().staleness.clone()
    }

    /// Wait until the push of `step` is at the gate.
    pub(crate) fn wait_for_push(&self, step: u64) {
        let mut gate = self.gate.lock();
        let here = |gate: &mut Gate| !gate.arrived.contains(&step);
        assert!(!self.moved.wait_while_for(&mut gate, here, LONG).timed_out(), "push {step} never came");
    }

    /// Wait until `count` look-ups have been served.
    pub(crate) fn wait_for_lookups(&self, count: usize) {
        let mut gate = self.gate.lock();
        let fewer = |gate: &mut Gate| gate.looked_up.len() < count;
        assert!(
            !self.moved.wait_while_for(&mut gate, fewer, LONG).timed_out(),
            "{count} look-ups never came"
        );
    }
}

fn broken() -> TablesError {
    TablesError::Unreachable { peer: "server 1".into(), what: "it was rigged".into() }
}

impl Wrapped for Rigged {
    fn inner(&self) -> &dyn Tables {
        &self.plain
    }

    fn lookup(
        &self,
        request: &LookupRequest<'_>,
        rows: &mut [&mut [f32]],
    ) -> Result<LookupReport, TablesError> {
        let mut gate = self.gate.lock();
        gate.looked_up.push(request.token.seq);
        let stale = (request.token.seq - 1).saturating_sub(gate.pushed.len() as u64);
        gate.staleness.push(stale);
        drop(gate);
        self.moved.notify_all();
        if self.fail_lookup_at == Some(request.token.seq) {
            return Err(broken());
        }
        self.plain.lookup(request, rows)
    }

    fn push(&self, request: &PushRequest<'_>) -> Result<PushReport, TablesError> {
        let step = request.token.seq;
        let mut gate = self.gate.lock();
        gate.arrived.push(step);
        self.moved.notify_all();
        let closed = |gate: &mut Gate| gate.closed_after.is_some_and(|last| step > last);
        // A failing test does not open the gate. Without a limit, its engine would wait here forever and hide the
        // cause.
        assert!(
            !self.moved.wait_while_for(&mut gate, closed, LONG).timed_out(),
            "push {step} was never let through"
        );
        if self.fail_push_at == Some(step) {
            return Err(broken());
        }
        assert!(self.panic_push_at != Some(step), "rigged panic");
        let report = self.plain.push(request)?;
        gate.pushed.push(step);
        Ok(report)
    }
}

tables_by_wrapping!(Rigged);
