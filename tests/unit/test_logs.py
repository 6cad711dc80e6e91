"""``persia logs``: lines of all processes in chronological order, from a run's folder and from the Docker engine."""

import json
import os
import re
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from conftest import Verb
from stack import start

from persia.doctor import log_lines
from persia.doctor.collectives import Failed
from persia.doctor.log_lines import Source, merged
from persia.doctor.logs import of_run
from persia.launch.local_job import Command

BATCH = "00000000000000aa/1/1/7"


def local(text: str) -> str:
    """Return a time of UTC as Python logs it."""
    seconds = datetime.fromisoformat(f"{text}+00:00").timestamp()
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + ",250"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the run ``runs/one``: logs of a server, a middleware and a trainer with two ranks."""
    folder = tmp_path / "runs" / "one" / "logs"
    folder.mkdir(parents=True)
    served = {"ts": "2025-11-25T10:00:02.5Z", "level": "info", "event": "look-up served", "service": "persia-server"}
    (folder / "server-0.log").write_text(
        "2025-11-25T10:00:01.000001Z info  persia-server 0: ready\n"
        f"{json.dumps({**served, 'replica': 0, 'rank': 1, 'step': 7, 'token': BATCH})}\n"
        "2025-11-25T10:00:09Z warn  persia-server 0: refused: token=00000000000000aa/1/1/70\n"
    )
    (folder / "middleware-0.log").write_text(
        f'2025-11-25T10:00:02.4Z debug persia-middleware 0: look-up forwarded token="{BATCH}"\n'
    )
    (folder / "trainer.log").write_text(
        "starting\n"
        f"[rank 0] {local('2025-11-25 10:00:00')} INFO    persia.remote: generation 1, rank 0 of 2\n"
        f"[rank 1] {local('2025-11-25 10:00:03')} ERROR   persia.loop: failed\n"
        "[rank 1] Traceback (most recent call last):\n"
        "[rank 1]   NCCL WARN of a traceback\n"
        f"[rank 0] {local('2025-11-25 10:00:04')} INFO    persia.loop: NCCL INFO Bootstrap\n"
    )
    return tmp_path


def order(out: str) -> list[str]:
    return [line.split()[1] for line in out.removesuffix("\n").split("\n") if line]


@pytest.mark.row("S4-46")
def test_lines_of_all_processes_are_in_the_order_of_time(run: Path, verb: Verb) -> None:
    out, errors = verb("logs")
    assert "logs of runs/one" in errors
    names = ["trainer", "trainer", "server-0", "middleware-0", "server-0", *["trainer"] * 4, "server-0"]
    assert order(out) == names, out
    lines = out.splitlines()
    assert lines[0].startswith("2025-11-25T10:00:00.250Z trainer        | starting"), "it has the next line's time"
    assert lines[4].startswith("2025-11-25T10:00:02.500Z server-0       | info  look-up served step=7 token=")
    assert "Traceback" in lines[6] and lines[6].startswith("2025-11-25T10:00:03.250Z"), "behind its first line"


@pytest.mark.row("S4-03")
def test_lines_of_ranks(run: Path, verb: Verb) -> None:
    out, _ = verb("logs", "runs/one", "--grep", "NCCL", "--rank", "all")
    assert len(out.splitlines()) == 2 and "Bootstrap" in out and "of a traceback" in out
    out, _ = verb("logs", "runs/one", "--grep", "NCCL", "--rank", "0")
    assert len(out.splitlines()) == 1 and "Bootstrap" in out
    out, _ = verb("logs", "runs/one", "--rank", "all")
    assert len(out.splitlines()) == 7 and "ready" not in out and "forwarded" not in out, "only lines of ranks"
    out, _ = verb("logs", "runs/one", "--rank", "1")
    assert "look-up served" in out and "Bootstrap" not in out, "a line of a server about the rank is one of the rank"
    out, _ = verb("logs", "runs/one", "--service", "server")
    assert {*order(out)} == {"server-0"}


@pytest.mark.row("S4-47")
def test_the_way_of_one_batch(run: Path, verb: Verb) -> None:
    for token in ("1/1/7", BATCH):
        out, _ = verb("logs", "runs/one", "--token", token)
        assert order(out) == ["middleware-0", "server-0"], "and not that of step 70"


@pytest.mark.row("S4-59")
def test_the_last_lines(run: Path, verb: Verb) -> None:
    out, _ = verb("logs", "runs/one", "--tail", "2")
    assert order(out) == ["trainer", "server-0"] and "Bootstrap" in out
    (run / "runs" / "one" / "logs" / "up.log").write_text("".join(f"line {number}\n" for number in range(5000)))
    assert len(verb("logs", "runs/one", "--tail", "1000")[0].splitlines()) == 1000


def test_lines_since_a_time(run: Path, verb: Verb) -> None:
    out, _ = verb("logs", "runs/one", "--since", "2025-11-25T10:00:04Z")
    assert order(out) == ["trainer", "server-0"]
    assert verb("logs", "runs/one", "--since", "10m")[0] == ""
    assert abs(log_lines.since("2h") - (time.time() - 7200)) < 5


@pytest.mark.row("S4-50")
def test_every_line_as_json(run: Path, verb: Verb) -> None:
    found = [json.loads(line) for line in verb("logs", "runs/one", "--json")[0].splitlines()]
    assert len(found) == 10 and all({"ts", "source", "event"} <= {*each} for each in found)
    assert [each["rank"] for each in found if each["source"] == "trainer"] == [0, 0, 1, 1, 1, 0]
    served = next(each for each in found if each["event"] == "look-up served")
    assert served["token"] == BATCH and served["service"] == "persia-server"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/none"], "runs/none: no logs; expected the folder of a run"),
        (["runs/one", "--rank", "x"], "--rank x: expected the number of a rank, or all"),
        (["runs/one", "--grep", "("], "--grep (: not a valid regular expression"),
        (["runs/one", "--token", "7"], "--token 7: expected GENERATION/RANK/STEP"),
        (["runs/one", "--since", "9999999999d"], "--since 9999999999d: expected a duration"),
        (
            ["runs/one", "--service", "x"],
            "--service x: no process name begins with this; processes: middleware-0, server-0",
        ),
        (["runs/one", "--since", "soon"], "--since soon: expected a duration such as 30s"),
    ],
)
def test_mistakes_are_named(run: Path, verb: Verb, arguments: list[str], message: str) -> None:
    errors = verb("logs", *arguments, code=2)[1]
    assert message in errors and (arguments[0] != "runs/none" or "specify a run with logs: runs/one" in errors)


def test_without_a_run_and_without_a_stack(verb: Verb) -> None:
    assert "the current folder has no stack with containers, and no run below runs/ has logs" in verb("logs", code=2)[1]


@pytest.mark.parametrize(
    ("services", "rest", "said"),
    [("echo web", "echo id", ""), ("echo trainer", "echo refused >&2; exit 1", "docker compose: refused")],
)
def test_what_is_no_stack(
    run: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch, services: str, rest: str, said: str
) -> None:
    """If the project is not Persia's or the engine refuses, the newest run is read."""
    program = run / "docker"
    program.write_text(f'#!/bin/sh\ncase "$*" in "compose config --services") {services} ;; *) {rest} ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{run}:{os.environ['PATH']}")
    out, errors = verb("logs")
    assert "server-0" in out and said in errors
    assert ("cannot determine whether this folder has a stack" in errors) == bool(said)


def test_times_that_do_not_exist_or_are_in_the_future() -> None:
    lines = [
        "2025-11-25T10:00:00Z one",
        "2999-01-01T00:00:00Z ahead",
        "2025-11-25T10:00:01Z two",
        "2026-13-45T10:00:00Z x",
    ]
    other = Source("b", ["2025-11-25T10:00:02Z three"])
    found = [*merged([Source("a", lines), other])]
    assert [line.text for line in found] == ["one", "ahead", "two", "2026-13-45T10:00:00Z x", "three"]
    assert found[2].time == found[3].time == found[4].time - 1


def test_a_pattern_is_searched_in_what_is_shown(run: Path, verb: Verb) -> None:
    assert order(verb("logs", "runs/one", "--grep", "served step=7")[0]) == ["server-0"]
    assert order(verb("logs", "runs/one", "--grep", '"step": 7')[0]) == ["server-0"]


def test_a_file_that_is_rotated_meanwhile_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for name, text in (("a.log.1", "one\n"), ("a.log", "two\nthree\n")):
        (folder / name).write_text(text)
    (source,) = of_run(tmp_path)
    lines = iter(source.lines)
    assert next(lines) == "one"
    (folder / "a.log").rename(folder / "a.log.1")
    assert [*lines] == ["two", "three"]
    (folder / "a.log").write_text("four\nfive\n")
    (source,) = of_run(tmp_path)
    (folder / "a.log.1").unlink()
    assert [*source.lines] == ["four", "five"]
    assert [*of_run(tmp_path, last=7)[0].lines] == ["five"], "from the start of a line"


@pytest.mark.row("S4-46")
def test_containers_are_read_with_their_own_times(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "logs").write_text(
        "trainer-2     | 2025-11-25T10:00:02.123456789Z 2025-11-25 09:00:00,000 INFO    persia.loop: second\n"
        '\x1b[2Kemb_server-1  | 2025-11-25T10:00:01.5Z {"ts":"2025-11-25T10:00:01.4Z","level":"info","event":"ready"}\n'
        "trainer-2     | 2025-11-25T10:00:03Z third\r50%\u2028of\x85it\n"
    )
    program = folder / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f'case "$*" in *--services) echo trainer ;;'
        f' *"ps --all --quiet"*) echo id ;; *" logs "*) cat {folder}/logs ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    out, _ = verb("logs")
    assert order(out) == ["emb_server-1", "trainer-2", "trainer-2", "trainer-2"], out
    assert "trainer-2      | 50%\u2028of\x85it\n" in out, "pieces of a line belong to its container"
    assert {*order(verb("logs", "--service", "server")[0])} == {"emb_server-1"}
    errors = verb("logs", "--service", "x", code=2)[1]
    assert "no process name begins with this; processes: emb_server-1, trainer-2" in errors
    assert "2025-11-25T10:00:02.123Z trainer-2      | INFO    persia.loop: second" in out
    assert verb("logs", "--rank", "1")[0].count("\n") == 3, "container 2 is rank 1"
    verb("logs", "--since", "2025-11-25T10:00:00Z")
    assert "compose logs --no-color --timestamps --since 2025-11-25T10:00:00.000Z" in (folder / "calls").read_text()


# --- Failed collectives

WATCHDOG = (
    "[rank{0}]:[E1125 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=262144, NumelOut=262144, Timeout(ms)=600000) ran for 600029 "
    "milliseconds before timing out."
)


def recognised(*lines: str) -> str:
    failed = Failed()
    for line in merged([Source("trainer", lines)]):
        failed.note(line)
    return "\n".join(failed.lines())


@pytest.mark.row("S4-17")
def test_a_time_out_of_nccl_names_the_ranks_in_and_out() -> None:
    text = recognised("rank 0 of 4", WATCHDOG.format(0, 66), WATCHDOG.format(2, 66), WATCHDOG.format(3, 65))
    assert "timed out after 600 s: ALLREDUCE number 66; in it: ranks 0, 2; rank 3 only in ALLREDUCE number 65" in text
    assert "not in it: rank 1, which the others waited for" in text
    assert "persia doctor --matrix 4" in text
    everyone = recognised("rank 0 of 2", WATCHDOG.format(0, 5), WATCHDOG.format(1, 5))
    assert "all ranks were in it: check the network between them" in everyone
    assert recognised("rank 0 of 2", "nothing") == ""


COLLECTIVE = """
import sys, time
from datetime import timedelta
import torch
from torch import distributed
rank, store = int(sys.argv[1]), f"file://{sys.argv[2]}"
distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
short = distributed.new_group(timeout=timedelta(seconds=5))
distributed.barrier()
if rank == 1:
    time.sleep(600)
try:
    distributed.all_reduce(torch.ones(1), group=short)
except Exception as error:
    print(error, flush=True)
"""


@pytest.mark.row("S4-17")
def test_a_time_out_of_gloo_is_recognised(tmp_path: Path) -> None:
    """Rank 1 never joins the collective, and torch itself writes the message."""
    script = tmp_path / "collective.py"
    script.write_text(COLLECTIVE)
    words = [sys.executable, str(script)]
    ranks = [
        start(Command(f"rank-{rank}", [*words, str(rank), str(tmp_path / "store")], dict(os.environ)))
        for rank in (0, 1)
    ]
    try:
        ranks[0].wait(120)
    finally:
        ranks[1].process.signal(signal.SIGKILL)
        ranks[1].wait()
    said = ranks[0].lines
    text = recognised("[rank 1] rank 1 of 2", *(f"[rank 0] {line}" for line in said))
    assert re.search("timed out after 5 s: a (recv|send) of gloo; in it: rank 0; not in it: rank 1", text), said


@pytest.mark.row("S4-54", "S4-17")
def test_nccl_that_cannot_connect_gets_the_interfaces(run: Path, verb: Verb) -> None:
    error = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2009, unhandled system error"
    with (run / "runs" / "one" / "logs" / "trainer.log").open("a") as file:
        file.write(f"[rank 0] {error}\n")
    _, errors = verb("logs", "runs/one")
    assert f"recognized: NCCL failed, often because it cannot connect: {error}" in errors
    assert "NCCL_IB_DISABLE=1" in errors and ("NCCL_SOCKET_IFNAME=" in errors or "no interface but loopback" in errors)
