//! The rules of each type of feature. They are applied to cells.

pub(crate) mod ids;
pub(crate) mod labels;
pub(crate) mod lists;
pub(crate) mod numbers;
pub(crate) mod time;
