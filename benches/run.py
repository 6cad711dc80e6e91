"""Run the benchmarks beside their peers, print the ratios, and write ``runs/bench.json``.

Every ratio is higher-is-better and comes from one run on one machine. What each id means stands in docs/performance.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import page

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ROOT / "benches"
PEERS = ROOT / ".venv-peers" / "bin" / "python"

TARGETS = {
    ("adagrad", 1): {16: 5.0, 64: 4.5, 128: 4.0},
    ("rowwise", 1): {16: 10.0, 64: 10.0, 128: 10.0},
    ("adagrad", 10): {16: 2.0, 64: 2.5, 128: 3.0},
    ("rowwise", 10): {16: 3.0, 64: 8.0, 128: 8.0},
}
"""B3 against FBGEMM: (optimizer, ids per sample) to dim to ratio."""

Record = dict[str, object]


def lines(command: list[str]) -> list[Record]:
    """Run ``command`` from the root and return the JSON lines it prints; stderr is shown."""
    sys.stderr.write(f"$ {' '.join(command)}\n")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def environment() -> dict[str, str]:
    """Return this environment with quiet logs and without the settings of a training job."""
    dropped = ("PERSIA_NATS_URL", "RANK", "WORLD_SIZE", "EMBEDDING_STALENESS", "REPRODUCIBLE")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, "LOG_LEVEL": "WARNING"}


def store(quick: bool) -> list[Record]:
    """B1, B2, B6, B7: the store alone."""
    example = ["cargo", "run", "--quiet", "--release", "--locked", "--manifest-path", "rust_core/Cargo.toml"]
    example += ["-p", "persia-store", "--example", "bench_store"]
    return [record for record in lines([*example, "--", *(["--quick"] if quick else [])]) if "id" in record]


def embedded_step(quick: bool) -> list[Record]:
    """B3: the embedded step beside FBGEMM and ``nn.EmbeddingBag``."""
    if not PEERS.exists():
        sys.exit("the peers are not installed: make bench does it, or `make .venv-peers/.installed`")
    arguments = ["--seconds", "1" if quick else "2"]
    records: list[Record] = []
    for dim in (16, 64, 128):
        for per_sample in (1, 10):
            case = [*arguments, "--dims", str(dim), "--per-sample", str(per_sample)]
            measured = lines([sys.executable, str(BENCHES / "embedded_step.py"), *case])
            measured += lines([str(PEERS), str(BENCHES / "peers.py"), *case])
            records += compare(measured, dim, per_sample)
    return records


def loopback_step(quick: bool) -> list[Record]:
    """B4: the step through a middleware and a server, beside the embedded one and plain sockets."""
    arguments = ["--seconds", "1" if quick else "3"]
    script = [sys.executable, str(BENCHES / "loopback_step.py"), *arguments]
    return lines(script) + lines([*script, "--tcp", "--dims", "16", "--wire", "f32"]) + lines([*script, "--servers"])


def training(quick: bool) -> list[Record]:
    """B5: the whole training loop."""
    return lines([sys.executable, str(BENCHES / "training.py"), "--seconds", "2" if quick else "4"])


def startup(quick: bool, containers: bool) -> list[Record]:
    """B9: from a start command to the first step."""
    arguments = ["--repeat", "1" if quick else "3", *(["--compose"] if containers else [])]
    return lines([sys.executable, str(BENCHES / "startup.py"), *arguments])


def compare(measured: list[Record], dim: int, per_sample: int) -> list[Record]:
    """Turn the rates of one case into ratios."""
    rates = {(m["system"], m["optimizer"]): m for m in measured}
    records: list[Record] = []
    for optimizer in ("adagrad", "rowwise"):
        own = rates["persia", optimizer]
        for peer in ("fbgemm", "embedding_bag"):
            if (peer, optimizer) not in rates:
                continue
            value, other = number(own), number(rates[peer, optimizer])
            target = TARGETS[optimizer, per_sample][dim] if peer == "fbgemm" else 1.0
            records.append(
                {
                    "id": "B3",
                    "case": f"{optimizer}, dim {dim}, L {per_sample}, against {peer}",
                    "value": value,
                    "unit": "million rows per CPU-second",
                    "peer": other,
                    "ratio": round(value / other, 3),
                    "target": target,
                    "spread": own["spread"],
                }
            )
    return records


def number(record: Record) -> float:
    """Return a record's rate."""
    return float(str(record["mrows_per_cpu_s"]))


def machine() -> str:
    """Return one line about this machine."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    memory = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    return f"{model}, {os.cpu_count()} CPUs, {int(memory) // 2**20} GiB, Linux {platform.release()}"


def show(records: list[Record]) -> None:
    """Print one line a record."""
    print(f"machine: {machine()}")
    for r in records:
        mark = "ok  " if float(str(r["ratio"])) >= float(str(r["target"])) else "miss"
        print(
            f"{mark} {r['id']} {r['case']}: {r['value']} {r['unit']}, peer {r['peer']}, "
            f"ratio {r['ratio']}, target {r['target']}"
        )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter, with wider spreads")
    parser.add_argument(
        "--only",
        choices=["store", "step", "loopback", "training", "startup"],
        help="the store (B1, B2, B6, B7), the step (B3), the step over sockets (B4), training (B5), starting (B9)",
    )
    parser.add_argument(
        "--containers", action="store_true", help="B9 with docker compose too; the images must be built"
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/performance.md after a part or a short run too"
    )
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], list[Record]]] = {
        "store": lambda: store(arguments.quick),
        "step": lambda: embedded_step(arguments.quick),
        "loopback": lambda: loopback_step(arguments.quick),
        "training": lambda: training(arguments.quick),
        "startup": lambda: startup(arguments.quick, arguments.containers),
    }
    records: list[Record] = []
    for name, part in parts.items():
        if arguments.only in (None, name):
            begun = time.monotonic()
            records += part()
            sys.stderr.write(f"{name}: {time.monotonic() - begun:.0f} s\n")
    show(records)
    path = ROOT / "runs" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n")
    print(path)
    if arguments.write or not (arguments.only or arguments.quick):
        page.write(records, f"{machine()}{', a short run' if arguments.quick else ''}.")
        print("docs/performance.md: its tables are those of this run")


if __name__ == "__main__":
    main()
