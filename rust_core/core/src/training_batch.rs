//! `persia_core.forward.TrainingBatch`: a batch with its embeddings.

use std::sync::Arc;

use parking_lot::Mutex;
use persia_engine::device::OnDevice;
use persia_engine::{
    Batch, Dtype, EvalResult, Gradient, Output, PooledBatch, PushOptions, PushTicket, Tensor as DenseTensor,
};
use persia_types::tables::LookupReport;
use pyo3::prelude::*;

use crate::backward::Sums;
use crate::dlpack::{ElementType, Tensor, TensorKind, borrow_f32};
use crate::{device, errors};

/// The ticket for one push of a batch's gradients; None once it is used or discarded.
pub(crate) type SharedTicket = Arc<Mutex<Option<PushTicket>>>;

/// A batch with its embeddings.
#[pyclass(module = "persia_core.forward")]
pub(crate) struct TrainingBatch {
    /// The training step, from 1. For an evaluation batch, it is the last step that was trained.
    #[pyo3(get)]
    step: u64,
    /// The dataset's position after this batch, which the data loader sets.
    #[pyo3(get, set)]
    position: Option<String>,
    batch: Arc<Batch>,
    outputs: Vec<Arc<Output>>,
    on_device: Option<OnDevice>,
    report: LookupReport,
    /// Whether the batch was created with a ticket.
    trains: bool,
    ticket: SharedTicket,
}

impl TrainingBatch {
    /// Create a batch from one that a pipeline looked up.
    pub(crate) fn looked_up(found: PooledBatch) -> Self {
        let PooledBatch { step, batch, outputs, on_device, report, ticket } = found;
        Self {
            step,
            position: None,
            batch,
            outputs: outputs.into_iter().map(Arc::new).collect(),
            on_device,
            report,
            trains: ticket.is_some(),
            ticket: Arc::new(Mutex::new(ticket)),
        }
    }

    /// Create a batch from one that was looked up outside any pipeline.
    pub(crate) fn evaluated(step: u64, batch: Arc<Batch>, found: EvalResult) -> Self {
        let EvalResult { outputs, on_device, report } = found;
        Self::looked_up(PooledBatch { step, batch, outputs, on_device, report, ticket: None })
    }

    pub(crate) fn ticket(&self) -> SharedTicket {
        Arc::clone(&self.ticket)
    }

    /// The shape of an output's tensor.
    fn shape(&self, output: &Output) -> Vec<usize> {
        let places = output.raw().map(|raw| raw.places);
        [Some(self.batch.batch_size()), places, Some(output.dim())].into_iter().flatten().collect()
    }

    /// A tensor on the device, if the step has a device.
    fn device_tensor(&self, kind: TensorKind, dtype: ElementType, shape: &[usize]) -> Option<Tensor> {
        device::tensor(self.on_device.as_ref()?, kind, dtype, shape)
    }

    /// Take the ticket. It can be taken only once.
    fn take_ticket(&self, py: Python<'_>) -> PyResult<PushTicket> {
        let step = self.step;
        let ticket = self.ticket.lock().take();
        ticket.ok_or_else(|| {
            let text = format!(
                "cannot push the gradients of step {step}: they were pushed before, the batch was discarded \
                 (explicitly, or because the loop took the next one), or it is an evaluation batch"
            );
            errors::raise(py, "UsageError", text)
        })
    }
}

#[pymethods]
impl TrainingBatch {
    /// The number of samples.
    #[getter]
    fn batch_size(&self) -> usize {
        self.batch.batch_size()
    }

    /// The names of the id features, in the batch's order.
    #[getter]
    fn slots(&self) -> Vec<String> {
        self.batch.id_features().iter().map(|feature| feature.name().to_owned()).collect()
    }

    /// The names of the dense inputs, in the batch's order; None for an input without a name.
    #[getter]
    fn dense_names(&self) -> Vec<Option<&str>> {
        self.batch.dense().iter().map(DenseTensor::name).collect()
    }

    /// The names of the labels, in the batch's order; None for a label without a name.
    #[getter]
    fn label_names(&self) -> Vec<Option<&str>> {
        self.batch.labels().iter().map(DenseTensor::name).collect()
    }

    /// Whether the batch belongs to a training loop.
    #[getter]
    fn requires_grad(&self) -> bool {
        self.trains
    }

    /// The CUDA device of the tensors; None means the CPU.
    #[getter]
    fn device_id(&self) -> Option<i32> {
        self.on_device.as_ref().and_then(device::ordinal)
    }

    /// The user's metadata, if any.
    #[getter]
    fn meta(&self) -> Option<&[u8]> {
        self.batch.meta()
    }

    /// Return one tensor per id feature, in the batch's order. The shape is `[batch, dim]`, or `[batch, places, dim]`
    /// for a raw feature. The type is float32 on the CPU, and the type chosen for vectors on a device.
    fn embeddings(&self) -> Vec<Tensor> {
        let vectors = self.on_device.as_ref().map_or(ElementType::F32, device::vectors);
        let share = |(index, output): (usize, &Arc<Output>)| {
            let shape = self.shape(output);
            self.device_tensor(TensorKind::Vectors(index), vectors, &shape).unwrap_or_else(|| {
                let bytes = bytemuck::cast_slice(output.as_ref().as_ref());
                Tensor::new(Arc::clone(output) as _, bytes, ElementType::F32, &shape)
            })
        };
        self.outputs.iter().enumerate().map(share).collect()
    }

    /// Return, for each raw feature, a bool tensor of the shape `[batch, places]`, which is true at positions with an
    /// id; None for other features.
    fn masks(&self) -> Vec<Option<Tensor>> {
        let bool8 = ElementType::new(6, 8);
        let share = |(index, output): (usize, &Arc<Output>)| {
            let raw = output.raw()?;
            let shape = [self.batch.batch_size(), raw.places];
            self.device_tensor(TensorKind::Mask(index), bool8, &shape).or_else(|| {
                let bytes = bytemuck::cast_slice(&raw.mask);
                Some(Tensor::new(Arc::clone(output) as _, bytes, bool8, &shape))
            })
        };
        self.outputs.iter().enumerate().map(share).collect()
    }

    /// Return the number of unique ids, and the number of these that read as zeros because they have no row.
    fn missing(&self) -> (u64, u64) {
        let LookupReport { hits, initial, missing } = self.report;
        (hits + initial + missing, missing)
    }

    /// Return, for each feature, the number of ids that were dropped because a raw slot has too few positions.
    fn truncated(&self) -> Vec<usize> {
        self.outputs.iter().map(|output| output.raw().map_or(0, |raw| raw.truncated)).collect()
    }

    /// Return the dense inputs, in the batch's order. On a device, every call returns the same memory.
    fn dense(&self) -> Vec<Tensor> {
        self.given(0, self.batch.dense())
    }

    /// Return the labels, in the batch's order.
    fn labels(&self) -> Vec<Tensor> {
        self.given(self.batch.dense().len(), self.batch.labels())
    }

    /// Push the gradients of `embeddings`, in the same order, with None for a missing gradient. Each gradient is
    /// multiplied by `scale`, such as 1 / the loss scale. Does not wait for the push.
    #[pyo3(signature = (gradients, lr_factor, scale=1.0))]
    fn push(
        &self,
        py: Python<'_>,
        gradients: Vec<Option<Bound<'_, PyAny>>>,
        lr_factor: f32,
        scale: f32,
    ) -> PyResult<()> {
        let step = self.step;
        let ticket = self.take_ticket(py)?;
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

    /// Sum the gradients of `embeddings` on the device and multiply them by `scale`. The gradients are in the same
    /// order, and none may be missing. Pushes nothing, and does not wait for the sums.
    fn sum(&self, py: Python<'_>, gradients: Vec<Bound<'_, PyAny>>, scale: f32) -> PyResult<Sums> {
        let (step, scale_of_ticket) =
            (self.step, self.ticket.lock().as_ref().map(PushTicket::gradient_scale));
        let (Some(on_device), Some(more)) = (&self.on_device, scale_of_ticket) else {
            let text = format!(
                "cannot sum the gradients of step {step} on a device: its embeddings are on the CPU, its gradients \
                 were pushed before, or its batch was discarded or is an evaluation batch"
            );
            return Err(errors::raise(py, "UsageError", text));
        };
        let shapes = self.outputs.iter().map(|output| self.shape(output));
        let gradients: Vec<_> = gradients.into_iter().zip(shapes).collect();
        device::sum(py, step, on_device, &gradients, scale * more)
    }

    /// Push the result of `sum`. Does not wait for the push.
    fn push_sums(&self, py: Python<'_>, sums: &Sums, lr_factor: f32) -> PyResult<()> {
        let ticket = self.take_ticket(py)?;
        let Some(gradients) = sums.take() else {
            let text = format!("cannot push the sums of step {}: they were pushed before", self.step);
            return Err(errors::raise(py, "UsageError", text));
        };
        let options = PushOptions { lr_factor, ..PushOptions::default() };
        ticket.push_summed(gradients, options).map_err(|error| errors::engine(py, &error))
    }

    /// Discard the batch, so that its rows are not updated.
    fn discard(&self) {
        let ticket = self.ticket.lock().take();
        drop(ticket);
    }
}

impl TrainingBatch {
    /// Return dense inputs or labels. `first` is the index of the first one on a device.
    fn given(&self, first: usize, tensors: &[DenseTensor]) -> Vec<Tensor> {
        let share = |(index, tensor): (usize, &DenseTensor)| {
            let dtype = element(tensor.dtype());
            let kind = TensorKind::Given(first + index);
            self.device_tensor(kind, dtype, tensor.shape()).unwrap_or_else(|| copied(tensor))
        };
        tensors.iter().enumerate().map(share).collect()
    }
}

/// Copy a tensor, because the model may write to dense inputs and labels.
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
