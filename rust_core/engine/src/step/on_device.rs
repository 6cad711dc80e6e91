//! Forward and backward where a device pools and sums. Rows still come from the tables, straight into the device's staging
//! memory, and gradients go back to them.

use persia_kernels::{Gradients, SegmentSum};
use persia_types::tables::{LookupRequest, Mode, PerSample, TableGradients, TableIds};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::device::{Device, DeviceError, DeviceFeature, DeviceGradients, DeviceTable, DeviceWork};
use crate::error::Error;
use crate::pipeline::shared::Context;
use crate::stats::Stopwatch;
use crate::step::backward::{Backward, push_all};
use crate::step::buffer::Buffer;
use crate::step::forward::{Forward, Output, bags, divisors, per_sample};
use crate::step::plan::{Plan, TablePlan};

/// Look the batch up, and start to pool it on the device.
pub(super) fn forward(
    context: &Context,
    device: &dyn Device,
    (batch, plan): (&Batch, &Plan),
    divisors: &[Option<Buffer>],
    token: Token,
    mode: Mode,
) -> Result<Forward, Error> {
    let step = token.seq;
    let failed = |source: DeviceError| Error::Device { worker: "look-up", step, source };
    let mut watch = Stopwatch::start();
    let tables: Vec<TableIds<'_>> = plan
        .tables()
        .iter()
        .map(|table| TableIds {
            table: table.table,
            ids: table.ids(plan, batch),
            per_sample: pooled_by_holder(context, batch, plan, table, divisors),
        })
        .collect();
    let work = work(context, (batch, plan), &tables, divisors, mode);
    let mut looking = device.begin(&work).map_err(failed)?;
    let request = LookupRequest { token, step, mode, tables: &tables };
    let lookup = context.tables.lookup(&request, &mut looking.rows());
    let report = lookup.map_err(|error| Error::Lookup { step, source: error.into() })?;
    let lookup = watch.lap();
    let on_device = Some(looking.launch().map_err(failed)?);
    let outputs = (0..plan.slots().len()).map(|feature| Output::elsewhere(context, plan, feature)).collect();
    Ok(Forward { outputs, on_device, report, lookup, pool: watch.lap() })
}

/// The samples of a table, where its holder pools them: vectors of samples then travel instead of rows.
fn pooled_by_holder<'a>(
    context: &Context,
    batch: &'a Batch,
    plan: &'a Plan,
    table: &TablePlan,
    divisors: &'a [Option<Buffer>],
) -> Option<PerSample<'a>> {
    per_sample(context, batch, plan, table, divisors).filter(|wanted| matches!(wanted, PerSample::Pooled(_)))
}

fn work<'a>(
    context: &Context,
    (batch, plan): (&'a Batch, &'a Plan),
    tables: &[TableIds<'_>],
    divisors: &'a [Option<Buffer>],
    mode: Mode,
) -> DeviceWork<'a> {
    let mut features: Vec<Option<DeviceFeature<'a>>> = plan.slots().iter().map(|_| None).collect();
    for (index, (table, ids)) in plan.tables().iter().zip(tables).enumerate() {
        for member in &table.members {
            let feature = plan.feature(batch, member.feature);
            let own = bags(feature, divisors[member.feature].as_ref().map(AsRef::as_ref));
            features[member.feature] = Some(DeviceFeature {
                table: index,
                samples: feature.samples(),
                bags: ids.per_sample.is_none().then_some(own),
                map: member.map.as_deref(),
                csr: (mode == Mode::Train).then(|| feature.csr()),
                csr_weights: feature.csr_weights(),
                raw: context.schema.slots[plan.slots()[member.feature]].sample_fixed_size.is_some(),
            });
        }
    }
    let table = |(plan, ids): (&TablePlan, &TableIds<'_>)| DeviceTable {
        dim: context.schema.tables[plan.table].dim,
        vectors: ids.vectors(),
        members: plan.members.iter().map(|member| member.feature).collect(),
    };
    DeviceWork {
        tables: plan.tables().iter().zip(tables).map(table).collect(),
        features: features.into_iter().flatten().collect(),
        tensors: batch.dense().iter().chain(batch.labels()).map(|tensor| tensor.bytes()).collect(),
    }
}

/// Push the gradients that the device has summed.
pub(super) fn push(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    mut gradients: Box<dyn DeviceGradients>,
    lr_factor: f32,
) -> Result<Backward, Error> {
    let mut watch = Stopwatch::start();
    let failed = |source: DeviceError| Error::Device { worker: "push", step: token.seq, source };
    let vectors = gradients.wait().map_err(failed)?;
    let divisors = divisors(context, batch, plan);
    let factors: Vec<Option<Buffer>> = divisors
        .iter()
        .map(|divisors| {
            let divisors: &[f32] = divisors.as_ref()?.as_ref();
            Some(context.buffers.collect(divisors.iter().map(|divisor| 1.0 / divisor)))
        })
        .collect();
    let requests: Vec<TableGradients<'_>> = plan
        .tables()
        .iter()
        .zip(&vectors)
        .map(|(table, vectors)| {
            let member = table.members[0].feature;
            let feature = plan.feature(batch, member);
            // Of a table that its holder pools, vectors are those of samples.
            let gradients = match pooled_by_holder(context, batch, plan, table, &divisors) {
                None => Gradients::Rows(vectors),
                Some(_) => Gradients::Samples(SegmentSum {
                    gradients: vectors,
                    dim: context.schema.tables[table.table].dim,
                    csr: feature.csr(),
                    factors: factors[member].as_ref().map(AsRef::as_ref),
                    per_sample_weights: feature.csr_weights(),
                    scale: 1.0,
                }),
            };
            TableGradients { table: table.table, ids: table.ids(plan, batch), gradients }
        })
        .collect();
    let segment_sum = watch.lap();
    let report = push_all(context, token, lr_factor, &requests)?;
    Ok(Backward { report, segment_sum, push: watch.lap() })
}
