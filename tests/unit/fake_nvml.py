"""A fake of the part of ``pynvml`` that ``persia.monitor.gpus`` uses, with devices that a test describes.

``test_gpus.py`` compares its names and constants with those of the real module, if the module is installed.
"""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

CONSTANTS = {
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_NOT_FOUND": 6,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
}


class NVMLError(Exception):
    """An error of NVML."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Device:
    """A GPU of 80 GiB, by default busy for half of the time.

    Attributes:
        uuid: The name of the GPU.
        used: The memory that all processes use.
        held: The memory of each process; None for a GPU that does not report it.
        busy: The use by each process at its last sample.
        busy_error: The error code of a query for the use by processes.
        percent_error: The error code of a query for the use of the GPU.
    """

    uuid: str
    used: int
    held: dict[int, int | None] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    busy_error: int | None = None
    percent_error: int | None = None


class FakeNvml(ModuleType):
    """The module."""

    NVMLError = NVMLError

    def __init__(self, devices: list[Device], *, init_error: int | None = None) -> None:
        super().__init__("pynvml")
        vars(self).update(CONSTANTS)
        self._devices, self._init_error = devices, init_error
        self.now = 1_000_000
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self._init_error is not None:
            raise NVMLError(self._init_error)
        self.is_open = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.is_open
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        return self._devices[index]

    def nvmlDeviceGetUUID(self, handle: Device) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: Device) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=handle.used, total=80 << 30, free=(80 << 30) - handle.used)

    def nvmlDeviceGetUtilizationRates(self, handle: Device) -> SimpleNamespace:  # noqa: N802
        if handle.percent_error is not None:
            raise NVMLError(handle.percent_error)
        return SimpleNamespace(gpu=50, memory=10)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Device) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in handle.held.items()]

    def nvmlDeviceGetProcessUtilization(self, handle: Device, since: int) -> list[SimpleNamespace]:  # noqa: N802
        """Return two newer samples of each process."""
        if handle.busy_error is not None:
            raise NVMLError(handle.busy_error)
        found = [
            SimpleNamespace(pid=pid, timeStamp=self.now + late, smUtil=percent)
            for pid, last in handle.busy.items()
            for late, percent in ((0, last), (1, last))
            if self.now + late > since
        ]
        if not found:
            raise NVMLError(CONSTANTS["NVML_ERROR_NOT_FOUND"])
        self.now += 1_000
        return found
