//! What one step computes: which rows, pooled how, and which gradient each of them gets.

pub(crate) mod backward;
pub(crate) mod buffer;
pub(crate) mod forward;
mod on_device;
pub(crate) mod plan;
