"""Shows the resource usage of the processes of a job or run, and training progress, as a refreshed table or as CSV."""

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
from persia.monitor import gpus
from persia.monitor.gpus import Gpu
from persia.runtime import job
from persia.runtime.errors import UsageError

METRICS, SUMMARY, LATEST = "metrics.jsonl", "summary.json", "LATEST"
"""Files in the folder of a run. They are defined in :mod:`persia.trainer.run_folder`, which imports torch."""
_GAP = 2
"""The number of spaces between two columns."""
_TAIL = 1 << 16
"""The number of bytes at the end of ``metrics.jsonl`` that are read."""


@dataclass(frozen=True)
class Watched:
    """A process that is watched.

    Attributes:
        name: The name of the process.
        host: The host on which it runs.
        pid: Its process id on the host.
        gpu: The UUID of the GPU that it has announced; empty if it uses none.
    """

    name: str
    host: str
    pid: int
    gpu: str = ""


@dataclass(frozen=True)
class Row:
    """The resource usage of a process, and training progress.

    Unknown values are None, such as those of another host or container.

    Attributes:
        time: The time of the sample, in UTC.
        process: The name of the process.
        host: The host on which it runs.
        pid: Its process id on the host.
        cpu_percent: CPU time since the last sample; 100 is one fully used processor.
        rss_bytes: Its resident memory, in bytes.
        preemptions_per_s: Involuntary context switches per second; a high value means too few processors.
        read_bytes_per_s: Bytes per second that it reads from disks.
        written_bytes_per_s: Bytes per second that it writes to disks.
        step: The last reported step. This and the next three attributes are those of rank 0.
        samples_per_s: Samples trained per second.
        loss: The last reported loss.
        data_wait: The share of the time in which training waits for data.
        rx_bytes_per_s: Bytes per second that the host receives, on all interfaces except loopback.
        tx_bytes_per_s: Bytes per second that the host sends, likewise.
        gpu_used_bytes: The memory that the process uses on its GPU. Each GPU of this host also has its own row, with
            the memory used by all processes.
        gpu_total_bytes: The memory of the GPU; only in the row of the GPU.
        gpu_percent: The share of the time in which the process computed on the GPU. In the row of a GPU, the share in
            which any process computed.
        gpu: The index of the GPU.
    """

    time: str
    process: str
    host: str
    pid: int | None
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    preemptions_per_s: float | None = None
    read_bytes_per_s: float | None = None
    written_bytes_per_s: float | None = None
    step: int | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    data_wait: float | None = None
    rx_bytes_per_s: float | None = None
    tx_bytes_per_s: float | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_percent: int | None = None
    gpu: str | None = None


class Watch:
    """Samples the resource usage of processes.

    Args:
        find: Returns the processes; called for every sample.
        folder: The folder of the run, with its reports.
    """

    def __init__(self, find: Callable[[], list[Watched]], folder: Path) -> None:
        self._find, self._folder = find, folder
        self._processes: dict[int, psutil.Process] = {}
        self._preempted: dict[int, int] = {}
        self._disk: dict[int, tuple[int, int] | None] = {}
        self._network = _network()
        self._gpus = gpus.find()
        self._at = time.monotonic()
        self.sample()  # rates require an earlier sample

    def sample(self) -> list[Row]:
        """Return a row for each process and each GPU, with rates since the previous call."""
        now, network = time.monotonic(), _network()
        spent = max(now - self._at, 1e-6)
        rates = [(after - before) / spent for after, before in zip(network, self._network, strict=True)]
        self._at, self._network = now, network
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        report = last_report(self._folder)
        here_gpus = self._gpus.sample()
        rows = []
        for each in self._find():
            is_first = each.name in ("persia-trainer 0", "persia train")
            training = report if is_first else {}
            here = each.host == socket.gethostname()
            traffic: dict[str, Any] = {"rx_bytes_per_s": round(rates[0]), "tx_bytes_per_s": round(rates[1])}
            rows.append(
                Row(
                    at,
                    each.name,
                    each.host,
                    each.pid or None,
                    **(self._used(each.pid, spent) | _used_of(here_gpus, each) if here else {}),
                    **training,
                    **(traffic if here else {}),
                )
            )
        return rows + [
            Row(
                at,
                f"gpu {each.index}",
                socket.gethostname(),
                None,
                gpu_used_bytes=each.used_bytes,
                gpu_total_bytes=each.total_bytes,
                gpu_percent=each.percent,
                gpu=each.index,
            )
            for each in here_gpus
        ]

    def _used(self, pid: int, spent: float) -> dict[str, Any]:
        """Return the resource usage of a process on this host; nothing if it has ended or belongs to another user."""
        try:
            process = self._processes.get(pid)
            if process is None or not process.is_running():
                process = self._processes[pid] = psutil.Process(pid)
                self._preempted.pop(pid, None)
                self._disk.pop(pid, None)
            with process.oneshot():
                preempted = process.num_ctx_switches().involuntary
                cpu, rss = process.cpu_percent(None), int(process.memory_info().rss)
                disk = _disk_of(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            return {}
        before = self._preempted.get(pid, preempted)
        self._preempted[pid] = preempted
        then = self._disk.get(pid, disk)
        rates = None if disk is None or then is None else [round((disk[at] - then[at]) / spent) for at in (0, 1)]
        self._disk[pid] = disk
        return {
            "cpu_percent": round(cpu, 1),
            "rss_bytes": rss,
            "preemptions_per_s": round((preempted - before) / spent, 1),
            **({} if rates is None else {"read_bytes_per_s": rates[0], "written_bytes_per_s": rates[1]}),
        }


def of_job(url: str, job: str | None) -> list[Watched]:
    """Return the processes that a job has announced.

    Raises:
        UnreachableError: NATS does not respond.
    """
    return [
        Watched(f"{each.kind} {each.number('index')}", each.text("host"), each.number("pid", 0), each.text("gpu"))
        for each in nats.services(url, job=job)
    ]


def of_run(folder: Path) -> list[Watched]:
    """Return the process that trains a run, according to the run's summary."""
    process = _read_json(folder / SUMMARY).get("process") or {}
    return [Watched("persia train", str(process.get("host", "")), int(process.get("pid") or 0))]


def run_folder(given: Path) -> Path:
    """Return the folder of a run. The path may be ``LATEST`` next to the folder.

    Raises:
        UsageError: The run does not exist.
        StorageError: ``LATEST`` cannot be read.
    """
    folder = given
    if given.name == LATEST and given.is_file():
        folder = job.target_of(given)
    if not (folder / METRICS).is_file():
        raise UsageError(
            f"{given}: no run; expected the folder of a run, such as runs/LATEST",
            hint="train one: persia train persia.yml; or, to watch a job, omit RUN and set PERSIA_NATS_URL",
        )
    return folder


def last_report(folder: Path) -> dict[str, Any]:
    """Return step, speed, loss and data wait of the last report of a run; nothing if there is no report."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:  # the line is incomplete
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
    """Show a table, refreshed at an interval, until Ctrl-C or ``count`` samples."""
    console = Console()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for rows in _samples(watch, seconds, count):
            live.update(_table(rows, console.width), refresh=True)


def write_csv(watch: Watch, seconds: float, count: int | None) -> None:
    """Write a header, and a line for each process and sample, to standard output, until Ctrl-C or ``count`` samples."""
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


def _fitting(heads: list[str], lines: list[list[str]], width: int) -> Iterator[Table]:
    """Yield one table, or several that are not wider than ``width``; each begins with the column of the processes."""
    wide = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    columns = list(range(1, len(heads)))
    while columns:
        chosen, used = [0], wide[0]
        while columns and (len(chosen) == 1 or used + _GAP + wide[columns[0]] <= width):
            used += _GAP + wide[columns[0]]
            chosen.append(columns.pop(0))
        table = Table(box=None, pad_edge=False)
        for at in chosen:
            table.add_column(heads[at], justify="left" if heads[at] in ("process", "host") else "right", no_wrap=True)
        for line in lines:
            table.add_row(*(line[at] for at in chosen))
        yield table


def _table(rows: list[Row], width: int) -> Group:
    heads = ["process", "pid", "cpu %", "memory", "preempted/s", "disk", "step", "samples/s", "loss", "data wait"]
    several = len({row.host for row in rows}) > 1
    on_gpus = any(row.gpu is not None and row.gpu_total_bytes is None for row in rows)
    heads += ["gpu", "gpu memory", "gpu %"] if on_gpus else []
    heads += ["host"] if several else []
    lines: list[list[str]] = []
    for row in rows:
        if row.gpu_total_bytes is not None:
            continue
        memory = None if row.rss_bytes is None else f"{row.rss_bytes / 1e6:,.0f} MB"
        wait = None if row.data_wait is None else f"{row.data_wait:.0%}"
        speed = None if row.samples_per_s is None else f"{row.samples_per_s:,.0f}"
        loss = None if row.loss is None else f"{row.loss:.4f}"
        used = [row.read_bytes_per_s, row.written_bytes_per_s]
        disk = None if None in used else f"{sum(filter(None, used)) / 1e6:,.1f} MB/s"
        cells: list[Any] = [row.process, row.pid, row.cpu_percent, memory, row.preemptions_per_s, disk, row.step]
        cells += [speed, loss, wait]
        if on_gpus:
            held = None if row.gpu_used_bytes is None else f"{row.gpu_used_bytes / 1e9:.1f} GB"
            cells += [row.gpu, held, row.gpu_percent]
        cells += [row.host] if several else []
        lines.append(["-" if cell is None else str(cell) for cell in cells])
    seen = next((row for row in rows if row.rx_bytes_per_s is not None and row.tx_bytes_per_s is not None), None)
    if seen is None:
        network = "the network is not shown, because no process of the table runs on this host"
    else:
        rx, tx = (seen.rx_bytes_per_s or 0.0) / 1e6, (seen.tx_bytes_per_s or 0.0) / 1e6
        network = f"{seen.host}: network receives {rx:.2f} MB/s, sends {tx:.2f} MB/s"
    gpus = [
        f"{row.process}: {(row.gpu_used_bytes or 0) / 1e9:.1f} of {row.gpu_total_bytes / 1e9:.1f} GB"
        + ("" if row.gpu_percent is None else f", {row.gpu_percent} % busy")
        for row in rows
        if row.gpu_total_bytes is not None
    ]
    return Group(*_fitting(heads, lines, width), *map(Text, gpus), Text(f"{network}. Ctrl-C ends"))


def _used_of(here: list[Gpu], process: Watched) -> dict[str, Any]:
    """Return the GPU usage of a process on this host; nothing if it uses no GPU.

    In a container, the driver shows no processes. The usage of the whole GPU is then attributed to the rank that has
    announced the GPU.
    """
    mine = [(each, each.processes[process.pid]) for each in here if process.pid in each.processes]
    if mine:
        held = [use.used_bytes for _, use in mine if use.used_bytes is not None]
        percents = [use.percent for _, use in mine if use.percent is not None]
        return {
            "gpu": " ".join(each.index for each, _ in mine),
            "gpu_used_bytes": sum(held) if held else None,
            "gpu_percent": max(percents, default=None),
        }
    for each in here:
        if process.gpu and each.uuid == process.gpu and not each.processes:
            return {"gpu": each.index, "gpu_used_bytes": each.used_bytes, "gpu_percent": each.percent}
    return {}


def _disk_of(process: psutil.Process) -> tuple[int, int] | None:
    """Return the bytes that a process has read from and written to disks; None for a process of another user."""
    try:
        counters = process.io_counters()
    except psutil.AccessDenied:
        return None
    return counters.read_bytes, counters.write_bytes


def _network() -> tuple[int, int]:
    """Return the bytes that this host has received and sent, excluding loopback."""
    counters = psutil.net_io_counters(pernic=True)
    real = [each for name, each in counters.items() if name != "lo"]
    return sum(each.bytes_recv for each in real), sum(each.bytes_sent for each in real)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
