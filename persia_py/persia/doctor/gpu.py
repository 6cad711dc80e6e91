"""Checks of GPUs: driver, devices, use by torch and the engine, and the versions of driver and runtime."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from persia.doctor.check import Check
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import in_container

_SMI_S = 20.0
"""The time limit for nvidia-smi, in seconds; the first call after a boot loads the driver."""
OVERLAY = "COMPOSE_FILE=docker-compose.yaml:docker-compose.gpu.yaml docker compose up"
STANZA = "deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}"
"""The stanza that gives a compose service access to the GPUs of its host."""


@dataclass(frozen=True)
class Facts:
    """The facts about the GPUs of this machine.

    Attributes:
        wanted: ``GPU_NUM``, the number of ranks on this host, each of which uses a GPU.
        driver_loaded: Whether the kernel has loaded the NVIDIA driver.
        devices: The device files, such as ``/dev/nvidia0``.
        in_container: Whether this process is in a container.
        smi: The lines of ``nvidia-smi``, one for each GPU; None if the program does not exist.
        smi_error: The message of nvidia-smi if it failed.
        driver_cuda: The CUDA version that the driver supports; None without a driver.
        torch_cuda: The CUDA version for which torch was built; None for a CPU-only build.
        torch_devices: The number of devices that torch can use.
        engine_cuda: Whether the engine was built with CUDA.
        visible: ``CUDA_VISIBLE_DEVICES``; None if it is not set.
    """

    wanted: int = 0
    driver_loaded: bool = False
    devices: tuple[str, ...] = ()
    in_container: bool = False
    smi: tuple[str, ...] | None = None
    smi_error: str = ""
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: str | None = None
    torch_devices: int = 0
    engine_cuda: bool = False
    visible: str | None = None


def wanted() -> int:
    """Return ``GPU_NUM``; 0 if it is not set or is not a number."""
    text = os.environ.get("GPU_NUM", "").strip()
    return int(text) if text.isdecimal() else 0


def visible_gpus() -> int:
    """Return the number of GPUs that a process started now could use."""
    import torch

    return torch.cuda.device_count()


def facts() -> Facts:
    """Collect the facts about the GPUs of this machine."""
    import torch

    import persia_core

    smi, smi_error = _smi()
    return Facts(
        wanted=wanted(),
        driver_loaded=Path("/proc/driver/nvidia/version").exists(),
        devices=tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))),
        in_container=in_container(),
        smi=smi,
        smi_error=smi_error,
        driver_cuda=_driver_cuda(),
        torch_cuda=torch.version.cuda,
        torch_devices=torch.cuda.device_count(),
        engine_cuda="cuda" in persia_core.FEATURES,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _smi() -> tuple[tuple[str, ...] | None, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, ""
    query = [program, "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), str(error)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return (), said[-1] if said else f"exit code {done.returncode}, without output"
    return tuple(line for line in done.stdout.splitlines() if line.strip()), ""


def _driver_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that the driver supports. ``cuDriverGetVersion`` encodes 12.4 as 12040."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or not version.value else (version.value // 1000, version.value % 1000 // 10)


def checks(found: Facts | None = None) -> Iterator[Check]:
    """Yield the checks of GPUs.

    Args:
        found: The facts about the machine; None collects them.
    """
    found = facts() if found is None else found
    yield device(found)
    if found.driver_cuda is not None and found.torch_cuda is not None:
        yield driver(found.driver_cuda, found.torch_cuda)
    if found.wanted:
        yield ranks(found.wanted, found.torch_devices, found.visible)
        if found.torch_devices and not found.engine_cuda:
            why = "GPU_NUM is set, but embeddings cannot be handed over on the device"
            yield Check("engine", "fail", "persia_core was built without CUDA", why, "see the documentation: CUDA")


def device(found: Facts) -> Check:
    """Check that torch finds a GPU; otherwise report why it does not."""
    if found.torch_devices:
        listed = "; ".join(found.smi or ()) or "nvidia-smi does not list them"
        return Check("gpu", "ok", f"torch sees {found.torch_devices}: {listed}")
    bad: Literal["fail", "warn"] = "fail" if found.wanted else "warn"
    code = ExitCode.CONFIG
    needed = f"; GPU_NUM={found.wanted} needs as many GPUs" if found.wanted else ""
    if found.in_container and found.driver_loaded and not found.devices:
        what = "the host has an NVIDIA driver, but this container has no device"
        return Check("gpu", bad, what + needed, f"its service lacks `{STANZA}`", OVERLAY, code)
    if found.driver_loaded and found.smi is None and not found.devices:
        what = "the NVIDIA driver is loaded, but nvidia-smi and /dev/nvidia0 are missing"
        return Check("gpu", bad, what + needed, "the driver is not installed completely", "reinstall the driver", code)
    if found.smi_error:
        why = "the driver does not respond; after an update, a driver needs a restart of the machine"
        return Check("gpu", bad, f"nvidia-smi failed: {found.smi_error}{needed}", why, "nvidia-smi", code)
    if found.smi or found.devices:
        return _unseen(found, bad, needed)
    if not found.wanted:
        return Check("gpu", "ok", "no NVIDIA driver on this host; training uses the CPU")
    if found.in_container:
        what, why = "this container has no NVIDIA device and no driver", f"its service lacks `{STANZA}`"
        return Check("gpu", bad, what + needed, why, f"nvidia-smi on the host, then: {OVERLAY}", code)
    what = "nvidia-smi is not on PATH, and no NVIDIA driver is loaded"
    return Check("gpu", bad, what + needed, "", "install the NVIDIA driver, or train on the CPU: unset GPU_NUM", code)


def _unseen(found: Facts, bad: Literal["fail", "warn"], needed: str) -> Check:
    """Return why torch does not find a GPU of this machine."""
    count = len(found.smi or found.devices)
    what = f"the machine has {count} GPU{'' if count == 1 else 's'}, but torch.cuda.is_available() is False{needed}"
    if found.torch_cuda is None:
        command = "python -m pip install --force-reinstall torch  # a build with CUDA"
        return Check("gpu", bad, what, "this torch was built for the CPU only", command)
    if found.visible is not None and found.visible.strip() in ("", "-1"):
        why = f"CUDA_VISIBLE_DEVICES={found.visible!r} hides them"
        return Check("gpu", bad, what, why, "unset CUDA_VISIBLE_DEVICES")
    if found.smi is None:
        why = "nvidia-smi and libcuda.so.1 are not installed; in a container, the NVIDIA container toolkit adds them"
        return Check("gpu", bad, what, why, "install the NVIDIA container toolkit on the host")
    why = f"torch was built for CUDA {found.torch_cuda}; see the check of the driver"
    return Check("gpu", bad, what, why, 'python -c "import torch; torch.cuda.init()"')


def driver(supports: tuple[int, int], runtime: str) -> Check:
    """Check that the driver is not older than the CUDA runtime of torch.

    A driver runs code for its major version and for older ones (CUDA's minor version compatibility).

    Args:
        supports: The CUDA version that the driver supports.
        runtime: The CUDA version for which torch was built, such as ``12.4``.
    """
    wants = tuple(int(part) for part in runtime.split(".")[:2])
    what = f"the driver supports CUDA {supports[0]}.{supports[1]}, torch was built for {runtime}"
    command = f"update the NVIDIA driver, or install a torch for CUDA {supports[0]}.{supports[1]} or earlier"
    if supports[0] < wants[0]:
        return Check("cuda driver", "fail", what, "the driver is older than the CUDA runtime", command)
    if supports < wants:
        return Check(
            "cuda driver", "warn", what, "the driver is older than the CUDA runtime; newer CUDA functions fail", command
        )
    return Check("cuda driver", "ok", what)


def ranks(wanted: int, there: int, visible: str | None) -> Check:
    """Check that each rank has a GPU."""
    if wanted <= there:
        return Check("ranks", "ok", f"{wanted} requested (GPU_NUM), {there} visible")
    where = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    what = f"{wanted} requested (GPU_NUM), {there} visible{where}"
    return Check("ranks", "fail", what, "each rank needs its own GPU", f"GPU_NUM={there}, or make more GPUs visible")
