"""A step that needs too much memory: how that is recognised, and a report of what takes the memory."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator

import torch

from persia.loop.finite import Named, local_part
from persia.runtime.errors import OutOfMemoryError, PersiaError

LARGEST = 8
"""Tensors that a report lists."""

_HINT = (
    "give fewer rows at a time: `for part in ctx.micro_batches(batch, rows)`, or smaller batches; or compute in half "
    "the bytes: TrainCtx(precision='bf16'); or make the model or the dimensions of the slots smaller"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch has raised it because memory could not be allocated, on a CUDA device or by the CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "CPUAllocator" in text and "memory" in text


@contextlib.contextmanager
def reported(step: int, rows: int, tensors: Callable[[], Iterable[Named]]) -> Iterator[None]:
    """Turn an error of the allocator into one that names the step and the largest tensors.

    Args:
        step: The step.
        rows: The rows that the model was given.
        tensors: Returns the tensors that are known by name; it is called after a failure only.

    Raises:
        OutOfMemoryError: The block needs more memory than there is.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PersiaError) or not is_out_of_memory(error):
            raise
        raise report(error, step, rows, tensors()) from error


def report(error: BaseException, step: int, rows: int, tensors: Iterable[Named]) -> OutOfMemoryError:
    """Return an error with torch's text, the step, and a table of the largest tensors."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    found = OutOfMemoryError(f"step {step}, {rows} rows at a time: {first}\nthe largest tensors:\n{_table(tensors)}")
    found.hint = _HINT
    return found


def _table(tensors: Iterable[Named]) -> str:
    rows: dict[int, tuple[int, str]] = {}
    for name, tensor in [*tensors, *_unnamed()]:
        local = local_part(tensor)
        if (place := local.untyped_storage().data_ptr()) not in rows and local.device.type != "meta":
            size = local.untyped_storage().nbytes()
            shape = "x".join(map(str, local.shape)) or "scalar"
            kind = str(local.dtype).removeprefix("torch.")
            rows[place] = (size, f"  {size / 2**20:10.1f} MiB  {kind:8} {shape:16} {local.device!s:7} {name}")
    return "\n".join(line for _, line in sorted(rows.values(), reverse=True)[:LARGEST])


def _unnamed() -> Iterator[Named]:
    """Yield the other tensors that Python holds. Those that only the autograd graph holds are not known."""
    for each in gc.get_objects():
        # isinstance would ask proxies for their class, which may run any code.
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            yield "not named", each
