"""Recognizes steps that need too much memory, and reports the largest tensors."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator

import torch

from persia.loop.finite import Named, local_part
from persia.runtime.errors import DeviceError, OutOfMemoryError, PersiaError

LARGEST = 8
"""The maximum number of lines in a report about tensors."""
MANY = 32
"""The number of equal tensors from which a report suggests that the script keeps a tensor of each step."""
NO_NAME = "not named"

_HINT = (
    "pass fewer rows at a time: `for part in ctx.micro_batches(batch, rows)`, or smaller batches; or compute in half "
    "the bytes: TrainCtx(precision='bf16'); or make the model or the dimensions of the slots smaller"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised the error because memory could not be allocated, on a CUDA device or the CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "CPUAllocator" in text and "memory" in text


@contextlib.contextmanager
def reported(step: int, rows: int, tensors: Callable[[], Iterable[Named]]) -> Iterator[None]:
    """Convert an error of the allocator to one that names the step and the largest tensors.

    Args:
        step: The step.
        rows: The number of rows on which the model runs.
        tensors: Returns the tensors that are known by name; called only after a failure.

    Raises:
        OutOfMemoryError: The block needs more memory than is available.
        DeviceError: An operation has failed on the CUDA device.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PersiaError):
            raise
        if not is_out_of_memory(error):
            if "CUDA error" in str(error):
                raise _of_device(error, step) from error
            raise
        raise report(error, step, rows, tensors()) from error


def _of_device(error: RuntimeError, step: int) -> DeviceError:
    """Return an error that explains how to find the failed operation, because CUDA reports failures late."""
    return DeviceError(
        f"step {step}: {str(error).splitlines()[0]}; the traceback may show a later operation",
        hint="to see the operation that failed, train with persia train --sync-cuda (in a script "
        "CUDA_LAUNCH_BLOCKING=1), which waits for each operation",
    )


def report(error: BaseException, step: int, rows: int, tensors: Iterable[Named]) -> OutOfMemoryError:
    """Return an error with torch's message, the step, and a table of the largest tensors."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    at_a_time = f"{rows} row{'s' * (rows != 1)} at a time"
    return OutOfMemoryError(f"step {step}, {at_a_time}: {first}\nthe largest tensors:\n{_table(tensors)}", hint=_HINT)


def _table(tensors: Iterable[Named]) -> str:
    """Return a line for each kind of tensor. Equal tensors without a name share a line, which has their count."""
    seen: set[int] = set()
    sizes: dict[tuple[str, str, str, str], list[int]] = {}
    for name, tensor in [*tensors, *((NO_NAME, each) for each in _unnamed())]:
        local = local_part(tensor)
        if (place := local.untyped_storage().data_ptr()) not in seen and local.device.type != "meta":
            seen.add(place)
            shape = "x".join(map(str, local.shape)) or "scalar"
            kind = (str(local.dtype).removeprefix("torch."), shape, str(local.device), name)
            sizes.setdefault(kind, []).append(local.untyped_storage().nbytes())
    largest = sorted(((sum(each), kind, len(each)) for kind, each in sizes.items()), reverse=True)[:LARGEST]
    return "\n".join(
        f"  {size / 2**20:10.1f} MiB  {kind:8} {shape:16} {device:7} {name}{_many(count)}"
        for size, (kind, shape, device, name), count in largest
    )


def _many(count: int) -> str:
    if count == 1:
        return ""
    kept = ": does a list of the model or the script grow with the steps?" if count >= MANY else ""
    return f", {count} of them{kept}"


def _unnamed() -> Iterator[torch.Tensor]:
    """Yield the other tensors that Python holds. Tensors that only the autograd graph holds are unknown."""
    for each in gc.get_objects():
        # isinstance would read the class of proxies, which may run arbitrary code.
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            yield each
