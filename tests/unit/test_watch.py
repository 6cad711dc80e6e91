"""``persia status --watch``: a table on a terminal, CSV elsewhere, of a run of ``persia train``."""

import csv
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_profile import verb  # noqa: F401 - a fixture
from waiting import wait_until

from persia.cli import watch

REPORT = {"step": 8, "samples_per_s": 1234, "loss": 0.25, "shares": {"data": 0.5, "dense": 0.5}}
BUSY = [sys.executable, "-c", "while True: pass"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that a busy process trains."""
    busy = subprocess.Popen(BUSY)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder.parent / "LATEST").write_text("one\n")
    lines = [json.dumps({**REPORT, "step": 4}), json.dumps(REPORT), '{"step": 8, "valid": {}}', '{"step": 12, "sam']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    process = {"host": socket.gethostname(), "pid": busy.pid}
    (folder / "summary.json").write_text(json.dumps({"process": process}))
    yield folder
    busy.kill()
    busy.wait()


@pytest.mark.row("S3-37", "S3-21")
def test_csv_has_a_line_for_each_sample(run: Path, verb: Callable[..., str]) -> None:  # noqa: F811
    out = verb("status", "runs/LATEST", "--watch", "--csv", "-l", "2", "-n", "0.3")
    rows = [*csv.DictReader(io.StringIO(out))]
    assert len(rows) == 2
    for row in rows:
        assert (row["process"], row["host"]) == ("persia train", socket.gethostname())
        assert float(row["cpu_percent"]) > 5 and int(row["rss_bytes"]) > 1 << 20
        assert float(row["rx_bytes_per_s"]) >= 0 and float(row["preemptions_per_s"]) >= 0
        assert [row[name] for name in ("step", "samples_per_s", "loss", "data_wait")] == ["8", "1234", "0.25", "0.5"]


@pytest.mark.row("S3-21")
def test_a_process_that_shares_its_processor_is_preempted(run: Path) -> None:
    rival = subprocess.Popen(BUSY)
    try:
        for pid in (rival.pid, watch.of_run(run)[0].pid):
            os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
        watching = watch.Watch(lambda: watch.of_run(run), run)
        wait_until("a preemption", lambda: (watching.sample()[0].preemptions_per_s or 0) > 0, 60)
    finally:
        rival.kill()
        rival.wait()


def test_a_process_that_is_gone_or_elsewhere_has_no_figures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        watch.Watched("persia-server 0", "elsewhere", 1),
        watch.Watched("persia-server 1", socket.gethostname(), 0),
    ]
    rows = watch.Watch(lambda: places, run).sample()
    assert [row.cpu_percent for row in rows] == [None, None]
    assert [row.rx_bytes_per_s is None for row in rows] == [True, False]
    assert all(row.step is None for row in rows)


@pytest.mark.row("S3-37")
def test_the_table_is_refreshed_and_ctrl_c_ends_it_with_0(run: Path) -> None:
    near, far = pty.openpty()
    command = [sys.executable, "-m", "persia", "status", "runs/LATEST", "--watch", "-n", "0.2"]
    env = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=run.parents[1], stdout=far, stderr=far, stdin=far, env=env)
    os.close(far)
    shown = b""

    def refreshed() -> bool:
        nonlocal shown
        shown += os.read(near, 1 << 16)
        return len(re.findall(rb"50%", shown)) >= 2

    try:
        wait_until("two tables", refreshed, 60, evidence=lambda: shown.decode(errors="replace"))
        assert b"samples/s" in shown and b"1,234" in shown and b"Ctrl-C ends" in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(near)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--csv"], "--csv needs --watch"),
        (["runs/one"], "RUN needs --watch"),
        (["--watch", "runs/two"], "runs/two: no run"),
        (["--watch", "--json"], "--json is for the status; use --csv"),
        (["--watch"], "PERSIA_NATS_URL is not set"),
    ],
)
def test_mistakes_are_named(
    run: Path,
    verb: Callable[..., str],  # noqa: F811
    arguments: list[str],
    message: str,
) -> None:
    assert message in verb("status", *arguments, code=2)
