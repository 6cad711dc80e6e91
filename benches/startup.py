"""B9: the time from a start command to the first training step of the DLRM example, and the time of ``persia --help``.

``--cases containers`` is the stack in containers, whose images must be built (`make images`).
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import figures

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
FIRST_STEP = "first step done"
PATIENCE_S = 120


def first_step(command: list[str]) -> float:
    """Start ``command``, return the seconds to its first training step, and stop it.

    Raises:
        SystemExit: The command ended without a step, or two minutes passed. The message has its output.
    """
    start = time.perf_counter()
    env = {**os.environ, "LOG_LEVEL": "INFO"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    assert process.stdout is not None  # noqa: S101 - stdout is a pipe
    try:
        for line in process.stdout:
            seen.append(line)
            if FIRST_STEP in line:
                return time.perf_counter() - start
            if time.perf_counter() - start > PATIENCE_S:
                break
        sys.exit(f"{' '.join(command)}: no step\n{''.join(seen)}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)


def local() -> float:
    """Return the seconds ``persia up`` takes to the first step."""
    with tempfile.TemporaryDirectory(prefix="persia-") as folder:
        stack = Path(folder) / "stack.yml"
        example = ROOT / "examples" / "dlrm"
        text = (example / "stack.yml").read_text(encoding="utf-8")
        for path in ("config/embedding_config.yml", "config/global_config.yml", "data_compose.py", "train.py"):
            text = text.replace(path, str(example / path))
        stack.write_text(f"{text}run_dir: {folder}/run\n", encoding="utf-8")
        return first_step([str(BIN / "persia"), "up", str(stack)])


def containers() -> float:
    """Return the seconds ``docker compose up`` takes to the first step, in a separate project."""
    compose = ["docker", "compose", "--project-name", "persia-bench"]
    try:
        return first_step([*compose, "up"])
    finally:
        subprocess.run([*compose, "down", "--volumes"], cwd=ROOT, check=True, capture_output=True)


def command_help() -> float:
    """Return the milliseconds of ``persia --help``."""
    start = time.perf_counter()
    subprocess.run([str(BIN / "persia"), "--help"], check=True, capture_output=True)
    return (time.perf_counter() - start) * 1e3


CASES: dict[str, tuple[str, Callable[[], float], str, float]] = {
    "up": ("persia up to the first step", local, "s", 10.0),
    "help": ("persia --help", command_help, "ms", 300.0),
    "containers": ("docker compose up to the first step", containers, "s", 10.0),
}
"""By name on the command line: case, measurement, unit and limit."""


def main() -> None:
    """Measure the cases, and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["up", "help"])
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    for case, measure, unit, limit in (CASES[name] for name in arguments.cases):
        values = sorted(measure() for _ in range(arguments.repeat))
        middle = statistics.median(values)
        record: figures.Record = {
            "id": "B9",
            "case": case,
            "value": round(middle, 2),
            "unit": unit,
            "peer": limit,
            "ratio": round(figures.ratio(limit, middle), 3),
            "target": 1.0,
            "spread": round(figures.ratio((values[-1] - values[0]) / 2, middle), 3),
        }
        figures.write(record)


if __name__ == "__main__":
    main()
