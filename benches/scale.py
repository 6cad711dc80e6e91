"""Scale: servers and ranks that share the cores of this host, by the CPU time of each kind of process.

Every rank is a process that makes B4's step with dim 64, L 1 and its own ids. The host has fewer cores than processes,
so the elapsed time shows the cores, and the CPU time per row shows what a further server or rank costs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import figures
import psutil
import torch
import workload
from embedded_step import stepper
from loopback_step import job, slots

from persia.backend.remote import RemoteBackend

DIM = 64
CASES = (
    *((servers, 1, 1) for servers in (1, 2, 4, 8)),
    *((1, ranks, 1) for ranks in (2, 4, 8)),
    *((servers, servers, 1) for servers in (2, 4, 8)),
    *((1, 4, threads) for threads in (2, 4, 8)),
)
"""Servers, ranks, and the threads of a request on a server."""


def rank(steps: int) -> None:
    """Warm up, print ``ready``, wait for a line of standard input, make steps, and print the CPU seconds."""
    torch.set_num_threads(1)
    context = RemoteBackend(trains=True)
    with stepper(context, DIM, 1, zipf=False, rowwise=False, seed=1 + int(os.environ["RANK"])) as step:
        for number in range(2 * workload.BATCHES):
            step(number)
        print("ready", flush=True)
        sys.stdin.readline()
        before = time.process_time()
        for number in range(steps):
            step(number)
        print(json.dumps(time.process_time() - before), flush=True)
        sys.stdin.readline()
    context.close(None)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def measure(servers: int, ranks: int, threads: int, steps: int) -> tuple[dict[str, float], float]:
    """Return the CPU seconds of each kind of process, and the elapsed seconds, of ``steps`` steps on every rank."""
    general = f"embedding_parameter_server_config: {{request_threads: {threads}}}"
    with tempfile.TemporaryDirectory(prefix="persia-") as folder, ExitStack() as stack:
        slots(Path(folder), DIM)
        *server_pids, middleware = stack.enter_context(job(Path(folder), tcp=False, servers=servers, general=general))
        processes = []
        for number in range(ranks):
            variables = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
            process = subprocess.Popen(
                [sys.executable, __file__, "--rank", "--steps", str(steps)],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            if read(process) != "ready":
                raise RuntimeError(f"a rank of {ranks} ended while it was prepared")
        before = [cpu_seconds(pid) for pid in (*server_pids, middleware)]
        start = time.perf_counter()
        for process in processes:
            tell(process)
        own = sum(float(read(process)) for process in processes)
        elapsed = time.perf_counter() - start
        after = [cpu_seconds(pid) for pid in (*server_pids, middleware)]
        for process in processes:
            tell(process)
        for process in processes:
            process.wait(60)
    *of_servers, of_middleware = (end - begin for begin, end in zip(before, after, strict=True))
    return {"ranks": own, "middleware": of_middleware, "servers": sum(of_servers)}, elapsed


def read(process: "subprocess.Popen[str]") -> str:
    """Return the next line that a rank prints; an empty string if it has ended."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]") -> None:
    """Let a rank continue."""
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.write("\n")
    process.stdin.flush()


def main() -> None:
    """Print one record for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="the steps of each rank")
    parser.add_argument("--rank", action="store_true", help="be a rank of a case")
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.steps)
        return
    first = 0.0
    for servers, ranks, threads in CASES:
        cpu, elapsed = measure(servers, ranks, threads, arguments.steps)
        rows = arguments.steps * ranks * workload.rows_of(1)
        parts = ", ".join(f"{kind} {seconds / rows * 1e9:.0f}" for kind, seconds in cpu.items())
        value = sum(cpu.values()) / rows * 1e9
        first = first or value
        figures.write(
            {
                "id": "scale",
                "case": f"servers {servers}, ranks {ranks}, request threads {threads}: {parts}; "
                f"{rows / elapsed / 1e6:.2f} million rows/s",
                "value": round(value),
                "unit": "CPU ns a row",
                "peer": round(first),
                "ratio": round(figures.ratio(first, value), 3),
                "target": 0.8,
                "spread": 0.0,
            }
        )


if __name__ == "__main__":
    main()
