"""B4: B3's step through one middleware and one server on this host, beside the embedded step and plain sockets.

The CPU time is that of all processes concerned. The limit of a step is what the embedded step costs plus what moving
the same bytes over the same two hops costs with plain sockets.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import raw_tcp
import torch
import workload
from embedded_step import make_batches, stepper

from persia.embedded import EmbeddedContext
from persia.launch.local import Command, LocalJob
from persia.launch.process import Process
from persia.remote import RemoteContext

ID_BYTES, FLOAT_BYTES = 8, 4


@contextmanager
def job(folder: Path, *, tcp: bool) -> Iterator[list[int]]:
    """Start NATS, a server and a middleware, point the environment at them, and give the pids of the last two."""
    private = folder / "p"
    private.mkdir()
    ports = (20_888, 20_777) if tcp else None
    local = LocalJob(
        name="bench",
        servers=1,
        middlewares=1,
        embedding_config=Path(os.environ["PERSIA_EMBEDDING_CONFIG"]),
        global_config=None,
        private=private,
        state=folder,
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
        parts = [start(local.part(kind, 0, url)) for kind in ("server", "middleware")]
        os.environ.update(local.settings(url))
        yield [part.pid for part in parts]


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds that this process and those of ``pids`` have used."""
    return time.process_time() + sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def cost(step: Callable[[int], None], pids: list[int], seconds: float) -> tuple[float, float, float]:
    """Return a step's CPU seconds, its spread (half the quartiles' distance over the median) and its wall seconds."""
    for number in range(4):
        step(number)
    cpu: list[float] = []
    wall: list[float] = []
    end = time.perf_counter() + seconds
    # The clock of other processes ticks every 10 ms: several steps a reading.
    while time.perf_counter() < end or len(cpu) < 7:
        start, before = time.perf_counter(), cpu_seconds(pids)
        for number in range(4):
            step(number)
        cpu.append((cpu_seconds(pids) - before) / 4)
        wall.append((time.perf_counter() - start) / 4)
    low, middle, high = statistics.quantiles(cpu, n=4)
    return middle, (high - low) / 2 / middle, statistics.median(wall)


def run(folder: Path, dim: int, per_sample: int, seconds: float, *, tcp: bool) -> None:
    """Measure one case and print it."""
    embedded_context = EmbeddedContext()
    with stepper(embedded_context, dim, per_sample, zipf=False, rowwise=False) as step:
        embedded, _, embedded_wall = cost(step, [], seconds)
    embedded_context.close()
    unique = statistics.mean(
        sum(len(np.unique(feature)) for feature in batch) for batch in make_batches(per_sample, zipf=False)
    )
    up, down = round(unique * ID_BYTES), round(unique * dim * FLOAT_BYTES)
    raw = raw_tcp.cpu_seconds(up, down, 20) + raw_tcp.cpu_seconds(up + down, 0, 20)
    with job(folder, tcp=tcp) as pids:
        context = RemoteContext(trains=True)
        with stepper(context, dim, per_sample, zipf=False, rowwise=False) as step:
            loopback, spread, wall = cost(step, pids, seconds)
        context.close(None)
    record = {
        "id": "B4",
        "case": f"adagrad, dim {dim}, L {per_sample}, {'TCP' if tcp else 'Unix sockets'}",
        "value": round(loopback * 1e3, 2),
        "unit": "CPU ms a step",
        "peer": round((embedded + raw) * 1e3, 2),
        "ratio": round((embedded + raw) / loopback, 3),
        "target": 0.6,
        "spread": round(spread, 3),
        "embedded_ms": round(embedded * 1e3, 2),
        "sockets_ms": round(raw * 1e3, 2),
        "wall_ms": round(wall * 1e3, 2),
        "embedded_wall_ms": round(embedded_wall * 1e3, 2),
    }
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--per-sample", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--tcp", action="store_true", help="TCP on loopback, as between containers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dim in arguments.dims:
        for per_sample in arguments.per_sample:
            with tempfile.TemporaryDirectory(prefix="persia-") as folder:
                path = Path(folder) / "embedding_config.yml"
                os.environ["PERSIA_EMBEDDING_CONFIG"] = str(path)
                slots = "".join(f"  f{feature}: {{dim: {dim}}}\n" for feature in range(workload.FEATURES))
                path.write_text(f"feature_index_prefix_bit: 0\nslots_config:\n{slots}")
                run(Path(folder), dim, per_sample, arguments.seconds, tcp=arguments.tcp)


if __name__ == "__main__":
    main()
