//! Input: Arrow record batches and JSON records, as cells; and the columns that features need in it.

pub(crate) mod arrow;
pub(crate) mod cell;
pub(crate) mod records;
pub(crate) mod schema;
