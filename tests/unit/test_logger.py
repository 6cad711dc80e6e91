"""Logs of Python: level names and lines are those of the servers."""

import contextlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from persia.errors import ConfigError
from persia.logger import setLogger
from persia.runtime import flight
from persia.runtime import logging as logging_
from persia.trainer.progress import Shown
from persia.trainer.reports import StepReport

NAME = "persia_test_logger"


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOG_LEVEL", "LOG_FORMAT", "PERSIA_LOG"):
        monkeypatch.delenv(name, raising=False)
    yield
    logger = logging.getLogger(NAME)
    logger.handlers.clear()
    logger.propagate = True  # pytest has separate handlers on loggers that do not propagate


@pytest.mark.parametrize(
    ("text", "level"),
    [("trace", 10), ("debug", 10), ("info", 20), ("", 20), ("warn", 30), ("error", 40), ("CRITICAL", 50)],
)
def test_levels_that_servers_take_are_levels_here(monkeypatch: pytest.MonkeyPatch, text: str, level: int) -> None:
    monkeypatch.setenv("LOG_LEVEL", text)
    assert setLogger(NAME).level == level


@pytest.mark.row("S3-34")
def test_levels_by_name_are_those_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """``rust_core/wire/src/logs.rs`` has a test with the same text."""
    names = ("persia.wire", "persia.wire.client", "persia.server", "persia")
    before = {name: logging.getLogger(name).level for name in names}
    monkeypatch.setenv("LOG_LEVEL", "error")
    monkeypatch.setenv("PERSIA_LOG", "persia.wire=DEBUG, persia.wire.client=trace,persia.server=warning,,critical")
    try:
        assert setLogger(NAME).level == 50
        assert [logging.getLogger(name).level for name in names[:3]] == [10, 10, 30]
        monkeypatch.setenv("PERSIA_LOG", "persia.wire=info")
        assert setLogger(NAME).level == 40
        assert logging.getLogger("persia.wire").level == 20
        assert setLogger(NAME, "info").level == 20
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("persia.wire=loud", "PERSIA_LOG='persia.wire=loud': 'persia.wire=loud': expected one of .*TRACE"),
        ("persia.wire", "expected one of"),
        ("persia_wire=debug", "found 'persia_wire', expected names such as persia.wire"),
        ("torch=debug", "found 'torch'"),
    ],
)
def test_a_wrong_name_or_level_is_named(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("PERSIA_LOG", text)
    with pytest.raises(ConfigError, match=message):
        setLogger(NAME)


def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOG_LEVEL='loud': expected one of .*INFO.*TRACE"):
        setLogger(NAME)
    monkeypatch.setenv("LOG_LEVEL", "info")
    monkeypatch.setenv("LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="LOG_FORMAT='xml': expected json or text"):
        setLogger(NAME)


KEYS = ["ts", "level", "event", "run_id", "service", "replica", "rank", "step", "node", "target", "loss", "token"]


@pytest.mark.row("S4-47", "S4-49")
@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, ("persia", 0, None)),
        ({"RANK": "3", "REPLICA_INDEX": "1"}, ("persia-trainer", 3, 3)),
        ({"PERSIA_LAUNCHER_SERVED": "note", "REPLICA_INDEX": "1"}, ("persia-data", 1, None)),
    ],
)
def test_a_json_line_has_the_keys_of_the_servers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env: dict[str, str],
    place: tuple[str, int, int | None],
) -> None:
    """``rust_core/server/src/logs.rs`` has a test for the same keys."""
    monkeypatch.setattr("persia.runtime.logging.context", {})
    for name, value in {"LOG_FORMAT": "json", "PERSIA_JOB": "ads", **env}.items():
        monkeypatch.setenv(name, value)
    logger = setLogger(NAME)
    logger.warning("a %s\nline", "long", extra={"step": 7, "loss": 0.5, "token": "00/1/3/7"})
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["ts"].endswith("Z") and first["node"] == socket.gethostname()
    assert {*first} == {key for key in KEYS if key != "rank" or place[2] is not None}
    assert (first["service"], first["replica"], first.get("rank")) == place
    assert (first["level"], first["event"], first["target"]) == ("warn", "a long\nline", NAME)
    assert (first["run_id"], first["step"], first["loss"], first["token"]) == ("ads", 7, 0.5, "00/1/3/7")
    assert second["level"] == "error" and second["exception"].endswith("ValueError: bad")


@pytest.mark.row("S4-47")
def test_a_line_has_the_last_step_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOG_FORMAT", "json")
    logger = setLogger(NAME)
    flight.begin_loop(4)
    flight.stepped(5)
    logger.info("written")
    assert json.loads(capsys.readouterr().err)["step"] == 5
    logging_.context.pop("step")


def test_reports_are_not_in_the_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The progress display of a run shows the reports."""
    record = logging.makeLogRecord({"name": logging_.REPORTS, "msg": "step", "levelno": logging.INFO})
    for form, lines in (("text", 0), ("json", 1)):
        monkeypatch.setenv("LOG_FORMAT", form)
        logger = setLogger(NAME)
        logger.handle(record)
        assert len(capsys.readouterr().err.splitlines()) == lines
        logger.handlers.clear()


def test_a_log_line_stands_above_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        logger = setLogger(NAME)
        with Shown("auc", Console(file=terminal)) as shown:
            shown.report(StepReport(1, 9, 1, 0.5, 1000.0, 0.1, 0, {"dense": 1.0}))
            logger.info("checkpoint written")
            shown.report(StepReport(2, 9, 1, 0.5, 1000.0, 0.1, 0, {"dense": 1.0}))
    read = b""
    with contextlib.suppress(OSError):  # everything is read, and the other end is closed
        while part := os.read(leader, 1 << 16):
            read += part
    os.close(leader)
    text = read.decode()
    assert "samples/s" in text.partition("checkpoint written")[0]
    assert re.search(r"\x1b\[2K[0-9]{4}-[^\n]* INFO [^\n]*checkpoint written", text), text
