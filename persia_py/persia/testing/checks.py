"""Runs each method of a model alone, on a synthetic batch."""

import copy
import io
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from persia.config import Config, load_config
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding.config import Configuration
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.listed import listed
from persia.embedding.optim import Adagrad
from persia.features import Features
from persia.runtime.errors import DataError, NonFiniteError, UsageError
from persia.runtime.logging import get_default_logger
from persia.runtime.settings import reload_env
from persia.testing.report import Report, Steps
from persia.trainer import models
from persia.trainer.objective import Objective

BATCH = 32
"""The number of rows of the synthetic batch."""
_IDS = 100
_SEED = 0
_JOB = ("PERSIA_NATS_URL", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that would make the check a rank of a job."""


Model = torch.nn.Module | Callable[[], torch.nn.Module] | None


def check(model: Model, config: "Config | Features | str | os.PathLike[str]") -> Report:
    """Run each method of a model alone: build, forward, loss, backward, eval, state_dict.

    Rows are kept in this process, even if ``PERSIA_NATS_URL`` is set. The weights of a model that is passed are
    restored afterwards.

    Args:
        model: The model, called as ``model(non_id_tensors, embedding_tensors)``; or a callable without arguments that
            creates it, such as a class; None means the model of the configuration.
        config: A configuration, the path of a ``persia.yml``, or features, for which ``model`` must be given.

    Returns:
        The report. It ends with the step that failed.

    Raises:
        ConfigError: The configuration has errors.
        UsageError: There is no model, or ``config`` has another type.
    """
    given = _Given.of(config)
    if model is None and given.config is None:
        raise UsageError("persia.testing.check(None, features): pass a model; features have no `model` block")
    with _embedded():
        return _Check(given).run(model)


def check_alone(model: Model, config: "Config | str | os.PathLike[str]") -> Report:
    """Run a model with torch alone: build, forward, loss, backward. Embeddings are random tensors.

    Args:
        model: As in :func:`check`.
        config: A configuration, or the path of a ``persia.yml``.

    Returns:
        The report. It ends with the step that failed.
    """
    given = _Given.of(config)
    steps = Steps()
    if given.config is None:
        raise UsageError(
            "persia.testing.check_alone: found features, expected a configuration or the path of a persia.yml"
        )
    with torch.random.fork_rng(devices=[]), steps.until_failure():
        torch.manual_seed(_SEED)
        with steps.step("build"):
            made = _made(model, given)
        inputs = models.inputs_of(given.config)
        dense = [torch.randn(BATCH, len(inputs.dense))] if inputs.dense else []
        embeddings = [
            torch.randn(*_shape(given.config, inputs, slot, dim), requires_grad=True)
            for slot, dim in zip(inputs.slots, inputs.dims, strict=True)
        ]
        with steps.step("forward"):
            output = made(dense, embeddings)
        objective = Objective(given.features.labels)
        labels = [torch.from_numpy(each) for each in _labels(given.features)]
        with steps.step("loss"):
            loss = _finite(objective(objective.outputs(output), labels))
        with steps.step("backward"):
            torch.autograd.backward(loss)
    return steps.report()


def _shape(config: Config, inputs: models.Inputs, slot: str, dim: int) -> tuple[int, ...]:
    """Return the shape in which the model receives a feature."""
    if slot in inputs.sequences:
        return BATCH, int(config.features[slot]["last"]), dim + 1
    return BATCH, dim


@dataclass(frozen=True)
class _Given:
    """The inputs of a check."""

    config: Config | None
    features: Features
    described: str

    @classmethod
    def of(cls, given: "Config | Features | str | os.PathLike[str]") -> "_Given":
        if isinstance(given, str | os.PathLike):
            given = load_config(given)
        if isinstance(given, Config):
            if not given.is_located:
                raise UsageError(
                    "persia.testing: the configuration was made by a program; write it into a file, and pass its path"
                )
            return cls(given, given.compiled, given.described)
        if isinstance(given, Features):
            return cls(None, given, repr(given.embedding_config().slots))
        raise UsageError(f"persia.testing: expected a configuration, a path or features, found {type(given).__name__}")


@contextmanager
def _embedded() -> Iterator[None]:
    """Within the block, keep rows in this process, regardless of the surrounding job, and log only errors."""
    before = {name: os.environ.pop(name) for name in _JOB if name in os.environ}
    if before:
        reload_env()
    logger = get_default_logger()
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))  # the log of a training loop with a single batch is not useful
    try:
        yield
    finally:
        logger.setLevel(level)
        if before:
            os.environ.update(before)
            reload_env()


class _Batches(IterableDataset):
    """A data set with one synthetic batch."""

    def __init__(self, batch: PersiaBatch) -> None:
        super().__init__(buffer_size=1)
        self._batch = batch

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield self._batch


class _Check:
    def __init__(self, given: _Given) -> None:
        self._given = given
        self._objective = Objective(given.features.labels)
        self._steps = Steps()

    def run(self, model: Model) -> Report:
        with torch.random.fork_rng(devices=[]), self._steps.until_failure():
            torch.manual_seed(_SEED)
            with self._steps.step("build"):
                made = _made(model, self._given)
                before, trains = copy.deepcopy(made.state_dict()), made.training
            try:
                self._methods(made)
            finally:
                made.train(trains)
                if before.keys() == made.state_dict().keys():
                    made.load_state_dict(before)
        return self._steps.report()

    def _methods(self, model: torch.nn.Module) -> None:
        given, step = self._given, self._steps.step
        slots = Configuration.of_slots(given.features.embedding_config(), given.described, "the features")
        with step("build"):
            parameters = [*model.parameters()]
            if not parameters:
                raise UsageError(
                    "the model has no parameters, but TrainCtx needs a dense optimizer",
                    hint="add a layer to the model, or train the rows alone with EmbeddingCollection",
                )
            optimizer = torch.optim.SGD(parameters, lr=1e-3)
            context = TrainCtx(Adagrad(lr=0.05), optimizer, mixed_precision=False, model=model, configuration=slots)
        self._steps.done.pop()  # this step and the earlier creation of the model count as one step
        gradients: dict[int | str, float] = {}
        with context as ctx, _watched(model, gradients):
            for batch in DataLoader(_Batches(_batch(given.features))):
                with step("forward"):
                    output, labels = ctx.forward(batch)
                with step("loss"):
                    loss = _finite(self._objective(self._objective.outputs(output), labels))
                    if not loss.requires_grad:
                        raise UsageError("the loss does not depend on the model; check that its output is not detached")
                with step("backward"):
                    ctx.backward(loss)
            self._warn(model, gradients)
            with step("eval"):
                scores = self._scores(model)
                if any(not torch.equal(one, other) for one, other in zip(scores, self._scores(model), strict=True)):
                    self._steps.warnings.append(
                        "two evaluations of one batch differ: the scores in eval mode are random"
                    )
            with step("state_dict"):
                self._save(model, scores)

    def _warn(self, model: torch.nn.Module, gradients: "dict[int | str, float]") -> None:
        """Record warnings about features and parameters without a gradient."""
        idle = [name for name, each in model.named_parameters() if each.requires_grad and name not in gradients]
        if idle:
            self._steps.warnings.append(f"parameters without a gradient: {listed(idle)}")
        slots = self._given.features.embedding_config().slots
        unused = [slot for place, slot in enumerate(slots) if not gradients.get(place)]
        if unused:
            self._steps.warnings.append(f"features whose embeddings get no gradient: {listed(unused)}")

    def _scores(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Evaluate the model on the batch."""
        with eval_ctx(model=model) as ctx:
            output, _ = ctx.forward(_batch(self._given.features, trains=False))
        return [part.detach().clone() for part in self._objective.outputs(output)]

    def _save(self, model: torch.nn.Module, scores: list[torch.Tensor]) -> None:
        """Save the model's state, load it again, and compare the outputs of the model."""
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # weights that are missing in the state dict keep the changed values
        model.load_state_dict(loaded)
        again = self._scores(model)
        if any(not torch.allclose(one, other, equal_nan=True) for one, other in zip(scores, again, strict=True)):
            raise DataError(
                "the model returns different scores after its state dict was loaded: a weight is missing from the "
                "state dict, or the scores in eval mode are random"
            )


@contextmanager
def _watched(model: torch.nn.Module, gradients: "dict[int | str, float]") -> Iterator[None]:
    """Record the largest gradient of each embedding tensor, by its position, and of each parameter, by its name."""

    def note(place: int | str) -> Callable[[torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            gradients[place] = max(gradients.get(place, 0.0), float(gradient.abs().max()))

        return keep

    def hook(tensor: Any, place: int | str) -> Any:
        return tensor.register_hook(note(place))

    def attach(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        del module
        for place, tensor in enumerate(arguments[1] if len(arguments) > 1 else ()):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                hook(tensor, place)

    handles: list[Any] = [model.register_forward_pre_hook(attach)]
    handles += [hook(each, name) for name, each in model.named_parameters() if each.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _made(model: Model, given: _Given) -> torch.nn.Module:
    if model is None and given.config is not None:
        return models.build(given.config)
    if isinstance(model, torch.nn.Module):
        return model
    made: object = model() if callable(model) else model
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"persia.testing: expected a torch.nn.Module as the model, found {type(made).__name__}")
    return made


def _batch(features: Features, *, trains: bool = True) -> PersiaBatch:
    """Return a synthetic batch: one to three ids for each sample and feature."""
    random = np.random.default_rng(_SEED)
    kinds = dict(features.types)
    ids = [
        IDTypeFeature(slot, [random.integers(0, _IDS, 1 + row % 3, dtype=np.uint64) for row in range(BATCH)])
        for slot in features.embedding_config().slots
    ]
    width = sum(kind == "dense" for kind in kinds.values())
    dense = [NonIDTypeFeature(random.standard_normal((BATCH, width), dtype=np.float32))] if width else []
    labels = [Label(each) for each in _labels(features)] if trains else None
    return PersiaBatch(ids, dense, labels, requires_grad=trains)


def _labels(features: Features) -> list[Any]:
    """Return an array ``[batch, 1]`` for each label: alternating 0 and 1, or other numbers."""
    alternating = (np.arange(BATCH) % 2).astype(np.float32)[:, None]
    numbers = np.linspace(-1, 1, BATCH, dtype=np.float32)[:, None]
    return [alternating.copy() if kind == "bce" else numbers.copy() for _, _, kind in features.labels]


def _finite(loss: torch.Tensor) -> torch.Tensor:
    if loss.numel() != 1 or not math.isfinite(loss.item()):
        raise NonFiniteError(
            f"the loss is {loss.detach().flatten()[:3].tolist()}, expected one finite number",
            hint="inspect the forward pass of the model for an operation that returns NaN or infinity",
        )
    return loss
