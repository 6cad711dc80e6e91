//! The gradients of a push, and the push itself.

use std::time::Duration;

use persia_types::tables::{PushReport, PushRequest, TableGradients, TablesError};
use persia_types::token::Token;

use crate::context::Context;
use crate::device::DeviceGradients;
use crate::error::Error;

/// The gradient of one id feature's output. It has the same shape and may be in any host memory.
pub type Gradient = Box<dyn AsRef<[f32]> + Send>;

/// The gradients of one push.
pub(crate) enum PushGradients {
    /// One gradient for each id feature, to be summed by the engine or by the tables.
    OnHost(Vec<Option<Gradient>>),
    /// Gradients that a device has summed.
    OnDevice(Box<dyn DeviceGradients>),
}

/// The result and the times of a push.
pub(crate) struct Backward {
    pub(crate) report: PushReport,
    pub(crate) segment_sum: Duration,
    pub(crate) push: Duration,
}

/// Push the gradients, and check that the report accounts for every row.
pub(super) fn push(
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
        let PushReport { rows_pushed, rows_applied, rows_missing, rows_nonfinite, rows_duplicate, .. } =
            report;
        let what = format!(
            "it was given {rows} rows and reported {rows_pushed} rows: {rows_applied} applied, {rows_missing} missing, \
             {rows_nonfinite} non-finite, {rows_duplicate} duplicate"
        );
        let peer = "the process that holds the rows".into();
        return Err(failed(TablesError::Incompatible { peer, what }));
    }
    Ok(report)
}
