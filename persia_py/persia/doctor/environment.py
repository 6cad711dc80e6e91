"""Checks the environment variables that a configuration needs, and prints the versions of this machine for a report."""

import os
from collections.abc import Iterator

from persia.config import Config
from persia.doctor.check import Check

_SHOWN = (
    *("PERSIA_", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "GPU_NUM", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"),
    *("REPLICA_", "LOG_", "OMP_NUM_THREADS", "REPRODUCIBLE", "EMBEDDING_STALENESS", "PYTHONPATH"),
)
"""Prefixes of the names of variables that affect a run."""
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "URL")
"""Parts of names whose values are not shown, because they may be secrets."""


def checks(config: Config) -> Iterator[Check]:
    """Yield a check of the variables in the block ``env``.

    Args:
        config: The configuration.
    """
    if not config.env:
        return
    missing = [name for name, value in config.env.items() if value is None and not os.environ.get(name, "").strip()]
    if missing:
        command = " ".join(f"{name}=VALUE" for name in missing)
        yield Check(
            "env", "fail", f"not set: {', '.join(missing)}", "`env` of persia.yml needs them", f"export {command}"
        )
        return
    yield Check("env", "ok", f"variables of persia.yml: {', '.join(config.env)}")


def variables() -> list[tuple[str, str]]:
    """Return the variables that affect a run. Values that may be secrets are omitted."""
    return [
        (name, "(set)" if any(part in name for part in _SECRET) else value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SHOWN)
    ]


def block() -> str:
    """Return versions, machine properties and variables as lines, to paste into a report."""
    import torch

    from persia.doctor import gpu, network, versions
    from persia.runtime import processors

    found, limit = gpu.facts(), processors.quota()
    usable = f"{processors.visible()} usable" + ("" if limit is None else f", limited to {limit:g}")
    rows = [
        *versions.environment(),
        ("CUDA of torch", found.torch_cuda or "none"),
        ("CUDA of driver", "none" if found.driver_cuda is None else ".".join(map(str, found.driver_cuda))),
        ("GPUs", "; ".join(found.smi or ()) or "none"),
        *network.environment(),
        ("torch threads", f"{torch.get_num_threads()} ({usable} processors)"),
        ("container", "yes" if found.in_container else "no"),
        *variables(),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
