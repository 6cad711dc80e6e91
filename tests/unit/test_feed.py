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
from conftest import ROOT, Told
from relay import Relay
from waiting import wait_until

from persia import __version__, auth, feed
from persia.data import StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import AuthError, DataError, IncompatibleError, UsageError
from persia.feed import RunRestarted, Stopped
from persia.feed.replay import Rounds, digests_behind, to_skip
from persia.feed.sender import Sender
from persia.feed.server import FeedServer
from persia_core.data import Batch

JOB = "feed-test"


def batch(number: int) -> Batch:
    """A batch that carries its number."""
    ids = np.array([number], np.uint64)
    labels = [Label(np.zeros(1, np.float32))]
    return PersiaBatch([IDTypeFeatureWithSingleID("a", ids)], labels=labels, meta=str(number).encode()).data


def many(number: int) -> Batch:
    """A batch of many ids, some of them twice, in several features."""
    drawn = np.random.default_rng(number).integers(0, 300, (3, 400), dtype=np.uint64)
    features = [IDTypeFeatureWithSingleID(name, ids) for name, ids in zip("abc", drawn, strict=True)]
    return PersiaBatch(features, labels=[Label(np.zeros(400, np.float32))]).data


def number(batch: Batch) -> int:
    """The number of a batch that was taken."""
    assert batch.meta is not None
    return int(batch.meta)


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
        return None if item is None else number(item[1])

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
    ranks: Ranks, count: int, index: int = 0, size: int = 1, *, first: int = 0, changed: int | None = None
) -> Iterator[tuple[threading.Thread, list[BaseException], list[int]]]:
    """A replica that sends ``count`` batches from a thread; what ended it early, and what it has sent.

    The batch ``changed`` is another one than otherwise.
    """
    ended: list[BaseException] = []
    sent: list[int] = []

    def run() -> None:
        sender = None
        try:
            sender = connect(ranks, index, size)
            for each in range(count):
                sender.send(batch(first + each if each != changed else 10_000))
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


def test_waiting_for_a_batch_is_told(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("persia.feed.inbox._REMIND_S", 0.1)
    logging.getLogger("persia").addHandler(caplog.handler)
    run = ranks(1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run.take)
        wait_until("a word about it", lambda: "waiting for a batch since" in caplog.text, 10)
        with sending(run, 1):
            assert first.result(20) == 0
    logging.getLogger("persia").removeHandler(caplog.handler)


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


def test_a_lost_connection_is_mended(ranks: Callable[..., Ranks], others_told: Told) -> None:
    """Through a proxy that cuts the connection: what was under way is sent again."""
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
    assert not others_told()


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
        assert [number(each.data) for each in data] == rest
        assert sum(data.state_dict()["taken"]) == 8 + len(rest)


def test_a_script_that_starts_again_with_the_same_batches_is_not_warned_of(
    ranks: Callable[..., Ranks], others_told: Told
) -> None:
    """In another process, whose hashes have other seeds."""
    run = ranks(1, buffer=30)
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests' / 'unit')!r}]\n"
        "import time\nfrom test_feed import JOB, many\nfrom persia.feed.sender import Sender\n"
        f"sender = Sender(JOB, 0, 1, find=lambda: {run.find()!r}, start_timeout=20)\n"
        "for n in range(20): sender.send(many(n))\n"
        "time.sleep(60)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    wait_until("20 batches", lambda: run.servers[0].inbox.queued() == 20, 60)
    first.kill()
    first.wait()
    for changed in (None, 7):
        second = connect(run, start_timeout=20)
        for each in range(20):
            second.send(many(each if each != changed else 8))
        second.close()
        assert len(others_told()) == (changed is not None)


@pytest.mark.parametrize(
    ("changed", "warned"),
    [(None, []), (0, [0]), (3, [1]), (4, [0]), (9, [])],
    ids=["none", "the first", "one of rank 1", "the last of those received", "one that was not received"],
)
def test_batches_that_differ_from_those_received_are_told_once(
    ranks: Callable[..., Ranks], others_told: Told, changed: int | None, warned: list[int]
) -> None:
    run = ranks(2, buffer=10)
    first = connect(run)
    for each in range(6):
        first.send(batch(each))
    wait_until("6 batches", lambda: sum(server.inbox.queued() for server in run.servers) == 6, 20)
    assert [run.take(0), run.take(1)] == [0, 1]
    first.close()
    with sending(run, 12, changed=changed) as (thread, ended, _):
        assert run.rest(0) == [2, 4, 6, 8, 10]
        assert run.rest(1) == [3, 5, 7, 10_000 if changed == 9 else 9, 11]
        thread.join(20)
        assert not ended
    text = (
        "data-compose replica 0: the 3 batches that rank {} has had already, and that are not sent again, are others "
        "than those it had: samples of these batches were trained on twice or not at all, and exactly-once does not "
        "hold for them; give the script a fixed seed and a fixed order, or begin a new run"
    )
    assert others_told() == [text.format(rank) for rank in warned]


def cut(relay: Relay, sender: Sender) -> None:
    """End the connection, and wait for the welcome of the next."""
    stream = sender._streams[0]
    before = [None, stream._call]
    relay.cut()
    wait_until("a welcome", lambda: stream._call not in before and stream._state.startswith("connected to"), 20)


@pytest.mark.parametrize("changed", [None, 1])
def test_a_connection_that_is_lost_while_batches_are_left_out_changes_nothing(
    ranks: Callable[..., Ranks], others_told: Told, changed: int | None
) -> None:
    run = ranks(1, buffer=10)
    inbox = run.servers[0].inbox
    first = connect(run)
    for each in range(4):
        first.send(batch(each))
    wait_until("4 batches", lambda: inbox.queued() == 4, 20)
    first.close()
    with Relay(run.servers[0].address) as relay:
        run.find = lambda: [{"index": "0", "replicas": "1", "address": relay.address, "started": ""}]  # type: ignore[method-assign]
        second = connect(run)
        for each in range(6):
            if each in {2, 5}:
                cut(relay, second)
            second.send(batch(each if each != changed else 10_000))
        ending = threading.Thread(target=second.end)
        ending.start()
        assert run.rest() == list(range(6))
        ending.join(20)
        second.close()
    assert len(others_told()) == (changed is not None)


def streaming(run: Ranks, epoch: int, monkeypatch: pytest.MonkeyPatch) -> StreamingDataset:
    """A data set over rank 0 of a new epoch, without training."""
    run.kill()
    run.servers = [feed.serve(JOB, host="127.0.0.1")]
    run.servers[0].welcome(epoch, 0, 1)
    context = SimpleNamespace(common_context=SimpleNamespace(feed=run.servers[0]))
    monkeypatch.setattr("persia.data.streaming.cnt_ctx", lambda: context)
    return StreamingDataset()


@pytest.mark.parametrize(
    ("changed", "known", "warned"),
    [
        (None, "whole", []),
        (2, "whole", [1]),
        (4, "whole", []),  # the last batch of a replica is received and dropped
        (2, "nothing", []),
        (2, "of another version", []),
        (2, "of another number", []),
    ],
)
def test_a_resumed_run_tells_of_batches_that_differ_from_those_trained_on(
    ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    others_told: Told,
    changed: int,
    known: str,
    warned: list[int],
) -> None:
    """Two replicas; what a checkpoint keeps goes through its JSON and its rank's file."""
    run = ranks(1)
    data = streaming(run, 2, monkeypatch)
    with sending(run, 8, 0, 2), sending(run, 8, 1, 2, first=100):
        given = iter(data)
        states = [(next(given), data.state_dict())[1] for _ in range(14)]
        data.trained(states[9])  # the others are only looked up
        assert states[9] == {"taken": [5, 5], "world_size": 1}
        data.interrupt()
    passed = data.passed()
    assert passed is not None and passed["batches"] == 4
    assert all(passed["digests"]) and len(set(passed["digests"])) == 2
    changes = {"nothing": None, "of another version": {**passed, "version": "0.0.9"}}
    passed = {**changes, "whole": passed, "of another number": {**passed, "batches": 3}}[known]
    data = streaming(run, 3, monkeypatch)
    data.load_state_dict(states[9])
    data.expect(passed)
    assert data.passed() == passed
    with sending(run, 8, 0, 2), sending(run, 8, 1, 2, first=100, changed=changed):
        assert [number(each.data) for each in data] == [5, 105, 6, 106, 7, 107]
    assert [int(message.split()[2][0]) for message in others_told()] == warned
    data.trained(data.state_dict())
    again = data.passed()
    assert again is not None and again["batches"] == 7
    assert (None not in again["digests"]) == (known == "whole")


def test_a_run_is_resumed_that_had_nothing_yet_of_some_replica(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ranks(1)
    data = streaming(run, 2, monkeypatch)
    with sending(run, 3, 0, 2), sending(run, 3, 1, 2, first=100):
        assert number(next(iter(data)).data) == 0
        state = data.state_dict()
        data.interrupt()
    assert state["taken"] == [1, 0]
    data = streaming(run, 3, monkeypatch)
    data.load_state_dict(state)
    with sending(run, 3, 0, 2), sending(run, 3, 1, 2, first=100):
        assert [number(each.data) for each in data] == [100, 1, 101, 2, 102]


def test_what_a_resumed_run_keeps_equals_that_of_one_that_was_not_interrupted() -> None:
    def take(rounds: Rounds, taken: list[int], turns: int) -> None:
        for _ in range(turns):
            for replica in range(2):
                if replica == 0 or taken[1] < 5:  # it ends early
                    taken[replica] += 1
                    rounds.take(replica, 100 * replica + taken[replica], taken)

    whole, taken = Rounds(), [0, 0]
    take(whole, taken, 4)
    state = whole.state()
    assert state == {"version": __version__, "batches": 3, "digests": [3, 103]}
    resumed, again = Rounds(3, digests_behind(3, 2, state)), [3, 3]
    take(resumed, again, 1)
    assert resumed.state() == state
    take(whole, taken, 20)
    take(resumed, again, 20)
    assert resumed.state() == whole.state() == {"version": __version__, "batches": 4, "digests": [4, 104]}
    assert to_skip(taken) == 4


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


def test_a_wrong_token_is_refused(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("persia").addHandler(caplog.handler)
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
    logging.getLogger("persia").removeHandler(caplog.handler)
    told = [line for line in caplog.text.splitlines() if "refused a call of ipv4:127.0.0.1:" in line]
    assert 1 <= len(told) <= 2, "at most one in a second"


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
