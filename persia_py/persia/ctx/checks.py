"""Checks of model inputs and losses, for cases in which torch raises no error or does not name the tensor."""

from typing import Any

import torch

from persia.checkpoint.policy import Checkpoints
from persia.distributed.options import DistributedBaseOption
from persia.embedding import EmbeddingConfig
from persia.embedding.listed import listed
from persia.embedding.optim import Optimizer
from persia.runtime.errors import FeatureTypeError, UsageError
from persia.runtime.logging import get_logger
from persia_core.config import EmbeddingConfig as Slots
from persia_core.forward import TrainingBatch

_logger = get_logger("ctx")

_EXACT = 2**24
"""Integers up to this value are exact in float32."""
_NODES = 1000
"""The maximum number of nodes of the graph of a loss that are searched for a broadcast."""


def named_error(
    error: RuntimeError,
    dense: list[torch.Tensor],
    names: list[str | None],
    embeddings: list[torch.Tensor],
    model: torch.nn.Module,
) -> RuntimeError | TypeError:
    """Return an error that names the tensors with a wrong dtype or device, or ``error`` if the cause is different.

    Args:
        error: The error of the model.
        dense: The dense inputs of the model.
        names: The names of the dense inputs.
        embeddings: The embeddings of the model.
        model: The model.
    """
    if "device" in str(error) and (found := _devices(dense, names, embeddings, model)):
        return UsageError(
            f"the model failed: {str(error).splitlines()[0]}; {found}",
            hint="move the model to the device of the batch: model.to(DEVICE) before the optimizer is created; or, to "
            "move batches to the GPU of the model, pass its number to the context: device_id=N",
        )
    others = [
        f"{titled('dense input', index, name)} is {_dtype(tensor)}"
        for index, (tensor, name) in enumerate(zip(dense, names, strict=True))
        if tensor.dtype != torch.float32
    ]
    text = str(error).splitlines()[0] if str(error) else ""
    if not others or not any(word in text for word in ("dtype", "scalar type", "expected m1 and m2")):
        return error
    return FeatureTypeError(
        f"the model failed: {text}; {listed(others)}. Give the model float32: "
        "NonIDTypeFeature(data.astype(np.float32)) where the batch is made, or tensor.float() in the model"
    )


def _devices(
    dense: list[torch.Tensor], names: list[str | None], embeddings: list[torch.Tensor], model: torch.nn.Module
) -> str:
    """Return the tensors on each device; empty if all are on one device."""
    places: dict[str, list[str]] = {}
    for index, (tensor, name) in enumerate(zip(dense, names, strict=True)):
        places.setdefault(str(tensor.device), []).append(titled("dense input", index, name))
    for tensor in embeddings[:1]:
        places.setdefault(str(tensor.device), []).append("embeddings")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        places.setdefault(str(tensor.device), []).append(f"the model's {name}")
    return "; ".join(f"on {place}: {listed(found, 3)}" for place, found in places.items()) if len(places) > 1 else ""


class LabelCheck:
    """Converts labels to floats if this is exact, and detects losses that broadcast labels."""

    def __init__(self) -> None:
        self._suspects: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._warned: set[str] = set()

    def forward(self, output: object, labels: list[torch.Tensor], names: list[str | None]) -> list[torch.Tensor]:
        """Return the labels. Integer labels with the shape of a float output are converted to floats.

        Args:
            output: The output of the model.
            labels: The labels of the batch.
            names: The names of the labels.
        """
        outputs = [output] if isinstance(output, torch.Tensor) else output if isinstance(output, list | tuple) else []
        tensors = [each for each in outputs if isinstance(each, torch.Tensor) and each.is_floating_point()]
        titles = [titled("label", index, name) for index, name in enumerate(names)]
        self._suspects = [
            (each, label, title)
            for each in tensors
            for label, title in zip(labels, titles, strict=True)
            if each.requires_grad and {each.dim(), label.dim()} == {1, 2} and each.numel() == label.numel() > 1
        ]
        return [self._convert(label, title, tensors) for label, title in zip(labels, titles, strict=True)]

    def _convert(self, label: torch.Tensor, title: str, outputs: list[torch.Tensor]) -> torch.Tensor:
        same = [each for each in outputs if each.shape == label.shape]
        if not same or label.is_floating_point():
            return label
        if label.dtype in (torch.int32, torch.int64) and bool(((label > _EXACT) | (label < -_EXACT)).any()):
            self._warn(
                f"{title} is {_dtype(label)} and has numbers beyond 2^24, which float32 does not hold exactly, so the "
                "label is not converted. Scale the label, and pass float32: Label(data.astype(np.float32))"
            )
            return label
        return label.to(torch.float64 if same[0].dtype == torch.float64 else torch.float32)

    def backward(self, loss: torch.Tensor) -> None:
        """Warn once if the loss compares every sample of an output with every label."""
        suspects, self._suspects = self._suspects, []
        for output, label, title in suspects:
            if _has_square(loss, output):
                batch = output.numel()
                self._warn(
                    f"{title} has shape {list(label.shape)} and the model's output {list(output.shape)}: the loss "
                    f"broadcasts them to {[batch, batch]} and compares all samples with all labels. Make the shapes "
                    "equal: Label(data.reshape(-1, 1)) where the batch is made, or output.reshape(labels[0].shape)"
                )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _logger.warning("%s", text)


def _has_square(loss: torch.Tensor, output: torch.Tensor) -> bool:
    """Return whether the graph has a tensor of shape ``[batch, batch]`` between an output and the loss."""
    square, seen, waiting = (output.numel(), output.numel()), {output.grad_fn}, [loss.grad_fn]
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(tuple(given.shape) == square for given in getattr(node, "_input_metadata", ())):
            return True
        waiting += [function for function, _ in node.next_functions]
    return False


def titled(kind: str, index: int, name: str | None) -> str:
    """Return the name of a dense input or a label for messages: its name, or its position in the batch."""
    return f"{kind} {index}" if name is None else f"{kind} {name!r}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class TruncatedSlots:
    """Logs a message once for each raw slot whose samples have more ids than positions."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, batch: TrainingBatch) -> None:
        """Log the truncated slots of a batch that have not been logged before."""
        for slot, truncated in zip(batch.slots, batch.truncated(), strict=True):
            if truncated and slot not in self._logged:
                self._logged.add(slot)
                _logger.warning(
                    "slot %r: some samples have more ids than sample_fixed_size (`last` in persia.yml), so only their "
                    "first ids are used; dropped ids in this batch: %d. Further dropped ids are counted in "
                    "ctx.engine.stats()['slots']",
                    slot,
                    truncated,
                )


def check_rows(given: object, where: str) -> None:
    """Check that the argument configures new rows. Slots, whose class has the same name, are refused."""
    if given is None or isinstance(given, EmbeddingConfig):
        return
    if isinstance(given, Slots):
        raise UsageError(
            f"{where}(embedding_config=...): found slots, such as features.embedding_config() returns; expected "
            "persia.embedding.EmbeddingConfig, which sets how rows are initialized",
            hint="do not pass slots here; set them with PERSIA_CONFIG=persia.yml in the environment",
        )
    raise UsageError(
        f"{where}(embedding_config=...): expected persia.embedding.EmbeddingConfig, found {type(given).__name__}"
    )


def check_training(given: dict[str, Any]) -> None:
    """Check the arguments of a :class:`persia.ctx.TrainCtx`, by name.

    Raises:
        UsageError: An argument has a class or value that is not allowed.
    """
    classes: dict[str, tuple[type, str, bool]] = {
        "embedding_optimizer": (Optimizer, "an optimizer of persia.embedding.optim", False),
        "dense_optimizer": (torch.optim.Optimizer, "a torch.optim.Optimizer", False),
        "distributed_option": (DistributedBaseOption, "an option of persia.distributed", True),
        "checkpoints": (Checkpoints, "persia.ctx.Checkpoints", True),
    }
    for name, (kind, wanted, optional) in classes.items():
        if not isinstance(given[name], kind) and not (optional and given[name] is None):
            raise UsageError(f"TrainCtx({name}=...): expected {wanted}, found {type(given[name]).__name__}")
    choices = {"embedding_gradient_scale": ("mean", "none"), "nonfinite": ("raise", "skip")}
    for name, (first, second) in choices.items():
        if given[name] not in (first, second):
            raise UsageError(f"TrainCtx({name}={given[name]!r}): expected {first!r} or {second!r}")
    if given["grad_scalar_update_factor"] < 1:
        raise UsageError(
            f"TrainCtx(grad_scalar_update_factor={given['grad_scalar_update_factor']}): must be at least 1"
        )
    limit = given["clip_norm"]
    if limit is not None and not limit > 0:
        raise UsageError(f"TrainCtx(clip_norm={limit}): must be a number above 0, or None")
