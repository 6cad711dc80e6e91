"""A generation begins when the servers have space for its number."""

import itertools
import logging
from types import SimpleNamespace

import pytest

from persia.backend import begin
from persia.backend.remote import RemoteBackend
from persia.errors import RunLostError, StorageError, UsageError


def test_a_full_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(begin, "_FIRST_S", 0.001)
    tries = itertools.count(1)

    def start() -> int:
        if next(tries) < 5:
            raise StorageError("server 1 of 2 at host:8888: epoch: No space left on device")
        return 7

    assert begin.begin_when_stored(start) == 7
    assert caplog.text.count("cannot begin a generation; retrying for 60 s: server 1 of 2") == 1


def test_after_the_time_limit_the_run_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "1")
    monkeypatch.setattr(begin, "_FIRST_S", 0.6)

    def full() -> int:
        raise StorageError("server 1 of 2: No space left on device")

    with pytest.raises(RunLostError, match=r"tried for \d s \(PERSIA_RPC_TIMEOUT\): server 1 of 2: No space") as caught:
        begin.begin_when_stored(full)
    assert caught.value.exit_code == 75 and "free space" in caught.value.hint


def test_another_error_is_not_retried() -> None:
    def wrong() -> int:
        raise UsageError("mine")

    with pytest.raises(UsageError, match="mine"):
        begin.begin_when_stored(wrong)


def test_the_log_names_the_generation_of_each_training_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Each training loop begins a generation, and ``persia status`` shows the newest one."""

    def renew(_: bool) -> int:
        engine.generation += 1
        return int(engine.generation)

    engine = SimpleNamespace(generation=1, renew=renew, open=lambda *_: None)
    backend = SimpleNamespace(activity=0, _peers=None, rank=0, _job="one", engine=engine, gradient_scale=1.0)
    logger = logging.getLogger("persia")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        for _ in range(2):
            RemoteBackend.open_loop(backend, 1, False, 1)  # type: ignore[arg-type]
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    named = [each for each in (1, 2, 3) if f"training loop in generation {each} of job one" in caplog.text]
    assert named == [2, 3]
