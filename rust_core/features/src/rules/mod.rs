//! The rules of each type of feature, which are applied to cells.

pub(crate) mod ids;
pub(crate) mod labels;
pub(crate) mod lists;
pub(crate) mod numbers;
pub(crate) mod time;
