"""Optimizers and learning-rate schedules of a configuration."""

import warnings
from collections.abc import Callable

import torch

from persia.config.blocks import TrainBlock
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.embedding.schedule import LRSchedule
from persia.runtime.errors import ConfigError

NEW_ROWS = EmbeddingConfig((-0.05, 0.05))
"""The initialization of new rows for features without ``init``, as in :class:`persia.nn.EmbeddingCollection`."""

_OF_ROWS: dict[str, Callable[..., Optimizer]] = {"adagrad": Adagrad, "adam": Adam, "sgd": SGD}
_OF_MODEL: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
"""The optimizer classes. :mod:`persia.config.optimizers` has checked their arguments and filled in defaults."""


def of_rows(train: TrainBlock, total_steps: int) -> Optimizer:
    """Return the optimizer of rows, with the schedule.

    Raises:
        ConfigError: ``warmup`` is not shorter than the run.
    """
    block = train.embedding_optimizer
    return _OF_ROWS[block.name](**block.arguments).scheduled(schedule(train, total_steps))


def of_model(train: TrainBlock, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model's weights."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    block = train.dense_optimizer
    return _OF_MODEL[block.name](parameters, **block.arguments)


def schedule(train: TrainBlock, total_steps: int) -> LRSchedule:
    """Return the schedule of both learning rates.

    Raises:
        ConfigError: ``warmup`` is not shorter than the run.
    """
    if train.lr_schedule == "constant":
        return LRSchedule(warmup_steps=train.warmup)
    if train.warmup >= total_steps:
        raise ConfigError(
            f"train.warmup: {train.warmup} steps, but the run has {total_steps}",
            hint=f"set train.warmup to less than {total_steps}, or train for more steps",
        )
    return LRSchedule(train.lr_schedule, train.warmup, total_steps)


def of_torch(course: LRSchedule, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the same schedule for an optimizer of torch, which counts steps from 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: course(step + 1))


def advance(course: torch.optim.lr_scheduler.LambdaLR, *, skipped: int) -> None:
    """Advance a schedule by one step, without torch's warning about skipped first steps, which are counted on purpose.

    Args:
        course: The schedule.
        skipped: The number of steps that were skipped so far.
    """
    if not skipped:
        course.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        course.step()
