//! The input: reads Arrow record batches and JSON records as cells, and checks the columns that features
//! need.

pub(crate) mod arrow;
pub(crate) mod cell;
pub(crate) mod records;
pub(crate) mod schema;
