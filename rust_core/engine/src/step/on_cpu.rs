//! Forward and backward on the CPU.

use std::sync::Arc;

use persia_kernels::{Bags, Csr, Gradients, Pool, SegmentSum};
use persia_types::tables::{LookupRequest, Mode, TableGradients, TableIds, TablesError};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::buffer::{Buffer, BufferPool};
use crate::context::Context;
use crate::error::Error;
use crate::options::PushOptions;
use crate::stats::Stopwatch;
use crate::step::gradients::{Backward, Gradient, push};
use crate::step::output::{Forward, Output};
use crate::step::plan::{Member, Plan, TablePlan};

/// Look up a batch and pool it. Tables that return vectors of samples write them directly to the output.
pub(super) fn forward(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    mode: Mode,
) -> Result<Forward, TablesError> {
    let mut watch = Stopwatch::start();
    let tables: Vec<TableIds<'_>> =
        plan.tables().iter().map(|table| table.request(plan, batch, table.per_sample(plan, batch))).collect();
    let mut rows: Vec<Buffer> =
        tables.iter().map(|table| context.buffers.take(table.vectors() * context.dim(table.table))).collect();
    let request = LookupRequest { token, step: token.seq, mode, tables: &tables };
    let mut targets: Vec<&mut [f32]> = rows.iter_mut().map(AsMut::as_mut).collect();
    let report = context.tables.lookup(&request, &mut targets)?;
    let lookup = watch.lap();

    let mut outputs: Vec<Option<Output>> = batch.id_features().iter().map(|_| None).collect();
    for ((table, ids), rows) in plan.tables().iter().zip(&tables).zip(rows) {
        let mut output = |member: &Member, buffer| {
            outputs[member.feature] = Some(Output::on_host(context, (batch, plan), member.feature, buffer));
        };
        if ids.per_sample.is_some() {
            output(&table.members[0], rows);
            continue;
        }
        let dim = context.dim(table.table);
        for member in &table.members {
            let bags = plan.bags(batch, member.feature);
            let mut buffer = context.buffers.take(bags.samples() * dim);
            pool(&context.buffers, bags, member, rows.as_ref(), dim, buffer.as_mut());
            output(member, buffer);
        }
    }
    let outputs = outputs.into_iter().flatten().collect();
    Ok(Forward { outputs, on_device: None, report, lookup, pool: watch.lap() })
}

/// Pool a feature from the rows of its table.
fn pool(
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

/// Push gradients. Features without a gradient are skipped, because a zero gradient would still decay weights
/// and moments. A table is skipped if none of its features has a gradient.
///
/// The tables sum the gradients of an id while they update its row. This function sums only the gradients of
/// tables that several features share.
pub(super) fn backward(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    gradients: &[Option<Gradient>],
    options: PushOptions,
) -> Result<Backward, Error> {
    let mut watch = Stopwatch::start();
    let given: Vec<usize> = (0..gradients.len()).filter(|feature| gradients[*feature].is_some()).collect();
    let subset;
    let tables = if given.len() == gradients.len() {
        plan.tables()
    } else {
        subset = plan.tables_of(batch, &context.schema, &given)?;
        &subset
    };
    let scale = options.scale * context.gradient_scale;
    let sources: Vec<Option<Source<'_>>> =
        (0..gradients.len()).map(|feature| Source::new(context, (batch, plan), feature, gradients)).collect();
    let shared: Vec<Option<Buffer>> =
        tables.iter().map(|table| sum_shared(context, (batch, plan), table, &sources, scale)).collect();
    let requests: Vec<TableGradients<'_>> = tables
        .iter()
        .zip(&shared)
        .filter_map(|(table, shared)| {
            let gradients = match shared {
                Some(rows) => Gradients::Rows(rows.as_ref()),
                None => Gradients::Samples(sources[table.members[0].feature].as_ref()?.sum(scale)),
            };
            Some(TableGradients { table: table.table, ids: table.ids(plan, batch), gradients })
        })
        .collect();
    let segment_sum = watch.lap();
    let report = push(context, token, options.lr_factor, &requests)?;
    Ok(Backward { report, segment_sum, push: watch.lap() })
}

/// The gradients of one feature, and the samples of each id.
struct Source<'a> {
    gradients: &'a [f32],
    dim: usize,
    csr: Csr<'a>,
    /// For each index of `csr`, the factor of its gradient; None means 1.
    weights: Option<&'a [f32]>,
    /// For each sample, the factor of its gradient; None means 1.
    factors: Option<Buffer>,
}

impl<'a> Source<'a> {
    fn new(
        context: &Context,
        (batch, plan): (&'a Batch, &'a Plan),
        feature: usize,
        gradients: &'a [Option<Gradient>],
    ) -> Option<Self> {
        let gradients = gradients[feature].as_ref()?.as_ref().as_ref();
        let dim = context.dim_of_slot(plan.slots()[feature]);
        let factors = plan.factors(feature, &context.buffers);
        let feature = plan.feature(batch, feature);
        Some(Self { gradients, dim, csr: feature.csr(), weights: feature.csr_weights(), factors })
    }

    fn sum(&self, scale: f32) -> SegmentSum<'_> {
        SegmentSum {
            gradients: self.gradients,
            dim: self.dim,
            csr: self.csr,
            factors: self.factors.as_ref().map(AsRef::as_ref),
            per_sample_weights: self.weights,
            scale,
        }
    }
}

/// Sum the gradients of a table that several features share, slot by slot, each in batch order.
fn sum_shared(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    table: &TablePlan,
    sources: &[Option<Source<'_>>],
    scale: f32,
) -> Option<Buffer> {
    if table.members.iter().all(|member| member.map.is_none()) {
        return None;
    }
    let mut rows = context.buffers.take(table.ids(plan, batch).len() * context.dim(table.table));
    rows.as_mut().fill(0.0);
    for member in &table.members {
        if let (Some(source), Some(map)) = (&sources[member.feature], &member.map) {
            persia_kernels::segment_sum_onto(&source.sum(1.0), map, rows.as_mut());
        }
    }
    persia_kernels::scale(rows.as_mut(), scale);
    Some(rows)
}
