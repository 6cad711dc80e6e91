//! The computation of one step: which rows it needs, their pooling, and the gradient of each row.

pub(crate) mod gradients;
mod on_cpu;
mod on_device;
pub(crate) mod output;
pub(crate) mod plan;

use persia_types::tables::{LookupRequest, Mode};
use persia_types::token::Token;

use crate::batch::Batch;
use crate::context::Context;
use crate::device::Device;
use crate::error::Error;
use crate::options::PushOptions;
use crate::step::gradients::{Backward, PushGradients};
use crate::step::output::Forward;
use crate::step::plan::Plan;

/// Decide how the batch is looked up and pushed.
pub(crate) fn plan(context: &Context, batch: &Batch) -> Result<Plan, Error> {
    Plan::new(batch, &context.schema, &context.buffers, &|dim, ids, bags| {
        context.tables.pools(dim, ids, bags)
    })
}

/// Look up a batch and pool it, on the device if there is one.
pub(crate) fn forward(
    context: &Context,
    device: Option<&dyn Device>,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    mode: Mode,
) -> Result<Forward, Error> {
    match device {
        Some(device) => on_device::forward(context, device, (batch, plan), token, mode),
        None => on_cpu::forward(context, (batch, plan), token, mode)
            .map_err(|error| Error::Lookup { step: token.seq, source: error.into() }),
    }
}

/// Look up each feature separately, and return the number of its unique ids and of those without a row.
pub(crate) fn missing(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    token: Token,
) -> Result<Vec<(u64, u64)>, Error> {
    let of_feature = |feature: usize| {
        let tables = plan.tables_of(batch, &context.schema, &[feature])?;
        let requests: Vec<_> = tables.iter().map(|table| table.request(plan, batch, None)).collect();
        let mut rows: Vec<_> = requests
            .iter()
            .map(|request| context.buffers.take(request.vectors() * context.dim(request.table)))
            .collect();
        let mut rows: Vec<&mut [f32]> = rows.iter_mut().map(AsMut::as_mut).collect();
        let request = LookupRequest { token, step: token.seq, mode: Mode::Eval, tables: &requests };
        let report = context
            .tables
            .lookup(&request, &mut rows)
            .map_err(|error| Error::Lookup { step: token.seq, source: error.into() })?;
        Ok((report.hits + report.missing, report.missing))
    };
    (0..plan.slots().len()).map(of_feature).collect()
}

/// Push the gradients of a batch.
pub(crate) fn backward(
    context: &Context,
    (batch, plan): (&Batch, &Plan),
    token: Token,
    gradients: PushGradients,
    options: PushOptions,
) -> Result<Backward, Error> {
    match gradients {
        PushGradients::OnHost(gradients) => {
            on_cpu::backward(context, (batch, plan), token, &gradients, options)
        }
        PushGradients::OnDevice(gradients) => {
            on_device::backward(context, (batch, plan), token, gradients, options.lr_factor)
        }
    }
}
