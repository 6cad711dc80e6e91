"""``persia status --watch`` shows a run of ``persia train``: a table on a terminal, otherwise CSV."""

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
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import Device, FakeNvml
from rich.console import Console
from test_profile import verb  # noqa: F401 - a fixture
from waiting import wait_until

from persia.cli import watch
from persia.discovery import nats
from persia.errors import UsageError

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
        assert float(row["cpu_percent"]) > 0 and int(row["rss_bytes"]) > 1 << 20
        assert float(row["rx_bytes_per_s"]) >= 0 and float(row["preemptions_per_s"]) >= 0
        assert [row[name] for name in ("step", "samples_per_s", "loss", "data_wait")] == ["8", "1234", "0.25", "0.5"]


@pytest.mark.row("S4-07", "S4-55")
def test_gpus_have_rows_of_their_own(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[..., str],  # noqa: F811
) -> None:
    smi = tmp_path / "nvidia-smi"
    lines = ("0, 70000, 81559, 93, GPU-a", "1, 512, 81559, [N/A], GPU-b", "no such line")
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # the extra `gpu` is not installed
    out = verb("status", "runs/LATEST", "--watch", "--csv", "-l", "2", "-n", "0.1")
    gpus = [row for row in csv.DictReader(io.StringIO(out)) if row["process"].startswith("gpu")]
    assert [row["process"] for row in gpus] == ["gpu 0", "gpu 1"] * 2
    assert [int(gpus[0][name]) >> 20 for name in ("gpu_used_bytes", "gpu_total_bytes")] == [70000, 81559]
    assert [row["gpu_percent"] for row in gpus[:2]] == ["93", ""]
    assert all(row["rss_bytes"] == "" and row["pid"] == "" for row in gpus)
    table = watch._table(watch.Watch(lambda: watch.of_run(run), run).sample(), 160)
    assert "gpu 0: 73.4 of 85.5 GB, 93 % busy" in [str(each) for each in table.renderables]
    smi.write_text("#!/bin/sh\necho broken >&2; exit 9\n")
    with pytest.raises(UsageError, match="nvidia-smi"):
        watch.Watch(lambda: watch.of_run(run), run)


@pytest.mark.row("S3-20")
def test_each_process_has_its_use_of_its_gpu(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[..., str],  # noqa: F811
) -> None:
    """A fake of NVML reports the use."""
    pid = watch.of_run(run)[0].pid
    nvml = FakeNvml([Device("GPU-a", used=7 << 30), Device("GPU-b", used=9 << 30, held={pid: 5 << 30}, busy={pid: 61})])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    out = verb("status", "runs/LATEST", "--watch", "--csv", "-l", "2", "-n", "0.1")
    rows = [*csv.DictReader(io.StringIO(out))][-3:]
    names = ("process", "gpu", "gpu_used_bytes", "gpu_percent", "gpu_total_bytes")
    total = str(80 << 30)
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("persia train", "1", str(5 << 30), "61", ""),
        ("gpu 0", "0", str(7 << 30), "50", total),
        ("gpu 1", "1", str(9 << 30), "50", total),
    ]
    shown = io.StringIO()
    Console(file=shown, width=160).print(watch._table(watch.Watch(lambda: watch.of_run(run), run).sample(), 160))
    head, line = (each.split() for each in shown.getvalue().splitlines()[:2])
    assert head[-5:] == ["gpu", "gpu", "memory", "gpu", "%"] and line[-4:] == ["1", "5.4", "GB", "61"]


@pytest.mark.row("S3-20")
def test_a_rank_whose_processes_the_driver_hides_has_what_its_gpu_has(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, the driver hides processes, but the rank has announced its GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([Device("GPU-a", used=1), Device("GPU-b", used=2 << 30)]))
    announced = [
        nats.Service("persia-trainer", str(rank), {"index": str(rank), "host": socket.gethostname(), **more})
        for rank, more in enumerate(({"gpu": "b"}, {"gpu": "elsewhere"}, {}))
    ]
    monkeypatch.setattr(nats, "services", lambda url, job: announced)
    rows = watch.Watch(lambda: watch.of_job("nats://x", "one"), run).sample()
    found = [(row.gpu, row.gpu_used_bytes, row.gpu_percent) for row in rows[:3]]
    assert found == [("1", 2 << 30, 50), (None, None, None), (None, None, None)]


@pytest.mark.row("S3-37")
def test_the_network_of_the_host_is_a_rate_of_all_interfaces_but_loopback(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, sent = [100.0], [0]

    def counters(*, pernic: bool) -> dict[str, SimpleNamespace]:
        assert pernic
        lo, wire = 10**9 * (1 + sent[0]), sent[0]
        return {
            "lo": SimpleNamespace(bytes_recv=lo, bytes_sent=lo),
            "eth0": SimpleNamespace(bytes_recv=7_000_000 * wire, bytes_sent=3_000_000 * wire),
            "eth1": SimpleNamespace(bytes_recv=1_000_000 * wire, bytes_sent=0),
        }

    monkeypatch.setattr("persia.cli.watch.psutil.net_io_counters", counters)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    watching = watch.Watch(lambda: watch.of_run(run), run)
    seconds[0], sent[0] = 102.0, 1
    rows = watching.sample()
    assert (rows[0].rx_bytes_per_s, rows[0].tx_bytes_per_s) == (4_000_000, 1_500_000)
    shown = io.StringIO()
    Console(file=shown, width=160).print(watch._table(rows, 160))
    assert f"{socket.gethostname()}: network receives 4.00 MB/s, sends 1.50 MB/s" in shown.getvalue()


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


@pytest.mark.row("S4-56")
def test_what_a_process_writes_to_disks_is_shown(run: Path, tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    if "tmpfs" in kind:
        pytest.skip("temporary files are in memory here")
    code = "import os\nfile = open('written', 'wb')\nwhile True: file.write(bytes(1 << 20)); file.flush(); file.seek(0)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as writer:
        process = {"host": socket.gethostname(), "pid": writer.pid}
        (run / "summary.json").write_text(json.dumps({"process": process}))
        watching = watch.Watch(lambda: watch.of_run(run), run)
        wait_until("written bytes", lambda: (watching.sample()[0].written_bytes_per_s or 0) > 1 << 20, 60)
        writer.kill()


def test_a_process_that_is_gone_or_elsewhere_has_no_figures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        watch.Watched("persia-server 0", "elsewhere", 1),
        watch.Watched("persia-server 1", socket.gethostname(), 0),
    ]
    rows = watch.Watch(lambda: places, run).sample()
    assert [row.cpu_percent for row in rows] == [None, None]
    assert [row.rx_bytes_per_s is None for row in rows] == [True, False]
    assert all(row.step is None for row in rows)


def test_the_table_fits_80_columns() -> None:
    usage = {"cpu_percent": 123.4, "rss_bytes": 12_345_000_000, "preemptions_per_s": 1234.5}
    disk = {"read_bytes_per_s": 123_456_789, "written_bytes_per_s": 0}
    progress = {"step": 123_456, "samples_per_s": 1_234_567, "loss": 0.4321, "data_wait": 0.5}
    figures: dict[str, Any] = {**usage, **disk, **progress, "gpu": "0", "gpu_used_bytes": 7e10, "gpu_percent": 93}
    hosts = ["0a1b2c3d4e5f", "f5e4d3c2b1a0"]
    rows = [watch.Row("t", f"persia-middleware {at}", host, 1_234_567, **figures) for at, host in enumerate(hosts)]
    shown = io.StringIO()
    Console(file=shown, width=80).print(watch._table(rows, 80))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in shown.getvalue(), shown.getvalue()
    text = " ".join(lines)
    for cell in ("12,345 MB", "1234.5", "123.5 MB/s", "123456", "1,234,567", "0.4321", "50%", "70.0 GB", *hosts):
        assert cell in text, cell
    tables = sum(line.startswith("process ") for line in lines)
    assert tables > 1 and sum(line.startswith("persia-middleware 0 ") for line in lines) == tables


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
        (["--csv"], "--csv: only allowed with --watch"),
        (["-n", "5"], "-n: only allowed with --watch"),
        (["runs/one"], "RUN: only allowed with --watch"),
        (["--watch", "runs/two"], "runs/two: no run"),
        (["--watch", "--json"], "--json is not allowed with --watch; use --csv"),
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
