"""The model of a configuration: a built-in model by name, or a class of the user."""

import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from persia.config import Config
from persia.embedding.config import Configuration
from persia.embedding.data import split_mask
from persia.models import DLRM, AutoInt, DCNv2, Tiny
from persia.runtime import own_frames
from persia.runtime.errors import ConfigError


@dataclass(frozen=True)
class Inputs:
    """The parts of a batch that a model receives, in order.

    Attributes:
        dense: The names of the dense columns.
        slots: The names of the features with an embedding.
        dims: The dimension of each slot.
        sequences: The slots that arrive as ``[batch, last, dim + 1]``.
        labels: The names of the labels.
    """

    dense: list[str]
    slots: list[str]
    dims: list[int]
    sequences: list[str]
    labels: list[str]


def slots_of(config: Config) -> Configuration:
    """Return the slots and tables of a configuration, for a context."""
    embedding = config.compiled.embedding_config()
    return Configuration.of_slots(embedding, config.described, "the features of persia.yml")


def inputs_of(config: Config) -> Inputs:
    """Return the inputs of the model of a configuration."""
    types = dict(config.compiled.types)
    slots = config.compiled.embedding_config().slots
    return Inputs(
        dense=[name for name, kind in types.items() if kind == "dense"],
        slots=slots,
        dims=[int(config.features[slot]["dim"]) for slot in slots],
        sequences=[slot for slot in slots if types[slot] == "sequence"],
        labels=[name for name, _, _ in config.compiled.labels],
    )


class PooledSequences(torch.nn.Module):
    """A model that accepts only pooled embeddings: each sequence is replaced by the mean of its rows.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the model's output.

        Args:
            non_id_tensors: The dense inputs.
            embedding_tensors: ``[batch, dim]``, or ``[batch, last, dim + 1]`` for a sequence.
        """
        pooled = [_mean(each) if each.dim() == 3 else each for each in embedding_tensors]
        output: torch.Tensor = self.model(non_id_tensors, pooled)
        return output


def _mean(raw: torch.Tensor) -> torch.Tensor:
    rows, mask = split_mask(raw)
    present = mask.unsqueeze(-1).to(rows.dtype)
    return (rows * present).sum(1) / present.sum(1).clamp(min=1)


def build(config: Config) -> torch.nn.Module:
    """Return the model of the ``model`` block, with random weights from torch's generator.

    Built-in models receive the mean of the rows of a sequence.

    Raises:
        ConfigError: The class cannot be imported, or the model refuses an argument.
    """
    inputs = inputs_of(config)
    block = config.model
    if block.class_ is not None:
        return _own(config, block.class_, inputs)
    model = _MADE[block.name or "dcnv2"](config, inputs, block.arguments)
    return PooledSequences(model) if inputs.sequences else model


def _dlrm(config: Config, inputs: Inputs, arguments: dict[str, Any]) -> torch.nn.Module:
    dim = inputs.dims[0]  # the dimension is equal for all features, as persia.config has checked
    given = {"num_dense": len(inputs.dense), "num_slots": len(inputs.slots), "embedding_dim": dim}
    defaults = {"bottom_mlp": [64, dim], "top_mlp": [256, 64, len(inputs.labels)], "num_labels": len(inputs.labels)}
    return _make(config, DLRM, "dlrm", {**given, **defaults, **arguments})


def _dcnv2(config: Config, inputs: Inputs, arguments: dict[str, Any]) -> torch.nn.Module:
    given = {"num_dense": len(inputs.dense), "embedding_dims": inputs.dims, "num_labels": len(inputs.labels)}
    return _make(config, DCNv2, "dcnv2", {**given, **arguments})


def _autoint(config: Config, inputs: Inputs, arguments: dict[str, Any]) -> torch.nn.Module:
    given = {"num_dense": len(inputs.dense), "embedding_dims": inputs.dims, "num_labels": len(inputs.labels)}
    return _make(config, AutoInt, "autoint", {**given, **arguments})


def _tiny(config: Config, inputs: Inputs, arguments: dict[str, Any]) -> torch.nn.Module:
    given = {"num_dense": len(inputs.dense), "embedding_dims": inputs.dims, "num_labels": len(inputs.labels)}
    return _make(config, Tiny, "tiny", {**given, **arguments})


_MADE = {"autoint": _autoint, "dcnv2": _dcnv2, "dlrm": _dlrm, "tiny": _tiny}


def _make(
    config: Config, make: Callable[..., torch.nn.Module], name: str, arguments: dict[str, Any]
) -> torch.nn.Module:
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        # The built-in models list all their errors.
        mistakes = str(error).split("; ") if config.model.class_ is None else [str(error)]
        frames = own_frames.own_frames(error.__traceback__)
        at = f" (at {own_frames.place(frames[0])})" if frames and config.model.class_ is not None else ""
        raise _refused(config, [f"{_placed(config, name, each)}{at}" for each in mistakes]) from error


def _refused(config: Config, mistakes: list[str]) -> ConfigError:
    """Return the error for a model that cannot be constructed; `persia config check` constructs no model."""
    place = config.origin.places.get("model", "")
    file = "persia.yml" if not place or place.startswith("--set") else place.rpartition(":")[0]
    hint = f"correct each error, then run: python -m persia.testing {shlex.quote(file)}"
    return ConfigError("\n".join(mistakes), hint=hint)


def _placed(config: Config, name: str, message: str) -> str:
    """Return an error with the place of the argument that it mentions, or with that of the block."""
    places, found = config.origin.places, dict[int, tuple[str, str]]()
    for key in config.model.arguments:
        if mentioned := re.search(rf"(?<![\w.]){re.escape(key)}(\[\d+\])?(?!\w)", message):
            found[mentioned.start()] = f"model.{key}", f"model.{key}{mentioned[1] or ''}"
    key, path = found[min(found)] if found else ("model", "model")
    place = places.get(path) or places.get(key)
    return (f"{place}: " if place else "") + f"{path}: {name}: {message}"


def _own(config: Config, place: str, inputs: Inputs) -> torch.nn.Module:
    """Return a model of the user's class, passing values of :class:`Inputs` for its arguments."""
    kind = _import(config, place)
    known = {
        "num_dense": len(inputs.dense),
        "num_slots": len(inputs.slots),
        "embedding_dims": inputs.dims,
        "num_labels": len(inputs.labels),
        "inputs": inputs,
    }
    parameters = inspect.signature(kind).parameters
    wanted = {name: value for name, value in known.items() if name in parameters}
    _check_arguments(config, place, [*parameters.values()])
    model = _make(config, kind, place, {**wanted, **config.model.arguments})
    if not isinstance(model, torch.nn.Module):
        raise _refused(config, [f"model.class: {place}: expected a torch.nn.Module, found {type(model).__name__}"])
    return model


def _check_arguments(config: Config, place: str, parameters: list[inspect.Parameter]) -> None:
    """Check the names of arguments, which :mod:`persia.config` cannot check if a class's source does not show them."""
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    allowed = [each.name for each in parameters]
    listed = f"the arguments are {', '.join(allowed)}" if allowed else "it takes no arguments"
    if wrong := [argument for argument in config.model.arguments if argument not in allowed]:
        raise _refused(config, [_placed(config, place, f"`{each}` is not an argument; {listed}") for each in wrong])


def _import(config: Config, place: str) -> Callable[..., torch.nn.Module]:
    module, _, name = place.partition(":")
    if not module or not name:
        raise ConfigError(f"model.class: found {place!r}, expected module:Class")
    folder = str(config.folder)
    sys.path.insert(0, folder)
    try:
        imported = importlib.import_module(module)
        found = getattr(imported, name, None)
    except ModuleNotFoundError as error:
        hint = f"correct model.class, or move the module into {folder}"
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            name = error.name.partition(".")[0]
            hint = (
                f"install what {module} imports: pip install {name}; or, if {name} is your own module, move it into "
                f"{folder}"
            )
        text = f"model.class: {place}: {error}; modules are searched for in {folder} and on sys.path"
        raise ConfigError(text, hint=hint) from error
    finally:
        sys.path.remove(folder)
    if found is None:
        file = getattr(imported, "__file__", None) or "built in"
        raise ConfigError(f"model.class: {place}: module {module} ({file}) has no {name}")
    kind: Callable[..., torch.nn.Module] = found
    return kind


def count_parameters(config: Config) -> int:
    """Return the number of weights of the model of a configuration, not counting embedding rows."""
    return sum(parameter.numel() for parameter in build(config).parameters())
