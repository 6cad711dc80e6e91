//! `persia_core.forward.Pipeline`: looks up the batches of a data loader before they are used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_engine::{Error, FeedOutcome, Next, Pipeline as EnginePipeline, Wait};
use pyo3::prelude::*;

use crate::data::Batch;
use crate::training_batch::{SharedTicket, TrainingBatch};
use crate::{errors, wait};

/// The interval between log lines during a wait for a batch.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// The engine's pipeline, until it is closed. The engine keeps only a weak reference to this, so its training loop
/// counts as running as long as this exists and is open.
#[derive(Default)]
pub(crate) struct OpenPipeline(Mutex<Option<Arc<EnginePipeline>>>);

impl OpenPipeline {
    fn get(&self) -> Option<Arc<EnginePipeline>> {
        self.0.lock().clone()
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Close the pipeline. This joins threads that may need the GIL, so do not call it with the GIL.
    pub(crate) fn close(&self) {
        let pipeline = self.0.lock().take();
        if let Some(pipeline) = pipeline {
            pipeline.close();
        }
    }
}

/// Looks up the batches of a data loader before they are used. One thread feeds batches, another takes them.
#[pyclass(module = "persia_core.forward", frozen)]
pub(crate) struct Pipeline {
    open: Arc<OpenPipeline>,
    /// The step and the ticket of the batch that was last taken.
    last: Mutex<Option<(u64, SharedTicket)>>,
}

impl Pipeline {
    pub(crate) fn new(pipeline: EnginePipeline) -> Self {
        let open = OpenPipeline(Mutex::new(Some(Arc::new(pipeline))));
        Self { open: Arc::new(open), last: Mutex::new(None) }
    }

    pub(crate) fn open(&self) -> &Arc<OpenPipeline> {
        &self.open
    }

    /// Discard the last batch that was taken, if the next batch waits only for its gradients. A loop that asks for
    /// the next batch no longer pushes these gradients.
    fn discard_last(&self, what: Wait) -> bool {
        let mut last = self.last.lock();
        let Some((step, ticket)) = last.as_ref() else { return false };
        if what != (Wait::Gradients { step: *step }) {
            return false;
        }
        let ticket = ticket.lock().take();
        *last = None;
        ticket.is_some()
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        Python::attach(|py| py.detach(|| self.open.close()));
    }
}

#[pymethods]
impl Pipeline {
    /// Queue a batch. Blocks while the queue is full. Returns False once the pipeline is closed.
    fn feed(&self, py: Python<'_>, batch: &Batch) -> PyResult<bool> {
        let mut batch = Arc::clone(&batch.0);
        wait::until(py, |slice| {
            let Some(pipeline) = self.open.get() else { return Ok(Some(false)) };
            match pipeline.feed(Arc::clone(&batch), slice) {
                Ok(FeedOutcome::Accepted) => Ok(Some(true)),
                Ok(FeedOutcome::Pending { batch: returned, .. }) => {
                    batch = returned;
                    Ok(None)
                }
                Err(Error::Closed { .. }) => Ok(Some(false)),
                Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
            }
        })
    }

    /// Mark the end of the data.
    fn end(&self) {
        if let Some(pipeline) = self.open.get() {
            pipeline.end_of_data();
        }
    }

    /// Report that the source failed. `next` raises `error` after the queued batches.
    fn fail(&self, error: Bound<'_, PyAny>) {
        if let Some(pipeline) = self.open.get() {
            pipeline.fail(Arc::new(PyErr::from_value(error)));
        }
    }

    /// Return the next batch, in the order in which batches were fed, or None after the last one.
    ///
    /// A wait for a look-up, a push or gradients may take `timeout_s`. A wait for the source has no time
    /// limit. Long waits are logged. If the next batch waits for the last batch that was taken, and that
    /// batch was neither pushed nor discarded, it is discarded.
    fn next(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<TrainingBatch>> {
        let Some(pipeline) = self.open.get() else {
            return Err(closed(py));
        };
        let mut waiting = Waiting::new(timeout_s);
        wait::until(py, |slice| match pipeline.next(slice) {
            Ok(Next::Ready(ready)) => {
                let step = ready.step;
                let batch = TrainingBatch::looked_up(*ready);
                *self.last.lock() = Some((step, batch.ticket()));
                Ok(Some(Some(batch)))
            }
            Ok(Next::End) => Ok(Some(None)),
            Ok(Next::Pending(what)) if self.discard_last(what) => Ok(None),
            Ok(Next::Pending(what)) => waiting.check(what).map(|()| None),
            Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
        })
    }

    /// Return whether there is another batch, looked up or not. Waiting for the source has no time limit and is
    /// logged.
    fn has_next(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(pipeline) = self.open.get() else {
            return Err(closed(py));
        };
        let mut waiting = Waiting::new(f64::INFINITY);
        wait::until(py, |slice| match pipeline.has_next(slice) {
            Ok(Some(known)) => Ok(Some(known)),
            Ok(None) => waiting.check(Wait::Batch).map(|()| None),
            Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
        })
    }

    /// Drop the queued batches and end the look-up thread.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.open.close());
    }
}

fn closed(py: Python<'_>) -> PyErr {
    errors::raise(
        py,
        "UsageError",
        "cannot take a batch: the data loader's loop has ended; iterate the data loader again",
    )
}

/// The time limit for a wait for the next batch, and its log lines.
struct Waiting {
    limit: Duration,
    start: Instant,
    logged: Instant,
}

impl Waiting {
    fn new(timeout_s: f64) -> Self {
        let now = Instant::now();
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
        Self { limit, start: now, logged: now }
    }

    fn check(&mut self, what: Wait) -> PyResult<()> {
        let waited = self.start.elapsed();
        if what != Wait::Batch && waited > self.limit {
            return Err(Python::attach(|py| {
                let (waited, limit) = (waited.as_secs_f64(), self.limit.as_secs_f64());
                let text = format!("waited {waited:.1} s for {what}, but the limit is {limit:.1} s");
                errors::raise(py, "WaitTimeoutError", text)
            }));
        }
        if self.logged.elapsed() > LOG_INTERVAL {
            self.logged = Instant::now();
            let text = format!("still waiting, after {:.0} s, for {what}", waited.as_secs_f64());
            return Python::attach(|py| log_warning(py, &text));
        }
        Ok(())
    }
}

fn log_warning(py: Python<'_>, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("persia.data",))?;
    logger.call_method1("warning", ("%s", text)).map(drop)
}
