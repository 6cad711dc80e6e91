"""The optimizers of ``train``, and their arguments. Each field is one key; its docstring is the key's reference."""

from typing import Annotated

from pydantic import Field

from persia.config.block import Block

NotNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
RowEps = Annotated[float, Field(gt=0, le=1e30)]


class RowSgd(Block):
    """:class:`persia.embedding.optim.SGD`."""

    lr: NotNegative
    """The learning rate."""
    momentum: Beta = 0.0
    """The share of the previous update that is kept."""
    weight_decay: NotNegative = 0.0
    """The weight decay: this factor times the learning rate times the weight is subtracted from the weight in each
    push. It does not enter the momentum."""


class RowAdagrad(Block):
    """:class:`persia.embedding.optim.Adagrad`, by default row-wise, as in :func:`persia.nn.default_optimizer`."""

    lr: NotNegative = 0.1
    """The learning rate."""
    initial_accumulator_value: NotNegative | None = None
    """The initial sum of squared gradients. None: ``1e-6 * (1024 / rows) ** 2`` with the rows of a step
    (``data.batch_size * train.accumulate``), which is small compared with the square of the gradient of a mean loss."""
    weight_decay: NotNegative = 0.0
    """The weight decay: this factor times the weight is added to its gradient."""
    g_square_momentum: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The factor by which the sum is multiplied before each addition. Below 1, the weight of old gradients decays."""
    eps: RowEps = 1e-10
    """Added to the sum before its root is taken."""
    vectorwise_shared: bool = True
    """Keep one sum per row, of the mean squared gradient, instead of one per weight."""


class RowAdam(Block):
    """:class:`persia.embedding.optim.Adam`."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay rates of the running means of the gradient and of its square."""
    weight_decay: NotNegative = 0.0
    """The weight decay: this factor times the weight is added to its gradient."""
    eps: RowEps = 1e-8
    """Added to the root of the mean square."""


class DenseSgd(Block):
    """:class:`torch.optim.SGD`."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    momentum: NotNegative = 0.0
    """The share of the previous update that is kept."""
    dampening: float = 0.0
    """The share of the gradient that is not added to the momentum."""
    weight_decay: NotNegative = 0.0
    """The weight decay: this factor times the weight is added to its gradient."""
    nesterov: bool = False
    """Use Nesterov momentum."""


class DenseAdagrad(Block):
    """:class:`torch.optim.Adagrad`."""

    lr: NotNegative = 1e-2
    """The learning rate."""
    lr_decay: NotNegative = 0.0
    """The rate is divided by ``1 + lr_decay * (step - 1)``."""
    weight_decay: NotNegative = 0.0
    """The weight decay: this factor times the weight is added to its gradient."""
    initial_accumulator_value: NotNegative = 0.0
    """The initial sum of squared gradients."""
    eps: NotNegative = 1e-10
    """Added to the root of the sum."""


class DenseAdam(Block):
    """:class:`torch.optim.Adam`."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay rates of the running means of the gradient and of its square."""
    eps: NotNegative = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NotNegative = 0.0
    """The weight decay: this factor times the weight is added to its gradient."""
    amsgrad: bool = False
    """Divide by the root of the largest mean square so far."""


class DenseAdamW(DenseAdam):
    """:class:`torch.optim.AdamW`: the decay is applied to the weights, not to the gradient."""

    weight_decay: NotNegative = 1e-2
    """The weight decay: this factor times the learning rate times the weight is subtracted from the weight in each
    step."""


OF_ROWS: dict[str, type[Block]] = {"adagrad": RowAdagrad, "adam": RowAdam, "sgd": RowSgd}
"""The optimizers of ``train.embedding_optimizer``."""
OF_MODEL: dict[str, type[Block]] = {"adam": DenseAdam, "adamw": DenseAdamW, "adagrad": DenseAdagrad, "sgd": DenseSgd}
"""The optimizers of ``train.dense_optimizer``."""
OPTIMIZERS = {"embedding_optimizer": OF_ROWS, "dense_optimizer": OF_MODEL}
"""The optimizers by the key of ``train`` that selects one."""


def initial_accumulator_value(rows: int) -> float:
    """Return the default ``initial_accumulator_value`` of :class:`RowAdagrad`.

    The gradient of a mean over the rows of a step is inversely proportional to the number of rows. See
    ``docs/performance.md`` for a measurement.
    """
    return float(1e-6 * (1024 / rows) ** 2)
