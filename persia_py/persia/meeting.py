"""How the ranks of a run come together: each introduces itself to rank 0, which takes or refuses it."""

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace

from persia.errors import AuthError, IncompatibleError, PersiaError, UnreachableError, UsageError
from persia.logger import get_logger
from persia.peers import REMIND_S, SLICE_S, Link, Peers, names

INTRODUCTION_S = 5.0
"""How long an introduction may take; others wait meanwhile."""

_logger = get_logger("meeting")


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


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address``, for :func:`host`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def host(listener: socket.socket, me: Introduction, timeout_s: float) -> Peers:
    """On rank 0: wait for every other rank of the run. The listener is closed with the run, or when this fails.

    Raises:
        UnreachableError: Ranks did not come in time; all are named.
    """
    deadline = time.monotonic() + timeout_s
    links: dict[int, Link] = {}
    known: dict[int, Introduction] = {}
    reminded = time.monotonic()
    try:
        for connection in _accept(listener, lambda: len(links) + 1 < me.world_size):
            if connection is not None:
                _admit(connection, me, links, known)
            missing = [rank for rank in range(1, me.world_size) if rank not in links]
            if missing and time.monotonic() > deadline:
                raise UnreachableError(
                    f"job {me.job!r}: {names(missing)} of {me.world_size} did not come within {timeout_s:g} s "
                    f"(PERSIA_START_TIMEOUT); is WORLD_SIZE={me.world_size} the number that was started?"
                )
            if missing and time.monotonic() - reminded > REMIND_S / 3:
                reminded = time.monotonic()
                _logger.info("waiting for %s of %d", names(missing), me.world_size)
    except BaseException:
        listener.close()
        for link in links.values():
            link.close()
        raise
    peers = Peers(me.rank, me.world_size, links)
    threading.Thread(target=_refuse, args=(listener, me, peers, known), name="persia-refuse", daemon=True).start()
    return peers


def _accept(listener: socket.socket, wanted: Callable[[], bool]) -> Iterator[socket.socket | None]:
    """Yield connections while they are wanted, and None now and then."""
    listener.settimeout(SLICE_S)
    while wanted():
        try:
            yield listener.accept()[0]
        except TimeoutError:
            yield None


def _admit(connection: socket.socket, me: Introduction, links: dict[int, Link], known: dict[int, Introduction]) -> None:
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


def _introduced(connection: socket.socket, challenge: str) -> tuple[Link, Introduction | None]:
    """Return who connects; None for what is no rank."""
    connection.settimeout(INTRODUCTION_S)
    link = Link(connection)
    too_slow = threading.Timer(INTRODUCTION_S, link.hang_up)  # the socket's own time is for each piece of a line
    too_slow.daemon = True
    too_slow.start()
    link.send({"challenge": challenge})
    message = link.receive()
    too_slow.cancel()
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
    right = proof(replace(them, token=me.token), challenge)
    if not hmac.compare_digest(them.token.encode(errors="surrogatepass"), right.encode()):
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
                f"rank 0 of job {me.job!r} at {address[0]}:{address[1]} ended the connection before its welcome"
            )
        kinds: dict[str, type[PersiaError]] = {"AuthError": AuthError, "IncompatibleError": IncompatibleError}
        raise kinds.get(kind, UsageError)(text)
    connection.settimeout(None)
    return Peers(me.rank, me.world_size, {0: link})


def unreachable(address: tuple[str, int], error: OSError) -> str:
    """Say what is wrong with ``host:port``: its name, or its port."""
    name, port = address
    if isinstance(error, socket.gaierror):
        return f"{name}:{port} not reachable (DNS failed: {error.strerror})"
    kind = "no answer" if isinstance(error, TimeoutError) else "refused" if error.errno == 111 else str(error.strerror)
    return f"{name}:{port} not reachable (DNS ok / TCP {kind})"
