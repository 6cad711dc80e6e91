"""What the processes of a job or a run use, and how training goes: a table that is refreshed, or lines of CSV."""

import contextlib
import csv
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from persia.discovery import nats
from persia.runtime.errors import UsageError

METRICS, SUMMARY, LATEST = "metrics.jsonl", "summary.json", "LATEST"
"""Files of a run, see :mod:`persia.trainer.run_folder`, which imports torch."""
_TAIL = 1 << 16
"""Bytes at the end of ``metrics.jsonl`` that are read."""


@dataclass(frozen=True)
class Watched:
    """A process that is watched."""

    name: str
    host: str
    pid: int


@dataclass(frozen=True)
class Row:
    """What a process uses, and how training goes. None where it cannot be seen from here.

    Attributes:
        time: When, in UTC.
        process: The name of the process.
        host: Its host.
        pid: Its number there.
        cpu_percent: Processor time since the last row; 100 is one processor.
        rss_bytes: Its memory.
        preemptions_per_s: How often it was taken off a processor that it could have used: many mean too few
            processors.
        step: The last step that was reported; of the trainer's rank 0, as are those that follow.
        samples_per_s: Rows trained on in a second.
        loss: The loss.
        data_wait: The share of the time that training waits for data.
        rx_bytes_per_s: What the host receives, all interfaces but loopback.
        tx_bytes_per_s: What the host sends.
    """

    time: str
    process: str
    host: str
    pid: int | None
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    preemptions_per_s: float | None = None
    step: int | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    data_wait: float | None = None
    rx_bytes_per_s: float | None = None
    tx_bytes_per_s: float | None = None


class Watch:
    """Samples processes.

    Args:
        find: Returns the processes; called for every sample.
        folder: The folder of the run, with its reports.
    """

    def __init__(self, find: Callable[[], list[Watched]], folder: Path) -> None:
        self._find, self._folder = find, folder
        self._processes: dict[int, psutil.Process] = {}
        self._preempted: dict[int, int] = {}
        self._network = _network()
        self._at = time.monotonic()
        self.sample()  # rates need a sample before

    def sample(self) -> list[Row]:
        """Return a row for each process, with rates since the last call."""
        now, network = time.monotonic(), _network()
        spent = max(now - self._at, 1e-6)
        rates = [(after - before) / spent for after, before in zip(network, self._network, strict=True)]
        self._at, self._network = now, network
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        report = last_report(self._folder)
        rows = []
        for each in self._find():
            is_first = each.name in ("persia-trainer 0", "persia train")
            training = report if is_first else {}
            here = each.host == socket.gethostname()
            rows.append(
                Row(
                    at,
                    each.name,
                    each.host,
                    each.pid or None,
                    **(self._used(each.pid, spent) if here else {}),
                    **training,
                    **({"rx_bytes_per_s": round(rates[0]), "tx_bytes_per_s": round(rates[1])} if here else {}),
                )
            )
        return rows

    def _used(self, pid: int, spent: float) -> dict[str, Any]:
        """Return what a process of this host uses; nothing if it is gone, or of another user."""
        try:
            process = self._processes.get(pid)
            if process is None or not process.is_running():
                process = self._processes[pid] = psutil.Process(pid)
                self._preempted.pop(pid, None)
            with process.oneshot():
                preempted = process.num_ctx_switches().involuntary
                cpu, rss = process.cpu_percent(None), int(process.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            return {}
        before = self._preempted.get(pid, preempted)
        self._preempted[pid] = preempted
        return {
            "cpu_percent": round(cpu, 1),
            "rss_bytes": rss,
            "preemptions_per_s": round((preempted - before) / spent, 1),
        }


def of_job(url: str, job: str | None) -> list[Watched]:
    """Return the processes of a job that have announced themselves.

    Raises:
        UnreachableError: NATS does not answer.
    """
    return [
        Watched(f"{each.kind} {each.number('index')}", each.text("host"), each.number("pid", 0))
        for each in nats.services(url, job=job)
    ]


def of_run(folder: Path) -> list[Watched]:
    """Return the process that trains a run, by the run's summary."""
    process = _read_json(folder / SUMMARY).get("process") or {}
    return [Watched("persia train", str(process.get("host", "")), int(process.get("pid") or 0))]


def run_folder(given: Path) -> Path:
    """Return the folder of a run, which may be named by ``LATEST`` beside it.

    Raises:
        UsageError: There is no run.
    """
    folder = given
    if given.name == LATEST and given.is_file():
        folder = given.parent / given.read_text(encoding="utf-8").strip()
    if not (folder / METRICS).is_file():
        error = UsageError(f"{given}: no run; want the folder of a run, such as runs/LATEST")
        error.hint = "train one: persia train persia.yml; or give PERSIA_NATS_URL, to watch a job"
        raise error
    return folder


def last_report(folder: Path) -> dict[str, Any]:
    """Return step, speed, loss and data wait of the last report of a run; nothing without one."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:  # cut short
            continue
        if isinstance(found, dict) and "samples_per_s" in found:
            return {
                "step": found["step"],
                "samples_per_s": found["samples_per_s"],
                "loss": found.get("loss"),
                "data_wait": found.get("shares", {}).get("data"),
            }
    return {}


def show(watch: Watch, seconds: float, count: int | None) -> None:
    """Show a table, refreshed every so many seconds, until Ctrl-C or ``count`` samples."""
    console = Console()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for rows in _samples(watch, seconds, count):
            live.update(_table(rows), refresh=True)


def write_csv(watch: Watch, seconds: float, count: int | None) -> None:
    """Write a head and a line for each process and sample to standard output, until Ctrl-C or ``count`` samples."""
    writer = csv.DictWriter(sys.stdout, [each.name for each in fields(Row)], lineterminator="\n")
    writer.writeheader()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        for rows in _samples(watch, seconds, count):
            writer.writerows(asdict(row) for row in rows)
            sys.stdout.flush()


def _samples(watch: Watch, seconds: float, count: int | None) -> Iterator[list[Row]]:
    done = 0
    while count is None or done < count:
        time.sleep(seconds)
        yield watch.sample()
        done += 1


def _table(rows: list[Row]) -> Group:
    table = Table(box=None, pad_edge=False)
    heads = ["process", "pid", "cpu %", "memory", "preempted/s", "step", "samples/s", "loss", "data wait"]
    several = len({row.host for row in rows}) > 1
    for head in [*heads, "host"] if several else heads:
        table.add_column(head, justify="left" if head in ("process", "host") else "right", no_wrap=True)
    for row in rows:
        memory = None if row.rss_bytes is None else f"{row.rss_bytes / 1e6:,.0f} MB"
        wait = None if row.data_wait is None else f"{row.data_wait:.0%}"
        speed = None if row.samples_per_s is None else f"{row.samples_per_s:,.0f}"
        loss = None if row.loss is None else f"{row.loss:.4f}"
        cells: list[Any] = [row.process, row.pid, row.cpu_percent, memory, row.preemptions_per_s, row.step]
        cells += [speed, loss, wait, row.host] if several else [speed, loss, wait]
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    seen = next((row for row in rows if row.rx_bytes_per_s is not None and row.tx_bytes_per_s is not None), None)
    if seen is None:
        network = "no process of this host"
    else:
        rx, tx = (seen.rx_bytes_per_s or 0.0) / 1e6, (seen.tx_bytes_per_s or 0.0) / 1e6
        network = f"{seen.host}: network receives {rx:.2f} MB/s, sends {tx:.2f} MB/s"
    return Group(table, Text(f"{network}. Ctrl-C ends"))


def _network() -> tuple[int, int]:
    """Return the bytes that this host has received and sent, loopback left out."""
    counters = psutil.net_io_counters(pernic=True)
    real = [each for name, each in counters.items() if name != "lo"]
    return sum(each.bytes_recv for each in real), sum(each.bytes_sent for each in real)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
