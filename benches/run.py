"""Run the benchmarks and their peers, print the ratios, and write ``runs/bench.json``.

A higher ratio is better. All ratios come from one run on one machine. docs/performance.md describes each id.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import figures
import page
from figures import UNMEASURED, Record

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ROOT / "benches"
PEERS = ROOT / ".venv-peers" / "bin" / "python"

TARGETS = {
    ("adagrad", 1): {16: 5.0, 64: 4.5, 128: 4.0},
    ("rowwise", 1): {16: 10.0, 64: 10.0, 128: 10.0},
    ("adagrad", 10): {16: 2.0, 64: 2.5, 128: 3.0},
    ("rowwise", 10): {16: 3.0, 64: 8.0, 128: 8.0},
}
"""The target ratios of B3 to FBGEMM, by optimizer and ids per sample, and then by dim."""

DEEPREC = 59_068 / 8
"""Samples per second and vCPU that DeepRec publishes for DLRM at batch 512, with its own data, on 8 vCPUs."""

PARTS = {
    "store": ("B1", "B2", "accesses", "B6", "B7", "threads"),
    "step": ("B3",),
    "loopback": ("B4", "scale"),
    "training": ("B5",),
    "startup": ("B9",),
    "data": ("B10",),
    "serving": ("B11",),
    "criteo": ("B12",),
}
"""The ids that each part measures."""


def lines(command: list[str], *ids: str) -> Iterator[Record]:
    """Run ``command`` from the root and yield the JSON lines it prints. Stderr is shown.

    Args:
        command: A program that measures. It runs in a separate process, so the other programs continue if it dies.
        ids: The ids that the program measures. If the program dies, each id gets a record of the failure.
    """
    shown = " ".join(command).replace(f"{ROOT}/", "")
    sys.stderr.write(f"$ {shown}\n")
    problems, found = list[str](), 0
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, env=environment())
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror}")
    else:
        for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
            try:
                record = json.loads(line)
            except ValueError:
                problems.append(f"this line is not JSON: {line}")
            else:
                found += 1
                yield record
        if done.returncode:
            problems.append(ended(done.returncode))
        elif not found:
            problems.append("printed no record")
    if problems:
        yield from (failed(name, shown, "; ".join(problems)) for name in ids)


def ended(code: int) -> str:
    """Return how a process ended, in the words of subprocess."""
    return f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"


def failed(name: str, case: str, reason: str) -> Record:
    """Return the record of a case that could not be measured."""
    return {"id": name, "case": case, "failed": reason}


def environment() -> dict[str, str]:
    """Return this environment with quiet logs and without the settings of a training job."""
    dropped = ("PERSIA_NATS_URL", "RANK", "WORLD_SIZE", "EMBEDDING_STALENESS", "REPRODUCIBLE")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, "LOG_LEVEL": "WARNING"}


def store(quick: bool) -> Iterator[Record]:
    """B1, B2, accesses, B6, B7, threads: the store alone."""
    example = ["cargo", "run", "--quiet", "--release", "--locked", "--manifest-path", "rust_core/Cargo.toml"]
    example += ["-p", "persia-store", "--example", "bench_store", "--", *(["--quick"] if quick else [])]
    for dim in (16, 64, 128):
        yield from lines([*example, "B1", "B2", str(dim)], "B1", "B2", "accesses")
    for name in ("B6", "B7", "threads"):
        yield from lines([*example, name], name)
    script = [
        sys.executable,
        str(BENCHES / "object_save.py"),
        *(["--rows", str(1 << 18), "--repeat", "3"] if quick else []),
    ]
    yield from lines(script, "B6")


def embedded_step(quick: bool) -> Iterator[Record]:
    """B3: the embedded step, compared with FBGEMM and ``nn.EmbeddingBag``."""
    if not PEERS.exists():
        yield failed("B3", "the peers", "they are not installed: make bench does it, or `make .venv-peers/.installed`")
        return
    arguments = ["--seconds", "1" if quick else "2"]
    for dim, per_sample in itertools.product((16, 64, 128), (1, 10)):
        case = [*arguments, "--dims", str(dim), "--per-sample", str(per_sample)]
        measured = [*lines([sys.executable, str(BENCHES / "embedded_step.py"), *case], "B3")]
        for system in ("fbgemm", "embedding_bag"):
            measured += lines([str(PEERS), str(BENCHES / "peers.py"), *case, "--systems", system], "B3")
        yield from (record for record in measured if figures.problem(record))
        yield from compare([record for record in measured if not figures.problem(record)], dim, per_sample)


def loopback_step(quick: bool) -> Iterator[Record]:
    """B4: the step through a middleware and a server, compared with the embedded one and plain sockets."""
    script = [sys.executable, str(BENCHES / "loopback_step.py"), "--seconds", "1" if quick else "3"]
    for dim, per_sample, wire in itertools.product(("16", "64"), ("1", "10"), ("f32", "f16")):
        yield from lines([*script, "--dims", dim, "--per-sample", per_sample, "--wire", wire], "B4")
    for per_sample in ("1", "10"):
        yield from lines([*script, "--tcp", "--dims", "16", "--per-sample", per_sample, "--wire", "f32"], "B4")
    scale = [sys.executable, str(BENCHES / "scale.py"), "--steps", "10" if quick else "40"]
    yield from lines(scale, "scale")


def training(quick: bool) -> Iterator[Record]:
    """B5: the whole training loop."""
    script = [sys.executable, str(BENCHES / "training.py"), "--seconds", "2" if quick else "4"]
    for case in ("census", "criteo-16", "criteo-64"):
        yield from lines([*script, "--cases", case], "B5")
    script = [sys.executable, str(BENCHES / "trainer.py"), "--seconds", "3" if quick else "10"]
    yield from lines(script, "B5")


def startup(quick: bool, containers: bool) -> Iterator[Record]:
    """B9: from a start command to the first step."""
    script = [sys.executable, str(BENCHES / "startup.py"), "--repeat", "1" if quick else "3"]
    for case in ("up", "help", *(["containers"] if containers else [])):
        yield from lines([*script, "--cases", case], "B9")


def data(quick: bool) -> Iterator[Record]:
    """B10: reading and transforming files."""
    script = [sys.executable, str(BENCHES / "data.py"), *(["--rows", "65536", "--seconds", "5"] if quick else [])]
    for case in ("files", "training", "memory"):
        yield from lines([*script, "--only", case], "B10")


def serving(quick: bool) -> Iterator[Record]:
    """B11: persia serve, compared with FastAPI and LitServe, and the start with a large bundle."""
    for script in ("serving.py", "serving_start.py"):
        yield from lines([sys.executable, str(BENCHES / script), *(["--quick"] if quick else [])], "B11")


def criteo(quick: bool) -> Iterator[Record]:
    """B12: DLRM at batch 512 in the shape of Criteo Kaggle, compared with FBGEMM, ``nn.EmbeddingBag`` and DeepRec."""
    if not PEERS.exists():
        yield failed("B12", "the peers", "they are not installed: make bench does it, or `make .venv-peers/.installed`")
        return
    rates: dict[str, list[Record]] = {}
    for _ in range(1 if quick else 3):
        for system, python in (("persia", sys.executable), ("fbgemm", str(PEERS)), ("plain", sys.executable)):
            script = [python, str(BENCHES / "criteo.py"), "--systems", system, "--seconds", "2" if quick else "6"]
            for record in lines(script, "B12"):
                if figures.problem(record):
                    yield record
                else:
                    rates.setdefault(system, []).append(record)
    medians = {
        system: statistics.median(figures.number(record, "samples_per_cpu_s") for record in measured)
        for system, measured in rates.items()
    }
    peers = {**medians, "DeepRec's published figure": DEEPREC}
    own = peers.pop("persia", None)
    if own is None:
        return
    for peer, value in peers.items():
        yield {
            "id": "B12",
            "case": f"batch 512, dim 16: persia against {peer}",
            "value": round(own),
            "unit": "samples per CPU-second",
            "peer": round(value),
            "ratio": round(figures.ratio(own, value), 3),
            "target": 1.0,
            "spread": max(figures.number(record, "spread") for record in rates["persia"]),
        }


def compare(measured: list[Record], dim: int, per_sample: int) -> Iterator[Record]:
    """Convert the rates of one case to ratios. A rate that was not measured has no ratio."""
    rates = {(m["system"], m["optimizer"]): m for m in measured}
    for optimizer, peer in itertools.product(("adagrad", "rowwise"), ("fbgemm", "embedding_bag")):
        own, other = rates.get(("persia", optimizer)), rates.get((peer, optimizer))
        if own is None or other is None:
            continue
        value, beside = (figures.number(rate, "mrows_per_cpu_s") for rate in (own, other))
        yield {
            "id": "B3",
            "case": f"{optimizer}, dim {dim}, L {per_sample}, against {peer}",
            "value": value,
            "unit": "million rows per CPU-second",
            "peer": beside,
            "ratio": round(figures.ratio(value, beside), 3),
            "target": TARGETS[optimizer, per_sample][dim] if peer == "fbgemm" else 1.0,
            "spread": own["spread"],
        }


def machine() -> str:
    """Return one line about this machine."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    memory = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    return f"{model}, {os.cpu_count()} CPUs, {int(memory) // 2**20} GiB, Linux {platform.release()}"


def collect(name: str, part: Iterable[Record]) -> list[Record]:
    """Return the records of a part. If the part fails, also return a failed record for each of its ids."""
    begun, records = time.monotonic(), list[Record]()
    try:
        for record in part:
            records.append(figures.checked(record))
    except Exception as error:  # for any error, because the other parts are still measured
        traceback.print_exc()
        records += (failed(each, f"--only {name}", f"{type(error).__name__}: {error}") for each in PARTS[name])
    sys.stderr.write(f"{name}: {time.monotonic() - begun:.0f} s\n")
    return records


def show(records: list[Record]) -> None:
    """Print one line per record."""
    print(f"machine: {machine()}")
    for r in records:
        if problem := figures.problem(r):
            kind, reason = problem
            print(f"{kind} {r['id']} {r['case']}: {reason}")
            continue
        mark = "ok  " if figures.number(r, "ratio") >= figures.number(r, "target") else "miss"
        print(
            f"{mark} {r['id']} {r['case']}: {r['value']} {r['unit']}, peer {r['peer']}, "
            f"ratio {r['ratio']}, target {r['target']}"
        )


def parse() -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 every case was measured, also where some miss their targets; 2 usage;\n"
        f"{UNMEASURED} a case is invalid or a part failed, which is printed and recorded; the others were measured",
    )
    parser.add_argument("--quick", action="store_true", help="shorter, with wider spreads")
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="the store (B1, B2, B6, B7, threads), the step (B3), the step over sockets (B4), training (B5), "
        "start-up (B9), files (B10), serving (B11), DLRM on data of Criteo's shape (B12)",
    )
    parser.add_argument(
        "--containers", action="store_true", help="B9 with docker compose too; the images must be built"
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/performance.md after a part or a short run too"
    )
    return parser.parse_args()


def parts(arguments: argparse.Namespace) -> dict[str, Iterable[Record]]:
    """Return the measurement of each part, by name; nothing runs until it is iterated."""
    every: dict[str, Iterable[Record]] = {
        "store": store(arguments.quick),
        "step": embedded_step(arguments.quick),
        "loopback": loopback_step(arguments.quick),
        "training": training(arguments.quick),
        "startup": startup(arguments.quick, arguments.containers),
        "data": data(arguments.quick),
        "serving": serving(arguments.quick),
        "criteo": criteo(arguments.quick),
    }
    return {name: part for name, part in every.items() if arguments.only in (None, name)}


def main() -> int:
    """Run the selected measurements."""
    arguments = parse()
    records = [record for name, part in parts(arguments).items() for record in collect(name, part)]
    show(records)
    path = ROOT / "runs" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(records, indent=1, allow_nan=False) + "\n")
    print(path)
    if arguments.write or not (arguments.only or arguments.quick):
        left = page.write(records, f"{machine()}{', a short run' if arguments.quick else ''}.")
        print("docs/performance.md: replaced the tables that have records of this run")
        for name in left:
            print(f"docs/performance.md: did not replace table {name}, because it has a failed record or no result")
    lost = sum(figures.problem(record) is not None for record in records)
    if lost:
        print(f"invalid or failed records: {lost} of {len(records)} (exit code {UNMEASURED})")
    return UNMEASURED if lost else 0


if __name__ == "__main__":
    sys.exit(main())
