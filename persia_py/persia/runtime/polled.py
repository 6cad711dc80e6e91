"""Polls an address in a thread while a run trains, for a notice or a price."""

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Generic, TypeVar

from typing_extensions import Self

from persia.runtime.errors import ConfigError, UnreachableError
from persia.runtime.files import shown_url
from persia.runtime.logging import get_logger

_logger = get_logger("poll")

TIMEOUT_S = 2.0
"""The time limit of a request, in seconds."""
RETRY_S = (0.5, 1.0, 2.0)
"""Seconds after which the first poll is retried, if it fails."""
_LONGEST = 65536
"""The maximum number of bytes of a response that are read."""

Answer = TypeVar("Answer")


class AnswerError(ValueError):
    """The response has an unknown format."""


class Polled(Generic[Answer]):
    """Polls inside its ``with`` block: once on entry, then in a thread.

    If a later poll fails, training continues. The failure is logged once, and a line is logged when the address
    responds again.

    Args:
        key: The key that sets the address, such as ``spot.url``, for messages.
        url: The address, for messages, which omit user, password and query.
        ask: Sends one request; raises an OSError, an HTTPException or an AnswerError.
        take: Called with each response, the first time before the block; a true result ends the polling.
        every_s: Seconds between two polls.
        lost: The consequence of a missing response, for the log.
        hint: The hint if there is no response at the start.
    """

    def __init__(
        self,
        key: str,
        url: str,
        ask: Callable[[], Answer],
        take: Callable[[Answer], bool],
        *,
        every_s: float,
        lost: str,
        hint: str,
    ) -> None:
        self._key, self._shown, self._ask, self._take = key, shown_url(url), ask, take
        self._every_s, self._lost, self._hint = every_s, lost, hint
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Poll once, then start polling. If the first poll gets no valid response, it is retried 3 times.

        Raises:
            UnreachableError: There is no response, or it has an unknown format.
            ConfigError: The address or a header has invalid characters.
        """
        answer = self._first()
        if not self._take(answer):
            self._thread = threading.Thread(target=self._watch, name=f"persia-{self._key}", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _first(self) -> Answer:
        for wait in (*RETRY_S, None):
            try:
                return self._ask()
            except _FAILURES as error:
                failed: ConfigError | UnreachableError
                failed = (ConfigError if _is_malformed(error) else UnreachableError)(
                    self._failure(error), hint=self._hint
                )
                if wait is None or isinstance(failed, ConfigError):
                    raise failed from error
                _logger.warning("%s; retrying in %g s", failed, wait)
            time.sleep(wait)
        raise AssertionError

    def _failure(self, error: Exception) -> str:
        return f"{self._key}: no valid response from {self._shown}: {_reason(error)}"

    def _watch(self) -> None:
        fails = False
        while not self._ended.wait(self._every_s):
            try:
                answer = self._ask()
            except _FAILURES as error:
                if not fails:
                    _logger.warning("%s; training continues, but %s", self._failure(error), self._lost)
                fails = True
                continue
            if fails:
                _logger.info("%s: %s responds again", self._key, self._shown)
            fails = False
            if self._take(answer):
                return


def request(url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
    """Return the status and the text of a response.

    No proxy is used, because metadata services are on the local link or on the host.

    Raises:
        OSError: There is no response.
        http.client.HTTPException: The response is not HTTP.
        ValueError: The address or a header has characters that cannot be sent.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(url, headers=dict(headers or {}), method=method)  # noqa: S310 - http(s) is checked
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(_LONGEST).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


_FAILURES = (OSError, http.client.HTTPException, ValueError)
"""The exceptions that a poll raises; AnswerError is a ValueError."""


def _is_malformed(error: Exception) -> bool:
    """Whether the address or a header is malformed."""
    return isinstance(error, http.client.InvalidURL) or (
        isinstance(error, ValueError) and not isinstance(error, AnswerError)
    )


def _reason(error: Exception) -> str:
    """Return why there is no response, without the wrapper of urllib, and without a header or a query."""
    if _is_malformed(error):
        return f"the address or a header cannot be sent ({type(error).__name__})"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
