"""Agreements of the ranks on failures, NaN and settings. ``TrainingLoop._agree_on_step`` has those on steps."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from persia.backend.base import NonFiniteTensor
from persia.distributed.control_plane import Peers
from persia.distributed.wrapped import check_averaged
from persia.embedding.optim import Optimizer
from persia.runtime import errors, flight, watchdog
from persia.runtime.errors import ConfigError, PersiaError, UsageError

_KEPT = 4096
"""The maximum number of characters of an error that are sent to the other ranks."""


@contextlib.contextmanager
def together(peers: Peers | None, what: str) -> Iterator[None]:
    """Run the block on every rank, with a barrier at its end.

    If the block fails on one rank, every rank raises an error. On the other ranks, the error has the message and hint
    of the first rank that failed, and the most specific class of its error that :mod:`persia.runtime.errors` has.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # any error, because the other ranks wait for the outcome
        failed = error
    if peers is not None:
        hint = getattr(failed, "hint", "")
        mine = None if failed is None else [_known_class(failed), str(failed)[:_KEPT], str(hint)[:_KEPT]]
        failures = peers.all_gather(what, mine)
        if failed is None and any(failures):
            rank, (kind, text, hint) = next((rank, each) for rank, each in enumerate(failures) if each)
            raise getattr(errors, kind, PersiaError)(f"rank {rank}: {text}", hint=hint)
    if failed is not None:
        raise failed


def _known_class(error: Exception) -> str:
    """Return the name of the most specific class of ``error`` that :mod:`persia.runtime.errors` has."""
    return next((each.__name__ for each in type(error).__mro__ if each.__name__ in errors.__all__), "PersiaError")


@contextlib.contextmanager
def collective(peers: Peers | None) -> Iterator[None]:
    """Enclose a collective of torch. If it fails, the error names the lost rank."""
    try:
        with watchdog.collective(), contextlib.nullcontext() if peers is None else peers.in_collective():
            yield
    except RuntimeError as error:
        if peers is not None and not isinstance(error, PersiaError):
            peers.blame(error)
        raise


@contextlib.contextmanager
def backward(peers: Peers, model: torch.nn.Module | None, loss: torch.Tensor, step: int) -> Iterator[None]:
    """Enclose the backward pass of ``loss`` on several ranks. Record two calls: the pass itself, then the all-reduce.

    The all-reduce is recorded from the time at which this rank has all its gradients, so its duration includes the
    waits for other ranks and for the network. The recorded time may be short, because DDP sends the first gradients
    earlier. Autograd runs callbacks in the order in which they are queued. The callback that starts this recording is
    queued at the start of the backward pass. The callback of DDP, which waits, is queued near the end of the pass.

    Raises:
        UsageError: Gradients of ``model`` were not averaged.
    """
    call = flight.Call(flight.BACKWARD, step, of_loop=True)

    def wait() -> None:
        nonlocal call
        call.__exit__(None, None, None)
        call = flight.Call(flight.ALL_REDUCE, step, of_loop=True).__enter__()

    def queue(_: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(wait)

    handle = loss.register_hook(queue) if loss.requires_grad else None  # type: ignore[no-untyped-call]
    call.__enter__()
    try:
        with collective(peers):
            yield
    except BaseException as error:
        call.__exit__(type(error), error, error.__traceback__)
        raise
    finally:
        if handle is not None:
            handle.remove()
    call.__exit__(None, None, None)
    check_averaged(model, step)


def first_nonfinite(peers: Peers, mine: NonFiniteTensor | None) -> NonFiniteTensor | None:
    """Return the first tensor that has NaN or infinity on any rank.

    NaN on one rank makes DDP's averages NaN on all ranks. A tensor that is not averaged has precedence, because it is
    the cause. Tensors that are computed before the gradients have precedence over gradients, and all of them over the
    gradient norm.
    """
    given = None if mine is None else [mine.derived, mine.averaged, mine.is_gradient, mine.text]
    found = peers.all_gather("gradients", given)
    offenders = [(*each[:3], rank, each[3]) for rank, each in enumerate(found) if each is not None]
    if not offenders:
        return None
    derived, averaged, is_gradient, rank, text = min(offenders)
    return NonFiniteTensor(f"rank {rank}: {text}", averaged, is_gradient, derived)


def check_slots(digests: list[str], source: str) -> None:
    """Check that all ranks have the same text of slots.

    Args:
        digests: The digest of each rank's text.
        source: The file with the slots, or another name of the text.

    Raises:
        ConfigError: The texts differ; the message names a rank.
    """
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        name = Path(source).name
        raise ConfigError(
            f"the configurations of the ranks differ: rank {different[0]} and rank 0 have different contents of {name}",
            hint=f"make {name} equal on all ranks",
        )


def rate(optimizer: Optimizer | None, *, restored: bool) -> dict[str, Any]:
    """Return the learning rate and schedule of rows, which must be equal on all ranks.

    The rate is None if rank 0 has loaded a checkpoint (``restored``), because the other ranks receive the rate later.
    """
    if optimizer is None:
        return {}
    return {"learning rate": None if restored else float(optimizer.lr), "schedule": optimizer.fingerprint}


def check_same(given: list[dict[str, Any]]) -> None:
    """Check that all ranks start a loop with equal settings; ``given`` has the settings of all ranks.

    All ranks compare the same settings, so all of them or none raise an error. A value that is None or missing on any
    rank is not compared.

    Raises:
        UsageError: Settings differ; the message names them and the ranks.
    """
    for name, first in given[0].items():
        values = [each.get(name) for each in given]
        other = next((rank for rank, value in enumerate(values) if value != first), None)
        if other is not None and None not in values:
            raise UsageError(
                f"cannot start a training loop: {name} is {values[other]} on rank {other} and {first} on rank 0; set "
                "the same value on every rank"
            )
