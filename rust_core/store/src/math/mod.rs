//! Optimizers, initialisers and random numbers: pure functions with equal bits on every machine.

pub(crate) mod initial;
pub(crate) mod optimizer;
pub(crate) mod random;
