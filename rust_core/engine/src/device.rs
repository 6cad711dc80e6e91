//! Devices that pool rows and sum gradients instead of the CPU. The engine does not depend on the type of its device.
//!
//! The results of a device are bit-identical to those of [`persia_kernels`]: the same sums in the same order.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use persia_kernels::{Bags, Csr};

/// An error of a device, whose message states the location, the cause, and what to do.
pub type DeviceError = Arc<dyn std::error::Error + Send + Sync>;

/// The tensors of a look-up on a device. Only the crate of the device can read them.
pub type OnDevice = Arc<dyn Any + Send + Sync>;

/// A device that pools look-ups.
pub trait Device: Send + Sync {
    /// Allocate the memory of a look-up.
    ///
    /// # Errors
    /// The device has no memory left, or it failed.
    fn begin<'a>(&'a self, work: &DeviceWork<'_>) -> Result<Box<dyn DeviceLookup + 'a>, DeviceError>;
}

/// A look-up on a device, whose rows have not been written yet.
pub trait DeviceLookup {
    /// The memory for the vectors of each table, in the order of the tables. It has the shape `[vectors, dim]` and
    /// unspecified values.
    fn rows(&mut self) -> Vec<&mut [f32]>;

    /// Start the copy and the pooling without waiting for them.
    ///
    /// # Errors
    /// The device failed.
    fn launch(self: Box<Self>) -> Result<OnDevice, DeviceError>;
}

/// The parts of a batch that a device needs.
#[derive(Debug)]
pub struct DeviceWork<'a> {
    /// The tables of the request.
    pub tables: Vec<DeviceTable>,
    /// The id features, in the batch's order.
    pub features: Vec<DeviceFeature<'a>>,
    /// The dense inputs, followed by the labels.
    pub tensors: Vec<&'a [u8]>,
}

/// One table of a request.
#[derive(Debug, Clone)]
pub struct DeviceTable {
    /// The number of floats in a row.
    pub dim: usize,
    /// The number of vectors of the look-up: of unique ids, or of samples.
    pub vectors: usize,
    /// The features of the table, in the order in which their gradients are added.
    pub members: Vec<usize>,
}

/// One id feature of a batch.
#[derive(Debug, Clone, Copy)]
pub struct DeviceFeature<'a> {
    /// The index into [`DeviceWork::tables`].
    pub table: usize,
    /// The number of samples; for a raw feature, the number of positions of all samples.
    pub samples: usize,
    /// The rows of each sample; None if the vectors of the table are those of samples.
    pub bags: Option<Bags<'a>>,
    /// Maps the unique ids of the feature to those of the table; None if they are the same.
    pub map: Option<&'a [u32]>,
    /// For a training batch, the samples of each unique id of the feature.
    pub csr: Option<Csr<'a>>,
    /// The weights in the order of `csr`.
    pub csr_weights: Option<&'a [f32]>,
    /// Whether the feature is raw, so that there is a mask of the positions that have an id.
    pub raw: bool,
}

/// Gradients that a device sums for a push.
pub trait DeviceGradients: Send {
    /// Wait for the sums. Returns, for each table of the look-up, the sums in the shape `[vectors, dim]`, multiplied
    /// by the complete scale of the push.
    ///
    /// # Errors
    /// The device failed.
    fn wait(&mut self) -> Result<Vec<Cow<'_, [f32]>>, DeviceError>;
}
