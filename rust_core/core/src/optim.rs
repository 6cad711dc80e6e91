//! `persia_core.optim`: the formula and numbers of an embedding optimizer.

use persia_types::Optimizer;
use pyo3::prelude::*;

/// One embedding optimizer, as the store takes it. Built by `persia.embedding.optim`.
#[pyclass(module = "persia_core.optim", frozen)]
#[derive(Clone, Copy)]
pub(crate) struct OptimizerSpec(pub(crate) Optimizer);

#[pymethods]
impl OptimizerSpec {
    /// SGD, with momentum if it is not 0.
    #[staticmethod]
    fn sgd(lr: f32, momentum: f32, weight_decay: f32) -> Self {
        Self(Optimizer::Sgd { lr, momentum, weight_decay })
    }

    /// Adagrad, element-wise or with one accumulator per row.
    #[staticmethod]
    fn adagrad(
        lr: f32,
        initial_accumulator_value: f32,
        weight_decay: f32,
        g_square_momentum: f32,
        eps: f32,
        vectorwise_shared: bool,
    ) -> Self {
        Self(Optimizer::Adagrad {
            lr,
            weight_decay,
            initial_accumulator_value,
            g_square_momentum,
            eps,
            vectorwise_shared,
        })
    }

    /// Adam.
    #[staticmethod]
    fn adam(lr: f32, betas: (f32, f32), weight_decay: f32, eps: f32) -> Self {
        Self(Optimizer::Adam { lr, beta1: betas.0, beta2: betas.1, weight_decay, eps })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
