//! The output of a look-up: the vectors of each id feature.

use std::time::Duration;

use persia_types::tables::LookupReport;

use crate::batch::Batch;
use crate::buffer::Buffer;
use crate::context::Context;
use crate::device::OnDevice;
use crate::step::plan::Plan;

/// The result of a look-up and its times.
pub(crate) struct Forward {
    pub(crate) outputs: Vec<Output>,
    pub(crate) on_device: Option<OnDevice>,
    pub(crate) report: LookupReport,
    pub(crate) lookup: Duration,
    pub(crate) pool: Duration,
}

/// The vectors of one id feature, 64-byte aligned: pooled, `[batch, dim]`; of a raw feature `[batch, places, dim]`.
#[derive(Debug)]
pub struct Output {
    slot: usize,
    dim: usize,
    /// The vectors; empty if a device has them.
    buffer: Buffer,
    raw: Option<Raw>,
}

/// The properties of a raw feature in addition to its rows.
#[derive(Debug)]
pub struct Raw {
    /// The number of positions of a sample: `sample_fixed_size`.
    pub places: usize,
    /// `[batch, places]`: whether the position has an id. Rows of empty positions are zeros. The mask is empty if a
    /// device has it.
    pub mask: Vec<bool>,
    /// The number of truncated ids: those after the first `places` of a sample.
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

    /// The index of its slot in the schema.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The number of floats of a sample.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The number of positions, the mask, and the number of truncated ids; `None` for a pooled feature.
    pub fn raw(&self) -> Option<&Raw> {
        self.raw.as_ref()
    }

    /// The floats alone; their memory is reused after they are dropped.
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
