//! Optimizers, initializers and random numbers, as pure functions whose results are bit-identical on every
//! machine.

pub(crate) mod initial;
pub(crate) mod optimizer;
pub(crate) mod random;
