"""A step that needs too much memory: how that is recognised, and a report of what takes the memory."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator

import torch

from persia.loop.finite import Named, local_part
from persia.runtime.errors import OutOfMemoryError, PersiaError

LARGEST = 8
"""Lines of a report about tensors."""
MANY = 32
"""Equal tensors from which on a report asks whether something keeps one of each step."""
NO_NAME = "not named"

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
    """Return a line for each kind of tensor: equal ones without a name share a line, which has their number."""
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
    """Yield the other tensors that Python holds. Those that only the autograd graph holds are not known."""
    for each in gc.get_objects():
        # isinstance would ask proxies for their class, which may run any code.
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            yield each
