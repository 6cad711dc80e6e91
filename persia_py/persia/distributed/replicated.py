"""DistributedDataParallel that names the weights without a gradient, instead of applying a step without averaging."""

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from persia.runtime.errors import UsageError

_ERROR = 2
"""The level of errors in torch's C++ code."""
_SHOWN = 5
"""The maximum number of weights that a message names."""


class Replicated(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel that checks each step, and omits torch's warning about an unneeded search.

    Torch searches the graph of each step for unused weights if ``find_unused_parameters`` is true. A model that uses
    all weights in one step may use fewer weights in a later step on one rank, while the other ranks already wait in the
    all-reduce. The result of the first step therefore cannot replace the search.
    """

    def check_averaged(self, step: int) -> None:
        """Check that all gradients of the backward pass were averaged.

        Otherwise the optimizer would apply gradients of this rank only, and torch would fail in the next forward pass.

        Raises:
            UsageError: Weights that torch expects to be used have no gradient; the message names them.
        """
        if self.find_unused_parameters or not self.require_backward_grad_sync:
            return
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise self._explained(error, step) from error

    def _explained(self, error: RuntimeError, step: int) -> UsageError:
        """Return the error of the reducer with the names of the weights."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        trained = [name for name, each in self.module.named_parameters() if each.requires_grad]
        numbers = [] if found is None else [int(each) for each in found[1].split()]
        names = [trained[number] for number in numbers if number < len(trained)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        weights = (", ".join(names[:_SHOWN]) or "some weights") + more
        option, needs = "find_unused_parameters=False", "that it depends on all weights"
        if self.static_graph:
            option, needs = "static_graph=True", "that it depends on the same weights in each step"
        return UsageError(
            f"step {step}, rank {torch.distributed.get_rank()}: the loss does not depend on {weights}, and "
            f"DDPOption({option}) requires {needs}; model and rows are unchanged",
            hint=f"leave out {option}; or call requires_grad_(False) on weights that are never used",
        )

    def _post_forward(self, output: Any) -> Any:
        with _without_warnings():
            return super()._post_forward(output)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Let torch's C++ code log errors only. Python cannot filter its warnings, and they name no category.

    If torch lacks the variable with its log level, its warnings are printed.
    """
    level = _log_level()
    if level is None:
        yield
        return
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """Return the variable with the level from which on torch's C++ code logs."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
