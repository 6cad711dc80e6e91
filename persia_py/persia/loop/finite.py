"""Finds NaN and infinity in a step: the first tensor in the order of the computation, with its sample and ids."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from persia.backend.base import NonFiniteTensor
from persia_core import backward as _core

MAX_IDS = 5
"""The maximum number of a sample's ids that a message lists."""

Named = tuple[str, torch.Tensor]
"""A tensor, and its name in messages."""


class Output(NamedTuple):
    """An output of the model.

    Attributes:
        name: The name of the output in messages.
        tensor: The output.
        first: The index in the batch of the first row's sample; above 0 in a micro-batch.
    """

    name: str
    tensor: torch.Tensor
    first: int = 0


Ids = Callable[[str, int], list[int]]
"""Returns the ids of a sample of a slot."""


def no_ids(slot: str, sample: int) -> list[int]:
    """Return an empty list, for batches whose ids are unknown."""
    del slot, sample
    return []


@dataclass
class StepTensors:
    """The tensors of a step, without gradients. The object exists from a forward pass to the backward pass.

    Attributes:
        model: The model, as the script made it.
        ids: Returns the ids of a sample.
        slots: The embedding tensors, with the names of their slots.
        dense: The dense inputs.
        labels: The labels.
        outputs: The outputs of the model, one for each micro-batch.
    """

    model: torch.nn.Module | None = None
    ids: Ids = no_ids
    slots: list[Named] = field(default_factory=list)
    dense: list[Named] = field(default_factory=list)
    labels: list[Named] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def by_size(self, optimizer: torch.optim.Optimizer) -> Iterator[Named]:
        """Yield all tensors with their names, including the gradients and optimizer states of the weights."""
        yield from ((f"embeddings of slot {slot}", rows) for slot, rows in self.slots)
        yield from (*self.dense, *self.labels, *((each.name, each.tensor) for each in self.outputs))
        for name, weight in [] if self.model is None else self.model.named_parameters():
            yield f"weight {name}", weight
            if weight.grad is not None:
                yield f"gradient of {name}", weight.grad
            for key, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value


def named_outputs(output: object) -> Iterator[Named]:
    """Yield the tensors in a model's output: a tensor, or a list, tuple or dictionary of them."""
    if isinstance(output, torch.Tensor):
        yield "the model's output", output
    elif isinstance(output, dict):
        yield from ((f"the model's output {key!r}", each) for key, each in output.items() if _is_tensor(each))
    elif isinstance(output, list | tuple):
        yield from ((f"the model's output {index}", each) for index, each in enumerate(output) if _is_tensor(each))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def first_nonfinite_index(tensor: torch.Tensor) -> int | None:
    """Return the position of the first NaN or infinity in a tensor, counted row by row.

    Return None if all elements are finite.
    """
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous():
        return _core.first_nonfinite(tensor.detach())
    places = torch.isfinite(tensor.detach()).logical_not().flatten().nonzero()
    return int(places[0]) if len(places) else None


def at_sample(what: str, tensor: torch.Tensor, index: int, ids: list[int], first: int = 0) -> str:
    """Return ``WHAT, sample 3 (id 17), is nan`` for a position in a tensor whose first dimension is the sample.

    The first row of the tensor is sample ``first`` of the batch.
    """
    value = tensor.detach().flatten()[index].item()
    if tensor.dim() == 0:
        return f"{what} is {value}"
    listed = ", ".join(map(str, ids[:MAX_IDS])) + (", …" if len(ids) > MAX_IDS else "")
    shown = f" (id{'s' if len(ids) > 1 else ''} {listed})" if ids else ""
    return f"{what}, sample {first + index // tensor[0].numel()}{shown}, is {value}"


def first_before_loss(tensors: StepTensors) -> NonFiniteTensor | None:
    """Return the first non-finite tensor among a step's rows, inputs, labels, weights and outputs, if any."""
    for slot, rows in tensors.slots:
        if (index := first_nonfinite_index(rows)) is not None:
            found = tensors.ids(slot, index // rows[0].numel())
            return NonFiniteTensor(at_sample(f"the looked-up row of slot {slot!r}", rows, index, found))
    if (given := _first_of(Output(*each) for each in (*tensors.dense, *tensors.labels))) is not None:
        return given
    for name, weight in [] if tensors.model is None else tensors.model.named_parameters():
        local = local_part(weight)
        if local.is_floating_point() and not torch.isfinite(local).all():
            return NonFiniteTensor(f"the weight {name!r} of the model, shape {tuple(weight.shape)}, is not finite")
    return _first_of(tensors.outputs)


def _first_of(tensors: Iterable[Output]) -> NonFiniteTensor | None:
    for name, tensor, first in tensors:
        if tensor.is_floating_point() and (index := first_nonfinite_index(tensor)) is not None:
            return NonFiniteTensor(at_sample(name, tensor, index, [], first))
    return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; return any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank has only a part of a tensor."""
    return hasattr(tensor, "to_local")
