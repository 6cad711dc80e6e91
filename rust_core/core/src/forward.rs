//! `persia_core.forward`: what a training loop takes from the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use persia_engine::device::OnDevice;
use persia_engine::{
    Batch as EngineBatch, Dtype, Fed, Gradient, Next, Output, Pipeline as Line, PushOptions, PushTicket,
    Tensor as DenseTensor, Wait,
};
use pyo3::prelude::*;

use crate::backward::Sums;
use crate::data::Batch;
use crate::dlpack::{ElementType, Tensor, borrow_f32};
use crate::{device, errors, wait};

/// How often waiting for the source of batches is logged.
const REMIND: Duration = Duration::from_secs(30);

/// A pipeline until it is closed. The engine keeps a weak one, to know whether a loop is under way.
#[derive(Default)]
pub(crate) struct Open(Mutex<Option<Arc<Line>>>);

impl Open {
    fn line(&self) -> Option<Arc<Line>> {
        self.0.lock().clone()
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().is_some()
    }

    /// End it. Joins threads that may need the GIL: never call this with it.
    pub(crate) fn close(&self) {
        let line = self.0.lock().take();
        if let Some(line) = line {
            line.close();
        }
    }
}

/// Which of a step's tensors on a device.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // nobody asks which without a device
pub(crate) enum Which {
    /// Vectors of an id feature.
    Vectors(usize),
    /// Mask of a raw feature.
    Mask(usize),
    /// A dense input or label.
    Given(usize),
}

/// The right to push a batch's gradients, until somebody takes or discards it.
type Right = Arc<Mutex<Option<PushTicket>>>;

/// Batches of one data loader, looked up ahead of their use. One thread feeds it, another takes from it.
#[pyclass(module = "persia_core.forward", frozen)]
pub(crate) struct Pipeline {
    open: Arc<Open>,
    /// Of the batch handed out last.
    last: Mutex<Option<(u64, Right)>>,
}

impl Pipeline {
    pub(crate) fn new(line: Line) -> Self {
        Self { open: Arc::new(Open(Mutex::new(Some(Arc::new(line))))), last: Mutex::new(None) }
    }

    pub(crate) fn open(&self) -> &Arc<Open> {
        &self.open
    }

    fn line(&self) -> Option<Arc<Line>> {
        self.open.line()
    }

    /// Discard the batch handed out last if nothing else can end the wait: the loop asked for the one after it.
    fn give_up(&self, what: Wait) -> bool {
        let mut last = self.last.lock();
        let Some((step, right)) = last.as_ref() else { return false };
        if what != (Wait::Gradients { step: *step }) {
            return false;
        }
        let ticket = right.lock().take();
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
    /// Queue a batch, waiting while the queue is full; false once the pipeline is closed.
    fn feed(&self, py: Python<'_>, batch: &Batch) -> PyResult<bool> {
        let mut batch = Arc::clone(&batch.0);
        wait::until(py, |slice| {
            let Some(line) = self.line() else { return Ok(Some(false)) };
            match line.feed(Arc::clone(&batch), slice) {
                Ok(Fed::Accepted) => Ok(Some(true)),
                Ok(Fed::Pending { batch: again, .. }) => {
                    batch = again;
                    Ok(None)
                }
                Err(persia_engine::Error::Closed { .. }) => Ok(Some(false)),
                Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
            }
        })
    }

    /// Say that there are no more batches.
    fn end(&self) {
        if let Some(line) = self.line() {
            line.end_of_data();
        }
    }

    /// Say that the source failed: `next` raises `error` after the batches before it.
    fn fail(&self, error: Bound<'_, PyAny>) {
        if let Some(line) = self.line() {
            line.fail(Arc::new(PyErr::from_value(error)));
        }
    }

    /// The next batch in the order they were fed; None after the last.
    ///
    /// A look-up or push may take `timeout_s`; waiting for the source has no limit and is logged. Where only the
    /// batch handed out last, neither pushed nor discarded, holds the next one up, it is discarded.
    fn next(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<TrainingBatch>> {
        let Some(line) = self.line() else {
            return Err(errors::raise(py, "UsageError", "the data loader's loop has ended"));
        };
        let mut patience = Patience::new(timeout_s);
        wait::until(py, |slice| match line.next(slice) {
            Ok(Next::Ready(looked)) => {
                let looked = *looked;
                let batch = TrainingBatch::new(
                    looked.step,
                    looked.batch,
                    looked.outputs,
                    looked.on_device,
                    looked.ticket,
                );
                *self.last.lock() = Some((batch.step, Arc::clone(&batch.right)));
                Ok(Some(Some(batch)))
            }
            Ok(Next::End) => Ok(Some(None)),
            Ok(Next::Pending(what)) if self.give_up(what) => Ok(None),
            Ok(Next::Pending(what)) => patience.check(what).map(|()| None),
            Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
        })
    }

    /// Whether `next` has a batch to give, now or after its look-up, which this does not ask for. Waiting for the source
    /// has no limit and is logged.
    fn has_next(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(line) = self.line() else {
            return Err(errors::raise(py, "UsageError", "the data loader's loop has ended"));
        };
        let mut patience = Patience::new(f64::INFINITY);
        wait::until(py, |slice| match line.has_next(slice) {
            Ok(Some(known)) => Ok(Some(known)),
            Ok(None) => patience.check(Wait::Batch).map(|()| None),
            Err(error) => Err(Python::attach(|py| errors::engine(py, &error))),
        })
    }

    /// Drop what is queued and end the look-up thread.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.open.close());
    }
}

/// How long one `next` has waited, and for what.
struct Patience {
    limit: Duration,
    start: Instant,
    reminded: Instant,
}

impl Patience {
    fn new(timeout_s: f64) -> Self {
        let now = Instant::now();
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
        Self { limit, start: now, reminded: now }
    }

    fn check(&mut self, what: Wait) -> PyResult<()> {
        let waited = self.start.elapsed();
        if what != Wait::Batch && waited > self.limit {
            return Err(Python::attach(|py| {
                errors::raise(
                    py,
                    "WaitTimeoutError",
                    format!("waited {:.1} s for {what}", waited.as_secs_f64()),
                )
            }));
        }
        if self.reminded.elapsed() > REMIND {
            self.reminded = Instant::now();
            let text = format!("waiting for {what} since {:.0} s", waited.as_secs_f64());
            return Python::attach(|py| log_warning(py, &text));
        }
        Ok(())
    }
}

fn log_warning(py: Python<'_>, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("persia.data",))?;
    logger.call_method1("warning", ("%s", text)).map(drop)
}

/// A batch with its embeddings.
#[pyclass(module = "persia_core.forward")]
pub(crate) struct TrainingBatch {
    /// The training step, from 1; for a batch looked up for evaluation the step before it.
    #[pyo3(get)]
    step: u64,
    /// Where the data set stands behind this batch; the data loader's.
    #[pyo3(get, set)]
    position: Option<String>,
    batch: Arc<EngineBatch>,
    outputs: Vec<Arc<Output>>,
    on_device: Option<OnDevice>,
    /// Whether it came with the right to push.
    trains: bool,
    right: Right,
}

impl TrainingBatch {
    fn new(
        step: u64,
        batch: Arc<EngineBatch>,
        outputs: Vec<Output>,
        on_device: Option<OnDevice>,
        ticket: Option<PushTicket>,
    ) -> Self {
        let outputs = outputs.into_iter().map(Arc::new).collect();
        let trains = ticket.is_some();
        Self { step, position: None, batch, outputs, on_device, trains, right: Arc::new(Mutex::new(ticket)) }
    }

    /// Of an output's tensor.
    fn shape(&self, output: &Output) -> Vec<usize> {
        let places = output.raw().map(|raw| raw.places);
        [Some(self.batch.batch_size()), places, Some(output.dim())].into_iter().flatten().collect()
    }

    pub(crate) fn evaluated(
        step: u64,
        batch: Arc<EngineBatch>,
        outputs: Vec<Output>,
        on_device: Option<OnDevice>,
    ) -> Self {
        Self::new(step, batch, outputs, on_device, None)
    }

    /// The device's tensor, if there is a device.
    fn elsewhere(&self, which: Which, dtype: ElementType, shape: &[usize]) -> Option<Tensor> {
        device::tensor(self.on_device.as_ref()?, which, dtype, shape)
    }

    /// The right to push, once.
    fn take_right(&self, py: Python<'_>) -> PyResult<PushTicket> {
        let step = self.step;
        let ticket = self.right.lock().take();
        ticket.ok_or_else(|| {
            let text = format!(
                "step {step}: no gradients can be pushed: they were before, or the batch was discarded (by hand, or \
                 because the loop went on to the next one), or it is not trained on"
            );
            errors::raise(py, "UsageError", text)
        })
    }
}

#[pymethods]
impl TrainingBatch {
    /// Number of samples.
    #[getter]
    fn batch_size(&self) -> usize {
        self.batch.batch_size()
    }

    /// Names of the id features, in the batch's order.
    #[getter]
    fn slots(&self) -> Vec<String> {
        self.batch.id_features().iter().map(|feature| feature.name().to_owned()).collect()
    }

    /// Whether it came from a training loop.
    #[getter]
    fn requires_grad(&self) -> bool {
        self.trains
    }

    /// The CUDA device that the tensors are on; None is the CPU.
    #[getter]
    fn device_id(&self) -> Option<i32> {
        self.on_device.as_ref().and_then(device::ordinal)
    }

    /// The user's own bytes.
    #[getter]
    fn meta(&self) -> Option<&[u8]> {
        self.batch.meta()
    }

    /// One float32 tensor per id feature, in the batch's order: `[batch, dim]`, of a raw feature `[batch, places, dim]`.
    fn embeddings(&self) -> Vec<Tensor> {
        let vectors = self.on_device.as_ref().map_or(ElementType::F32, device::vectors);
        let share = |(index, output): (usize, &Arc<Output>)| {
            let shape = self.shape(output);
            self.elsewhere(Which::Vectors(index), vectors, &shape).unwrap_or_else(|| {
                let bytes = bytemuck::cast_slice(output.as_ref().as_ref());
                Tensor::new(Arc::clone(output) as _, bytes, ElementType::F32, &shape)
            })
        };
        self.outputs.iter().enumerate().map(share).collect()
    }

    /// For each raw feature a `[batch, places]` bool tensor, true where an id is; None for the others.
    fn masks(&self) -> Vec<Option<Tensor>> {
        let bool8 = ElementType::new(6, 8);
        let share = |(index, output): (usize, &Arc<Output>)| {
            let raw = output.raw()?;
            let shape = [self.batch.batch_size(), raw.places];
            self.elsewhere(Which::Mask(index), bool8, &shape).or_else(|| {
                let bytes = bytemuck::cast_slice(&raw.mask);
                Some(Tensor::new(Arc::clone(output) as _, bytes, bool8, &shape))
            })
        };
        self.outputs.iter().enumerate().map(share).collect()
    }

    /// For each feature, how many ids exceed the places of a raw slot; they are left out.
    fn truncated(&self) -> Vec<usize> {
        self.outputs.iter().map(|output| output.raw().map_or(0, |raw| raw.truncated)).collect()
    }

    /// Dense inputs, in the batch's order. On a device every call gives the same memory.
    fn dense(&self) -> Vec<Tensor> {
        self.given(0, self.batch.dense())
    }

    /// Labels, in the batch's order.
    fn labels(&self) -> Vec<Tensor> {
        self.given(self.batch.dense().len(), self.batch.labels())
    }

    /// Hand the gradients of `embeddings` over, in their order, None where there is none, and return at once.
    /// Each is multiplied by `scale`, for example 1 / the scale of the loss.
    #[pyo3(signature = (gradients, lr_factor, scale=1.0))]
    fn push(
        &self,
        py: Python<'_>,
        gradients: Vec<Option<Bound<'_, PyAny>>>,
        lr_factor: f32,
        scale: f32,
    ) -> PyResult<()> {
        let step = self.step;
        let ticket = self.take_right(py)?;
        let mut borrowed: Vec<Option<Gradient>> = Vec::with_capacity(gradients.len());
        for (index, gradient) in gradients.iter().enumerate() {
            let (Some(gradient), Some(output)) = (gradient, self.outputs.get(index)) else {
                borrowed.push(None);
                continue;
            };
            let what = format!("step {step}, gradient {index}");
            borrowed.push(Some(Box::new(borrow_f32(gradient, &what, &self.shape(output))?)));
        }
        ticket.push(borrowed, PushOptions { lr_factor, scale }).map_err(|error| errors::engine(py, &error))
    }

    /// Let the device sum the gradients of `embeddings`, one for each, in their order, and multiply them by `scale`; returns
    /// at once. Nothing is pushed yet.
    fn sum(&self, py: Python<'_>, gradients: Vec<Bound<'_, PyAny>>, scale: f32) -> PyResult<Sums> {
        let (step, right) = (self.step, self.right.lock().as_ref().map(PushTicket::gradient_scale));
        let (Some(on_device), Some(more)) = (&self.on_device, right) else {
            let text =
                format!("step {step}: its vectors are not on a device, or its gradients cannot be pushed");
            return Err(errors::raise(py, "UsageError", text));
        };
        let shapes = self.outputs.iter().map(|output| self.shape(output));
        let gradients: Vec<_> = gradients.into_iter().zip(shapes).collect();
        device::sum(py, step, on_device, &gradients, scale * more)
    }

    /// Hand over what `sum` gave, and return at once.
    fn push_sums(&self, py: Python<'_>, sums: &Sums, lr_factor: f32) -> PyResult<()> {
        let ticket = self.take_right(py)?;
        let Some(gradients) = sums.take() else {
            return Err(errors::raise(py, "UsageError", "these sums were pushed before"));
        };
        let options = PushOptions { lr_factor, ..PushOptions::default() };
        ticket.push_summed(gradients, options).map_err(|error| errors::engine(py, &error))
    }

    /// Give up the right to push: the rows stay as they are.
    fn discard(&self) {
        let ticket = self.right.lock().take();
        drop(ticket);
    }
}

impl TrainingBatch {
    /// Dense inputs or labels; on a device `first` of them lie before.
    fn given(&self, first: usize, tensors: &[DenseTensor]) -> Vec<Tensor> {
        let share = |(index, tensor): (usize, &DenseTensor)| {
            let dtype = element(tensor.dtype());
            let which = Which::Given(first + index);
            self.elsewhere(which, dtype, tensor.shape()).unwrap_or_else(|| copied(tensor))
        };
        tensors.iter().enumerate().map(share).collect()
    }
}

/// Dense inputs and labels are copied: the model may write to them, the batch stays as it is.
fn copied(tensor: &DenseTensor) -> Tensor {
    let bytes: Arc<Vec<u8>> = Arc::new(tensor.bytes().to_vec());
    let view = Arc::clone(&bytes);
    Tensor::new(bytes as _, &view, element(tensor.dtype()), tensor.shape())
}

fn element(dtype: Dtype) -> ElementType {
    match dtype {
        Dtype::Bool => ElementType::new(6, 8),
        Dtype::I8 => ElementType::new(0, 8),
        Dtype::I16 => ElementType::new(0, 16),
        Dtype::I32 => ElementType::new(0, 32),
        Dtype::I64 => ElementType::new(0, 64),
        Dtype::U8 => ElementType::new(1, 8),
        Dtype::F32 => ElementType::F32,
        Dtype::F64 => ElementType::new(2, 64),
    }
}
