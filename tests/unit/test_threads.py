"""The torch threads of processes that share a host: ranks, and data scripts."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import pytest

from persia.launch import threads
from persia.runtime import processors

SHOW = """
import os, torch
given = os.environ["OMP_NUM_THREADS"]
print("threads", os.environ["RANK"], given, torch.get_num_threads() <= int(given), flush=True)
"""
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
LOOK = 'import os\nprint("variable", os.environ.get("OMP_NUM_THREADS"), flush=True)\n'
LAUNCH = """
import os, pathlib
from persia.launch.cli import main
from persia.runtime import processors
os.sched_getaffinity = lambda _: {mask}
processors._CPUS = pathlib.Path({cpus!r})
processors.quota = lambda *_: {quota}
main()
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``persia-launcher`` to its end on a host with 4 cores and 8 hyperthreads. No variable sets the threads."""
    for name in ("OMP_NUM_THREADS", "REPRODUCIBLE", "PERSIA_HOST_REPLICAS"):
        monkeypatch.delenv(name, raising=False)
    cpus = str(hyperthreads(tmp_path / "cpus", [f"{each % 4},{each % 4 + 4}" for each in range(8)]))

    def call(
        *words: str, mask: Set[int] = frozenset(range(8)), quota: float | None = None, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", LAUNCH.format(mask={*mask}, cpus=cpus, quota=quota), *words],
            cwd=tmp_path,
            env={**os.environ, "PERSIA_NATS_URL": "", **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


def hyperthreads(root: Path, siblings: Sequence[str]) -> Path:
    """Write files like those in which the kernel lists, for each processor, all processors of the same core."""
    for number, each in enumerate(siblings):
        (root / f"cpu{number}" / "topology").mkdir(parents=True)
        (root / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{each}\n")
    return root


def groups(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "800000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "50000 100000\n", "c/cpu.max": "1 100000"}, 0.5),
        ("0::/../not/seen/here\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("7:cpuset:/\n4:cpu,cpuacct:/a\n", {f"cpu/a/{QUOTA}": "400000", f"cpu/a/{PERIOD}": "100000"}, 4.0),
        ("4:cpuacct,cpu:/a\n", {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "100000"}, None),
        ("4:cpu:/hidden\n", {f"cpu/{QUOTA}": "250000\n", f"cpu/{PERIOD}": "100000\n"}, 2.5),
        ("nonsense\n", {"cpu.max": "100 0\n"}, None),
    ],
)
def test_the_limit_of_the_control_groups(
    tmp_path: Path, of_process: str, files: dict[str, str], expected: float | None
) -> None:
    (tmp_path / "cgroup").write_text(of_process)
    assert processors.quota(groups(tmp_path / "groups", files), tmp_path / "cgroup") == expected


@pytest.mark.parametrize(
    ("siblings", "mask", "expected"),
    [
        (["0,4", "1,5", "2,6", "3,7"] * 2, range(8), 4),
        (["0-1", "0-1", "2-3", "2-3"], range(4), 2),
        (["0", "1", "2", "3"], range(4), 4),
        # The mask contains both threads of one core, and one thread of another.
        (["0,4", "1,5", "2,6", "3,7"] * 2, [0, 4, 1], 2),
        (["0,4", "1,5", "2,6", "3,7"] * 2, [0, 1, 2], 3),
        (["0,2", "1,3"], range(4), 4),  # the kernel reports the core of some processors only
        ([], range(3), 3),
    ],
)
def test_hyperthreads_of_a_core_count_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, siblings: list[str], mask: Sequence[int], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*mask})
    assert processors.cores(hyperthreads(tmp_path / "cpus", siblings)) == expected


@pytest.mark.parametrize(
    ("cores", "quota", "processes", "replicas", "expected"),
    [
        (16, None, 4, 1, 4),
        (16, None, 3, 1, 5),
        (2, None, 4, 1, 1),
        (16, None, 2, 4, 2),
        (16, 6.0, 2, 1, 3),
        (16, 0.5, 1, 1, 1),
        (16, 6.0, 1, 2, 6),  # the limit applies to this container, and both containers share the cores
        (16, 12.0, 1, 2, 8),
    ],
)
def test_the_share_of_a_process(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, processes: int, replicas: int, expected: int
) -> None:
    monkeypatch.setattr(processors, "cores", lambda: cores)
    monkeypatch.setattr(processors, "quota", lambda: quota)
    assert processors.share(processes, replicas) == expected


@pytest.mark.parametrize(
    ("ranks", "mask", "quota", "expected", "cores"),
    [
        (2, range(8), None, 2, "4 cores"),
        (3, range(8), None, 1, "4 cores"),
        (2, [0, 4], None, 1, "1 core;"),
        (1, range(8), 3.5, 3, "4 cores, limited to 3.5"),
        (1, range(8), 6.0, 4, "4 cores, limited to 6"),
    ],
)
def test_ranks_share_the_cores(
    run: Run, tmp_path: Path, ranks: int, mask: Sequence[int], quota: float | None, expected: int, cores: str
) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    done = run("nn-worker", "train.py", "--nproc-per-node", str(ranks), mask={*mask}, quota=quota)
    assert done.returncode == 0, done.stderr
    shown = sorted(line.split("threads ")[1] for line in done.stdout.splitlines() if "threads " in line)
    assert shown == [f"{rank} {expected} True" for rank in range(ranks)], done.stdout
    which = "the rank" if ranks == 1 else f"each of {ranks} ranks"
    assert done.stderr.count("torch threads") == 1
    assert f"persia-launcher: torch threads of {which}: {expected}, of {cores}" in done.stderr


@pytest.mark.parametrize("quota", [None, 8.0, 64.0])
def test_a_single_rank_that_shares_nothing_keeps_the_default_of_torch(
    run: Run, tmp_path: Path, quota: float | None
) -> None:
    (tmp_path / "train.py").write_text(LOOK)
    done = run("nn-worker", "train.py", quota=quota)
    assert done.returncode == 0 and "variable None" in done.stdout, done
    assert "torch threads" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "expected", "said"),
    [
        ({"OMP_NUM_THREADS": "3"}, "3", ""),
        ({"REPRODUCIBLE": "1"}, "1", "torch threads of the rank: 1, because REPRODUCIBLE is set"),
        ({"PERSIA_HOST_REPLICAS": "4096"}, "1", "with 4096 replicas on this host; OMP_NUM_THREADS changes it"),
        ({"OMP_NUM_THREADS": "3", "REPRODUCIBLE": "1"}, "3", ""),
    ],
)
def test_variables_decide(run: Run, tmp_path: Path, variables: dict[str, str], expected: str, said: str) -> None:
    (tmp_path / "train.py").write_text(LOOK)
    done = run("nn-worker", "train.py", **variables)
    assert done.returncode == 0 and f"variable {expected}" in done.stdout, done
    assert said in done.stderr and ("torch threads" in done.stderr) == bool(said)


@pytest.mark.parametrize(("replicas", "expected"), [("1", "None"), ("2", "2"), ("4", "1")])
def test_data_scripts_of_a_host_share_its_cores(run: Run, tmp_path: Path, replicas: str, expected: str) -> None:
    (tmp_path / "data.py").write_text(LOOK + "raise SystemExit(5)\n")
    done = run("data-loader", "data.py", PERSIA_NATS_URL="nats://127.0.0.1:1", PERSIA_HOST_REPLICAS=replicas)
    assert done.returncode == 5 and f"variable {expected}\n" in done.stdout, done
    said = f"torch threads of the data script: {expected}, of 4 cores, with {replicas} replicas on this host"
    assert (said in done.stderr) == (replicas != "1")


def test_what_limits_a_share_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "cores", lambda: 16)
    monkeypatch.setattr(processors, "quota", lambda: 6.5)
    lines: list[str] = []
    assert threads.variables(2, "rank", lines.append, {}) == {"OMP_NUM_THREADS": "3"}
    (line,) = lines
    assert line == "torch threads of each of 2 ranks: 3, of 16 cores, limited to 6.5; OMP_NUM_THREADS changes it"
