//! Forward: rows of unique ids from the tables, pooled into one vector per sample and feature.

use std::sync::Arc;
use std::time::Duration;

use persia_kernels::{Bags, Pool};
use persia_types::tables::{LookupReport, LookupRequest, Mode, PerSample, TableIds, TablesError};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::batch::feature::IdFeature;
use crate::device::{Device, OnDevice};
use crate::error::Error;
use crate::pipeline::shared::Context;
use crate::stats::Stopwatch;
use crate::step::buffer::{Buffer, BufferPool};
use crate::step::on_device;
use crate::step::plan::{Member, Plan, TablePlan};

/// The rows of one id feature, 64-byte aligned: pooled, `[batch, dim]`; of a raw feature `[batch, places, dim]`.
#[derive(Debug)]
pub struct Output {
    slot: usize,
    dim: usize,
    /// Empty where a device has the rows.
    buffer: Buffer,
    raw: Option<Raw>,
}

/// What a raw feature has beside its rows.
#[derive(Debug)]
pub struct Raw {
    /// Places of a sample: `sample_fixed_size`.
    pub places: usize,
    /// `[batch, places]`: whether an id is there. Rows of the other places are zeros. Empty where a device has it.
    pub mask: Vec<bool>,
    /// Ids left out, because their samples have more of them than places.
    pub truncated: usize,
}

impl Output {
    /// Of a feature whose rows a device has.
    pub(super) fn elsewhere(context: &Context, plan: &Plan, feature: usize) -> Self {
        let slot = plan.slots()[feature];
        let dim = context.schema.tables[context.schema.slots[slot].table].dim;
        Self { slot, dim, buffer: context.buffers.take(0), raw: raw(context, plan, feature, Vec::new) }
    }

    /// Index of its slot in the schema.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Floats per sample.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Places, mask, and what was left out; `None` for a pooled feature.
    pub fn raw(&self) -> Option<&Raw> {
        self.raw.as_ref()
    }

    /// The floats alone; their memory is used again once dropped.
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

/// A look-up's result and its times.
pub(crate) struct Forward {
    pub(crate) outputs: Vec<Output>,
    pub(crate) on_device: Option<OnDevice>,
    pub(crate) report: LookupReport,
    pub(crate) lookup: Duration,
    pub(crate) pool: Duration,
}

/// Look the batch up and pool it, on the device where one is given.
///
/// Where every sample has one id, pooling is a copy: the tables then write rows straight to the output. So they do with
/// pooled samples, where they [pool](persia_types::Tables::pools).
pub(crate) fn forward(
    context: &Context,
    device: Option<&dyn Device>,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    mode: Mode,
) -> Result<Forward, Error> {
    let divisors = divisors(context, batch, plan);
    if let Some(device) = device {
        return on_device::forward(context, device, (batch, plan), &divisors, token, mode);
    }
    on_cpu(context, batch, plan, &divisors, token, mode)
        .map_err(|error| Error::Lookup { step: token.seq, source: error.into() })
}

/// Per feature what the sums of its samples are divided by.
pub(super) fn divisors(context: &Context, batch: &Batch, plan: &Plan) -> Vec<Option<Buffer>> {
    let divisors = |(feature, slot): (usize, &usize)| {
        let divisors = context.schema.slots[*slot].divisors(plan.feature(batch, feature).offsets());
        divisors.map(|divisors| context.buffers.collect(divisors))
    };
    plan.slots().iter().enumerate().map(divisors).collect()
}

fn on_cpu(
    context: &Context,
    batch: &Batch,
    plan: &Plan,
    divisors: &[Option<Buffer>],
    token: Token,
    mode: Mode,
) -> Result<Forward, TablesError> {
    let mut watch = Stopwatch::start();
    let dim = |table: usize| context.schema.tables[table].dim;
    let tables: Vec<TableIds<'_>> = plan
        .tables()
        .iter()
        .map(|table| TableIds {
            table: table.table,
            ids: table.ids(plan, batch),
            per_sample: per_sample(context, batch, plan, table, divisors),
        })
        .collect();
    let mut rows: Vec<Buffer> =
        tables.iter().map(|table| context.buffers.take(table.vectors() * dim(table.table))).collect();
    let request = LookupRequest { token, step: token.seq, mode, tables: &tables };
    let mut targets: Vec<&mut [f32]> = rows.iter_mut().map(AsMut::as_mut).collect();
    let report = context.tables.lookup(&request, &mut targets)?;
    let lookup = watch.lap();

    let mut outputs: Vec<Option<Output>> = batch.id_features().iter().map(|_| None).collect();
    for ((table, ids), rows) in plan.tables().iter().zip(&tables).zip(rows) {
        let dim = dim(table.table);
        let slot = |member: &Member| plan.slots()[member.feature];
        if ids.per_sample.is_some() {
            let member = &table.members[0];
            outputs[member.feature] = Some(Output { slot: slot(member), dim, buffer: rows, raw: None });
            continue;
        }
        for member in &table.members {
            let (slot, feature) = (slot(member), plan.feature(batch, member.feature));
            let mut buffer = context.buffers.take(feature.samples() * dim);
            let bags = bags(feature, divisors[member.feature].as_ref().map(AsRef::as_ref));
            pool_member(&context.buffers, bags, member, rows.as_ref(), dim, buffer.as_mut());
            let mask =
                || (0..feature.samples()).map(|place| !feature.occurrences_of(place).is_empty()).collect();
            let raw = raw(context, plan, member.feature, mask);
            outputs[member.feature] = Some(Output { slot, dim, buffer, raw });
        }
    }
    let outputs = outputs.into_iter().flatten().collect();
    Ok(Forward { outputs, on_device: None, report, lookup, pool: watch.lap() })
}

/// What a raw feature has beside its rows.
fn raw(context: &Context, plan: &Plan, feature: usize, mask: impl FnOnce() -> Vec<bool>) -> Option<Raw> {
    let places = context.schema.slots[plan.slots()[feature]].sample_fixed_size?;
    Some(Raw { places: places as usize, mask: mask(), truncated: plan.truncated(feature) })
}

/// How samples use the ids of a table that serves one feature, where they are better off without rows of ids. A raw feature
/// is not: its samples are places of others, and go with a mask.
pub(super) fn per_sample<'a>(
    context: &Context,
    batch: &'a Batch,
    plan: &'a Plan,
    table: &TablePlan,
    divisors: &'a [Option<Buffer>],
) -> Option<PerSample<'a>> {
    let [Member { feature: index, map: None }] = table.members[..] else { return None };
    if context.schema.slots[plan.slots()[index]].sample_fixed_size.is_some() {
        return None;
    }
    let feature = plan.feature(batch, index);
    if feature.offsets().is_none() && feature.per_sample_weights().is_none() {
        return Some(PerSample::Gathered(feature.csr()));
    }
    let bags = bags(feature, divisors[index].as_ref().map(AsRef::as_ref));
    let (dim, ids) = (context.schema.tables[table.table].dim, feature.unique().len());
    context.tables.pools(dim, ids, &bags).then_some(PerSample::Pooled(bags))
}

/// What each sample of a feature adds up, of the feature's own unique ids.
pub(super) fn bags<'a>(feature: &'a IdFeature, divisors: Option<&'a [f32]>) -> Bags<'a> {
    Bags {
        indices: feature.inverse(),
        offsets: feature.offsets(),
        per_sample_weights: feature.per_sample_weights(),
        divisors,
    }
}

fn pool_member(
    buffers: &Arc<BufferPool>,
    bags: Bags<'_>,
    member: &Member,
    rows: &[f32],
    dim: usize,
    out: &mut [f32],
) {
    let composed = member.map.as_ref().map(|map| {
        let mut indices = buffers.take(bags.indices.len());
        let words: &mut [u32] = bytemuck::cast_slice_mut(indices.as_mut());
        words.iter_mut().zip(bags.indices).for_each(|(index, unique)| *index = map[*unique as usize]);
        indices
    });
    let indices = composed.as_ref().map_or(bags.indices, |indices| bytemuck::cast_slice(indices.as_ref()));
    persia_kernels::pool(&Pool { rows, dim, bags: Bags { indices, ..bags } }, out);
}
