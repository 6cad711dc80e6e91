//! Backward: one gradient per sample and feature becomes one summed gradient per unique id, pushed once.

use std::time::Duration;

use persia_types::tables::{PushReport, PushRequest, TableGradients};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::error::Error;
use crate::pipeline::push::{Gradient, PushOptions};
use crate::pipeline::shared::Context;
use crate::stats::Stopwatch;
use crate::step::buffer::Buffer;
use crate::step::kernels::{self, SegmentSum};
use crate::step::plan::{Plan, TablePlan};
use crate::step::weighted::segment_sum_weighted;

/// A push's result and its times.
pub(crate) struct Backward {
    pub(crate) report: PushReport,
    pub(crate) segment_sum: Duration,
    pub(crate) push: Duration,
}

/// Sum the gradients and push them. Features without one are left out, as are tables without any: a zero
/// gradient would still decay weights and moments.
pub(crate) fn backward(
    context: &Context,
    batch: &Batch,
    plan: &Plan,
    token: Token,
    gradients: Vec<Option<Gradient>>,
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
    let factor = options.scale * context.gradient_scale;
    let sums: Vec<Buffer> =
        tables.iter().map(|table| sum_table(context, batch, plan, table, &gradients, factor)).collect();
    drop(gradients); // the model's memory is free before the tables are waited for
    let requests: Vec<TableGradients<'_>> = tables
        .iter()
        .zip(&sums)
        .map(|(table, sum)| TableGradients {
            table: table.table,
            ids: table.ids(batch),
            gradients: sum.as_ref(),
        })
        .collect();
    let segment_sum = watch.lap();
    let request = PushRequest { token, step: token.seq, lr_factor: options.lr_factor, tables: &requests };
    let report = context
        .tables
        .push(&request)
        .map_err(|error| Error::Push { step: token.seq, source: error.into() })?;
    Ok(Backward { report, segment_sum, push: watch.lap() })
}

/// Slot after slot, each in batch order.
fn sum_table(
    context: &Context,
    batch: &Batch,
    plan: &Plan,
    table: &TablePlan,
    gradients: &[Option<Gradient>],
    factor: f32,
) -> Buffer {
    let dim = context.schema.tables[table.table].dim;
    let mut sum = context.buffers.take(table.ids(batch).len() * dim);
    if table.members.iter().any(|member| member.map.is_some()) {
        sum.as_mut().fill(0.0);
    }
    for member in &table.members {
        let Some(gradient) = &gradients[member.feature] else { continue };
        let feature = plan.feature(batch, member.feature);
        let slot = &context.schema.slots[plan.slots()[member.feature]];
        let factors = kernels::divisors(slot, feature.offsets())
            .map(|divisors| divisors.into_iter().map(|divisor| 1.0 / divisor).collect::<Vec<_>>());
        let input = SegmentSum {
            gradients: gradient.as_ref().as_ref(),
            dim,
            starts: feature.occurrence_starts(),
            samples: feature.occurrence_samples(),
            factors: factors.as_deref(),
            map: member.map.as_deref(),
        };
        match feature.grouped_weights() {
            None => kernels::segment_sum(&input, sum.as_mut()),
            Some(weights) => segment_sum_weighted(&input, weights, sum.as_mut()),
        }
    }
    if factor != 1.0 {
        kernels::scale(sum.as_mut(), factor);
    }
    sum
}
