"""The optimizers of ``train``, and their arguments. Each field is one key; its docstring is the key's reference."""

from typing import Annotated

from pydantic import Field

from persia.config.blocks import Block

NotNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RowSgd(Block):
    """:class:`persia.embedding.optim.SGD`."""

    lr: NotNegative
    """The learning rate."""
    momentum: Beta = 0.0
    """The share of the last update that is kept."""
    weight_decay: NotNegative = 0.0
    """The factor of a weight that is added to its gradient."""


class RowAdagrad(Block):
    """:class:`persia.embedding.optim.Adagrad`, row-wise as :func:`persia.nn.default_optimizer`."""

    lr: NotNegative = 0.1
    """The learning rate."""
    initial_accumulator_value: NotNegative | None = None
    """Where the sum of squared gradients starts. None: ``1e-6 * (1024 / rows) ** 2`` with the rows of a step
    (``data.batch_size * train.accumulate``), small compared with the square of a gradient of a mean over them."""
    weight_decay: NotNegative = 0.0
    """The factor of a weight that is added to its gradient."""
    g_square_momentum: NotNegative = 1.0
    """The factor of the sum before each addition; below 1, old gradients are forgotten."""
    eps: NotNegative = 1e-10
    """Added to the sum before its root is taken."""
    vectorwise_shared: bool = True
    """One sum for a row, of the mean squared gradient, in place of one for each weight."""


class RowAdam(Block):
    """:class:`persia.embedding.optim.Adam`."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay of the means of the gradient and of its square."""
    weight_decay: NotNegative = 0.0
    """The factor of a weight that is added to its gradient."""
    eps: NotNegative = 1e-8
    """Added to the root of the mean square."""


class DenseSgd(Block):
    """:class:`torch.optim.SGD`."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    momentum: NotNegative = 0.0
    """The share of the last update that is kept."""
    dampening: float = 0.0
    """The share of the gradient that is not added to the momentum."""
    weight_decay: NotNegative = 0.0
    """The factor of a weight that is added to its gradient."""
    nesterov: bool = False
    """Nesterov's momentum."""


class DenseAdagrad(Block):
    """:class:`torch.optim.Adagrad`."""

    lr: NotNegative = 1e-2
    """The learning rate."""
    lr_decay: NotNegative = 0.0
    """The rate is divided by ``1 + lr_decay * (step - 1)``."""
    weight_decay: NotNegative = 0.0
    """The factor of a weight that is added to its gradient."""
    initial_accumulator_value: NotNegative = 0.0
    """Where the sum of squared gradients starts."""
    eps: NotNegative = 1e-10
    """Added to the root of the sum."""


class DenseAdam(Block):
    """:class:`torch.optim.Adam`."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay of the means of the gradient and of its square."""
    eps: NotNegative = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NotNegative = 0.0
    """The factor of a weight that is added to its gradient."""
    amsgrad: bool = False
    """Divide by the largest mean square so far."""


class DenseAdamW(DenseAdam):
    """:class:`torch.optim.AdamW`: the decay is applied to the weights, not to the gradient."""

    weight_decay: NotNegative = 1e-2
    """The factor of a weight that is subtracted from it in each step, times the learning rate."""


OF_ROWS: dict[str, type[Block]] = {"adagrad": RowAdagrad, "adam": RowAdam, "sgd": RowSgd}
"""The optimizers of ``train.embedding_optimizer``."""
OF_MODEL: dict[str, type[Block]] = {"adam": DenseAdam, "adamw": DenseAdamW, "adagrad": DenseAdagrad, "sgd": DenseSgd}
"""The optimizers of ``train.dense_optimizer``."""
OPTIMIZERS = {"embedding_optimizer": OF_ROWS, "dense_optimizer": OF_MODEL}
"""The optimizers by the key of ``train`` that selects one."""


def initial_accumulator_value(rows: int) -> float:
    """Return the ``initial_accumulator_value`` of :class:`RowAdagrad` if the file gives none.

    The gradient of a mean over the rows of a step is inversely proportional to their number. ``docs/performance.md``
    has the measurement.
    """
    return float(1e-6 * (1024 / rows) ** 2)
