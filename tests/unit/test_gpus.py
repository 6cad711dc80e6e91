"""Memory and use of GPUs and their processes, from a fake of NVML. Tests in ``tests/gpu`` query the driver."""

import sys

import pytest
from fake_nvml import CONSTANTS, Device, FakeNvml, NVMLError

from persia.errors import UsageError
from persia.monitor import gpus
from persia.monitor.gpus import Use

pytestmark = pytest.mark.row("S3-20")


def test_processes_have_memory_and_the_mean_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Device("GPU-one", used=30, held={7: 10, 8: 20, 9: None}, busy={7: 40, 8: 100})
    nvml = FakeNvml([one, Device("GPU-two", used=0)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = gpus.find()
    first, second = found.sample()
    assert (first.index, first.uuid, first.used_bytes, first.total_bytes) == ("0", "one", 30, 80 << 30)
    assert first.processes == {7: Use(10, 40), 8: Use(20, 100), 9: Use(None, 0)} and first.percent == 50
    assert (second.index, second.processes) == ("1", {})
    one.busy = {7: 20}
    assert found.sample()[0].processes == {7: Use(10, 20), 8: Use(20, 0), 9: Use(None, 0)}, "since the last sample"


def test_samples_of_a_process_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([Device("GPU-one", used=30, held={7: 10})])

    class Sample:
        def __init__(self, at: int, percent: int) -> None:
            self.pid, self.timeStamp, self.smUtil = 7, at, percent

    asked: list[int] = []

    def samples(handle: Device, since: int) -> list[Sample]:
        asked.append(since)
        return [Sample(10, 90), Sample(20, 30), Sample(30, 61)]

    monkeypatch.setattr(nvml, "nvmlDeviceGetProcessUtilization", samples)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = gpus.find()
    assert found.sample()[0].processes == {7: Use(10, 60)}
    assert found.sample()[0].processes == {7: Use(10, 0)}, "samples that were seen before do not count again"
    assert asked == [0, 30]


@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION"])
def test_what_a_gpu_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """A GPU that is divided by MIG does not report these values."""
    code = CONSTANTS[error]
    device = Device("GPU-one", used=30, held={7: 10}, busy_error=code, percent_error=code)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([device]))
    (found,) = gpus.find().sample()
    assert found.percent is None and found.processes == {7: Use(10, None)}


def test_without_a_driver_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        None,  # the extra `gpu` is not installed
        FakeNvml([], init_error=CONSTANTS["NVML_ERROR_LIBRARY_NOT_FOUND"]),
        FakeNvml([], init_error=CONSTANTS["NVML_ERROR_DRIVER_NOT_LOADED"]),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert isinstance(gpus.find(), gpus._Smi)
    monkeypatch.setenv("PATH", "")
    assert gpus.find().sample() == []


def test_a_driver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = CONSTANTS["NVML_ERROR_LIB_RM_VERSION_MISMATCH"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], init_error=mismatch))
    with pytest.raises(UsageError, match="cannot read the GPUs with NVML: error 18") as caught:
        gpus.find()
    assert caught.value.hint == "persia doctor --only gpu"
    lost = FakeNvml([Device("GPU-one", used=30, percent_error=15)])  # a device that no longer responds
    monkeypatch.setitem(sys.modules, "pynvml", lost)
    with pytest.raises(UsageError, match="cannot read the GPUs with NVML: error 15"):
        gpus.find().sample()


def test_the_fake_is_like_the_module() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install 'persia[gpu]'")
    for name, value in CONSTANTS.items():
        assert getattr(nvml, name) == value, name
    for name in (name for name in vars(FakeNvml) if name.startswith("nvml")):
        assert callable(getattr(nvml, name)), name
    assert nvml.NVMLError(CONSTANTS["NVML_ERROR_NOT_FOUND"]).value == NVMLError(6).value
