"""The handshake of ranks: refused ranks, and strangers that connect."""

import itertools
import json
import socket
import threading
import time
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import pytest
from meeting import LONG, Meet, all_gather, me
from waiting import wait_until

from persia.distributed import control_plane, handshake
from persia.errors import AuthError, IncompatibleError, RunLostError, UnreachableError, UsageError
from persia.runtime import clock


def test_a_silent_rank_is_named(meet: Meet, pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is stopped, not dead, so its connection stays open."""
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


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"token": "other"}, AuthError, "does not accept the token of rank 1"),
        ({"version": "2"}, IncompatibleError, "rank 0 has version 1, but rank .* has version 2"),
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
    pool: Executor, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with pytest.raises(error, match=text):
        handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1, **changes), LONG)
    right = handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1), LONG)
    alone = first.result(LONG)
    with pytest.raises(UsageError, match="already running: pid 101 on here; pid 7 on here has the same RANK"):
        handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1, pid=7), LONG)
    for each in (right, alone):
        each.leave(None)
    listener.close()


@pytest.mark.parametrize(
    ("variables", "announced", "text"),
    [
        (
            {},
            "10.0.0.1:7",
            r"within 1 s \(PERSIA_START_TIMEOUT\) to 10\.0\.0\.1:7, which rank 0 has announced$",
        ),
        (
            {"PERSIA_SOCKET_IFNAME": "lo"},
            "127.0.0.1:7",
            "announced; PERSIA_SOCKET_IFNAME=lo names a loopback address, .*reaches$",
        ),
        ({"PERSIA_ADVERTISE": "localhost"}, "localhost:7", "PERSIA_ADVERTISE=localhost names a loopback address"),
        ({"PERSIA_SOCKET_IFNAME": "eth0"}, "10.0.0.1:7", "has announced$"),
        ({}, "127.0.0.1:7", "has announced$"),
    ],
)
def test_ranks_that_do_not_connect_were_told_an_address(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], announced: str, text: str
) -> None:
    """The message has whole seconds. It names a loopback address with the variable that selected the address."""
    times = itertools.chain([0.0], itertools.repeat(2.0))
    here, now = threading.get_ident(), clock.now  # connections of earlier tests may still end in their threads
    monkeypatch.setattr(clock, "now", lambda: next(times) if threading.get_ident() == here else now())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnreachableError, match=text) as caught:
        handshake.host(handshake.listen("127.0.0.1"), me(0), 1.4978, announced)
    assert "2 ranks were started, each with WORLD_SIZE=2" in caught.value.hint
    assert ("unset" in caught.value.hint) == ("loopback" in str(caught.value))


def test_garbage_takes_no_place(pool: Executor) -> None:
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


def test_strangers_that_say_nothing_hold_nobody_up(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may connect before and after the ranks. With too many, the oldest connections are closed."""
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


def test_a_stranger_that_trickles_is_cut_off(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_hello_has_an_end(pool: Executor) -> None:
    listener = handshake.listen("127.0.0.1")
    first = pool.submit(handshake.host, listener, me(0), LONG)
    with socket.create_connection(listener.getsockname()) as stranger:
        assert b"challenge" in stranger.recv(1000)
        with pytest.raises(OSError, match="reset|Broken pipe"):
            for _ in range(20_000):  # rank 0 may be slow to read, and buffers take more than a hello
                stranger.sendall(b" " * 1000)
                time.sleep(0.001)
    right = handshake.join(("127.0.0.1", listener.getsockname()[1]), me(1), LONG)
    for each in (right, first.result(LONG)):
        each.leave(None)
    listener.close()


def test_no_line_of_a_stranger_ends_rank_0(pool: Executor) -> None:
    """The lines arrive while rank 0 waits for ranks, or afterwards."""
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
def test_a_rank_that_starts_again_is_not_taken_for_its_twin(pool: Executor, met: bool) -> None:
    """The rank connects before rank 0 has detected the loss or has ended. In both cases, the rank must retry."""
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    first = pool.submit(handshake.host, listener, me(0, 2 if met else 3), LONG)
    killed = handshake.join(address, me(1, 2 if met else 3), LONG)
    killed._links[0].send({"alive": True})  # the rank may have sent messages before
    killed._links[0].hang_up()
    if met:
        alone = first.result(LONG)
        with pytest.raises(UnreachableError, match="closed the connection or did not respond during the handshake"):
            handshake.join(address, me(1, pid=7), LONG)
        made = [alone]
    else:
        made = [handshake.join(address, me(rank, 3, pid=7), LONG) for rank in (1, 2)]
        made.append(first.result(LONG))
        assert [future.result(LONG) for future in all_gather(pool, made, "step 1")] == [[0, 10, 20]] * 3
    for each in (killed, *made):
        each.leave(None)
    listener.close()


def test_only_a_rank_of_the_job_learns_who_is_here(pool: Executor) -> None:
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


def test_a_start_that_fails_leaves_nothing_open(pool: Executor) -> None:
    listener = handshake.listen("127.0.0.1")
    address = ("127.0.0.1", listener.getsockname()[1])
    first = pool.submit(handshake.host, listener, me(0, 3), 2.0)  # rank 1 connects within 2 s
    second = handshake.join(address, me(1, 3), LONG)
    with pytest.raises(UnreachableError, match="rank 2 of 3 did not connect"):
        first.result(LONG)
    assert listener.fileno() == -1
    with pytest.raises(RunLostError, match="rank 0 is gone"):
        second.all_gather("step 1", 0)
    second.leave(None)


def test_a_token_is_in_no_text() -> None:
    assert "secret" not in repr(me(1))


@pytest.mark.row("S0-20")
def test_a_rank_0_that_does_not_listen_is_told_with_name_and_port() -> None:
    with handshake.listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=rf"127.0.0.1:{port} is not reachable \(DNS ok / TCP refused\)"):
        handshake.join(("127.0.0.1", port), me(1), 2.0)
    with pytest.raises(UnreachableError, match=r"no\.such\.host\.invalid:1 is not reachable \(DNS failed"):
        handshake.join(("no.such.host.invalid", 1), me(1), 2.0)
