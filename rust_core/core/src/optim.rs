//! `persia_core.optim`: initializers and optimizers of embedding rows.

use persia_types::{Initializer, Optimizer};
use pyo3::prelude::*;

/// An embedding optimizer. It is created by `persia.embedding.optim`.
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

    /// Adagrad, with one accumulator per weight or per row.
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

/// The initializer of new rows. It is created by `persia.embedding`.
#[pyclass(module = "persia_core.optim", frozen)]
#[derive(Clone, Copy)]
pub(crate) struct InitializerSpec(pub(crate) Initializer);

#[pymethods]
impl InitializerSpec {
    /// All zeros.
    #[staticmethod]
    fn zero() -> Self {
        Self(Initializer::Zero)
    }

    /// Uniformly distributed in `[low, high)`.
    #[staticmethod]
    fn uniform(low: f32, high: f32) -> Self {
        Self(Initializer::Uniform { low, high })
    }

    /// Normally distributed.
    #[staticmethod]
    fn normal(mean: f32, std: f32) -> Self {
        Self(Initializer::Normal { mean, std })
    }

    /// Gamma distributed.
    #[staticmethod]
    fn gamma(shape: f32, scale: f32) -> Self {
        Self(Initializer::Gamma { shape, scale })
    }

    /// Poisson distributed, with the mean `lam`.
    #[staticmethod]
    fn poisson(lam: f32) -> Self {
        Self(Initializer::Poisson { lam })
    }

    /// Uniformly distributed in `[-1 / sqrt(dim), 1 / sqrt(dim))`.
    #[staticmethod]
    fn inverse_sqrt_dim() -> Self {
        Self(Initializer::InverseSqrtDim)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
