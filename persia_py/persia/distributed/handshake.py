"""The handshake of the ranks of a run: each rank introduces itself to rank 0, which admits or refuses it."""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, fields, replace

from persia.distributed.control_plane import Peers
from persia.distributed.link import Link, line, names, parsed
from persia.distributed.network import is_loopback
from persia.runtime import clock
from persia.runtime.errors import AuthError, IncompatibleError, PersiaError, UnreachableError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import variable
from persia.runtime.waits import REMIND_S, SLICE_S

INTRODUCTION_S = 5.0
"""The time limit for an introduction, in seconds."""
UNAUTHENTICATED = 64
"""The maximum number of connections without an introduction, in addition to one per rank."""
_HELLO = 1 << 14
"""The maximum size of an introduction, in bytes."""

_logger = get_logger("meeting")


@dataclass(frozen=True)
class Introduction:
    """The introduction of a rank, which is its first message.

    Attributes:
        job: The name of the job.
        rank: The rank, from 0.
        world_size: The number of ranks in its configuration.
        version: The version of persia.
        host: The host on which it runs.
        pid: Its process id on the host.
        token: The token of the trainer's role, or an empty string. A message contains the proof of the token instead.
    """

    job: str
    rank: int
    world_size: int
    version: str
    host: str
    pid: int
    token: str

    def __repr__(self) -> str:
        """Return the rank without its token, which must not reach a log."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def proof(me: Introduction, challenge: str) -> str:
    """Return the proof that a rank knows the token and sent this introduction. The proof does not reveal the token."""
    said = json.dumps({**asdict(me), "token": challenge}, sort_keys=True)
    return hmac.new(me.token.encode(), said.encode(), "sha256").hexdigest()


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address``, for :func:`host`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def host(listener: socket.socket, me: Introduction, timeout_s: float, announced: str = "") -> Peers:
    """On rank 0: wait for every other rank of the run.

    The listener is closed at the end of the run, or after a failure.

    Args:
        listener: The socket to which the other ranks connect.
        me: The introduction of this rank.
        timeout_s: The time limit for all ranks, in seconds.
        announced: The address that was announced to the other ranks, ``HOST:PORT``, for the message.

    Raises:
        UnreachableError: Ranks did not connect in time; the message names all of them.
    """
    deadline = clock.now() + timeout_s
    links: dict[int, Link] = {}
    known: dict[int, Introduction] = {}
    reminded = time.monotonic()
    lobby = _Lobby(listener, me.world_size + UNAUTHENTICATED)
    try:
        while missing := [rank for rank in range(1, me.world_size) if rank not in links]:
            if clock.now() > deadline:
                raise UnreachableError(
                    f"job {me.job!r}: {names(missing)} of {me.world_size} did not connect within "
                    f"{round(timeout_s) if timeout_s >= 1 else timeout_s:g} s (PERSIA_START_TIMEOUT)"
                    f"{f' to {announced}, which rank 0 has announced' if announced else ''}"
                    f"{_loopback(announced)}",
                    hint=_start_all(me.world_size, announced),
                )
            if time.monotonic() - reminded > REMIND_S / 3:
                reminded = time.monotonic()
                _logger.info("waiting for %s of %d to connect", names(missing), me.world_size)
            if (arrived := lobby.next()) is not None:
                _admit(*arrived, me, links, known)
    except BaseException:
        lobby.close()
        for link in links.values():
            link.close()
        raise
    peers = Peers(me.rank, me.world_size, links)
    threading.Thread(target=_refuse_all, args=(lobby, me, peers, known), name="persia-refuse", daemon=True).start()
    return peers


def _loopback(announced: str) -> str:
    """Return a note if a variable has set the announced address to a loopback address; otherwise an empty text."""
    name = _selects_loopback(announced)
    if not name:
        return ""
    return f"; {name}={variable(name)} names a loopback address, which no other host or container reaches"


def _selects_loopback(announced: str) -> str:
    """Return the variable that has set the announced address to a loopback address; an empty text if none has."""
    if not is_loopback(announced.rpartition(":")[0]):
        return ""
    names = ("PERSIA_ADVERTISE", "PERSIA_SOCKET_IFNAME")
    return next((name for name in names if variable(name) is not None), "")


def _start_all(world_size: int, announced: str) -> str:
    """Return the next step if ranks did not connect."""
    step = f"check that {world_size} ranks were started, each with WORLD_SIZE={world_size}"
    name = _selects_loopback(announced)
    return f"{step}; for ranks on other hosts or in other containers, unset {name}" if name else step


@dataclass(eq=False)
class _Pending:
    """A connection whose introduction is not complete."""

    connection: socket.socket
    challenge: str
    until: float
    said: bytes = b""


class _Lobby:
    """Receives introductions concurrently. An incomplete introduction therefore does not block other ranks.

    Args:
        listener: The socket to which ranks connect; closed together with the lobby.
        most: The maximum number of open connections without an introduction; beyond it the oldest one is closed.
    """

    def __init__(self, listener: socket.socket, most: int) -> None:
        self._listener = listener
        self._most = most
        self._pending: list[_Pending] = []  # in the order of their arrival
        self._ready: deque[tuple[socket.socket, str, Introduction]] = deque()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def next(self) -> tuple[socket.socket, str, Introduction] | None:
        """Return the next connection, its challenge and its introduction; its socket is non-blocking.

        Return None if none is complete after at most 0.5 s.
        """
        if not self._ready:
            for key, _ in self._selector.select(SLICE_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            while self._pending and (len(self._pending) > self._most or time.monotonic() > self._pending[0].until):
                self._remove(self._pending[0]).close()
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Close the listener and all connections that were not returned."""
        self._selector.close()
        self._listener.close()
        for connection in (*(pending.connection for pending in self._pending), *(ready[0] for ready in self._ready)):
            connection.close()

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except (BlockingIOError, ConnectionError):  # the peer has already disconnected
            return
        pending = _Pending(connection, secrets.token_hex(16), time.monotonic() + INTRODUCTION_S)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.sendall(line({"challenge": pending.challenge}))
        self._pending.append(pending)
        self._selector.register(connection, selectors.EVENT_READ, pending)

    def _hear(self, pending: _Pending) -> None:
        try:
            piece = pending.connection.recv(_HELLO)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        pending.said += piece
        if piece and b"\n" not in piece and len(pending.said) < _HELLO:
            return
        connection, them = self._remove(pending), _introduction(pending.said)
        if them is None:
            connection.close()
        else:
            self._ready.append((connection, pending.challenge, them))

    def _remove(self, pending: _Pending) -> socket.socket:
        self._pending.remove(pending)
        self._selector.unregister(pending.connection)
        return pending.connection


def _introduction(said: bytes) -> Introduction | None:
    """Return the introduction of a rank; None if the message is something else."""
    message = parsed(said)
    try:
        them = Introduction(**message["hello"]) if message is not None else None
    except (KeyError, TypeError):
        return None
    right = them is not None and all(type(getattr(them, field.name)) is field.type for field in fields(them))
    return them if right else None


def _admit(
    connection: socket.socket,
    challenge: str,
    them: Introduction,
    me: Introduction,
    links: dict[int, Link],
    known: dict[int, Introduction],
) -> None:
    taken = links.get(them.rank)
    if taken is not None and taken.over:
        _logger.warning("%r disconnected before the run began; another process may take this rank", known[them.rank])
        links.pop(them.rank).close()
        taken = None
    refused = _reason_to_refuse(me, challenge, them, None if taken is None else known[them.rank])
    if refused is not None:
        _refuse(connection, them, refused)
        return
    connection.settimeout(None)
    links[them.rank], known[them.rank] = Link(connection), them
    links[them.rank].send({"welcome": True})


def _refuse(connection: socket.socket, them: Introduction, reason: tuple[str, str]) -> None:
    _logger.warning("refused %r: %s", them, reason[1])
    link = Link(connection)
    link.send({"refused": reason})
    link.close()


def _reason_to_refuse(
    me: Introduction, challenge: str, them: Introduction, same: Introduction | None
) -> tuple[str, str] | None:
    """Return the kind of the error and its text; None if the rank is admitted."""
    right = proof(replace(them, token=me.token), challenge)
    if not hmac.compare_digest(them.token.encode(errors="surrogatepass"), right.encode()):
        return "AuthError", f"rank 0 of job {me.job!r} does not accept the token of {them!r}"
    if them.version != me.version:
        return "IncompatibleError", f"rank 0 has version {me.version}, but {them!r} has version {them.version}"
    if (them.job, them.world_size) != (me.job, me.world_size) or not 0 < them.rank < me.world_size:
        return "UsageError", (
            f"{me!r} of job {me.job!r} has WORLD_SIZE={me.world_size}, {them!r} of job {them.job!r} has "
            f"WORLD_SIZE={them.world_size}: start every rank with the same PERSIA_JOB and WORLD_SIZE, and with a RANK "
            "below WORLD_SIZE"
        )
    if same is not None:
        return "UsageError", (
            f"rank {them.rank} of job {me.job!r} is already running: pid {same.pid} on {same.host}; pid {them.pid} on "
            f"{them.host} has the same RANK: stop one of them, set another RANK, or set another name for this job "
            "(PERSIA_JOB)"
        )
    return None


def _refuse_all(lobby: _Lobby, me: Introduction, peers: Peers, known: dict[int, Introduction]) -> None:
    """Refuse ranks that connect after all ranks are connected, and name the process that holds the rank.

    If the process that holds the rank has ended, or the run is ending, close the connection without a response. The
    connecting rank retries until the next rank 0 admits it.
    """
    with contextlib.closing(lobby), contextlib.suppress(OSError):  # if the listener fails, later ranks get no response
        while not peers.closed:
            if (arrived := lobby.next()) is None:
                continue
            connection, challenge, them = arrived
            refused = _reason_to_refuse(me, challenge, them, known.get(them.rank))
            if refused is not None and (them.rank not in known or peers.holds(them.rank)):
                _refuse(connection, them, refused)
            else:
                connection.close()


def join(address: tuple[str, int], me: Introduction, timeout_s: float) -> Peers:
    """On the other ranks: connect to rank 0.

    Raises:
        UnreachableError: Rank 0 cannot be reached; the message says whether its name resolves and its port responds.
        PersiaError: Rank 0 refused this rank; the message is that of rank 0.
    """
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise UnreachableError(
            f"rank 0 of job {me.job!r} at {unreachable(address, error)}",
            hint="check that rank 0 runs; to check the network, run on every rank: "
            f"RANK=R persia doctor --matrix {me.world_size}",
        ) from error
    link = Link(connection)
    message = link.receive()
    if message is not None and isinstance(challenge := message.get("challenge"), str):
        link.send({"hello": asdict(replace(me, token=proof(me, challenge)))})
        message = link.receive()
    if message is None or "welcome" not in message:
        link.close()
        kind, text = message["refused"] if message is not None and "refused" in message else ("", "")
        if not text:
            raise UnreachableError(
                f"rank 0 of job {me.job!r} at {address[0]}:{address[1]} closed the connection or did not respond "
                "during the handshake",
                hint="see the output of rank 0",
            )
        kinds: dict[str, type[PersiaError]] = {"AuthError": AuthError, "IncompatibleError": IncompatibleError}
        raise kinds.get(kind, UsageError)(text)
    connection.settimeout(None)
    return Peers(me.rank, me.world_size, {0: link})


def unreachable(address: tuple[str, int], error: OSError) -> str:
    """Return the reason why ``host:port`` cannot be reached: its name, or its port."""
    name, port = address
    if isinstance(error, socket.gaierror):
        return f"{name}:{port} is not reachable (DNS failed: {error.strerror})"
    dropped = "no answer: a firewall may drop packets to this port"
    kind = dropped if isinstance(error, TimeoutError) else "refused" if error.errno == 111 else str(error.strerror)
    text = f"{name}:{port} is not reachable (DNS ok / TCP {kind})"
    if name.startswith("127."):
        text += "; if rank 0 is on another host, its PERSIA_SOCKET_IFNAME or PERSIA_ADVERTISE names a loopback address"
    return text
