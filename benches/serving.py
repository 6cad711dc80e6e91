"""B11: requests per second and latency of ``persia serve``, compared with the same model in FastAPI and LitServe.

A DCN-v2 over seven id columns, a bag and four floats is trained, exported, and served by each system in turn.
``persia serve`` serves the bundle, the peers serve the same weights in ``nn.EmbeddingBag``. Each system runs on
processor 0. Requests come from processor 1, at a rate that increases until the system is too slow. The scores of all
systems are compared before anything is measured.

A system's throughput is the highest rate at which all requests get scores, 99% of them within ``--p99-ms``. ``cpu_us``
is the processor time of the system for a request, which depends less on other load than the throughput. The packages of
the peers are installed into ``.venv-serving-peers``.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import figures
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import persia
from persia.serving import Bundle
from persia.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ROOT / "benches"
PEERS = ROOT / ".venv-serving-peers"
IDS = {f"id{number}": size for number, size in enumerate((50, 200, 1_000, 5_000, 10_000, 20_000, 50_000))}
BAG, BAG_IDS, BAG_MOST = "tags", 5_000, 8
FLOATS = ("f0", "f1", "f2", "f3")
DIM = 16
ROWS = 60_000
BODIES = 200
"""The number of different requests."""
PEER_SCRIPTS = {"fastapi": "serving_peers.py", "litserve": "serving_litserve.py"}
TARGET = 3.0
STEP = 1.25
"""The factor between two rates."""
FIRST = {1: 50.0, 100: 10.0}
"""The first rate in requests per second, by the number of rows of a request."""
CONNECTIONS = 64
START_S = 120.0
"""Seconds within which a system must listen."""


def table(rows: int, seed: int) -> pa.Table:
    """Return random rows."""
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {name: random.integers(0, size, rows) for name, size in IDS.items()}
    lengths = random.integers(0, BAG_MOST + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns[BAG] = pa.ListArray.from_arrays(offsets, random.integers(0, BAG_IDS, offsets[-1]))
    columns |= {name: random.normal(size=rows).astype(np.float32) for name in FLOATS}
    columns["label"] = (columns["id0"] % 3 + columns["f0"] > 1).astype(np.int8)
    return pa.table(columns)


def train(folder: Path) -> Path:
    """Train the model, export it, write the files that the peers load, and return the bundle."""
    pq.write_table(table(ROWS, 1), folder / "train.parquet")
    features = "\n".join(
        [f"  {name}: {{type: id, dim: {DIM}}}" for name in IDS]
        + [f"  {BAG}: {{type: bag, dim: {DIM}}}"]
        + [f"  {name}: {{type: dense, standardise: true}}" for name in FLOATS]
    )
    (folder / "persia.yml").write_text(
        f"data: {{train: train.parquet, batch_size: 1024}}\nfeatures:\n{features}\nlabels:\n  label: {{}}\n"
        f"model: {{name: dcnv2, cross_layers: 2, deep_mlp: [128, 64]}}\nrun: {{dir: {folder}/runs, name: one}}\n"
    )
    with Trainer(persia.load_config(folder / "persia.yml")) as trainer:
        for _ in trainer.fit():
            pass
    with Trainer(persia.load_config(folder / "persia.yml")) as trainer:
        trainer.resume(folder / "runs" / "one").export(folder / "bundle")
    write_for_peers(folder)
    return folder / "bundle"


def rows_with(column: str, values: Any) -> pa.Table:
    """Return rows with these values in a column, and zeros or empty bags in the others."""
    count = len(values)
    columns = {name: pa.array([0] * count) for name in IDS} | {name: pa.array([0.0] * count) for name in FLOATS}
    columns[BAG] = pa.array([[]] * count, pa.list_(pa.int64()))
    return pa.table({**columns, column: pa.array(values, columns[column].type)})


def write_for_peers(folder: Path) -> None:
    """Write weights, dense model and fitted numbers of a bundle for the peers."""
    weights: dict[str, torch.Tensor] = {}
    with Bundle.open(folder / "bundle") as bundle:
        slots = list(bundle.manifest.model.slots)
        for name, size in {**IDS, BAG: BAG_IDS}.items():
            values = [[number] for number in range(size)] if name == BAG else range(size)
            _, vectors, _ = bundle.vectors_of(bundle.transform(rows_with(name, values)))
            weights[name] = vectors[slots.index(name)].clone()
        zero, one = (
            np.concatenate(
                [bundle.transform(rows_with(name, [value])).dense[0, [place]] for place, name in enumerate(FLOATS)]
            )
            for value in (0.0, 1.0)
        )
        (folder / "model.pt2").write_bytes((bundle.path / bundle.manifest.model.file).read_bytes())
    torch.save(weights, folder / "weights.pt")
    std = 1 / (one - zero)
    spec = {"ids": slots[:-1], "bag": BAG, "floats": FLOATS, "mean": (-zero * std).tolist(), "std": std.tolist()}
    if sorted(slots[:-1]) != sorted(IDS) or slots[-1] != BAG:
        raise RuntimeError(f"the peers expect the slots {[*IDS, BAG]} with {BAG!r} last; the model has {slots}")
    (folder / "spec.json").write_text(json.dumps(spec))


def bodies(folder: Path, rows: int) -> list[Path]:
    """Write the bodies of requests."""
    records = table(BODIES * rows, 2).drop(["label"]).to_pylist()
    found = []
    for number in range(BODIES):
        found.append(folder / f"body-{rows}-{number}.json")
        found[-1].write_text(json.dumps(records[number * rows : (number + 1) * rows], separators=(",", ":")))
    return found


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(system: str, folder: Path, pinned: bool) -> Iterator[tuple[int, int]]:
    """Serve the model by a system until the end of the block. Yield its port and its process id."""
    port = free_port()
    if system == "persia":
        words = [str(Path(sys.executable).parent / "persia"), "serve", str(folder / "bundle")]
        words += ["--http", f"127.0.0.1:{port}", "--grpc", "none"]
    else:
        script = BENCHES / PEER_SCRIPTS[system]
        words = [str(PEERS / "bin" / "python"), str(script), str(folder), str(port)]
    words = ["taskset", "--cpu-list", "0", *words] if pinned else words
    with (folder / f"{system}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
            except OSError:
                if process.poll() is not None:
                    text = (folder / f"{system}.log").read_text()[-2000:]
                    raise RuntimeError(f"{system} ended with {process.returncode} at its start: {text}") from None
                time.sleep(0.1)
        else:
            text = (folder / f"{system}.log").read_text()[-2000:]
            raise RuntimeError(f"{system} did not listen on port {port} within {START_S:g} s: {text}")
        yield port, process.pid
    finally:
        with suppress(ProcessLookupError):  # the process has ended
            os.killpg(process.pid, 15)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def scores(port: int, body: bytes) -> list[float]:
    """Request scores, and wait while the system starts."""
    for attempt in itertools.count():
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/score", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                return list(json.load(answer)["scores"])
        except OSError:
            if attempt > 100:
                raise
            time.sleep(0.2)
    raise AssertionError


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its child processes."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])


def load(
    served: tuple[int, int], files: list[Path], rate: float, seconds: float, folder: Path, pinned: bool
) -> dict[str, Any]:
    """Return the measurements of a load at this rate."""
    spec = folder / "load.json"
    spec.write_text(
        json.dumps({"port": served[0], "path": "/score", "rate": rate, "seconds": seconds, "connections": CONNECTIONS,
                    "bodies": [str(file) for file in files]})
    )  # fmt: skip
    words = [sys.executable, str(BENCHES / "serving_load.py"), str(spec)]
    words = ["taskset", "--cpu-list", "1", *words] if pinned else words
    before = cpu_seconds(served[1])
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
    found["cpu_us"] = round(1e6 * (cpu_seconds(served[1]) - before) / max(found["answered"], 1))
    return found


def rising(
    served: tuple[int, int], files: list[Path], rows: int, options: argparse.Namespace, folder: Path, pinned: bool
) -> list[dict[str, Any]]:
    """Return the measurements at increasing rates, until the system is too slow twice."""
    load(served, files, FIRST[rows], 1.0, folder, pinned)
    found, failures, rate = [], 0, FIRST[rows]
    while failures < 2:
        point = load(served, files, rate, options.seconds, folder, pinned)
        point["good"] = (
            point["p99_ms"] is not None and point["p99_ms"] <= options.p99_ms
            and not point["refused"] and not point["unanswered"] and not point["lost"]
        )  # fmt: skip
        failures = 0 if point["good"] else failures + 1
        found.append(point)
        sys.stderr.write(f"  {json.dumps(point)}\n")
        rate *= STEP if len(found) > 4 or failures else 2.0
        if point["throughput"] < 0.5 * point["rate"]:
            break
    return found


def measure(options: argparse.Namespace, folder: Path) -> Iterator[figures.Record]:
    """Measure all systems."""
    pinned = (os.cpu_count() or 1) > 1
    train(folder)
    curves: dict[tuple[str, int], list[dict[str, Any]]] = {}
    wanted: list[float] = []
    for system in options.systems:
        with served(system, folder, pinned) as (port, pid):
            for rows in options.rows:
                files = bodies(folder, rows)
                found = scores(port, bodies(folder, 100)[0].read_bytes())
                wanted = wanted or found
                far = float(np.abs(np.array(found) - np.array(wanted)).max())
                if far > 1e-4:
                    raise RuntimeError(
                        f"{system}: scores differ from those of {options.systems[0]} by up to {far:.1g}; limit: 1e-4"
                    )
                sys.stderr.write(f"{system}, {rows} rows a request; scores differ by at most {far:.1g}\n")
                curves[system, rows] = rising((port, pid), files, rows, options, folder, pinned)
    if options.curves is not None:
        named = {f"{system}, {rows} rows": curve for (system, rows), curve in curves.items()}
        options.curves.write_text(json.dumps(named, indent=1))
    for rows, peer in itertools.product(options.rows, [each for each in options.systems if each != "persia"]):
        own, other = (best(curves[system, rows]) for system in ("persia", peer))
        yield {
            "id": "B11",
            "case": f"rows {rows}, p99 up to {options.p99_ms:g} ms, against {peer}",
            "value": own["throughput"],
            "unit": "requests/s",
            "peer": other["throughput"],
            "ratio": round(figures.ratio(own["throughput"], other["throughput"]), 3),
            "target": TARGET,
            "spread": 0.0,
            "p50_ms": own["p50_ms"],
            "p99_ms": own["p99_ms"],
            "peer_p50_ms": other["p50_ms"],
            "peer_p99_ms": other["p99_ms"],
        }
        cheap, costly = (min(point["cpu_us"] for point in curves[system, rows]) for system in ("persia", peer))
        yield {
            "id": "B11",
            "case": f"rows {rows}, processor time, against {peer}",
            "value": round(figures.ratio(1e6, cheap), 1),
            "unit": "requests/CPU-s",
            "peer": round(figures.ratio(1e6, costly), 1),
            "ratio": round(figures.ratio(costly, cheap), 3),
            "target": TARGET,
            "spread": 0.0,
        }


def best(curve: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the point with the highest throughput among the good points of a curve."""
    good = [point for point in curve if point["good"]]
    return (
        max(good, key=lambda point: point["throughput"])
        if good
        else {"throughput": 0.0, "p50_ms": None, "p99_ms": None}
    )


def install_peers() -> None:
    """Create the environment of the peers, once. Its torch is that of this environment."""
    if (PEERS / ".installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    python = str(PEERS / "bin" / "python")
    where = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, stdout=subprocess.PIPE, text=True
    )
    packages = ROOT / "requirements" / "serving-peers.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(packages)], check=True)
    Path(where.stdout.strip(), "torch-of-persia.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (PEERS / ".installed").touch()


def main() -> None:
    """Measure, and print a record for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--p99-ms", type=float, default=25.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 100], choices=[*FIRST])
    parser.add_argument("--systems", nargs="+", default=["persia", "fastapi", "litserve"])
    parser.add_argument("--quick", action="store_true", help="2 s of each rate")
    parser.add_argument("--curves", type=Path, help="write all points to this file")
    options = parser.parse_args()
    options.seconds = 2.0 if options.quick else options.seconds
    install_peers()
    with tempfile.TemporaryDirectory() as folder:
        for record in measure(options, Path(folder)):
            figures.write(record)


if __name__ == "__main__":
    main()
