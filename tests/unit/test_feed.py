"""The feed over real sockets: what is sent arrives once and in order, whoever comes, goes or fails."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from waiting import wait_until

from persia import auth, feed
from persia.data import StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import AuthError, DataError, IncompatibleError, UsageError
from persia.feed import RunRestarted, Stopped
from persia.feed.sender import Sender
from persia.feed.server import FeedServer
from persia_core.data import Batch

JOB = "feed-test"


def batch(number: int) -> Batch:
    """A batch that carries its number."""
    ids = np.array([number], np.uint64)
    labels = [Label(np.zeros(1, np.float32))]
    return PersiaBatch([IDTypeFeatureWithSingleID("a", ids)], labels=labels, meta=str(number).encode()).data


def number(item: tuple[int, Batch]) -> int:
    """The number of a batch that was taken."""
    assert item[1].meta is not None
    return int(item[1].meta)


class Ranks:
    """Trainer ranks of one run, without training."""

    def __init__(self, count: int, *, epoch: int = 1, buffer: int = 3, job: str = JOB) -> None:
        self.count, self.buffer = count, buffer
        self.servers: list[FeedServer] = []
        self.stop = threading.Event()
        self.begin(epoch, job)

    def begin(self, epoch: int, job: str = JOB) -> None:
        """Be a new run; the ranks of the last one are gone without a word."""
        self.kill()
        self.servers = [feed.serve(job, host="127.0.0.1") for _ in range(self.count)]
        for rank, server in enumerate(self.servers):
            server.welcome(epoch, rank, self.count)
            server.inbox.open(self.buffer)

    def kill(self) -> None:
        for server in self.servers:
            server.close(RuntimeError("killed"))

    def find(self) -> list[dict[str, Any]]:
        """What discovery would say."""
        return [
            {"index": str(rank), "replicas": str(self.count), "address": server.address, "started": "1"}
            for rank, server in enumerate(self.servers)
        ]

    def take(self, rank: int = 0) -> int | None:
        item = self.servers[rank].inbox.take(self.stop)
        return None if item is None else number(item)

    def rest(self, rank: int = 0) -> list[int]:
        return list(iter(lambda: self.take(rank), None))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    """Make ranks, and end them."""
    for name in ("PERSIA_TOKEN_FILE", "PERSIA_TLS_CERT", "PERSIA_TLS_KEY", "PERSIA_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Ranks:
            made = Ranks(*args, **kwargs)
            stack.callback(made.kill)
            return made

        yield make


def connect(ranks: Ranks, index: int = 0, size: int = 1, *, job: str = JOB, start_timeout: float = 5.0) -> Sender:
    return Sender(job, index, size, find=ranks.find, start_timeout=start_timeout)


def test_a_rank_without_data_is_told_of_and_waited_for(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """One that trains with an EmbeddingCollection announces no address."""
    run = ranks(1)
    found = run.find()
    run.find = lambda: [{**found[0], "address": ""}]  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: Sender(JOB, 0, 1, find=lambda: run.find(), start_timeout=5))
        wait_until("a word about it", lambda: "trains with an EmbeddingCollection" in caplog.text, 10)
        run.find = lambda: found  # type: ignore[method-assign]
        made.result(20).close()


@contextmanager
def sending(
    ranks: Ranks, count: int, index: int = 0, size: int = 1, *, first: int = 0
) -> Iterator[tuple[threading.Thread, list[BaseException], list[int]]]:
    """A replica that sends ``count`` batches from a thread; what ended it early, and what it has sent."""
    ended: list[BaseException] = []
    sent: list[int] = []

    def run() -> None:
        sender = None
        try:
            sender = connect(ranks, index, size)
            for each in range(count):
                sender.send(batch(first + each))
                sent.append(first + each)
            sender.end()
        except BaseException as error:
            ended.append(error)
        finally:
            if sender is not None:
                sender.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread, ended, sent
    finally:
        for server in ranks.servers:
            server.stop("the test is over")
        thread.join(20)
        assert not thread.is_alive()


def test_batches_come_in_order_and_end(ranks: Callable[..., Ranks]) -> None:
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


def test_replicas_are_merged_in_turn_whoever_is_faster(ranks: Callable[..., Ranks]) -> None:
    run = ranks(1)
    with sending(run, 4, 1, 2, first=100), sending(run, 7, 0, 2):
        assert run.rest() == [0, 100, 1, 101, 2, 102, 3, 103, 4, 5, 6]


def test_a_replica_that_is_ahead_waits(ranks: Callable[..., Ranks]) -> None:
    run = ranks(1, buffer=3)
    with sending(run, 50) as (thread, _, sent):
        for taken in range(10):
            assert run.take() == taken
            assert len(sent) <= taken + 1 + 3
        thread.join(0.3)
        assert thread.is_alive() and len(sent) <= 13
        assert run.servers[0].inbox.queued() <= 3


def test_a_trainer_that_stops_ends_a_sender_that_waits(ranks: Callable[..., Ranks]) -> None:
    run = ranks(2, buffer=1)
    with sending(run, 1000) as (thread, ended, _):
        assert run.take(0) == 0
        run.servers[0].stop("left its loop")
        assert run.take(1) == 1  # a rank that goes on is still served
        run.servers[1].stop("left its loop")
        thread.join(20)
        assert not thread.is_alive()
        assert isinstance(ended[0], Stopped)
    with sending(run, 5) as (thread, ended, _):  # one that comes when all is over
        thread.join(20)
        assert isinstance(ended[0], Stopped)


def test_a_failed_script_stops_training_by_name(ranks: Callable[..., Ranks]) -> None:
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


def test_a_replica_that_was_killed_comes_back_without_loss_or_repetition(ranks: Callable[..., Ranks]) -> None:
    run = ranks(1, buffer=4)
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests' / 'unit')!r}]\n"
        "from test_feed import JOB, batch\nfrom persia.feed.sender import Sender\n"
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


def test_a_lost_connection_is_mended(ranks: Callable[..., Ranks]) -> None:
    """Through a proxy that cuts the connection: what was under way is sent again."""
    from relay import Relay

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


def test_a_new_epoch_starts_the_script_again(ranks: Callable[..., Ranks]) -> None:
    run = ranks(2)
    with sending(run, 1000) as (thread, ended, _):
        assert [run.take(0), run.take(1), run.take(0)] == [0, 1, 2]
        run.begin(epoch=2)
        thread.join(20)
        assert isinstance(ended[0], RunRestarted)
        assert "epoch 2" in str(ended[0])
    run.begin(epoch=3)
    with sending(run, 3) as (thread, ended, _):
        assert run.rest(0) == [0, 2]


def test_a_rank_that_gives_up_before_the_run_began_does_not_end_its_senders(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 ends, because rank 1 is not there, and both are started again: rank 0 gets its batches, too."""
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    caplog.set_level(logging.INFO, "persia.feed")
    run = ranks(2)
    run.kill()
    run.servers = [feed.serve(JOB, host="127.0.0.1") for _ in range(2)]
    run.servers[0].stop("training is over")
    with sending(run, 4):
        wait_until("a refused sender", lambda: "the run has not begun" in caplog.text, 20, evidence=lambda: caplog.text)
        run.begin(epoch=1)
        assert run.rest(0) == [0, 2]
        assert run.rest(1) == [1, 3]


def test_a_resumed_run_skips_what_it_has_trained_on(ranks: Callable[..., Ranks]) -> None:
    run = ranks(2)
    run.begin(5)
    for server in run.servers:
        server.inbox.open(3, skip=2, replicas=1)
    with sending(run, 8):
        assert run.rest(0) == [4, 6]
        assert run.rest(1) == [5, 7]


@pytest.mark.parametrize(("of_second", "rest"), [(3, [5, 6]), (2, [6])])
def test_a_resumed_run_counts_in_the_order_of_training(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, of_second: int, rest: list[int]
) -> None:
    """Replica 1 ended early, perhaps with one batch less for this rank than for rank 0, which wrote the checkpoint."""
    run = ranks(1)
    run.servers[0].close()
    run.servers = [feed.serve(JOB, host="127.0.0.1")]
    run.servers[0].welcome(2, 0, 1)
    context = SimpleNamespace(common_context=SimpleNamespace(feed=run.servers[0]))
    monkeypatch.setattr("persia.data.streaming.cnt_ctx", lambda: context)
    data = StreamingDataset()
    data.load_state_dict({"taken": [5, 3], "world_size": 1})
    with sending(run, 7, 0, 2), sending(run, of_second, 1, 2, first=100):
        assert [number((0, each.data)) for each in data] == rest
        assert sum(data.state_dict()["taken"]) == 8 + len(rest)


def test_two_processes_cannot_be_one_replica(ranks: Callable[..., Ranks]) -> None:
    run = ranks(1)
    first = connect(run)
    with pytest.raises(UsageError, match=r"another process is connected as data-compose replica 0 of 1.*REPLICA_INDEX"):
        connect(run, start_timeout=1)
    first.send(batch(0))
    assert run.take() == 0
    first.close()


def test_a_sender_of_something_else_is_refused(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    run = ranks(1)
    with pytest.raises(IncompatibleError, match=r"job 'other' \(the trainer has 'feed-test'\)"):
        connect(run, job="other")
    monkeypatch.setattr("persia.feed.stream.__version__", "0.0.9")
    with pytest.raises(IncompatibleError, match=r"version '0.0.9' \(the trainer has '0.1.0'\)"):
        connect(run)
    monkeypatch.undo()
    first = connect(run, 0, 2)
    with pytest.raises(IncompatibleError, match="REPLICA_SIZE=3, this run has 2 replicas"):
        connect(run, 1, 3)
    first.close()


def test_a_wrong_token_is_refused(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("r" * auth.LEAST_SECRET)
    wrong.write_text("w" * auth.LEAST_SECRET)
    monkeypatch.setenv("PERSIA_TOKEN_FILE", str(right))
    run = ranks(1)
    with sending(run, 1):
        assert run.rest() == [0]
    for value in (str(wrong), ""):
        monkeypatch.setenv("PERSIA_TOKEN_FILE", value)
        with pytest.raises(AuthError, match="no valid token of role data") as caught:
            connect(run)
        assert caught.value.exit_code == 5
        assert "r" * auth.LEAST_SECRET not in str(caught.value)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """Make a certificate for ``persia`` that signs itself; return its path and its key's."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=DNS:persia"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_batches_travel_by_tls(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, key = certificate(tmp_path, "right")
    monkeypatch.setenv("PERSIA_TLS_CERT", path)
    monkeypatch.setenv("PERSIA_TLS_KEY", key)
    monkeypatch.setenv("PERSIA_TLS_CA", path)
    run = ranks(1)
    with sending(run, 3):
        assert run.rest() == [0, 1, 2]
    run.begin(epoch=2)
    monkeypatch.setenv("PERSIA_TLS_CA", certificate(tmp_path, "wrong")[0])
    with pytest.raises(AuthError, match=r"no TLS connection: .*CERTIFICATE_VERIFY_FAILED.*wrong.pem"):
        connect(run)
    for name in ("PERSIA_TLS_CERT", "PERSIA_TLS_KEY"):
        monkeypatch.delenv(name)
    run.begin(epoch=3)
    with pytest.raises(AuthError, match="no TLS connection: .*WRONG_VERSION_NUMBER"):
        connect(run)


def test_a_script_that_sends_other_batches_than_before_is_told(ranks: Callable[..., Ranks]) -> None:
    run = ranks(1, buffer=10)
    first = connect(run)
    for each in range(5):
        first.send(batch(each))
    assert [run.take(), run.take()] == [0, 1]
    first.close()
    second = connect(run)
    second.send(batch(0))
    with pytest.raises(UsageError, match="ended after 1 batches for this rank, and [2-5] have come"):
        second.end()
    second.close()
    with pytest.raises(DataError, match="same batches"):
        run.rest()
