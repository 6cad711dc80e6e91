"""B4: B3's step through a middleware and a server on this host, compared with the embedded step and plain sockets.

The CPU time is the sum over all processes of the step. The limit of a step is the time of the embedded step plus the
time to send ids, rows and gradients over the same two hops with plain sockets. If samples have many ids, the middleware
pools them, and fewer bytes are sent between it and the trainer.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import figures
import numpy as np
import psutil
import raw_tcp
import torch
import workload
from embedded_step import make_batches, stepper

from persia.backend.local import LocalBackend
from persia.backend.remote import RemoteBackend
from persia.launch.local_job import Command, LocalJob
from persia.launch.process import Process

ID_BYTES = 8
WIRE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@contextmanager
def job(folder: Path, *, tcp: bool, servers: int = 1, general: str = "{}") -> Iterator[list[int]]:
    """Start NATS, servers and a middleware, set the environment to them, and yield the pids of all but NATS.

    ``general`` is the text of their ``global_config.yml``.
    """
    global_config = folder / "global_config.yml"
    global_config.write_text(general, encoding="utf-8")
    private = folder / "p"
    private.mkdir()
    ports = (20_888, 20_777) if tcp else None
    local = LocalJob(
        name="bench",
        servers=servers,
        middlewares=1,
        embedding_config=Path(os.environ["PERSIA_EMBEDDING_CONFIG"]),
        global_config=global_config,
        private_dir=private,
        state_dir=folder,
        env={"LOG_LEVEL": "warn"},
        ports=ports,
        metrics="off",
    )
    local.make_token()
    before = dict(os.environ)
    with ExitStack() as stack:
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.clear)

        def start(command: Command) -> Process:
            process = Process(command.name, command.words, env=command.env, line=lambda _: None, ended=lambda _: None)
            stack.callback(process.signal, 15)
            return process

        url = local.nats_url(start(local.nats()))
        parts = [start(local.part("server", index, url)) for index in range(servers)]
        parts.append(start(local.part("middleware", 0, url)))
        os.environ.update(local.settings(url), PERSIA_GLOBAL_CONFIG=str(global_config))
        yield [part.pid for part in parts]


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of this process and of ``pids``."""
    return time.process_time() + sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def cost(step: Callable[[int], None], pids: list[int], seconds: float) -> tuple[float, float, float]:
    """Return a step's CPU seconds, its spread (half the quartiles' distance over the median) and its wall seconds."""
    for number in range(4):
        step(number)
    cpu: list[float] = []
    wall: list[float] = []
    end = time.perf_counter() + seconds
    # The clock of other processes ticks every 10 ms, so a reading covers several steps.
    while time.perf_counter() < end or len(cpu) < 7:
        start, before = time.perf_counter(), cpu_seconds(pids)
        for number in range(4):
            step(number)
        cpu.append((cpu_seconds(pids) - before) / 4)
        wall.append((time.perf_counter() - start) / 4)
    return statistics.median(cpu), figures.spread(cpu), statistics.median(wall)


def run(folder: Path, dim: int, per_sample: int, seconds: float, *, tcp: bool, wire: str) -> None:
    """Measure one case and print it."""
    embedded_context = LocalBackend()
    with stepper(embedded_context, dim, per_sample, zipf=False, rowwise=False) as step:
        embedded, _, embedded_wall = cost(step, [], seconds)
    embedded_context.close()
    unique = statistics.mean(
        sum(len(np.unique(feature)) for feature in batch) for batch in make_batches(per_sample, zipf=False)
    )
    up, down = round(unique * ID_BYTES), round(unique * dim * WIRE_BYTES[wire])
    raw = raw_tcp.cpu_seconds(up, down, 20) + raw_tcp.cpu_seconds(up + down, 0, 20)
    with job(folder, tcp=tcp, general=f"embedding_worker_config: {{wire_dtype: {wire}}}") as pids:
        context = RemoteBackend(trains=True)
        with stepper(context, dim, per_sample, zipf=False, rowwise=False) as step:
            loopback, spread, wall = cost(step, pids, seconds)
        context.close(None)
    record: figures.Record = {
        "id": "B4",
        "case": f"adagrad, dim {dim}, L {per_sample}, {wire}, {'TCP' if tcp else 'Unix sockets'}",
        "value": round(loopback * 1e3, 2),
        "unit": "CPU ms a step",
        "peer": round((embedded + raw) * 1e3, 2),
        "ratio": round(figures.ratio(embedded + raw, loopback), 3),
        "target": 0.6,
        "spread": round(spread, 3),
        "embedded_ms": round(embedded * 1e3, 2),
        "sockets_ms": round(raw * 1e3, 2),
        "wall_ms": round(wall * 1e3, 2),
        "embedded_wall_ms": round(embedded_wall * 1e3, 2),
    }
    figures.write(record)


def slots(folder: Path, dim: int) -> None:
    """Write the slots to the file from which contexts read them."""
    path = folder / "embedding_config.yml"
    os.environ["PERSIA_EMBEDDING_CONFIG"] = str(path)
    lines = "".join(f"  f{feature}: {{dim: {dim}}}\n" for feature in range(workload.FEATURES))
    path.write_text(f"feature_index_prefix_bit: 0\nslots_config:\n{lines}", encoding="utf-8")


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--per-sample", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--tcp", action="store_true", help="TCP on loopback, as between containers")
    parser.add_argument("--wire", choices=WIRE_BYTES, nargs="+", default=["f32", "f16"], help="what floats travel as")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dim, per_sample, wire in itertools.product(arguments.dims, arguments.per_sample, arguments.wire):
        with tempfile.TemporaryDirectory(prefix="persia-") as folder:
            slots(Path(folder), dim)
            run(Path(folder), dim, per_sample, arguments.seconds, tcp=arguments.tcp, wire=wire)


if __name__ == "__main__":
    main()
