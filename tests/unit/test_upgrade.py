"""Checkpoints of released versions resume in this version, with bit-identical results.

tests/integration/test_upgraded_job.py does the same with a job on servers. rust_core/store/tests/corrupt.rs and
corrupt_shard.rs show that files of a later format are refused.
"""

import json
import shutil
from pathlib import Path

import pytest
import upgrade_job
from upgrade_job import SAVED, VERSIONS

RELEASED = sorted(path.name for path in VERSIONS.iterdir() if path.is_dir())


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the run of a version."""
    for name, value in upgrade_job.configure(tmp_path).items():
        monkeypatch.setenv(name, value)
    shutil.copy2(VERSIONS / request.param / "expected.json", tmp_path)
    return Path(shutil.copytree(VERSIONS / request.param / "run", tmp_path / "run"))


def test_a_version_has_a_run() -> None:
    assert RELEASED, f"no version in {VERSIONS}; make upgrade-data writes that of this version"


@pytest.mark.parametrize("run", RELEASED, indirect=True)
def test_a_checkpoint_of_a_released_version_resumes_with_equal_bits(run: Path) -> None:
    expected = json.loads((run.parent / "expected.json").read_text())
    assert upgrade_job.train(run, until=SAVED) == (SAVED, expected["saved"])
    assert upgrade_job.train(run) == (SAVED, expected["trained"])
    step, _ = upgrade_job.train(run)
    assert step == upgrade_job.STEPS, "its own checkpoint is newer"
