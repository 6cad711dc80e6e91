"""Digests of the tensors of each step, which show where two runs, or two ranks, begin to differ.

With ``PERSIA_DIGEST=N`` every rank writes ``rank-R.csv`` in :func:`folder`: one line ``step,name,md5,norm`` for each
tensor of every N-th step, in the order in which a step computes them. ``persia debug digest --diff A B`` compares two
such files, or two folders of them.
"""

import contextlib
import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from persia.distributed.wrapped import trained_module
from persia.loop.finite import StepTensors, is_sharded, local_part
from persia.runtime import flight, job
from persia.runtime.errors import StorageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia_core.forward import Tensor, TrainingBatch

COLUMNS = ("step", "name", "md5", "norm")
SHARED = ("parameter/", "gradient/")
"""Tensors that are equal on all ranks. All other tensors depend on the batch of each rank."""

Named = Iterable[tuple[str, torch.Tensor | None]]

_logger = get_logger("digest")


def md5_of(tensor: torch.Tensor) -> str:
    """Return the MD5 of the bytes of a tensor, in the order of its elements.

    For a sharded tensor, return the MD5 of this rank's shard.
    """
    content = local_part(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.md5(content.numpy().data, usedforsecurity=False).hexdigest()


def norm_of(tensor: torch.Tensor) -> float:
    """Return the L2 norm of a tensor, computed in float64."""
    return float(torch.linalg.vector_norm(tensor.detach().to("cpu", torch.float64)))


class Digests:
    """Writes the digests of one rank. The file of an earlier run in the folder is kept as ``rank-R-previous.csv``.

    Args:
        folder: The folder of the files; it is created if it does not exist.
        rank: The rank.
        every: The interval between recorded steps.

    Attributes:
        newest: The latest digests, by the name of the tensor.

    Raises:
        StorageError: The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, every: int) -> None:
        self.newest: dict[str, str] = {}
        self._every = every
        self._path = folder / f"rank-{rank}.csv"
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._path.replace(previous := folder / f"rank-{rank}-previous.csv")
                _logger.info("renamed the digests of an earlier start to %s", previous)
            self._append([COLUMNS])

    def due(self, step: int) -> bool:
        """Whether the tensors of ``step`` must be recorded."""
        return step % self._every == 0

    def record(self, step: int, tensors: Named) -> None:
        """Write a line for each tensor, in the given order. A missing gradient (None) gets no line.

        Raises:
            StorageError: The file cannot be written.
        """
        found = {name: tensor for name, tensor in tensors if tensor is not None}
        self.newest = {name: md5_of(tensor) for name, tensor in found.items()}
        lines = [(step, name, self.newest[name], f"{norm_of(tensor):.9g}") for name, tensor in found.items()]
        with self._writing():
            self._append(lines)

    def _append(self, lines: Iterable[Sequence[object]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write the digests (PERSIA_DIGEST) to {self._path}: {error.strerror}") from error


class Weights:
    """The weights of a model and their gradients.

    If they are sharded, every rank must call the methods, which gather them.

    Args:
        model: The model; None has no weights.
        step: The step, for the flight recorder.
    """

    def __init__(self, model: torch.nn.Module | None, step: int) -> None:
        self._named = [] if model is None else list(trained_module(model).named_parameters())
        self._step = step

    def parameters(self) -> Named:
        """Yield the weights."""
        return ((f"parameter/{name}", self._whole(each)) for name, each in self._named)

    def gradients(self) -> Named:
        """Yield the gradients; None for a weight without a gradient."""
        return ((f"gradient/{name}", self._whole(each.grad)) for name, each in self._named)

    def _whole(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or not is_sharded(tensor):
            return tensor
        with flight.Call(flight.COLLECTIVE, self._step, "digests"):
            whole: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return whole


_current: Digests | None = None


def folder() -> Path:
    """Return ``PERSIA_DIGEST_DIR``, else ``digest`` in ``PERSIA_RUN_DIR`` if it is set, or in the working directory."""
    if settings.digest_dir is not None:
        return Path(settings.digest_dir)
    return job.run_dir() / "digest" if settings.run_dir is not None else Path("digest")


def current() -> Digests | None:
    """Return the digests that this process writes; None if ``PERSIA_DIGEST`` is not set."""
    global _current
    if _current is None and settings.digest_every:
        _current = Digests(folder(), settings.rank, settings.digest_every)
    return _current


def record_step(
    batch: TrainingBatch,
    loss: torch.Tensor,
    embeddings: Sequence[torch.Tensor],
    known: Callable[[], StepTensors],
) -> None:
    """Record a step after its back-propagation, before model and rows change.

    If weights are sharded, every rank must call this.

    Args:
        batch: The batch of the step.
        loss: The loss of the step, summed over its micro-batches.
        embeddings: The looked-up vectors, with their gradients.
        known: Returns the tensors of the step, including the model with its gradients.
    """
    if (digests := current()) is not None and digests.due(batch.step):
        weights = Weights(known().model, batch.step)
        digests.record(batch.step, _tensors(batch, loss, embeddings, weights))


def record_push(batch: TrainingBatch, gradients: Sequence[torch.Tensor | None]) -> None:
    """Record the look-up and the push of a step of an EmbeddingCollection."""
    if (digests := current()) is not None and digests.due(batch.step):
        looked = map(from_dlpack, batch.embeddings())
        digests.record(batch.step, [*_each("lookup", batch.slots, looked), *_each("push", batch.slots, gradients)])


def _tensors(
    batch: TrainingBatch, loss: torch.Tensor, embeddings: Sequence[torch.Tensor], weights: Weights
) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from weights.parameters()
    yield from _each("dense", _names(batch.dense_names), _given(batch.dense()))
    yield from _each("label", _names(batch.label_names), _given(batch.labels()))
    yield from _each("lookup", batch.slots, embeddings)
    yield "loss", loss
    yield from weights.gradients()
    yield from _each("push", batch.slots, [tensor.grad for tensor in embeddings])


def _each(
    kind: str, names: Iterable[str], tensors: Iterable[torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    return ((f"{kind}/{name}", tensor) for name, tensor in zip(names, tensors, strict=True))


def _names(names: Sequence[str | None]) -> list[str]:
    return [str(index) if name is None else name for index, name in enumerate(names)]


def _given(tensors: Sequence[Tensor]) -> Iterator[torch.Tensor]:
    return map(from_dlpack, tensors)
