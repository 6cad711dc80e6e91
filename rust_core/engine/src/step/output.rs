//! The output of a look-up: the vectors of each id feature.

use std::time::Duration;

use persia_types::tables::LookupReport;

use crate::batch::Batch;
use crate::buffer::Buffer;
use crate::context::Context;
use crate::device::OnDevice;
use crate::step::plan::Plan;

/// A look-up's result and its times.
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
    /// Empty if a device has the vectors.
    buffer: Buffer,
    raw: Option<Raw>,
}

/// The properties of a raw feature in addition to its rows.
#[derive(Debug)]
pub struct Raw {
    /// Places of a sample: `sample_fixed_size`.
    pub places: usize,
    /// `[batch, places]`: whether the place has an id. Rows of empty places are zeros. Empty if a device has
    /// the mask.
    pub mask: Vec<bool>,
    /// Ids that were truncated: those after a sample's first `places`.
    pub truncated: usize,
}

impl Output {
    /// Of a feature whose vectors are in `buffer`.
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

    /// Of a feature whose vectors a device has.
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

    /// Index of its slot in the schema.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Floats per sample.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Places, mask, and the number of truncated ids; `None` for a pooled feature.
    pub fn raw(&self) -> Option<&Raw> {
        self.raw.as_ref()
    }

    /// The floats alone; their memory is reused once dropped.
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
