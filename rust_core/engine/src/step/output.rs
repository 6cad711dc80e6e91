//! The output of a look-up: the vectors of each id feature.

use std::time::Duration;

use persia_types::tables::LookupReport;

use crate::batch::Batch;
use crate::buffer::Buffer;
use crate::context::Context;
use crate::device::OnDevice;
use crate::step::plan::Plan;

/// The result and the times of a look-up.
pub(crate) struct Forward {
    pub(crate) outputs: Vec<Output>,
    pub(crate) on_device: Option<OnDevice>,
    pub(crate) report: LookupReport,
    pub(crate) lookup: Duration,
    pub(crate) pool: Duration,
}

/// The vectors of one id feature, aligned to 64 bytes. The shape is `[batch, dim]` for a pooled feature, and
/// `[batch, places, dim]` for a raw one.
#[derive(Debug)]
pub struct Output {
    slot: usize,
    dim: usize,
    /// The vectors; empty if they are on a device.
    buffer: Buffer,
    raw: Option<Raw>,
}

/// The output of a raw feature in addition to its vectors.
#[derive(Debug)]
pub struct Raw {
    /// The number of positions per sample: `sample_fixed_size`.
    pub places: usize,
    /// The mask, with the shape `[batch, places]`: whether a position has an id. The rows of empty positions are
    /// zeros. The mask is empty if it is on a device.
    pub mask: Vec<bool>,
    /// The number of truncated ids: those after the first `places` ids of a sample.
    pub truncated: usize,
}

impl Output {
    /// The output of a feature whose vectors are in `buffer`.
    pub(super) fn on_host(
        context: &Context,
        (batch, plan): (&Batch, &Plan),
        feature: usize,
        buffer: Buffer,
    ) -> Self {
        let mask = || {
            let feature = plan.feature(batch, feature);
            (0..feature.samples()).map(|place| !feature.occurrences_of(place).is_empty()).collect()
        };
        Self::new(context, plan, feature, buffer, mask)
    }

    /// The output of a feature whose vectors are on a device.
    pub(super) fn on_device(context: &Context, plan: &Plan, feature: usize) -> Self {
        Self::new(context, plan, feature, context.buffers.take(0), Vec::new)
    }

    fn new(
        context: &Context,
        plan: &Plan,
        feature: usize,
        buffer: Buffer,
        mask: impl FnOnce() -> Vec<bool>,
    ) -> Self {
        let slot = plan.slots()[feature];
        let raw = context.schema.slots[slot].sample_fixed_size.map(|places| Raw {
            places: places as usize,
            mask: mask(),
            truncated: plan.truncated(feature),
        });
        Self { slot, dim: context.dim_of_slot(slot), buffer, raw }
    }

    /// The index of the feature's slot in the schema.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The number of floats per vector.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The number of positions, the mask, and the number of truncated ids; None for a pooled feature.
    pub fn raw(&self) -> Option<&Raw> {
        self.raw.as_ref()
    }

    /// Return only the floats. Their memory is reused after they are dropped.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

impl AsRef<[f32]> for Output {
    fn as_ref(&self) -> &[f32] {
        self.buffer.as_ref()
    }
}

impl AsMut<[f32]> for Output {
    fn as_mut(&mut self) -> &mut [f32] {
        self.buffer.as_mut()
    }
}
