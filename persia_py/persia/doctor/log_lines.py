"""Lines of logs: parsing of time, process and rank, and merging in chronological order."""

import heapq
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from persia.runtime.errors import UsageError

_RANK = re.compile(r"^\[rank (\d+)\] ")
"""The prefix that the launcher adds to the lines of one of several ranks."""
_TIMES = (
    # Time formats of Rust and the Docker engine, of Python (local time), and of NATS (local time).
    re.compile(r"^(?P<utc>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z +"),
    re.compile(r"^(?P<local>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) +"),
    re.compile(r"^\[\d+\] (?P<nats>\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) +"),
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PREFIXES = ("emb-", "persia-")
"""Prefixes in which names of services differ from names of a run's processes: ``emb_server``, ``server``."""
_AHEAD_S = 60.0
"""The maximum number of seconds by which a time may be ahead of this host's clock and still order later lines."""
_OWN_KEYS = {"ts", "time", "level", "event", "message", "run_id", "service", "replica", "rank", "node", "target"}
"""JSON keys that the text of a line shows in another position, or omits."""


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Attributes:
        time: Seconds since 1970; a line without a time has that of the previous line in its log.
        source: The process, such as ``server-0``.
        rank: The rank that wrote the line, or that the line is about; None if there is none.
        text: The line without its time and the prefix of its rank.
        fields: The keys of a JSON line; empty otherwise.
    """

    time: float
    source: str
    rank: int | None
    text: str
    fields: dict[str, Any]

    @property
    def level(self) -> str:
        """The log level in lower case; empty if it is unknown."""
        if self.fields:
            return str(self.fields.get("level", ""))
        found = re.match(r"(?i)(error|warn|warning|critical)\b", self.text)
        return "" if found is None else {"warning": "warn", "critical": "error"}.get(found[1].lower(), found[1].lower())

    @property
    def shown(self) -> str:
        """The line as text. For JSON, this is level, event and the fields of the event."""
        if not self.fields:
            return self.text
        fields = self.fields
        event = str(fields.get("event", fields.get("message", ""))).replace("\n", " | ")
        more = [f"{name}={_plain(value)}" for name, value in fields.items() if name not in _OWN_KEYS]
        return " ".join([f"{self.level:<5}", event, *more])

    def as_text(self) -> str:
        """Return time, process and text in one line."""
        return f"{stamp(self.time)} {self.source:<14} | {self.shown}"

    def as_json(self) -> str:
        """Return the line as JSON: its own keys, or the keys of a text line."""
        own = self.fields or {"event": self.text}
        known = {"ts": stamp(self.time), "source": self.source} | ({} if self.rank is None else {"rank": self.rank})
        return json.dumps({**known, **own}, ensure_ascii=False)


def _plain(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value).replace("\n", " | ")


def stamp(seconds: float) -> str:
    """Return a time in UTC, with milliseconds."""
    text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


@dataclass(frozen=True)
class Source:
    """The log of one process.

    Attributes:
        name: The process, such as ``server-0``.
        lines: The lines of the log, in order.
        rank: The rank of lines without a rank, if the process is the only rank of its trainer.
        since: The time assigned to lines before the first line with a time.
    """

    name: str
    lines: Iterable[str]
    rank: int | None = None
    since: float = 0.0


def parsed(source: Source) -> Iterator[Line]:
    """Yield the lines of a log. A line without a time, as in a traceback, gets the time of the previous line."""
    now, known = source.since, source.since > 0
    waiting: list[tuple[int | None, str, dict[str, Any]]] = []
    for raw in source.lines:
        rank, text, at, fields = _parts(raw, source.rank)
        if at is None and not known:
            waiting.append((rank, text, fields))
            continue
        now, known = now if at is None else at, True
        yield from (Line(now, source.name, *each) for each in waiting)
        waiting.clear()
        yield Line(now, source.name, rank, text, fields)
    yield from (Line(now, source.name, *each) for each in waiting)


def _parts(raw: str, rank: int | None) -> tuple[int | None, str, float | None, dict[str, Any]]:
    """Return the rank, text, time and fields of a line."""
    at, text = time_of(raw)  # of the Docker engine, or else of the line itself
    if (found := _RANK.match(text)) is not None:
        rank, text = int(found[1]), text[found.end() :]
    fields = _fields(text)
    if fields:
        own, _ = time_of(f"{fields.get('ts', fields.get('time', ''))} ")
        of_line = fields.get("rank", rank)
        return (of_line if isinstance(of_line, int) else rank), text, at or own, fields
    own, text = time_of(text)
    return rank, text, at or own, {}


def _fields(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and ("event" in found or "message" in found) else {}


def time_of(text: str) -> tuple[float | None, str]:
    """Return the time at the start of a line, and the rest of the line; None if the time is missing or invalid."""
    for pattern in _TIMES:
        if (found := pattern.match(text)) is not None:
            try:
                return _seconds(found.groupdict()), text[found.end() :]
            except (ValueError, OverflowError, OSError):  # invalid, such as month 13
                return None, text
    return None, text


def _seconds(given: dict[str, str]) -> float:
    if "utc" in given:
        whole, _, part = given["utc"].partition(".")
        return datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp() + float(f"0.{part or 0}")
    form = "%Y-%m-%d %H:%M:%S,%f" if "local" in given else "%Y/%m/%d %H:%M:%S.%f"
    return datetime.strptime(given.get("local") or given["nats"], form).timestamp()


def merged(sources: Iterable[Source]) -> Iterator[Line]:
    """Yield the lines of several logs in chronological order. Lines of one log keep their order."""
    for _, line in heapq.merge(*(_keyed(parsed(each)) for each in sources), key=lambda keyed: keyed[0]):
        yield line


def _keyed(lines: Iterator[Line]) -> Iterator[tuple[float, Line]]:
    """Yield lines with times that never decrease. A time in the future does not delay later lines."""
    latest, key = time.time() + _AHEAD_S, 0.0
    for line in lines:
        key = max(key, line.time) if line.time <= latest else key
        yield key, line


def is_of(source: str, service: str) -> bool:
    """Whether a process belongs to a service: ``emb_server-1`` belongs to ``emb_server`` and to ``server``."""
    name, wanted = source.replace("_", "-"), service.replace("_", "-")
    return any(each.startswith(wanted) for each in (name, *(name.removeprefix(prefix) for prefix in _PREFIXES)))


@dataclass(frozen=True)
class Wanted:
    """A filter for lines. None for an attribute means no restriction.

    Attributes:
        rank: The rank, or ``all`` for lines of any rank.
        service: The beginning of the names of processes, such as ``server``, see :func:`is_of`.
        grep: A regular expression that matches a part of the line, as it is shown or as it was written.
        token: A push token, with or without the hash of its job: ``GENERATION/RANK/STEP``.
        since: The time of the first line, in seconds since 1970.
    """

    rank: int | Literal["all"] | None = None
    service: str | None = None
    grep: re.Pattern[str] | None = None
    token: str | None = None
    since: float | None = None

    def filter(self) -> Callable[[Line], bool]:
        """Return a function that returns whether a line passes the filter.

        Raises:
            UsageError: :attr:`token` is not a push token.
        """
        token = None if self.token is None else _token(self.token)

        def is_wanted(line: Line) -> bool:
            if self.since is not None and line.time < self.since:
                return False
            if self.service is not None and not is_of(line.source, self.service):
                return False
            if self.rank is not None and (line.rank is None if self.rank == "all" else line.rank != self.rank):
                return False
            patterns = [each for each in (self.grep, token) if each is not None]
            return all(each.search(line.text) or (line.fields and each.search(line.shown)) for each in patterns)

        return is_wanted


def _token(text: str) -> re.Pattern[str]:
    """Return the pattern that matches a push token in a line.

    Raises:
        UsageError: The text is not a push token.
    """
    if re.fullmatch(r"([0-9a-f]{16}/)?\d+/\d+/\d+", text) is None:
        raise UsageError(
            f"--token {text}: expected GENERATION/RANK/STEP, such as 1/0/120",
            hint="with PERSIA_LOG=persia.server=debug, servers log the tokens of batches, as `token=`",
        )
    job = "" if text.count("/") == 3 else "[0-9a-f]{16}/"
    return re.compile(rf"(?<![\w/]){job}{text}(?![\w/])")


def since(text: str) -> float:
    """Return the time in an option: ``10m`` before now (s, m, h, d), or a time such as 2026-11-25T16:00:00Z.

    A time without a zone is local.

    Raises:
        UsageError: The text is neither.
    """
    try:
        if (found := re.fullmatch(r"(\d+)([smhd])", text)) is not None:
            at = time.time() - int(found[1]) * _UNITS[found[2]]
            stamp(at)  # the result may be before the year 1
            return at
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"--since {text}: expected a duration such as 30s, 10m, 2h or 1d, or a time such as 2026-11-25T16:00:00Z"
        ) from error
