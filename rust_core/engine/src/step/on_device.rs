//! Forward and backward on a device, which pools rows and sums gradients. The tables write rows to the device's
//! staging memory and receive the summed gradients.

use persia_kernels::{Gradients, SegmentSum};
use persia_types::tables::{LookupRequest, Mode, TableGradients, TableIds};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::buffer::Buffer;
use crate::context::Context;
use crate::device::{Device, DeviceError, DeviceFeature, DeviceGradients, DeviceTable, DeviceWork};
use crate::error::Error;
use crate::stats::Stopwatch;
use crate::step::gradients::{Backward, push};
use crate::step::output::{Forward, Output};
use crate::step::plan::{Plan, TablePlan};

/// Look up a batch, and start to pool it on the device.
pub(super) fn forward(
    context: &Context,
    device: &dyn Device,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    mode: Mode,
) -> Result<Forward, Error> {
    let step = token.seq;
    let failed = |source: DeviceError| Error::Device { worker: "look-up", step, source };
    let mut watch = Stopwatch::start();
    let tables: Vec<TableIds<'_>> =
        plan.tables().iter().map(|table| table.request(plan, batch, table.pooled(plan, batch))).collect();
    let work = work(context, (batch, plan), &tables, mode);
    let mut looking = device.begin(&work).map_err(failed)?;
    let request = LookupRequest { token, step, mode, tables: &tables };
    let lookup = context.tables.lookup(&request, &mut looking.rows());
    let report = lookup.map_err(|error| Error::Lookup { step, source: error.into() })?;
    let lookup = watch.lap();
    let on_device = Some(looking.launch().map_err(failed)?);
    let features = 0..plan.slots().len();
    let outputs = features.map(|feature| Output::on_device(context, plan, feature)).collect();
    Ok(Forward { outputs, on_device, report, lookup, pool: watch.lap() })
}

fn work<'a>(
    context: &Context,
    (batch, plan): (&'a Batch, &'a Plan),
    tables: &[TableIds<'_>],
    mode: Mode,
) -> DeviceWork<'a> {
    let mut features: Vec<Option<DeviceFeature<'a>>> = plan.slots().iter().map(|_| None).collect();
    for (index, (table, ids)) in plan.tables().iter().zip(tables).enumerate() {
        for member in &table.members {
            let feature = plan.feature(batch, member.feature);
            features[member.feature] = Some(DeviceFeature {
                table: index,
                samples: feature.samples(),
                bags: ids.per_sample.is_none().then(|| plan.bags(batch, member.feature)),
                map: member.map.as_deref(),
                csr: (mode == Mode::Train).then(|| feature.csr()),
                csr_weights: feature.csr_weights(),
                raw: context.schema.slots[plan.slots()[member.feature]].sample_fixed_size.is_some(),
            });
        }
    }
    let table = |(plan, ids): (&TablePlan, &TableIds<'_>)| DeviceTable {
        dim: context.dim(plan.table),
        vectors: ids.vectors(),
        members: plan.members.iter().map(|member| member.feature).collect(),
    };
    DeviceWork {
        tables: plan.tables().iter().zip(tables).map(table).collect(),
        features: features.into_iter().flatten().collect(),
        tensors: batch.dense().iter().chain(batch.labels()).map(|tensor| tensor.bytes()).collect(),
    }
}

/// Push the gradients that the device has summed. For a table whose look-up returned pooled samples, these are
/// the gradients of the samples.
pub(super) fn backward(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    mut gradients: Box<dyn DeviceGradients>,
    lr_factor: f32,
) -> Result<Backward, Error> {
    let mut watch = Stopwatch::start();
    let failed = |source: DeviceError| Error::Device { worker: "push", step: token.seq, source };
    let vectors = gradients.wait().map_err(failed)?;
    let factors: Vec<Option<Buffer>> = plan
        .tables()
        .iter()
        .map(|table| {
            table.is_pooled().then(|| plan.factors(table.members[0].feature, &context.buffers)).flatten()
        })
        .collect();
    let requests: Vec<TableGradients<'_>> = plan
        .tables()
        .iter()
        .zip(&vectors)
        .zip(&factors)
        .map(|((table, vectors), factors)| {
            let feature = plan.feature(batch, table.members[0].feature);
            let gradients = if table.is_pooled() {
                Gradients::Samples(SegmentSum {
                    gradients: vectors,
                    dim: context.dim(table.table),
                    csr: feature.csr(),
                    factors: factors.as_ref().map(AsRef::as_ref),
                    per_sample_weights: feature.csr_weights(),
                    scale: 1.0,
                })
            } else {
                Gradients::Rows(vectors)
            };
            TableGradients { table: table.table, ids: table.ids(plan, batch), gradients }
        })
        .collect();
    let segment_sum = watch.lap();
    let report = push(context, token, lr_factor, &requests)?;
    Ok(Backward { report, segment_sum, push: watch.lap() })
}
