//! Backward: the gradients of samples become one summed gradient per unique id, pushed once.

use std::time::Duration;

use persia_kernels::{Csr, Gradients, SegmentSum};
use persia_types::tables::{PushReport, PushRequest, TableGradients, TablesError};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::error::Error;
use crate::pipeline::push::{Gradient, PushGradients, PushOptions};
use crate::pipeline::shared::Context;
use crate::stats::Stopwatch;
use crate::step::buffer::Buffer;
use crate::step::on_device;
use crate::step::plan::{Plan, TablePlan};

/// A push's result and its times.
pub(crate) struct Backward {
    pub(crate) report: PushReport,
    pub(crate) segment_sum: Duration,
    pub(crate) push: Duration,
}

/// Push the gradients. Features without one are left out, as are tables without any: a zero gradient would still
/// decay weights and moments.
///
/// The holder of a table's rows adds the gradients of an id itself, as it updates the row. Only what several
/// features share is summed here before.
pub(crate) fn backward(
    context: &Context,
    batch: &Batch,
    plan: &Plan,
    token: Token,
    gradients: PushGradients,
    options: PushOptions,
) -> Result<Backward, Error> {
    let gradients = match gradients {
        PushGradients::Here(gradients) => gradients,
        PushGradients::OnDevice(gradients) => {
            return on_device::push(context, (batch, plan), token, gradients, options.lr_factor);
        }
    };
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
        (0..gradients.len()).map(|feature| Source::new(context, batch, plan, feature, &gradients)).collect();
    let shared: Vec<Option<Buffer>> =
        tables.iter().map(|table| sum_shared(context, batch, plan, table, &sources, scale)).collect();
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
    let report = push_all(context, token, options.lr_factor, &requests)?;
    Ok(Backward { report, segment_sum, push: watch.lap() })
}

/// Push, and check that every row is accounted for.
pub(super) fn push_all(
    context: &Context,
    token: Token,
    lr_factor: f32,
    tables: &[TableGradients<'_>],
) -> Result<PushReport, Error> {
    let request = PushRequest { token, step: token.seq, lr_factor, tables };
    let failed = |error: TablesError| Error::Push { step: token.seq, source: error.into() };
    let report = context.tables.push(&request).map_err(failed)?;
    let rows = tables.iter().map(|table| table.ids.len() as u64).sum();
    if !report.accounts_for(rows) {
        let what = format!("it was given {rows} rows and reported {report:?}");
        return Err(failed(TablesError::Incompatible { peer: "the holder of the rows".into(), what }));
    }
    Ok(report)
}

/// The gradients of one feature that has some, and the samples of each id.
struct Source<'a> {
    gradients: &'a [f32],
    dim: usize,
    csr: Csr<'a>,
    /// Per index of `csr` what its gradient is multiplied by; `None` is 1.
    weights: Option<&'a [f32]>,
    /// Per sample what its gradient is multiplied by; `None` is 1.
    factors: Option<Buffer>,
}

impl<'a> Source<'a> {
    fn new(
        context: &Context,
        batch: &'a Batch,
        plan: &'a Plan,
        feature: usize,
        gradients: &'a [Option<Gradient>],
    ) -> Option<Self> {
        let gradients = gradients[feature].as_ref()?.as_ref().as_ref();
        let slot = &context.schema.slots[plan.slots()[feature]];
        let feature = plan.feature(batch, feature);
        let factors = slot
            .divisors(feature.offsets())
            .map(|divisors| context.buffers.collect(divisors.map(|divisor| 1.0 / divisor)));
        let dim = context.schema.tables[slot.table].dim;
        Some(Self { gradients, dim, csr: feature.csr(), weights: feature.csr_weights(), factors })
    }

    fn sum(&self, scale: f32) -> SegmentSum<'_> {
        let Self { gradients, dim, csr, weights, factors } = self;
        SegmentSum {
            gradients,
            dim: *dim,
            csr: *csr,
            factors: factors.as_ref().map(AsRef::as_ref),
            per_sample_weights: *weights,
            scale,
        }
    }
}

/// The summed gradients of a table that several features share: slot after slot, each in batch order.
fn sum_shared(
    context: &Context,
    batch: &Batch,
    plan: &Plan,
    table: &TablePlan,
    sources: &[Option<Source<'_>>],
    scale: f32,
) -> Option<Buffer> {
    if table.members.iter().all(|member| member.map.is_none()) {
        return None;
    }
    let dim = context.schema.tables[table.table].dim;
    let mut rows = context.buffers.take(table.ids(plan, batch).len() * dim);
    rows.as_mut().fill(0.0);
    for member in &table.members {
        if let (Some(source), Some(map)) = (&sources[member.feature], &member.map) {
            persia_kernels::segment_sum_onto(&source.sum(1.0), map, rows.as_mut());
        }
    }
    persia_kernels::scale(rows.as_mut(), scale);
    Some(rows)
}
