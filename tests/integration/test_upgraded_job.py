"""Jobs of released versions whose server was killed resume in this version. Their results are bit-identical."""

import json
import re
import shutil

import pytest
import upgrade_job
from stack import MakeStack, Stack
from upgrade_job import SAVED, STEPS, VERSIONS

import persia

RELEASED = sorted(path.name for path in VERSIONS.iterdir() if path.is_dir())


@pytest.fixture
def stopped(request: pytest.FixtureRequest, make_stack: MakeStack) -> Stack:
    """Return a stack with a copy of the folders of a version's job. The stack is not started."""
    stack = make_stack(start=False, **upgrade_job.options())
    shutil.copytree(VERSIONS / request.param / "job", stack.folder, dirs_exist_ok=True)
    shutil.copy2(VERSIONS / request.param / "expected.json", stack.folder)
    return stack


def test_a_version_has_a_job() -> None:
    assert RELEASED, f"no version in {VERSIONS}; make upgrade-data writes that of this version"


@pytest.mark.parametrize("stopped", RELEASED, indirect=True)
def test_a_job_of_a_released_version_resumes_with_equal_bits(stopped: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = int((stopped.folder / "servers" / "0" / "generation").read_text())
    expected = json.loads((stopped.folder / "expected.json").read_text())
    stopped.start().use(monkeypatch)
    assert upgrade_job.train("run") == (SAVED, expected["trained"])
    assert int((stopped.folder / "servers" / "0" / "generation").read_text()) > generation
    assert upgrade_job.train("run")[0] == STEPS, "its own checkpoint is newer"


@pytest.mark.parametrize("stopped", [persia.__version__], indirect=True)
def test_a_server_continues_the_log_of_its_version(stopped: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped.start()
    stopped.parts["server-0"].says("run resumed from the log")


def crc32c(content: bytes) -> bytes:
    """Return the checksum at the start of the base of a log."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


@pytest.mark.parametrize("stopped", RELEASED[-1:], indirect=True)
@pytest.mark.parametrize("version", ["0.0.9", "99.0.0"])
def test_a_job_resumes_where_the_log_is_of_another_version(
    stopped: Stack, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The server names the version of the log and starts without rows. The job resumes after its checkpoint."""
    base = stopped.folder / "servers" / "0" / "journal" / "base"
    checksum, content = base.read_bytes()[:4], base.read_bytes()[4:]
    assert crc32c(content) == checksum
    changed, count = re.subn(rb'"version":"[0-9.]+"', f'"version":"{version}"'.encode(), content)
    assert count == 1
    base.write_bytes(crc32c(changed) + changed)
    resumes_without_log(stopped, f"written by server 0 of 1 with version {version} ", monkeypatch)


@pytest.mark.parametrize("stopped", RELEASED[-1:], indirect=True)
def test_a_job_resumes_where_the_log_has_another_format(stopped: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for segment in (stopped.folder / "servers" / "0" / "journal").glob("[0-9]*"):
        changed, count = re.subn(rb"^persia journal \d", b"persia journal 9", segment.read_bytes())
        assert count == 1
        segment.write_bytes(changed)
    resumes_without_log(stopped, "not a log segment that this version can read", monkeypatch)


def resumes_without_log(stopped: Stack, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((stopped.folder / "expected.json").read_text())
    stopped.start().use(monkeypatch)
    said = stopped.parts["server-0"].says("cannot use the log, so the job resumes from its last checkpoint")
    assert why in said
    assert upgrade_job.train("run") == (SAVED, expected["trained"])
