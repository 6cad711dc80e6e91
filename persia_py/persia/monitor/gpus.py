"""The memory and utilization of the GPUs of this host, and of each process on them.

The values come from NVML, through the package ``nvidia-ml-py`` of the extra ``gpu``. Without this package, nvidia-smi
provides the values of whole GPUs.
"""

import importlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from persia.runtime.errors import UsageError

_SMI_S = 20.0
"""Seconds within which nvidia-smi must respond."""
_FIELDS = "index,memory.used,memory.total,utilization.gpu,uuid"
_HINT = "persia doctor --only gpu"


@dataclass(frozen=True)
class Use:
    """The use of a GPU by a process.

    Attributes:
        used_bytes: The memory that the process uses; None if the driver does not report it.
        percent: The share of the time since the last sample in which the process computed; None if the driver does not
            report it.
    """

    used_bytes: int | None
    percent: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        index: Its index, as in nvidia-smi.
        uuid: Its UUID without ``GPU-``, which is the same in containers.
        used_bytes: The memory that all processes use.
        total_bytes: The total memory of the GPU.
        percent: The share of time in which the GPU computed, over at most the last second; None if the driver does not
            report it.
        processes: The processes on the GPU, by process id. It is empty if only nvidia-smi is used, and may be empty in
            a container.
    """

    index: str
    uuid: str
    used_bytes: int
    total_bytes: int
    percent: int | None
    processes: dict[int, Use] = field(default_factory=dict)


class Gpus(Protocol):
    """Samples the GPUs of this host."""

    def sample(self) -> list[Gpu]:
        """Return the current state of the GPUs.

        Raises:
            UsageError: The driver does not respond correctly.
        """


def find() -> Gpus:
    """Return a sampler of the GPUs of this host: NVML, or nvidia-smi, which may be missing.

    Raises:
        UsageError: NVML is installed, but cannot be used.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _Smi()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return _Smi()  # there is no GPU, or nvidia-smi reports the problem
        raise _refused("NVML", error) from error
    return _Nvml(nvml)


class _Nvml:
    """Queries NVML, which stays open until the process ends."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._seen: dict[int, int] = {}  # for each GPU, the time of the newest sample of its processes

    def sample(self) -> list[Gpu]:
        nvml = self._nvml
        try:
            return [self._gpu(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise _refused("NVML", error) from error

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rates = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        used = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        percents = self._percents(index, handle)

        def use(pid: int, held: int | None) -> Use:
            # A process without a sample has not computed since the last sample.
            return Use(held, None if percents is None else percents.get(pid, 0))

        return Gpu(
            str(index),
            str(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-"),
            int(memory.used),
            int(memory.total),
            None if rates is None else int(rates.gpu),
            {pid: use(pid, held) for pid, held in used.items()},
        )

    def _percents(self, index: int, handle: Any) -> dict[int, int] | None:
        """Return the mean utilization by each process since the last call; None if the driver does not report it."""
        nvml = self._nvml
        since = self._seen.get(index, 0)
        samples = self._told(lambda: nvml.nvmlDeviceGetProcessUtilization(handle, since))
        if samples is None:
            return None
        found: dict[int, list[int]] = {}
        for each in samples:
            if each.timeStamp > since:
                found.setdefault(each.pid, []).append(int(each.smUtil))
                self._seen[index] = max(self._seen.get(index, 0), int(each.timeStamp))
        return {pid: round(sum(values) / len(values)) for pid, values in found.items()}

    def _told(self, ask: Callable[[], Any]) -> Any:
        """Return the result of a query.

        Return an empty list if the query has no entries, and None if it is not supported (MIG) or not permitted.
        """
        nvml = self._nvml
        try:
            return ask()
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # no process has computed since the last sample
                return []
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
                return None
            raise


class _Smi:
    """Queries nvidia-smi."""

    def sample(self) -> list[Gpu]:
        program = shutil.which("nvidia-smi")
        if program is None:
            return []
        query = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise _refused("nvidia-smi", error) from error
        found = []
        for line in done.stdout.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(_FIELDS.split(",")) and cells[1].isdecimal() and cells[2].isdecimal():
                percent = int(cells[3]) if cells[3].isdecimal() else None
                uuid = cells[4].removeprefix("GPU-")
                found.append(Gpu(cells[0], uuid, int(cells[1]) << 20, int(cells[2]) << 20, percent))
        return found


def _refused(who: str, error: Exception) -> UsageError:
    why = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        lines = f"{error.stdout or ''}\n{error.stderr or ''}".split("\n")
        why = ": ".join([f"exit status {error.returncode}", *[line for line in lines if line.strip()][:1]])
    elif isinstance(error, subprocess.TimeoutExpired):
        why = f"no response within {error.timeout:g} s"
    return UsageError(f"cannot read the GPUs with {who}: {why}", hint=_HINT)
