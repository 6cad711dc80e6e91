"""The name of a run survives the loss of the file that holds it."""

import errno
import os
from pathlib import Path

import pytest

from persia.distributed import run
from persia.errors import ConfigError, StorageError
from persia.runtime import job
from persia.runtime.exit_codes import ExitCode

FIRST, SECOND = "census-20260101-000000", "census-20260102-000000"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of checkpoints of a job in which no earlier test has failed a run."""
    monkeypatch.setattr(run, "_process", run._Process())
    monkeypatch.setenv("PERSIA_JOB", "census")
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PERSIA_CKPT_DIR", str(tmp_path / "checkpoints"))
    return tmp_path / "checkpoints"


def checkpoint(root: Path, name: str) -> None:
    (root / name / "step-10").mkdir(parents=True)
    (root / name / "step-10" / "MANIFEST.json").touch()


def test_a_run_keeps_its_name(root: Path) -> None:
    name = job.run_name()
    assert name.startswith("census-") and job.run_name() == name
    checkpoint(root, "census-20990101-000000")
    assert job.run_name() == name, "the file counts"


@pytest.mark.parametrize("lost", ["missing", "empty"])
def test_a_run_whose_name_is_lost_is_found_by_its_checkpoints(
    root: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (FIRST, SECOND, "census-2-20260103-000000", "census-20260104", "other-20260105-000000"):
        checkpoint(root, name)
    (root / "census-20260106-000000").mkdir()  # without a checkpoint
    if lost == "empty":
        job.run_dir().mkdir(parents=True)
        (job.run_dir() / job.RUN).touch()
    assert job.run_name() == SECOND
    assert f"is missing or empty: resuming run {SECOND}, which is not finished" in caplog.text
    assert (job.run_dir() / job.RUN).read_text() == f"{SECOND}\n"


def test_a_finished_run_is_not_resumed(root: Path) -> None:
    checkpoint(root, FIRST)
    assert job.run_name() == FIRST
    job.finish_run()
    assert not (job.run_dir() / job.RUN).exists()
    new = job.run_name()
    assert new != FIRST
    job.finish_run()  # without a checkpoint there is no folder to mark
    assert not (root / new).exists()


@pytest.mark.parametrize(("content", "found"), [(b"\xff\xfe", "bytes that are not UTF-8"), (b"a b", "'a b'")])
def test_a_file_that_names_no_run_is_an_error_that_names_the_file(root: Path, content: bytes, found: str) -> None:
    path = job.run_dir() / job.RUN
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        job.run_name()
    assert str(caught.value).startswith(f"{path}: ") and found in str(caught.value)
    assert caught.value.hint.startswith(f"remove the file: rm {path}; then the newest run that has a checkpoint")
    checkpoint(root, FIRST)
    path.unlink()
    assert job.run_name() == FIRST
    path.write_bytes(content)
    job.finish_run()
    assert not path.exists()


def test_a_mark_that_fails_does_not_unfinish_the_run(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise StorageError("no bucket")

    checkpoint(root, job.run_name())
    run.at_finish(refuse)
    run.finish()
    assert (job.run_dir() / job.SUMMARY).exists() and not (job.run_dir() / job.RUN).exists()
    assert "not marked as finished: no bucket" in caplog.text


def test_the_name_and_the_folders_that_hold_it_are_durable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new folder entry is synced, from the new entry in an existing folder down to the file."""
    synced: list[Path] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())

    monkeypatch.setattr(os, "fsync", sync)
    folder = root.parent / "new" / "runs" / "census"
    monkeypatch.setenv("PERSIA_RUN_DIR", str(folder))
    job.run_name()
    assert {folder, folder.parent, folder.parent.parent, root.parent} <= set(synced)
    assert any(path.name == ".RUN.tmp" for path in synced), "the content"


@pytest.mark.parametrize("what", ["name", "summary"])
def test_a_full_disk_is_no_mistake_of_the_configuration(root: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    del root

    def full(path: Path, content: bytes) -> None:
        del path, content
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("persia.runtime.files.write_whole", full)
    with pytest.raises(StorageError, match=r"(RUN|summary\.json): No space left on device") as caught:
        job.run_name() if what == "name" else run.finish()
    assert "space" in caught.value.hint and "config check" not in caught.value.hint
    assert caught.value.exit_code == ExitCode.FAILED
