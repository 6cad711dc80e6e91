"""Optimizers and learning-rate schedules of a configuration."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from persia.config.blocks import OptimizerBlock, TrainBlock
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.embedding.schedule import LRSchedule
from persia.runtime.errors import ConfigError

NEW_ROWS = EmbeddingConfig((-0.05, 0.05))
"""New rows of features without ``init``, as in :class:`persia.nn.EmbeddingCollection`."""

_OF_ROWS: dict[str, Callable[..., Optimizer]] = {"adagrad": Adagrad, "adam": Adam, "sgd": SGD}
_OF_MODEL: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def adagrad_defaults(batch_size: int) -> dict[str, Any]:
    """Return what an ``adagrad`` of rows has where the configuration says nothing.

    The accumulator is small beside a squared gradient. The gradient of a mean over the batch is inversely proportional
    to the batch size B, so it is ``1e-6 * (256 / B) ** 2`` (docs/tables.md, "What to tune first").
    """
    return {"lr": 0.1, "initial_accumulator_value": 1e-6 * (256 / batch_size) ** 2, "vectorwise_shared": True}


def optimizer_of_rows(train: TrainBlock, batch_size: int) -> dict[str, Any]:
    """Return the name and the arguments of the optimizer of rows, with the defaults of ``adagrad``."""
    block = train.embedding_optimizer
    defaults = adagrad_defaults(batch_size) if block.name == "adagrad" else {}
    return {"name": block.name, **defaults, **block.arguments}


def of_rows(train: TrainBlock, batch_size: int, total_steps: int) -> Optimizer:
    """Return the optimizer of rows, with the schedule.

    Raises:
        ConfigError: The optimizer is unknown, or an argument does not fit.
    """
    block = OptimizerBlock(**optimizer_of_rows(train, batch_size))
    made: Optimizer = _make("train.embedding_optimizer", block, _OF_ROWS)
    return made.scheduled(schedule(train, total_steps))


def of_model(train: TrainBlock, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model's weights.

    With ``clip_norm`` their gradients are scaled down to that norm before each step, after all of them were found to be
    finite (Pascanu, Mikolov and Bengio 2013, algorithm 1).

    Raises:
        ConfigError: The optimizer is unknown, or an argument does not fit.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: torch.optim.Optimizer = _make("train.dense_optimizer", train.dense_optimizer, _OF_MODEL, parameters)
    if (limit := train.clip_norm) is not None:
        made.register_step_pre_hook(lambda *_: _clip(parameters, limit))
    return made


def _clip(parameters: list[torch.nn.Parameter], limit: float) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, limit)


def schedule(train: TrainBlock, total_steps: int) -> LRSchedule:
    """Return the course of both learning rates.

    Raises:
        ConfigError: ``warmup`` is as long as the run.
    """
    if train.lr_schedule == "constant":
        return LRSchedule(warmup_steps=train.warmup)
    if train.warmup >= total_steps:
        raise ConfigError(f"train.warmup: {train.warmup} steps, but the run has {total_steps}; give fewer")
    return LRSchedule(train.lr_schedule, train.warmup, total_steps)


def of_torch(course: LRSchedule, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the same course for an optimizer of torch, which counts steps from 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: course(step + 1))


def _make(key: str, block: OptimizerBlock, known: Mapping[str, Callable[..., Any]], *first: Any) -> Any:
    if block.name not in known:
        raise ConfigError(f"{key}.name: {block.name!r}, want one of {', '.join(known)}")
    make = known[block.name]
    arguments = block.arguments
    check_arguments(key, make, arguments, block.name, skip=len(first))
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return make(*first, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {block.name}: {error}") from error


def check_arguments(key: str, make: Callable[..., Any], arguments: Mapping[str, Any], name: str, skip: int = 0) -> None:
    """Check that a function takes arguments of these names.

    Args:
        key: The key of the configuration, for the message.
        make: The function or class.
        arguments: The arguments by name.
        name: Its name in the message.
        skip: The number of positional arguments that are given beside them.

    Raises:
        ConfigError: It does not take one; the message names all of those.
    """
    parameters = [*inspect.signature(make).parameters.values()][skip:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    allowed = [each.name for each in parameters]
    wrong = [argument for argument in arguments if argument not in allowed]
    if wrong:
        listed = "; ".join(_unknown(f"{key}.{argument}", argument, allowed) for argument in wrong)
        raise ConfigError(f"{listed}; {name} has {', '.join(allowed) or 'no arguments'}")


def _unknown(place: str, argument: str, allowed: list[str]) -> str:
    near = get_close_matches(argument, allowed, 1)
    return f"{place}: unknown" + (f", did you mean {near[0]!r}?" if near else "")
