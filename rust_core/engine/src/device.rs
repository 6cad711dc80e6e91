//! Devices that pool rows and sum gradients in place of the CPU. The engine is given one and does not depend
//! on its kind.
//!
//! A device gives the bits of [`persia_kernels`]: the same sums in the same order.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use persia_kernels::{Bags, Csr};

/// A failure of a device: where, why, and what to do next.
pub type DeviceError = Arc<dyn std::error::Error + Send + Sync>;

/// The tensors of a look-up on a device. Only the device's own crate can read them.
pub type OnDevice = Arc<dyn Any + Send + Sync>;

/// A device that pools look-ups.
pub trait Device: Send + Sync {
    /// Make room for a look-up.
    ///
    /// # Errors
    /// No memory, or a device that failed.
    fn begin<'a>(&'a self, work: &DeviceWork<'_>) -> Result<Box<dyn DeviceLookup + 'a>, DeviceError>;
}

/// A look-up that waits for its rows.
pub trait DeviceLookup {
    /// Memory for the vectors of each table, in their order: `[vectors, dim]`, of unspecified value.
    fn rows(&mut self) -> Vec<&mut [f32]>;

    /// Start the copy and the pooling, and return without waiting.
    ///
    /// # Errors
    /// A device that failed.
    fn launch(self: Box<Self>) -> Result<OnDevice, DeviceError>;
}

/// One batch, as a device needs it.
#[derive(Debug)]
pub struct DeviceWork<'a> {
    /// Tables of the request.
    pub tables: Vec<DeviceTable>,
    /// Id features, in the batch's order.
    pub features: Vec<DeviceFeature<'a>>,
    /// Dense inputs, then labels.
    pub tensors: Vec<&'a [u8]>,
}

/// One table of a request.
#[derive(Debug, Clone)]
pub struct DeviceTable {
    /// Floats of a row.
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
    /// Samples, or places of a raw feature.
    pub samples: usize,
    /// The rows of each sample; `None` where the table's vectors are those of samples.
    pub bags: Option<Bags<'a>>,
    /// From its own unique ids to the table's; `None` if they are the same.
    pub map: Option<&'a [u32]>,
    /// Of a training batch: the samples of each of its unique ids.
    pub csr: Option<Csr<'a>>,
    /// The weights in the order of `csr`.
    pub csr_weights: Option<&'a [f32]>,
    /// Whether a mask says which places have an id.
    pub raw: bool,
}

/// Gradients that a device sums.
pub trait DeviceGradients: Send {
    /// Wait for them: for each table of the look-up its `[vectors, dim]`, multiplied by the push's whole scale.
    ///
    /// # Errors
    /// A device that failed.
    fn wait(&mut self) -> Result<Vec<Cow<'_, [f32]>>, DeviceError>;
}
