"""A benchmark that dies or is invalid because of noise is reported as such, and the others are measured."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT

if not (ROOT / "benches").exists():
    pytest.skip("no clone here", allow_module_level=True)
sys.path.append(str(ROOT / "benches"))
import figures
import on_gpu
import page
import run
import serving
from figures import Record

pytestmark = pytest.mark.clone

GOOD: Record = {
    "id": "B1",
    "case": "look-up",
    "value": 50.0,
    "unit": "CPU ns a row",
    "peer": 15.0,
    "ratio": 0.3,
    "target": 0.3,
    "spread": 0.01,
}
INVALID: Record = {**GOOD, "case": "update", "ratio": 1.69, "invalid": "1.69 times as fast as its limit"}

Main = Callable[..., int]


def program(text: str, *records: Record) -> list[str]:
    """Return a sub-benchmark that prints records and then runs ``text``."""
    return [sys.executable, "-c", f"for each in {list(map(json.dumps, records))!r}: print(each, flush=True)\n{text}"]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """Run ``benches/run.py`` with the given parts instead of its own. Records go to ``tmp_path/runs/bench.json``."""

    def call(*words: str, **parts: Iterator[Record]) -> int:
        monkeypatch.setattr(run, "ROOT", tmp_path)
        monkeypatch.setattr(run, "parts", lambda _: parts)
        monkeypatch.setattr(page, "DOCS", tmp_path)
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        return run.main()

    return call


def recorded(folder: Path) -> list[Record]:
    found: list[Record] = json.loads((folder / "runs" / "bench.json").read_text())
    return found


def test_a_missed_target_is_a_result(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missed = {**GOOD, "ratio": 0.2}
    assert main("--quick", store=run.lines(program("", GOOD, missed), "B1")) == 0
    assert recorded(tmp_path) == [GOOD, missed]
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:3]] == ["ok", "miss"]
    assert out[3:] == [str(tmp_path / "runs" / "bench.json")]


def test_an_invalid_case_is_told_and_the_others_go_on(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**GOOD, "id": "B6"}
    parts = {"store": run.lines(program("", INVALID, GOOD), "B1"), "training": run.lines(program("", other), "B6")}
    assert main("--quick", **parts) == figures.UNMEASURED == 3
    assert recorded(tmp_path) == [INVALID, GOOD, other]
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "invalid B1 update: 1.69 times as fast as its limit"
    assert [line.split()[0] for line in out[2:4]] == ["ok", "ok"]
    assert out[-1] == "invalid or failed records: 1 of 3 (exit code 3)"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (program("import sys; sys.exit(101)", GOOD), "ended with exit code 101"),
        (program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", GOOD), "was killed by signal 9"),
        (program("print('{\"id\": ')", GOOD), 'this line is not JSON: {"id": '),
        (program("print('nothing')"), "printed no record"),
        (["/does/not/exist"], "/does/not/exist: No such file or directory"),
    ],
)
def test_a_program_that_dies_is_named_and_what_it_measured_is_kept(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], reason: str
) -> None:
    parts = {"store": run.lines(command, "B1", "B2"), "startup": run.lines(program("", {**GOOD, "id": "B9"}), "B9")}
    assert main("--quick", **parts) == 3
    found = recorded(tmp_path)
    assert [(each["id"], each.get("failed")) for each in found if each != GOOD] == [
        ("B1", reason),
        ("B2", reason),
        ("B9", None),
    ]
    assert (GOOD in found) is (str(GOOD["case"]) in " ".join(command))
    assert f"failed B2 {' '.join(command)}: {reason}" in capsys.readouterr().out


def test_an_error_of_a_part_is_told_for_all_it_measures(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Record]:
        yield GOOD
        raise LookupError("no such peer")

    assert main("--quick", loopback=broken(), startup=iter([GOOD])) == 3
    assert [each.get("failed") for each in recorded(tmp_path)] == [None, *["LookupError: no such peer"] * 2, None]
    captured = capsys.readouterr()
    assert "failed scale --only loopback: LookupError: no such peer" in captured.out
    assert "Traceback" in captured.err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ratio": math.nan}, "ratio is nan"),
        ({"value": math.inf, "ratio": 0.0}, "value is inf, ratio is 0.0"),
        ({"spread": -0.1}, "spread is -0.1"),
        ({"peer": None}, "peer is None"),
    ],
)
def test_numbers_that_cannot_be_are_invalid(change: Record, reason: str) -> None:
    record = figures.checked({**GOOD, **change})
    assert figures.problem(record) == ("invalid", reason)
    json.dumps(record, allow_nan=False)
    assert figures.checked(record) == record


def test_nothing_is_divided_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.ratio(3, 2) == 1.5 and math.isnan(figures.ratio(1, 0))
    assert figures.spread([1, 2, 3, 4]) == pytest.approx(0.5)
    assert math.isnan(figures.spread([0, 0, 0]))
    figures.write({**GOOD, "ratio": math.nan})
    assert json.loads(capsys.readouterr().out)["ratio"] is None


def test_a_case_whose_peer_died_gives_no_ratio() -> None:
    rate: Record = {"optimizer": "adagrad", "mrows_per_cpu_s": 8.0, "spread": 0.01}
    own, peer = {**rate, "system": "persia"}, {**rate, "system": "fbgemm", "mrows_per_cpu_s": 2.0}
    (found,) = run.compare([own, peer], 16, 1)
    assert (found["case"], found["ratio"]) == ("adagrad, dim 16, L 1, against fbgemm", 4.0)
    assert list(run.compare([peer], 16, 1)) == list(run.compare([own], 16, 1)) == []
    (found,) = run.compare([own, {**peer, "mrows_per_cpu_s": None}], 16, 1)
    assert figures.problem(figures.checked(found)) == ("invalid", "peer is nan, ratio is nan")


TABLE = "<!-- table {0} -->\n| of an earlier run of {0} |\n<!-- end -->\n"


def test_a_page_shows_no_invalid_figure_and_keeps_tables_that_would_lack_a_case(main: Main, tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text("".join(TABLE.format(name) for name in ("B1", "B2", "B7", "B9")))
    scale: Record = {**GOOD, "id": "B7", "case": "look-up, 100 rows"}
    records = [GOOD, INVALID, {**INVALID, "id": "B2"}, scale, run.failed("B7", "bench_store B7", "killed")]
    assert main("--write", store=iter(records)) == 3
    text = path.read_text()
    assert "| look-up | 50 | CPU ns a row | 15 | 0.30 | 0.3 | 1% |" in text
    assert "| update | | CPU ns a row | | invalid | 0.3 | |" in text
    assert "1.69" not in text
    for name in ("B2", "B7", "B9"):
        assert TABLE.format(name) in text
    assert not (tmp_path / "bench-scale.svg").exists()


def test_a_part_of_the_gpus_benchmark_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[Record]:
        yield {"id": "B8", "case": "copy", "over_cpu": 2.00049}
        raise RuntimeError("out of memory")

    lost: Record = {"id": "B8", "case": "training", "over_cpu": math.nan}
    records = on_gpu.collect({"kernels": broken(), "training": iter([lost])})
    assert records == [
        {"id": "B8", "case": "copy", "over_cpu": 2.0},
        {"id": "B8", "case": "kernels", "failed": "RuntimeError: out of memory"},
        {"id": "B8", "case": "training", "over_cpu": None, "invalid": "not finite: over_cpu"},
    ]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records


def test_the_exit_code_is_documented(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        run.main()
    assert "3 a case is invalid or a part failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "said"), [("exit 3", "peer ended with 3 at its start"), ("sleep 60", "peer did not listen on port .*")]
)
def test_a_system_that_does_not_serve_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho its last words\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(serving, "PEERS", tmp_path)
    monkeypatch.setattr(serving, "PEER_SCRIPTS", {"peer": "peer.py"})
    monkeypatch.setattr(serving, "START_S", 1.0)
    with pytest.raises(RuntimeError, match=f"{said}.*: its last words"), serving.served("peer", tmp_path, False):
        pass
