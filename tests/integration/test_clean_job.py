"""A job without a fault causes no alarm, and a fault causes one. ``make clean-hour`` trains for an hour."""

from pathlib import Path

import pytest
from clean_job import observe
from prometheus import find
from stack import missing

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SECONDS = 90.0


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = find(tmp_path_factory.mktemp("prometheus"))
    if found is None:
        pytest.skip("no Prometheus here, and apt-get downloads none")
    return found


@pytest.mark.row("S4-31", "S4-41")
def test_a_job_without_a_fault_gives_no_alarm(programs: Path, tmp_path: Path, no_job: None) -> None:
    found = observe(tmp_path, programs, SECONDS)
    assert not found.alarms, "\n".join(found.alarms)
    assert not found.gaps, "\n".join(found.gaps)
    assert found.facts["steps"] > 20


@pytest.mark.row("S4-31", "S4-41")
def test_a_leak_and_a_loss_that_is_nan_are_alarms(programs: Path, tmp_path: Path, no_job: None) -> None:
    found = observe(tmp_path, programs, SECONDS, pause=0.1, leak_mb=1.0, nan_step=30)
    text = "\n".join(found.alarms)
    assert "alert PersiaSkippedSteps of" in text and "step 30 skipped" in text, text
    assert "memory of Python grows by" in text and "slow_model.py" in text, text
    assert any("trainer" in line and " warn" in line for line in found.alarms), text
