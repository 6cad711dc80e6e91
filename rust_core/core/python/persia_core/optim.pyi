from typing import final

@final
class OptimizerSpec:
    @staticmethod
    def sgd(lr: float, momentum: float, weight_decay: float) -> OptimizerSpec: ...
    @staticmethod
    def adagrad(
        lr: float,
        initial_accumulator_value: float,
        weight_decay: float,
        g_square_momentum: float,
        eps: float,
        vectorwise_shared: bool,
    ) -> OptimizerSpec: ...
    @staticmethod
    def adam(lr: float, betas: tuple[float, float], weight_decay: float, eps: float) -> OptimizerSpec: ...

@final
class InitializerSpec:
    @staticmethod
    def zero() -> InitializerSpec: ...
    @staticmethod
    def uniform(low: float, high: float) -> InitializerSpec: ...
    @staticmethod
    def normal(mean: float, std: float) -> InitializerSpec: ...
    @staticmethod
    def gamma(shape: float, scale: float) -> InitializerSpec: ...
    @staticmethod
    def poisson(lam: float) -> InitializerSpec: ...
    @staticmethod
    def inverse_sqrt_dim() -> InitializerSpec: ...
