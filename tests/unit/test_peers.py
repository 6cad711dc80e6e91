"""Connected ranks: agreement, names of lost ranks, and refusals."""

import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is exported, if not explicitly
from waiting import wait_until

from persia.backend import rank_checks, remote
from persia.ctx import Checkpoints
from persia.discovery import nats
from persia.distributed import control_plane, handshake, network, options, rendezvous, run
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import AuthError, IncompatibleError, PersiaError, RunLostError, UnreachableError, UsageError
from persia.loop.feeder import FedBatch
from persia.loop.quarantine import Quarantine
from persia.runtime import environment, flight, preemption
from persia.runtime.job import finished_summary

LONG = 20.0


def me(rank: int, world_size: int = 2, **changes: Any) -> handshake.Introduction:
    known: dict[str, Any] = {"version": "1", "host": "here", "pid": 100 + rank, "token": "secret", **changes}
    return handshake.Introduction(job=known.pop("job", "j"), rank=rank, world_size=world_size, **known)


Meet = Callable[[int], list[control_plane.Peers]]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def meet(pool: ThreadPoolExecutor) -> Iterator[Meet]:
    """Connect ranks, which end with the test."""
    made: list[control_plane.Peers] = []
    listeners: list[socket.socket] = []

    def together(count: int) -> list[control_plane.Peers]:
        listener = handshake.listen("127.0.0.1")
        listeners.append(listener)
        first = pool.submit(handshake.host, listener, me(0, count), LONG)
        address = ("127.0.0.1", listener.getsockname()[1])
        others = [pool.submit(handshake.join, address, me(rank, count), LONG) for rank in range(1, count)]
        made.extend(future.result(LONG) for future in (first, *others))
        return made

    yield together
    for each in made:
        each.leave(None)
    for listener in listeners:
        listener.close()


def all_gather(pool: ThreadPoolExecutor, ranks: list[control_plane.Peers], topic: str) -> list[Future[list[Any]]]:
    return [pool.submit(each.all_gather, topic, each.rank * 10) for each in ranks]


def test_every_rank_gets_what_all_have(meet: Meet, pool: ThreadPoolExecutor) -> None:
    ranks = meet(3)
    for number in range(50):
        assert [future.result(LONG) for future in all_gather(pool, ranks, f"step {number}")] == [[0, 10, 20]] * 3


def test_ranks_at_different_places_are_told_so(meet: Meet, pool: ThreadPoolExecutor) -> None:
    first, second = meet(2)
    futures = [pool.submit(first.all_gather, "the loop", 0), pool.submit(second.all_gather, "the end", 0)]
    for future in futures:
        with pytest.raises(UsageError, match="rank [01] at 'the (loop|end)'"):
            future.result(LONG)


def test_a_rank_that_is_gone_is_named_on_every_other(meet: Meet, pool: ThreadPoolExecutor) -> None:
    first, second, third = meet(3)
    waiting = [pool.submit(each.all_gather, "step 1", 0) for each in (first, second)]
    third._links[0].hang_up()  # as the kernel does for a process that is killed
    for future in waiting:
        with pytest.raises(RunLostError, match="rank 2 is gone: its connection ended without a message"):
            future.result(LONG)
    with pytest.raises(RunLostError, match="rank 0 is gone"):
        third.all_gather("step 1", 0)


def test_a_rank_that_fails_leaves_its_reason(meet: Meet, pool: ThreadPoolExecutor) -> None:
    first, second = meet(2)
    waiting = pool.submit(first.all_gather, "step 1", 0)
    second.leave("ValueError: bad")
    with pytest.raises(RunLostError, match="rank 1 is gone: ValueError: bad"):
        waiting.result(LONG)


def test_a_rank_that_ended_cleanly_is_missed_only_where_it_is_needed(meet: Meet, pool: ThreadPoolExecutor) -> None:
    first, second, third = meet(3)
    waiting = pool.submit(third.all_gather, "step 1", 0)
    second.leave(None)
    with pytest.raises(RunLostError, match="rank 1 is gone: its script has ended"):
        first.all_gather("step 1", 0)
    first.leave("RunLostError")
    with pytest.raises(RunLostError):
        waiting.result(LONG)


def test_ranks_meet_wherever_they_are_and_go_on_sharing(meet: Meet, pool: ThreadPoolExecutor) -> None:
    """Two wait in an all-gather that the third does not call; one of them has completed more than the others."""
    ranks = meet(3)
    waiting = [pool.submit(each.all_gather, "the loop", 0) for each in ranks[:2]]
    third = pool.submit(ranks[2].all_gather_at_exit, 20, LONG)
    for future in waiting:
        with pytest.raises(SystemExit) as left:
            future.result(LONG)
        assert left.value.code == 75
    met = [third, *(pool.submit(each.all_gather_at_exit, each.rank * 10, LONG) for each in ranks[:2])]
    assert [future.result(LONG) for future in met] == [[0, 10, 20]] * 3
    assert [future.result(LONG) for future in all_gather(pool, ranks, "the save")] == [[0, 10, 20]] * 3


@pytest.mark.parametrize("how", ["at its end", "by an error", "killed", "not at all"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_that_fails_because_a_rank_is_gone_is_no_failure_of_a_batch(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, rank: int
) -> None:
    """Torch may detect it before that rank's message arrives; ranks above 0 hear of each other from rank 0."""
    *ranks, last = meet(3)
    monkeypatch.setattr(run, "peers", lambda: ranks[rank])
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("a", np.arange(3, dtype=np.uint64))], labels=[Label(np.zeros((3, 1)))]
    )
    backend: Any = SimpleNamespace(
        engine=SimpleNamespace(step=4), all_gather=lambda _, mine: [mine], is_rank_0=True, checkpoint_dir=Path
    )
    quarantine = Quarantine(Checkpoints(tmp_path))
    quarantine.on_start(SimpleNamespace(backend=backend))
    fed_batch = FedBatch(5, json.dumps({"batches": 5, "source": None}), batch.data)
    if how == "not at all":
        monkeypatch.setattr(control_plane, "_NOTICED_S", 0.2)
    else:
        reason = "its error" if how == "by an error" else None
        leave = last._links[0].hang_up if how == "killed" else lambda: last.leave(reason)
        threading.Timer(0.3, leave).start()
    quarantine.on_error(RuntimeError("Connection closed by peer"), fed_batch)
    assert ([*tmp_path.iterdir()] == []) == (how != "not at all")


def test_what_all_have_shared_is_told_though_one_of_them_left_behind_it(meet: Meet, pool: ThreadPoolExecutor) -> None:
    first, second = meet(2)
    with second._changed:  # it wakes up late
        waiting = pool.submit(second.all_gather, "the save", 10)
        assert first.all_gather("the save", 0) == [0, 10]
        first.leave("SystemExit: 75")
        second._answers[0], second._lost = ("the save", [0, 10]), (0, "SystemExit: 75")
    assert waiting.result(LONG) == [0, 10]


def test_a_rank_that_does_not_come_to_meet_is_named(meet: Meet, pool: ThreadPoolExecutor) -> None:
    first, _ = meet(2)
    with pytest.raises(UnreachableError, match=r"waited 0\.2 s for rank 1 to end the run together"):
        first.all_gather_at_exit(0, 0.2)


def test_a_rank_that_waits_lets_all_know_that_it_was_asked_to_stop(meet: Meet, pool: ThreadPoolExecutor) -> None:
    """Its loop waits, for example for a rank that evaluates."""
    ranks = meet(3)
    with preemption.saving_run():
        waiting = pool.submit(ranks[1].all_gather, "the loop", 0)
        preemption.note_remote_stop()
        wait_until("all to know", lambda: all(each._asked for each in ranks), LONG)
        for each in (ranks[0], ranks[2]):
            pool.submit(each.all_gather, "the loop", 0)
        assert waiting.result(LONG) == [0, 0, 0]


def test_a_silent_rank_is_named(meet: Meet, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, not dead: its connection stays open."""
    monkeypatch.setattr(control_plane, "_ALIVE_S", 0.05)
    monkeypatch.setattr(control_plane, "SILENCE_S", 0.5)
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with socket.create_connection(listener.getsockname()) as silent:
        challenge = json.loads(silent.recv(1000))["challenge"]
        hello = {**me(1).__dict__, "token": handshake.proof(me(1), challenge)}
        assert "secret" not in str(hello)
        silent.sendall(json.dumps({"hello": hello}).encode() + b"\n")
        alone = first.result(LONG)
        with pytest.raises(RunLostError, match="rank 1 is gone: silent for .* s: stopped, frozen"):
            alone.all_gather("step 1", 0)
        alone.leave(None)
    listener.close()


def test_waiting_for_a_rank_is_logged(
    meet: Meet, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_plane, "REMIND_S", 0.1)
    first, second = meet(2)
    logging.getLogger("persia").addHandler(caplog.handler)
    try:
        waiting = pool.submit(first.all_gather, "a batch", 0)
        wait_until("the reminder", lambda: "waiting for rank 1 to say: a batch after" in caplog.text, LONG)
        second.all_gather("a batch", 0)
        waiting.result(LONG)
    finally:
        logging.getLogger("persia").removeHandler(caplog.handler)


def test_rank_0_waits_for_notes_and_names_who_is_behind(meet: Meet) -> None:
    first, second, _ = meet(3)
    second.note(1)
    with pytest.raises(UnreachableError, match="waited 0.2 s for rank 2 to leave its loop"):
        first.wait_for_notes(1, "to leave its loop", 0.2)


class FakeEngine:
    """Its pushes are applied, or cannot be."""

    def __init__(self, error: PersiaError | None) -> None:
        self.error = error

    def drain(self) -> None:
        if self.error is not None:
            raise self.error


class FakePipeline:
    def close(self) -> None: ...


def test_a_loop_whose_last_pushes_fail_on_one_rank_fails_on_all(meet: Meet, pool: ThreadPoolExecutor) -> None:
    waiting = []
    for each in meet(3):
        context: Any = object.__new__(remote.RemoteBackend)
        context._peers = each
        context.engine = FakeEngine(UnreachableError("server 1 is gone") if each.rank == 1 else None)
        waiting.append(pool.submit(context.close_loop, FakePipeline(), together=True))
    for rank, future in enumerate(waiting):
        with pytest.raises(UnreachableError, match="^server 1 is gone" if rank == 1 else "^rank 1: server 1 is gone"):
            future.result(LONG)


def test_ranks_begin_a_loop_with_the_same() -> None:
    told: list[dict[str, Any]] = [{"staleness": 1, "learning rate": rate} for rate in (0.1, 0.1, 0.2)]
    with pytest.raises(UsageError, match=r"learning rate is 0\.2 on rank 2 and 0\.1 on rank 0"):
        rank_checks.check_same(told)
    told[0]["learning rate"] = None  # of a checkpoint that rank 0 has loaded, which the others get from it
    rank_checks.check_same(told)
    told[2]["staleness"] = 2
    with pytest.raises(UsageError, match="staleness is 2 on rank 2 and 1 on rank 0"):
        rank_checks.check_same(told)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"token": "other"}, AuthError, "does not accept the token of rank 1"),
        ({"version": "2"}, IncompatibleError, "rank 0 is of version 1"),
        ({"job": "k"}, UsageError, "of job 'k'"),
        (
            {"world_size": 3},
            UsageError,
            r"rank 0 \(pid 100 on here\) of job 'j' has WORLD_SIZE=2, rank 1 \(pid 101 on here\) .* WORLD_SIZE=3",
        ),
    ],
)
@pytest.mark.row("S3-33")
def test_a_rank_that_does_not_fit_is_refused(
    pool: ThreadPoolExecutor, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with pytest.raises(error, match=text):
        handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1, **changes), LONG)
    right = handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1), LONG)
    alone = first.result(LONG)
    with pytest.raises(UsageError, match="running already: pid 101 on here; pid 7 on here has the same RANK"):
        handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1, pid=7), LONG)
    for each in (right, alone):
        each.leave(None)
    listener.close()


def test_garbage_takes_no_place(pool: ThreadPoolExecutor) -> None:
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 7}\n', b"[]\n", b'{"hello": {"rank": 1}}\n'):
        with socket.create_connection(listener.getsockname()) as stranger:
            assert b"challenge" in stranger.recv(1000)
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    right = handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1), LONG)
    for each in (right, first.result(LONG)):
        each.leave(None)
    listener.close()


def test_strangers_that_say_nothing_hold_nobody_up(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is so while rank 0 waits for ranks and afterwards; if there are too many, the oldest are closed."""
    monkeypatch.setattr(handshake, "INTRODUCTION_S", 10 * LONG)
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with ExitStack() as stack:
        unauthenticated = [
            stack.enter_context(socket.create_connection(address)) for _ in range(handshake.UNAUTHENTICATED + 20)
        ]
        for stranger in unauthenticated:
            assert b"challenge" in stranger.recv(1000)
        right = handshake.join(address, me(1), LONG)
        alone = first.result(LONG)
        with pytest.raises(UsageError, match="pid 101 on here"):
            handshake.join(address, me(1, pid=7), LONG)
        assert unauthenticated[0].recv(1000) == b""
        unauthenticated[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            unauthenticated[-1].recv(1000)
        for each in (right, alone):
            each.leave(None)
        unauthenticated[-1].settimeout(LONG)
        assert unauthenticated[-1].recv(1000) == b""
    listener.close()


def test_a_stranger_that_trickles_is_cut_off(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "INTRODUCTION_S", 0.5)
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with socket.create_connection(listener.getsockname()) as stranger:
        assert b"challenge" in stranger.recv(1000)
        monkeypatch.setattr(handshake, "INTRODUCTION_S", LONG)  # the rank has enough time

        def trickle() -> bool:
            try:
                stranger.sendall(b"x")
            except OSError:
                return True
            return False

        wait_until("the stranger to be cut off", trickle, LONG)
    right = handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1), LONG)
    for each in (right, first.result(LONG)):
        each.leave(None)
    listener.close()


def test_a_hello_has_an_end(pool: ThreadPoolExecutor) -> None:
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with socket.create_connection(listener.getsockname()) as stranger:
        assert b"challenge" in stranger.recv(1000)
        with pytest.raises(OSError, match="reset|Broken pipe"):
            for _ in range(1000):
                stranger.sendall(b" " * 1000)
                time.sleep(0.001)
    right = handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1), LONG)
    for each in (right, first.result(LONG)):
        each.leave(None)
    listener.close()


def test_no_line_of_a_stranger_ends_rank_0(pool: ThreadPoolExecutor) -> None:
    """This is so while it waits for ranks and afterwards."""
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    lines = [b"[" * 10_000, json.dumps({"hello": {**me(1).__dict__, "token": "\ud800"}}).encode()]

    def annoy() -> None:
        for line in lines:
            with socket.create_connection(address) as stranger:
                assert b"challenge" in stranger.recv(1000)
                stranger.sendall(line + b"\n")
                while stranger.recv(1000):
                    pass

    first = pool.submit(handshake.host, listener, me(0), LONG)
    annoy()
    right = handshake.join(address, me(1), LONG)
    alone = first.result(LONG)
    annoy()
    with pytest.raises(UsageError, match="pid 101 on here"):  # another rank can still report it
        handshake.join(address, me(1, pid=7), LONG)
    for each in (right, alone):
        each.leave(None)
    listener.close()


@pytest.mark.parametrize("met", [True, False])
def test_a_rank_that_starts_again_is_not_taken_for_its_twin(pool: ThreadPoolExecutor, met: bool) -> None:
    """It connects before rank 0 has detected the loss, or before rank 0 has ended, and must retry in both cases."""
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    first = pool.submit(handshake.host, listener, me(0, 2 if met else 3), LONG)
    killed = handshake.join(address, me(1, 2 if met else 3), LONG)
    killed._links[0].send({"alive": True})  # it may have reported something before
    killed._links[0].hang_up()
    if met:
        alone = first.result(LONG)
        with pytest.raises(UnreachableError, match="closed the connection during the handshake"):
            handshake.join(address, me(1, pid=7), LONG)
        made = [alone]
    else:
        made = [handshake.join(address, me(rank, 3, pid=7), LONG) for rank in (1, 2)]
        made.append(first.result(LONG))
        assert [future.result(LONG) for future in all_gather(pool, made, "step 1")] == [[0, 10, 20]] * 3
    for each in (killed, *made):
        each.leave(None)
    listener.close()


def test_only_a_rank_of_the_job_learns_who_is_here(pool: ThreadPoolExecutor) -> None:
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    first = pool.submit(handshake.host, listener, me(0), LONG)
    ranks = [handshake.join(address, me(1), LONG), first.result(LONG)]
    wrong: list[Any] = [7, {"rank": [1]}, {**me(1).__dict__, "rank": [1]}, {**me(1, pid=9).__dict__, "token": "é"}]
    for hello in wrong:
        with socket.create_connection(address) as stranger:
            assert b"challenge" in stranger.recv(1000)
            stranger.sendall(json.dumps({"hello": hello}).encode() + b"\n")
            assert b"101" not in stranger.recv(1000)
    with pytest.raises(AuthError):
        handshake.join(address, me(1, token="other"), LONG)  # noqa: S106
    with pytest.raises(UsageError, match="pid 101 on here"):
        handshake.join(address, me(1, pid=7), LONG)
    for each in ranks:
        each.leave(None)
    listener.close()


def test_missing_ranks_are_named() -> None:
    with (
        handshake.listen("127.0.0.1") as listener,
        pytest.raises(UnreachableError, match="ranks 1, 2 of 3 did not connect"),
    ):
        handshake.host(listener, me(0, 3), 0.1)


def test_a_start_that_fails_leaves_nothing_open(pool: ThreadPoolExecutor) -> None:
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    first = pool.submit(handshake.host, listener, me(0, 3), 0.5)
    second = handshake.join(address, me(1, 3), LONG)
    with pytest.raises(UnreachableError, match="rank 2 of 3 did not connect"):
        first.result(LONG)
    assert listener.fileno() == -1
    with pytest.raises(RunLostError, match="rank 0 is gone"):
        second.all_gather("step 1", 0)
    second.leave(None)


class FakeDiscovery:
    """A discovery of one job. NATS is unreachable for the first few queries."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.announced: list[dict[str, str]] = []

    def announce(self, service: str, index: int, replicas: int, address: str, extra: dict[str, str]) -> io.BytesIO:
        me = {"host": socket.gethostname(), "pid": str(os.getpid())}
        self.announced.append({"index": str(index), **me, "started": "1", **extra})
        return io.BytesIO()

    def find(self, service: str, timeout_s: float) -> list[dict[str, str]]:
        self.away -= 1
        if self.away >= 0:
            raise UnreachableError("NATS is away")
        return self.announced


def start(discovery: Any, rank: int) -> tuple[control_plane.Peers, Any]:
    place = rendezvous.Rendezvous(discovery, "nats://127.0.0.1:4222", rank, 2)
    try:
        place.announce("", place.open())
        return place.connect()
    finally:
        place.close()


def test_nats_may_be_away_while_ranks_meet(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")
    discovery = FakeDiscovery(away=5)
    ranks = [pool.submit(start, discovery, rank) for rank in (0, 1)]
    met = [future.result(LONG)[0] for future in ranks]
    assert all_gather(pool, met, "step 1")[1].result(LONG) == [0, 10]
    for each in met:
        each.leave(None)


def test_nats_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")
    monkeypatch.setenv("PERSIA_START_TIMEOUT", "0.2")
    with pytest.raises(UnreachableError, match="NATS is away"):
        start(FakeDiscovery(away=10**9), 1)


def test_a_rank_that_cannot_reach_the_store_leaves_the_others(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")

    def store(host: str, port: int, timeout_s: float, descriptor: int | None) -> int:
        if descriptor is None:
            raise UnreachableError("no store")
        return descriptor

    monkeypatch.setattr(rendezvous, "_store", store)
    discovery = FakeDiscovery()
    first, second = (pool.submit(start, discovery, rank) for rank in (0, 1))
    with pytest.raises(UnreachableError, match="no store"):
        second.result(LONG)
    alone, descriptor = first.result(LONG)
    socket.socket(fileno=descriptor).close()
    with pytest.raises(RunLostError, match="rank 1 is gone: UnreachableError: no store"):
        alone.all_gather("step 1", 0)
    alone.leave(None)


def test_a_second_rank_0_stops_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_JOB", "j")
    discovery = FakeDiscovery()
    discovery.announce("persia-trainer", 0, 2, "", {"started": "0", "host": "another"})
    place: Any = rendezvous.Rendezvous(discovery, "nats://127.0.0.1:4222", 0, 2)  # type: ignore[arg-type]
    extra = place.open()
    with pytest.raises(UsageError, match="is running already"):
        place.announce("", extra)
    place.close()
    for address in extra.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(rendezvous._address(address))


def test_a_token_is_in_no_text() -> None:
    assert "secret" not in repr(me(1))


def test_a_password_in_an_address_is_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous._shown("nats://user:secret@broker:4222") == "broker:4222"
    with pytest.raises(UsageError, match="want nats://HOST:PORT") as caught:
        nats.services("http://user:secret@broker:4222")
    assert "secret" not in str(caught.value)


@pytest.mark.row("S0-20")
def test_a_rank_0_that_does_not_listen_is_told_with_name_and_port() -> None:
    with handshake.listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=rf"127.0.0.1:{port} not reachable \(DNS ok / TCP refused\)"):
        handshake.join(("127.0.0.1", port), me(1), 2.0)
    with pytest.raises(UnreachableError, match=r"no\.such\.host\.invalid:1 not reachable \(DNS failed"):
        handshake.join(("no.such.host.invalid", 1), me(1), 2.0)


@pytest.mark.row("S0-19")
@pytest.mark.parametrize("variable", network.VARIABLES)
def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "eth9")
    with pytest.raises(UsageError, match=f"{variable}=eth9: interface eth9 does not exist; have .*lo"):
        network.check()
    monkeypatch.setenv(variable, "lo")
    network.check()


@pytest.mark.parametrize(("value", "good"), [("l", True), ("=l", False), ("=lo", True), ("^lo,e", True), ("^", True)])
def test_nccl_has_its_own_way_to_name_interfaces(monkeypatch: pytest.MonkeyPatch, value: str, good: bool) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "veth1": []})
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    if good:
        network.check()
    else:
        with pytest.raises(UsageError, match="NCCL_SOCKET_IFNAME"):
            network.check()


@pytest.mark.row("S0-19")
def test_fewer_gpus_than_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_NUM", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=0 lists 1 GPUs, but GPU_NUM=2"):
        network.check()


def test_the_summary_holds_what_was_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PERSIA_JOB", "j")
    monkeypatch.setattr(run, "_process", run._Process())
    run.trained(7, generation=3)
    run.report({"auc": 0.5})
    run.report({"rows": [1, 2]})
    assert finished_summary(tmp_path / "run") is None
    run.finish()
    summary = finished_summary(tmp_path / "run")
    assert summary is not None
    assert summary["result"] == {"auc": 0.5, "rows": [1, 2]}
    assert (summary["job"], summary["generation"], summary["steps"], summary["world_size"]) == ("j", 3, 7, 1)
    with pytest.raises(UsageError, match="want numbers"):
        run.report({"auc": float("nan")})


def test_ddp_options_are_checked() -> None:
    with pytest.raises(UsageError, match="initialization_method='mpi'"):
        options.DDPOption("mpi")
    with pytest.raises(UsageError, match="backend='mpi'"):
        options.DDPOption(backend="mpi")
    assert options.get_default_distributed_option().backend == "gloo"
    assert options.get_default_distributed_option(0).backend == "nccl"
    with pytest.raises(UsageError, match=r"timeout_s=0\): want seconds"):
        options.DDPOption(timeout_s=0)


@pytest.mark.row("S0-18", "S3-10")
def test_the_environment_chooses_the_backend_and_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    for name, device, backend in (("auto", None, "gloo"), ("auto", 0, "nccl"), ("gloo", 0, "gloo")):
        monkeypatch.setenv("PERSIA_DIST_BACKEND", name)
        option = options.get_default_distributed_option(device)
        with caplog.at_level(logging.INFO, "persia"):
            option.initialize(HashStore(), 0, 2, device)
        assert asked.pop() == backend
        assert f"over {backend} ({'no GPU' if device is None else 'GPU'})" in caplog.messages[-1]
    monkeypatch.setenv("PERSIA_DIST_BACKEND", "nccl")
    with pytest.raises(UsageError, match="nccl needs a GPU"):
        options.get_default_distributed_option(None).initialize(HashStore(), 0, 2, None)
    monkeypatch.setenv("PERSIA_DIST_BACKEND", "mpi")
    with pytest.raises(UsageError, match="PERSIA_DIST_BACKEND='mpi': want auto, nccl, gloo"):
        options.get_default_distributed_option(None)


@pytest.mark.row("S3-12")
def test_with_nccl_the_flight_recorder_of_torch_is_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in (*names, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)  # restored after the test
    monkeypatch.setenv("PERSIA_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setattr(flight, "collectives", None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: None)
    options.DDPOption(backend="gloo").initialize(HashStore(), 0, 2, None)
    assert not any(name in os.environ for name in names)
    options.DDPOption(backend="nccl").initialize(HashStore(), 0, 2, 0)
    assert [os.environ[name] for name in names] == ["2000", "1", "2000"]
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/nccl-rank-"
    monkeypatch.setattr(flight, "collectives", lambda: '{"entries": []}')
    flight.dump("a test")
    assert (tmp_path / "nccl-rank-0.json").read_text() == '{"entries": []}'


@pytest.mark.row("S4-20", "S4-22")
def test_variables_that_nobody_reads_are_mapped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    given = {"NCCL_TIMEOUT": "9", "NCCL_BLOCKING_WAIT": "1", "NCCL_TOPOLOGY_FILE": "/a.xml", "NCCL_TOPO_FILE": "/b.xml"}
    now = dict(given)
    environment.rename(now)
    assert {name: now[name] for name in now if name not in given} == {
        "PERSIA_DIST_TIMEOUT": "9",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert now["NCCL_TOPO_FILE"] == "/b.xml"
    assert {message.split(" has no effect")[0] for message in caplog.messages} == {
        f"environment variable {name}" for name in ("NCCL_BLOCKING_WAIT", "NCCL_TIMEOUT", "NCCL_TOPOLOGY_FILE")
    }
    assert "NCCL_TOPO_FILE is set: remove NCCL_TOPOLOGY_FILE" in caplog.text
    with pytest.raises(UsageError, match="NCCL_TOPO_FILE=/b.xml: no such file"):
        environment.check_files(now)


def test_ranks_may_wait_hours_for_one_that_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **options: asked.update(options))
    options.DDPOption(backend="gloo").initialize(HashStore(), 0, 2, None)
    assert asked["timeout"] >= timedelta(hours=12)
    monkeypatch.setenv("PERSIA_DIST_TIMEOUT", "5")
    options.DDPOption(backend="gloo").initialize(HashStore(), 0, 2, None)
    assert asked["timeout"] == timedelta(seconds=5)
    options.DDPOption(backend="gloo", timeout_s=7).initialize(HashStore(), 0, 2, None)
    assert asked["timeout"] == timedelta(seconds=7)


def test_alone_everything_is_agreed() -> None:
    assert run.agree(True)
    assert not run.agree(False)
    assert threading.active_count() >= 1
