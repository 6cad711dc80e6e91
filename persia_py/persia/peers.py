"""The ranks of one run, in touch with each other through rank 0.

Every rank above 0 keeps one connection to rank 0. Over it the ranks agree on flags (:meth:`Peers.share`), and learn
at once, and by name, when one of them fails, dies or falls silent: torch's collectives know neither.

Messages are lines of JSON. They carry flags and names, never tensors.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from persia.errors import AuthError, IncompatibleError, PersiaError, RunLostError, UnreachableError, UsageError
from persia.logger import get_logger

_logger = get_logger("peers")

_ALIVE_S = 5.0
"""How often a rank says that it is alive."""
SILENCE_S = 120.0
"""How long a rank may be silent before it counts as lost: stopped, frozen, or its network is gone."""
_GRACE_S = 15.0
"""How long the training loop may take to notice that a rank is lost, before this process ends by itself."""
_REMIND_S = 30.0
_LINE = 1 << 20
"""Bytes a message may have."""
_SLICE_S = 0.5
"""How long a signal may have to wait."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Introduction:
    """Who a rank is; the first thing it sends.

    Attributes:
        job: The job's name.
        rank: From 0.
        world_size: Ranks it counts on.
        version: Of persia.
        host: Where it runs.
        pid: Its process there.
        token: The token of the trainer's role, or an empty string; on its way, the proof that the rank has it.
    """

    job: str
    rank: int
    world_size: int
    version: str
    host: str
    pid: int
    token: str

    def __repr__(self) -> str:
        """Name it; the token stays out of every log."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def proof(me: Introduction, challenge: str) -> str:
    """Return what shows that a rank has the token, and says what it says, without telling the token."""
    said = json.dumps({**asdict(me), "token": challenge}, sort_keys=True)
    return hmac.new(me.token.encode(), said.encode(), "sha256").hexdigest()


class _Link:
    """One connection, and lines of JSON over it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()
        self.heard = time.monotonic()

    def send(self, message: Message) -> bool:
        """Send; False when the connection is gone (its reader says so too)."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message; None at the end of the connection, or for anything that is no message."""
        try:
            line = self._lines.readline(_LINE)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        self.heard = time.monotonic()
        return message if isinstance(message, dict) else None

    @property
    def over(self) -> bool:
        """Whether the other side is gone, whatever of it is still to be read."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed here
            return True

    def hang_up(self) -> None:
        """End the connection; whoever reads from it is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free what it holds; nobody may be reading."""
        self.hang_up()
        self._lines.close()
        self._socket.close()


class Peers:
    """This rank's view of the others.

    Made by :func:`host` on rank 0 and by :func:`join` on the others.

    Attributes:
        loops: Training loops this rank has begun, in all contexts of its process; for :meth:`note`.
    """

    def __init__(self, me: Introduction, links: dict[int, _Link]) -> None:
        self.rank, self.world_size = me.rank, me.world_size
        self.loops = 0
        self._links = links
        self._changed = threading.Condition()
        self._shares: dict[int, dict[int, tuple[str, Any]]] = {}
        self._answers: dict[int, tuple[str, list[Any]]] = {}
        self._count = 0
        self._notes: dict[int, int] = {}
        self._lost: tuple[int, str] | None = None
        self._left: set[int] = set()
        self._closed = False
        for rank, link in links.items():
            threading.Thread(target=self._read, args=(rank, link), name=f"persia-rank-{rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="persia-peers", daemon=True).start()

    def share(self, topic: str, value: Any) -> list[Any]:
        """Return what every rank gave for ``topic``, in the order of ranks; waits until all have.

        Every rank calls this in the same order. There is no limit while all of them live, because one may be waiting
        for data or evaluating; a line every 30 s says who is waited for.

        Raises:
            RunLostError: A rank is gone; it is named.
            UsageError: The ranks are at different places of the script.
        """
        number, self._count = self._count, self._count + 1
        if self.rank == 0:
            return self._collect(number, topic, value)
        self._links[0].send({"share": [number, topic, value]})

        def answer() -> tuple[str, list[Any]] | None:
            if number not in self._answers:
                self._check_left([0])
            return self._answers.pop(number, None)

        others: tuple[str, list[Any]] = self._wait(answer, lambda: f"rank 0 to say: {topic}")
        if others[0] != topic:
            raise UsageError(f"the ranks are not at the same place: rank 0 at {others[0]!r}, this one at {topic!r}")
        return others[1]

    def _collect(self, number: int, topic: str, value: Any) -> list[Any]:
        shares = self._shares.setdefault(number, {})

        def missing() -> list[int]:
            return [rank for rank in self._links if rank not in shares]

        def complete() -> bool | None:
            self._check_left(missing())
            return None if missing() else True

        self._wait(complete, lambda: f"{_ranks(missing())} to say: {topic}")
        del self._shares[number]
        different = {rank: at for rank, (at, _) in shares.items() if at != topic}
        values = [value if rank == 0 else shares[rank][1] for rank in range(self.world_size)]
        for link in self._links.values():
            link.send({"answer": [number, topic, values]})
        if different:
            places = ", ".join(f"rank {rank} at {at!r}" for rank, at in sorted(different.items()))
            raise UsageError(f"the ranks are not at the same place: rank 0 at {topic!r}, {places}")
        return values

    def note(self, value: int) -> None:
        """Let rank 0 know how far this rank is; what it waits for with :meth:`wait_for_notes`."""
        if self.rank != 0:
            self._links[0].send({"note": value})

    def wait_for_notes(self, value: int, what: str, timeout_s: float) -> None:
        """On rank 0: wait until every other rank has noted ``value`` or more.

        Raises:
            UnreachableError: One did not in time; it is named.
        """
        deadline = time.monotonic() + timeout_s

        def behind() -> list[int]:
            return [rank for rank in self._links if self._notes.get(rank, 0) < value]

        def done() -> bool | None:
            if behind() and time.monotonic() > deadline:
                raise UnreachableError(f"waited {timeout_s:g} s for {_ranks(behind())} {what}")
            return None if behind() else True

        self._wait(done, lambda: f"{_ranks(behind())} {what}")

    def blame(self, error: BaseException) -> None:
        """After a collective failed: if that is because a rank is gone, say which.

        Raises:
            RunLostError: A rank is gone.
        """
        deadline = time.monotonic() + 3.0
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, max(0.0, deadline - time.monotonic()))
            if self._lost is not None:
                raise self._lost_error() from error

    def leave(self, reason: str | None) -> None:
        """Tell the others that this rank leaves: cleanly, or why it has to."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for link in self._links.values():
            link.send({"left": reason})
            link.hang_up()

    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
        return self._closed

    def holds(self, rank: int) -> bool:
        """Whether the run goes on with the process that is ``rank``, as far as is known."""
        with self._changed:
            over = self._closed or self._lost is not None or rank in self._left
        return not over and not self._links[rank].over

    def _wait(self, look: Callable[[], Any], what: Callable[[], str]) -> Any:
        """Return what ``look`` finds, once it finds something."""
        started = reminded = time.monotonic()
        with self._changed:
            while True:
                if self._lost is not None:
                    raise self._lost_error()
                if (found := look()) is not None:
                    return found
                self._changed.wait(_SLICE_S)
                if time.monotonic() - reminded > _REMIND_S:
                    reminded = time.monotonic()
                    _logger.warning("waiting for %s since %.0f s", what(), reminded - started)

    def _lost_error(self) -> RunLostError:
        assert self._lost is not None  # noqa: S101  # every caller has looked
        return RunLostError(f"rank {self._lost[0]} is gone: {self._lost[1]}")

    def _check_left(self, wanted: list[int]) -> None:
        for rank in wanted:
            if rank in self._left:
                raise RunLostError(f"rank {rank} is gone: its script has ended, while this one goes on")

    def _read(self, rank: int, link: _Link) -> None:
        """Take what ``rank`` sends until its connection ends."""
        while (message := link.receive()) is not None:
            with self._changed:
                self._take(rank, message)
                self._changed.notify_all()
        link.close()
        self._lose(rank, "its connection ended without a word: the process died, was killed, or lost its network")

    def _take(self, rank: int, message: Message) -> None:
        if "share" in message:
            number, topic, value = message["share"]
            self._shares.setdefault(number, {})[rank] = (topic, value)
        elif "answer" in message:
            number, topic, values = message["answer"]
            self._answers[number] = (topic, values)
        elif "note" in message:
            self._notes[rank] = message["note"]
        elif "lost" in message:
            self._lost = self._lost or (message["lost"][0], message["lost"][1])
        elif "left" in message:
            if message["left"] is None:
                self._left.add(rank)
            else:
                self._lost = self._lost or (rank, message["left"])

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if self._lost is None and rank not in self._left and not self._closed:
                self._lost = (rank, why)
            self._changed.notify_all()

    def _watch(self) -> None:
        """Say that this rank lives, and end the process when the loop cannot notice that another does not."""
        told, ends = threading.Event(), 0.0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (self._lost is not None and not told.is_set()), timeout=_ALIVE_S
                )
                if self._closed:
                    return
                lost = self._lost
            if lost is not None and not told.is_set():
                told.set()
                ends = time.monotonic() + _GRACE_S
                for rank, link in self._links.items():
                    if rank != lost[0]:
                        link.send({"lost": lost})
            elif told.is_set() and time.monotonic() > ends:
                self._end()
            for rank, link in self._links.items():
                link.send({"alive": True})
                silent = time.monotonic() - link.heard
                if silent > SILENCE_S and rank not in self._left:
                    self._lose(rank, f"silent for {silent:.0f} s: stopped, frozen, or its network is gone")

    def _end(self) -> None:
        """End the process from outside its main thread, which waits in a collective that never returns."""
        error = self._lost_error()
        sys.stderr.write(f"error: {error}\nnext: {error.hint}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address``, for :func:`host`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def host(listener: socket.socket, me: Introduction, timeout_s: float) -> Peers:
    """On rank 0: wait for every other rank of the run.

    Raises:
        UnreachableError: Ranks did not come in time; all are named.
    """
    deadline = time.monotonic() + timeout_s
    links: dict[int, _Link] = {}
    known: dict[int, Introduction] = {}
    reminded = time.monotonic()
    for connection in _accept(listener, lambda: len(links) + 1 < me.world_size):
        if connection is not None:
            _admit(connection, me, links, known)
        missing = [rank for rank in range(1, me.world_size) if rank not in links]
        if missing and time.monotonic() > deadline:
            raise UnreachableError(
                f"job {me.job!r}: {_ranks(missing)} of {me.world_size} did not come within {timeout_s:g} s "
                f"(PERSIA_START_TIMEOUT); is WORLD_SIZE={me.world_size} the number that was started?"
            )
        if missing and time.monotonic() - reminded > _REMIND_S / 3:
            reminded = time.monotonic()
            _logger.info("waiting for %s of %d", _ranks(missing), me.world_size)
    peers = Peers(me, links)
    threading.Thread(target=_refuse, args=(listener, me, peers, known), name="persia-refuse", daemon=True).start()
    return peers


def _accept(listener: socket.socket, wanted: Callable[[], bool]) -> Iterator[socket.socket | None]:
    """Yield connections while they are wanted, and None now and then."""
    listener.settimeout(_SLICE_S)
    while wanted():
        try:
            yield listener.accept()[0]
        except TimeoutError:
            yield None


def _admit(
    connection: socket.socket, me: Introduction, links: dict[int, _Link], known: dict[int, Introduction]
) -> None:
    challenge = secrets.token_hex(16)
    link, them = _introduced(connection, challenge)
    if them is None:
        link.close()
        return
    taken = links.get(them.rank)
    if taken is not None and taken.over:
        _logger.warning("%r is gone before the run began; another may take its place", known[them.rank])
        links.pop(them.rank).close()
        taken = None
    refused = _reason_to_refuse(me, challenge, them, None if taken is None else known[them.rank])
    if refused is not None:
        _logger.warning("refused %r: %s", them, refused[1])
        link.send({"refused": refused})
        link.close()
        return
    link.send({"welcome": True})
    connection.settimeout(None)
    links[them.rank], known[them.rank] = link, them


def _introduced(connection: socket.socket, challenge: str) -> tuple[_Link, Introduction | None]:
    """Return who connects; None for what is no rank."""
    connection.settimeout(5.0)
    link = _Link(connection)
    link.send({"challenge": challenge})
    message = link.receive()
    try:
        them = Introduction(**message["hello"]) if message is not None else None
    except (KeyError, TypeError):
        return link, None
    right = them is not None and all(type(getattr(them, field.name)) is field.type for field in fields(them))
    return link, them if right else None


def _reason_to_refuse(
    me: Introduction, challenge: str, them: Introduction, same: Introduction | None
) -> tuple[str, str] | None:
    """Return the kind of the error and its text."""
    if not hmac.compare_digest(them.token.encode(), proof(replace(them, token=me.token), challenge).encode()):
        return "AuthError", f"rank 0 of job {me.job!r} does not accept the token of {them!r}: see PERSIA_TOKEN_FILE"
    if them.version != me.version:
        return "IncompatibleError", f"rank 0 is of version {me.version}, {them!r} of version {them.version}"
    if (them.job, them.world_size) != (me.job, me.world_size) or not 0 < them.rank < me.world_size:
        return "UsageError", (
            f"rank 0 of job {me.job!r} has WORLD_SIZE={me.world_size}, {them!r} of job {them.job!r} has "
            f"WORLD_SIZE={them.world_size}"
        )
    if same is not None:
        return "UsageError", (
            f"rank {them.rank} of job {me.job!r} is running already: pid {same.pid} on {same.host}; stop it, or give "
            "the other job another name (PERSIA_JOB)"
        )
    return None


def _refuse(listener: socket.socket, me: Introduction, peers: Peers, known: dict[int, Introduction]) -> None:
    """Tell ranks that come when all are there who has their place.

    One that comes as its predecessor or the run is ending hears nothing, and tries again: the next rank 0 takes it.
    """
    with listener, contextlib.suppress(OSError):  # the listener fails: nobody is told any more
        for connection in _accept(listener, lambda: not peers.closed):
            if connection is None:
                continue
            challenge = secrets.token_hex(16)
            link, them = _introduced(connection, challenge)
            refused = None if them is None else _reason_to_refuse(me, challenge, them, known.get(them.rank))
            if them is not None and refused is not None and (them.rank not in known or peers.holds(them.rank)):
                _logger.warning("refused %r: %s", them, refused[1])
                link.send({"refused": refused})
            link.close()


def join(address: tuple[str, int], me: Introduction, timeout_s: float) -> Peers:
    """On the other ranks: connect to rank 0.

    Raises:
        UnreachableError: It cannot be reached; whether its name resolves and its port answers is told.
        PersiaError: It refused this rank; its words.
    """
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise UnreachableError(f"rank 0 of job {me.job!r} at {unreachable(address, error)}") from error
    link = _Link(connection)
    message = link.receive()
    if message is not None and isinstance(challenge := message.get("challenge"), str):
        link.send({"hello": asdict(replace(me, token=proof(me, challenge)))})
        message = link.receive()
    if message is None or "welcome" not in message:
        link.close()
        kind, text = message["refused"] if message is not None and "refused" in message else ("", "")
        if not text:
            raise UnreachableError(
                f"rank 0 of job {me.job!r} at {address[0]}:{address[1]} ended the connection before its welcome"
            )
        kinds: dict[str, type[PersiaError]] = {"AuthError": AuthError, "IncompatibleError": IncompatibleError}
        raise kinds.get(kind, UsageError)(text)
    connection.settimeout(None)
    return Peers(me, {0: link})


def unreachable(address: tuple[str, int], error: OSError) -> str:
    """Say what is wrong with ``host:port``: its name, or its port."""
    name, port = address
    if isinstance(error, socket.gaierror):
        return f"{name}:{port} not reachable (DNS failed: {error.strerror})"
    kind = "no answer" if isinstance(error, TimeoutError) else "refused" if error.errno == 111 else str(error.strerror)
    return f"{name}:{port} not reachable (DNS ok / TCP {kind})"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
