//! Devices that pool rows and sum gradients in place of the CPU. The engine gets one and does not depend on its type.
//!
//! The results of a device are bit-identical to those of [`persia_kernels`]: the same sums in the same order.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use persia_kernels::{Bags, Csr};

/// An error of a device: the place, the cause, and the next step.
pub type DeviceError = Arc<dyn std::error::Error + Send + Sync>;

/// The tensors of a look-up on a device. Only the device's own crate can read them.
pub type OnDevice = Arc<dyn Any + Send + Sync>;

/// A device that pools look-ups.
pub trait Device: Send + Sync {
    /// Allocate the memory of a look-up.
    ///
    /// # Errors
    /// There is no memory, or the device failed.
    fn begin<'a>(&'a self, work: &DeviceWork<'_>) -> Result<Box<dyn DeviceLookup + 'a>, DeviceError>;
}

/// A look-up whose rows have not been written yet.
pub trait DeviceLookup {
    /// Memory for the vectors of each table, in the order of the tables: `[vectors, dim]`, with unspecified values.
    fn rows(&mut self) -> Vec<&mut [f32]>;

    /// Start the copy and the pooling, and return without waiting.
    ///
    /// # Errors
    /// The device failed.
    fn launch(self: Box<Self>) -> Result<OnDevice, DeviceError>;
}

/// The parts of a batch that a device needs.
#[derive(Debug)]
pub struct DeviceWork<'a> {
    /// Tables of the request.
    pub tables: Vec<DeviceTable>,
    /// Id features, in the batch's order.
    pub features: Vec<DeviceFeature<'a>>,
    /// The dense inputs, followed by the labels.
    pub tensors: Vec<&'a [u8]>,
}

/// One table of a request.
#[derive(Debug, Clone)]
pub struct DeviceTable {
    /// The number of floats in a row.
    pub dim: usize,
    /// The rows of the look-up: of unique ids, or of samples.
    pub vectors: usize,
    /// Its features, in the order in which their gradients are added.
    pub members: Vec<usize>,
}

/// One id feature of a batch.
#[derive(Debug, Clone, Copy)]
pub struct DeviceFeature<'a> {
    /// Index into [`DeviceWork::tables`].
    pub table: usize,
    /// The number of samples, or of positions of a raw feature.
    pub samples: usize,
    /// The rows of each sample; `None` where the table's vectors are those of samples.
    pub bags: Option<Bags<'a>>,
    /// Maps its own unique ids to those of the table; `None` if they are the same.
    pub map: Option<&'a [u32]>,
    /// For a training batch: the samples of each of its unique ids.
    pub csr: Option<Csr<'a>>,
    /// The weights in the order of `csr`.
    pub csr_weights: Option<&'a [f32]>,
    /// Whether there is a mask of the positions that have an id.
    pub raw: bool,
}

/// Gradients that a device sums.
pub trait DeviceGradients: Send {
    /// Wait for the sums. Returns `[vectors, dim]` for each table of the look-up, multiplied by the complete scale of
    /// the push.
    ///
    /// # Errors
    /// The device failed.
    fn wait(&mut self) -> Result<Vec<Cow<'_, [f32]>>, DeviceError>;
}
