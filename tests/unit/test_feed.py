"""The feed over real sockets: batches arrive once and in order, even after lost connections, restarts and failures."""

import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, ReplayWarnings
from feeding import JOB, MakeRanks, batch, connect, new_ranks, sending
from relay import Relay
from waiting import wait_until

from persia import __version__
from persia.errors import AuthError, DataError, IncompatibleError, UsageError
from persia.feed import channel
from persia.feed import server as feed_server
from persia.feed.protocol import RunRestarted, Stopped
from persia.feed.sender import Sender
from persia.runtime import tokens
from persia.serving import rpc


@pytest.fixture
def ranks() -> Iterator[MakeRanks]:
    """Create ranks, and end them after the test."""
    with new_ranks() as make:
        yield make


@pytest.mark.parametrize("module", [channel, rpc])
def test_grpc_knows_the_options(module: ModuleType) -> None:
    """gRPC ignores options with unknown names. Without the ping limit, connections that are idle for long would end."""
    names = re.findall(r'"(grpc\.[a-z0-9_.]+)"', Path(str(module.__file__)).read_text())
    library = Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()
    assert "grpc.http2.min_ping_interval_without_data_ms" in names
    assert [name for name in names if name.encode() not in library] == []


def test_waiting_for_a_rank_that_takes_no_batches_is_logged(ranks: MakeRanks, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that trains with an EmbeddingCollection announces no address."""
    run = ranks(1)
    found = run.find()
    run.find = lambda: [{**found[0], "address": ""}]  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: Sender(JOB, 0, 1, find=lambda: run.find(), start_timeout=5))
        wait_until("a word about it", lambda: "trains with an EmbeddingCollection" in caplog.text, 10)
        run.find = lambda: found  # type: ignore[method-assign]
        made.result(20).close()


def test_trainers_that_disagree_on_their_number_are_named(ranks: MakeRanks, caplog: pytest.LogCaptureFixture) -> None:
    run = ranks(1)
    found = run.find()
    run.find = lambda: [*found, {**found[0], "replicas": "2"}]  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: Sender(JOB, 0, 1, find=lambda: run.find(), start_timeout=5))
        wait_until("a word about it", lambda: "disagree on the number of ranks: 1, 2" in caplog.text, 10)
        run.find = lambda: found  # type: ignore[method-assign]
        made.result(20).close()


@pytest.mark.stack
def test_batches_come_in_order_and_end(ranks: MakeRanks) -> None:
    run = ranks(2)
    with sending(run, 11) as (thread, ended, _):
        even = threading.Thread(target=lambda: got.extend(run.rest(0)))
        got: list[int] = []
        even.start()
        assert run.rest(1) == [1, 3, 5, 7, 9]
        even.join(20)
        assert got == [0, 2, 4, 6, 8, 10]
        thread.join(20)
        assert not thread.is_alive() and not ended


def test_replicas_get_the_transform_of_the_ranks(ranks: MakeRanks) -> None:
    run = ranks(2)

    def sent(first: str, second: str) -> str:
        run.begin(1)
        for server, transform in zip(run.servers, (first, second), strict=True):
            server.inbox.open(run.buffer, transform=transform)
        with closing(connect(run)) as sender:
            return sender.transform

    assert sent("", "") == ""
    assert sent("one", "one") == "one"
    with pytest.raises(IncompatibleError, match="the transform of rank 1 differs from that of rank 0"):
        sent("one", "two")


def test_waiting_for_a_batch_is_logged(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("persia.feed.inbox.REMIND_S", 0.1)
    logging.getLogger("persia").addHandler(caplog.handler)
    run = ranks(1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run.take)
        wait_until("a word about it", lambda: "waiting for a batch for" in caplog.text, 10)
        with sending(run, 1):
            assert first.result(20) == 0
    logging.getLogger("persia").removeHandler(caplog.handler)


def test_replicas_are_merged_in_turn_at_any_speed(ranks: MakeRanks) -> None:
    run = ranks(1)
    with sending(run, 4, 1, 2, first=100), sending(run, 7, 0, 2):
        assert run.rest() == [0, 100, 1, 101, 2, 102, 3, 103, 4, 5, 6]


def test_a_replica_that_is_ahead_waits(ranks: MakeRanks) -> None:
    run = ranks(1, buffer=3)
    with sending(run, 50) as (thread, _, sent):
        for taken in range(10):
            assert run.take() == taken
            assert len(sent) <= taken + 1 + 3
        thread.join(0.3)
        assert thread.is_alive() and len(sent) <= 13
        assert run.servers[0].inbox.queued() <= 3


def test_a_trainer_that_stops_ends_a_sender_that_waits(ranks: MakeRanks) -> None:
    run = ranks(2, buffer=1)
    with sending(run, 1000) as (thread, ended, _):
        assert run.take(0) == 0
        run.servers[0].stop("left its loop")
        assert run.take(1) == 1  # the other rank still gets its batches
        run.servers[1].stop("left its loop")
        thread.join(20)
        assert not thread.is_alive()
        assert isinstance(ended[0], Stopped)
    with sending(run, 5) as (thread, ended, _):  # a replica that connects after the end
        thread.join(20)
        assert isinstance(ended[0], Stopped)


def test_a_failed_script_stops_training_by_name(ranks: MakeRanks) -> None:
    run = ranks(1)
    sender = connect(run)
    sender.send(batch(0))
    failing = threading.Thread(target=sender.fail, args=(KeyError("column age"),))
    failing.start()
    assert run.take() == 0
    with pytest.raises(DataError, match=r"data-compose replica 0: its script failed: KeyError: 'column age'"):
        run.take()
    failing.join(20)
    sender.close()


def test_a_replica_that_was_killed_comes_back_without_loss_or_repetition(ranks: MakeRanks) -> None:
    run = ranks(1, buffer=4)
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests' / 'unit')!r}]\n"
        "from feeding import JOB, batch\nfrom persia.feed.sender import Sender\n"
        f"sender = Sender(JOB, 0, 1, find=lambda: {run.find()!r}, start_timeout=20)\n"
        "for n in range(40): sender.send(batch(n))\n"
        "sender.end()\n"
    )
    first = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    got = [run.take() for _ in range(10)]
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    got += run.rest()
    assert got == list(range(40))
    assert second.wait(20) == 0


def test_a_lost_connection_is_mended(ranks: MakeRanks, replay_warnings: ReplayWarnings) -> None:
    """A proxy cuts the connection. Batches in flight are sent again."""
    run = ranks(1, buffer=5)
    with Relay(run.servers[0].address) as relay:
        run.find = lambda: [{"index": "0", "replicas": "1", "address": relay.address, "started": ""}]  # type: ignore[method-assign]
        with sending(run, 60) as (thread, ended, _):
            got: list[int | None] = []
            for cut in (5, 20, 33):
                while len(got) < cut:
                    got.append(run.take())
                relay.cut()
            got += run.rest()
            assert got == list(range(60))
            thread.join(20)
            assert not thread.is_alive() and not ended
    assert not replay_warnings()


def test_a_new_generation_restarts_the_script(ranks: MakeRanks) -> None:
    run = ranks(2)
    with sending(run, 1000) as (thread, ended, _):
        assert [run.take(0), run.take(1), run.take(0)] == [0, 1, 2]
        run.begin(generation=2)
        thread.join(20)
        assert isinstance(ended[0], RunRestarted)
        assert "generation 2" in str(ended[0])
    run.begin(generation=3)
    with sending(run, 3) as (thread, ended, _):
        assert run.rest(0) == [0, 2]


def test_a_rank_that_gives_up_before_the_run_began_does_not_end_its_senders(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 ends because rank 1 is missing. After both are restarted, rank 0 gets all its batches."""
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    caplog.set_level(logging.INFO, "persia.feed")
    run = ranks(2)
    run.kill()
    run.servers = [feed_server.serve(JOB, host="127.0.0.1") for _ in range(2)]
    run.servers[0].stop("training is over")
    with sending(run, 4):
        wait_until("a refused sender", lambda: "the run has not begun" in caplog.text, 20, evidence=lambda: caplog.text)
        run.begin(generation=1)
        assert run.rest(0) == [0, 2]
        assert run.rest(1) == [1, 3]


def test_two_processes_cannot_be_one_replica(ranks: MakeRanks) -> None:
    run = ranks(1)
    first = connect(run)
    with pytest.raises(UsageError, match=r"another process is connected as data-compose replica 0 of 1.*REPLICA_INDEX"):
        connect(run, start_timeout=1)
    first.send(batch(0))
    assert run.take() == 0
    first.close()


def test_a_sender_of_something_else_is_refused(ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ranks(1)
    with pytest.raises(IncompatibleError, match=r"job 'other' \(the trainer has 'feed-test'\)"):
        connect(run, job="other")
    monkeypatch.setattr("persia.feed.rank_stream.__version__", "0.0.9")
    with pytest.raises(IncompatibleError, match=rf"version '0.0.9' \(the trainer has '{__version__}'\)"):
        connect(run)
    monkeypatch.undo()
    first = connect(run, 0, 2)
    with pytest.raises(IncompatibleError, match="REPLICA_SIZE=3, but this run has REPLICA_SIZE=2"):
        connect(run, 1, 3)
    with pytest.raises(IncompatibleError, match="REPLICA_INDEX is 2, but REPLICA_SIZE is 2: indexes go from 0 to 1"):
        connect(run, 2, 2)
    first.close()


@pytest.mark.stack
def test_a_wrong_token_is_refused(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("persia").addHandler(caplog.handler)
    monkeypatch.setattr("persia.feed.channel._LOG_INTERVAL_S", 60.0)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("r" * tokens.LEAST_SECRET)
    wrong.write_text("w" * tokens.LEAST_SECRET)
    monkeypatch.setenv("PERSIA_TOKEN_FILE", str(right))
    run = ranks(1)
    with sending(run, 1):
        assert run.rest() == [0]
    for value in (str(wrong), ""):
        monkeypatch.setenv("PERSIA_TOKEN_FILE", value)
        with pytest.raises(AuthError, match="no valid token of role data") as caught:
            connect(run)
        assert caught.value.exit_code == 5
        assert "r" * tokens.LEAST_SECRET not in str(caught.value)
    logging.getLogger("persia").removeHandler(caplog.handler)
    logged = [line for line in caplog.text.splitlines() if "refused a call of ipv4:127.0.0.1:" in line]
    assert len(logged) == 1


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """Create a self-signed certificate for ``persia``. Return its path and that of its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=DNS:persia"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_batches_travel_by_tls(ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, key = certificate(tmp_path, "right")
    monkeypatch.setenv("PERSIA_TLS_CERT", path)
    monkeypatch.setenv("PERSIA_TLS_KEY", key)
    monkeypatch.setenv("PERSIA_TLS_CA", path)
    run = ranks(1)
    with sending(run, 3):
        assert run.rest() == [0, 1, 2]
    run.begin(generation=2)
    monkeypatch.setenv("PERSIA_TLS_CA", certificate(tmp_path, "wrong")[0])
    with pytest.raises(AuthError, match=r"cannot open a TLS connection to .*CERTIFICATE_VERIFY_FAILED.*wrong.pem"):
        connect(run)
    for name in ("PERSIA_TLS_CERT", "PERSIA_TLS_KEY"):
        monkeypatch.delenv(name)
    run.begin(generation=3)
    with pytest.raises(AuthError, match="cannot open a TLS connection to .*WRONG_VERSION_NUMBER"):
        connect(run)
