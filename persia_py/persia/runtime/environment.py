"""The environment variables of torch and NCCL: those that ``persia.yml`` sets, and names that must be replaced."""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from persia.runtime.errors import UsageError
from persia.runtime.logging import get_logger

_logger = get_logger("distributed")


@dataclass(frozen=True)
class Given:
    """A variable that a key of ``persia.yml`` sets.

    Attributes:
        key: The key, such as ``nccl.debug``.
        value: The value of the variable.
    """

    key: str
    value: str


RENAMED = {
    "NCCL_TIMEOUT": ("PERSIA_DIST_TIMEOUT", "has no effect: NCCL has no such variable"),
    "NCCL_BLOCKING_WAIT": ("TORCH_NCCL_BLOCKING_WAIT", "is deprecated: torch has renamed it"),
    "NCCL_ASYNC_ERROR_HANDLING": ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "is deprecated: torch has renamed it"),
    "NCCL_TOPOLOGY_FILE": ("NCCL_TOPO_FILE", "has no effect: NCCL has no such variable"),
}
"""Variables that guides mention but that are not read or are deprecated, each with the variable to use and the
reason."""


@contextmanager
def applied(given: Mapping[str, Given]) -> Iterator[None]:
    """Set variables for the duration of the block.

    A variable that the environment already has is kept, with a warning if its value differs.

    Args:
        given: The variables, by name.
    """
    own = {name: each for name, each in given.items() if not os.environ.get(name, "").strip()}
    for name, each in given.items():
        if name not in own and os.environ[name] != each.value:
            _logger.warning("%s=%s in the environment overrides %s: %s", name, os.environ[name], each.key, each.value)
    before = {name: os.environ.get(name) for name in own}
    os.environ.update({name: each.value for name, each in own.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def rename(environ: MutableMapping[str, str] = os.environ) -> None:
    """For each of :data:`RENAMED`, set the intended variable, unless it is set already, and log a warning."""
    for old, (new, why) in RENAMED.items():
        value = environ.get(old, "").strip()
        if not value:
            continue
        if environ.get(new, "").strip():
            _logger.warning("environment variable %s %s. %s is set, so remove %s", old, why, new, old)
            continue
        environ[new] = value
        _logger.warning(
            "environment variable %s %s. Persia sets %s=%s instead; set %s yourself",
            old,
            why,
            new,
            value,
            new,
        )


def check_files(environ: Mapping[str, str] = os.environ) -> None:
    """Check that files named by variables exist, because NCCL ignores a missing file.

    Raises:
        UsageError: A file does not exist.
    """
    path = environ.get("NCCL_TOPO_FILE", "").strip()
    if path and not os.path.isfile(path):  # noqa: PTH113 - as NCCL sees it
        raise UsageError(f"NCCL_TOPO_FILE={path}: no such file; correct the variable, or nccl.topo_file in persia.yml")


def check_devices(ranks: int, options: str, environ: Mapping[str, str] = os.environ) -> None:
    """Check that ``CUDA_VISIBLE_DEVICES``, if it is set, lists a GPU for each rank of this host.

    Args:
        ranks: The number of ranks of this host, which train on GPUs if ``GPU_NUM`` is above 0.
        options: The settings that determine the number of ranks, for the message.
        environ: The environment.

    Raises:
        UsageError: The variable lists fewer devices than ranks.
    """
    visible, gpus = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("GPU_NUM", "").strip()
    if visible is None or not gpus.isdecimal() or int(gpus) == 0:
        return
    listed = [name.strip() for name in visible.split(",")]
    listed = listed[: listed.index("-1")] if "-1" in listed else listed  # CUDA ignores devices after an invalid one
    found = len({*filter(None, listed)})
    if found < ranks:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible!r} lists too few devices: found {found}, expected {ranks}, a different one "
            f"for each rank of this host (GPU_NUM={gpus})",
            hint=f"list one device for each rank in CUDA_VISIBLE_DEVICES, or start fewer ranks: {options}",
        )
