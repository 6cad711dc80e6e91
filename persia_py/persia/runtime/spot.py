"""Polls for the termination notice of a spot (preemptible) instance, and saves the run before the instance ends.

Cloud providers announce the end of such an instance at an address that only the instance can reach:

* Amazon, ``http://169.254.169.254/latest/meta-data/spot/instance-action``: 404, then ``{"action": ..., "time": ...}``
* Google, ``http://metadata.google.internal/computeMetadata/v1/instance/preempted``: ``FALSE``, then ``TRUE``
* Azure, ``http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01``: ``{"Events": [...]}``

Responses in these formats are accepted. Any other response is an error, such as the error page of a proxy, or 404 at an
address other than Amazon's.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from persia.runtime import preemption
from persia.runtime.exit_codes import ExitCode
from persia.runtime.logging import get_logger
from persia.runtime.polled import AnswerError, Polled, request

_logger = get_logger("spot")

_ENDS = {"Preempt", "Terminate"}
"""The types of Azure events that end the instance."""
_AMAZON = "/spot/instance-action"
"""The end of the path of Amazon's address, where 404 means that nothing is announced."""
_TOKEN_S = 300
"""Seconds for which a token of Amazon's metadata service is valid. A token is fetched for each poll."""


@dataclass(frozen=True)
class Notice:
    """The announced end of this instance.

    Attributes:
        at: The time of the end; None if the provider does not report it.
        action: The announced action, in the provider's term.
    """

    at: datetime | None
    action: str

    @property
    def left_s(self) -> float | None:
        """The seconds until the end; None if unknown."""
        return None if self.at is None else (self.at - datetime.now(timezone.utc)).total_seconds()

    def __str__(self) -> str:
        """Return the notice as text for a log line."""
        when = "soon" if self.at is None else f"at {self.at:%Y-%m-%d %H:%M:%S} UTC, in {self.left_s:.0f} s"
        return f"spot notice ({self.action}): this instance ends {when}"


def parse(status: int, body: str, *, url: str, resource: str | None = None) -> Notice | None:
    """Return the notice in a response; None if nothing is announced.

    Args:
        status: The HTTP status.
        body: The text of the response.
        url: The address; at Amazon's, 404 means that there is no notice.
        resource: The name of this virtual machine on Azure, where events may concern other machines; None accepts all
            events.

    Raises:
        AnswerError: The response has none of the formats of this module.
    """
    text = body.strip()
    absent = status == http.client.NOT_FOUND and urlsplit(url).path.endswith(_AMAZON)
    if absent or (status == http.client.OK and text.upper() == "FALSE"):
        return None
    if status != http.client.OK:
        raise AnswerError(f"expected status {http.client.OK:d}, found {status}")
    if text.upper() == "TRUE":
        return Notice(None, "preempted")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        if isinstance(content.get("Events"), list):
            return _of_azure(content["Events"], resource)
        if "time" in content:
            return Notice(_time(content["time"]), str(content.get("action", "terminate")))
    raise AnswerError(f"the response is not a notice: {text[:80]!r}")


def _of_azure(events: list[Any], resource: str | None) -> Notice | None:
    ends = [each for each in events if isinstance(each, dict) and str(each.get("EventType")) in _ENDS]
    ends = [each for each in ends if resource is None or _is_of(each, resource)]
    if not ends:
        return None
    times = [_time(each.get("NotBefore")) for each in ends]
    return Notice(min((each for each in times if each is not None), default=None), str(ends[0]["EventType"]))


def _is_of(event: dict[str, Any], resource: str) -> bool:
    """Whether an event lists this virtual machine, or none. Names on Azure are case-insensitive."""
    listed = event.get("Resources")
    return not isinstance(listed, list) or resource.casefold() in {str(each).casefold() for each in listed}


def _time(text: object) -> datetime | None:
    """Return a time in UTC; None if it cannot be parsed, because the instance ends in any case."""
    for parsed in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            found = parsed(str(text).replace("Z", "+00:00"))
            return (found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
        except (TypeError, ValueError, OverflowError):
            continue
    return None


class SpotWatch(Polled[Notice | None]):
    """Polls for the termination notice of this instance inside its ``with`` block.

    The run is saved when a notice arrives.

    ::

        with SpotWatch("http://169.254.169.254/latest/meta-data/spot/instance-action"), TrainCtx(...) as ctx:
            ...

    The notice has the effect of SIGTERM to this process: every rank finishes the current step, the run is saved, and
    all ranks exit with 75. A context with checkpoints is therefore required. One process on each host polls. If the end
    is announced before the block, entering it raises SystemExit with 75. If the address does not respond, entering it
    raises UnreachableError: this host is not a spot instance, or the address is wrong.

    Args:
        url: The address.
        every_s: Seconds between two polls.
        headers: Headers of each request, such as ``{"Metadata-Flavor": "Google"}``.
        token_url: The address from which a token for each request is fetched with PUT, which Amazon's metadata service
            may require.
        resource: On Azure, the name of this virtual machine; events that list only others are ignored.
        stop: Called with the text of the notice after each poll, until it returns true. The default asks this process
            to stop.
    """

    def __init__(
        self,
        url: str,
        *,
        every_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        token_url: str | None = None,
        resource: str | None = None,
        stop: Callable[[str], bool] = preemption.stop_this_process,
    ) -> None:
        super().__init__(
            "spot.url",
            url,
            self.poll,
            self._arrived,
            every_s=every_s,
            lost="a notice would be missed",
            hint="correct spot.url, spot.headers or spot.token_url; on a host that is not a spot instance, train "
            "without the block: --set spot=null",
        )
        self._url, self._headers, self._token_url = url, dict(headers or {}), token_url
        self._resource, self._stop = resource, stop

    def poll(self) -> Notice | None:
        """Send one request, and return the notice, if there is one.

        Raises:
            OSError: There is no response.
            http.client.HTTPException: The response is not HTTP.
            AnswerError: The response has an unknown format.
            ValueError: The address or a header cannot be sent.
        """
        headers = dict(self._headers)
        if self._token_url is not None:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            status, token = request(self._token_url, wanted, "PUT")
            if status != http.client.OK:
                raise AnswerError(f"spot.token_url: expected status {http.client.OK:d}, found {status}")
            headers["X-aws-ec2-metadata-token"] = token.strip()
        return parse(*request(self._url, headers), url=self._url, resource=self._resource)

    def _arrived(self, notice: Notice | None) -> bool:
        if notice is None:
            return False
        if self._thread is None:  # the notice arrived before the block
            _logger.warning("%s: training does not start", notice)
            raise SystemExit(ExitCode.AGAIN)
        if self._stop(str(notice)):
            _logger.warning("%s: saving the run, then ending it", notice)
            return True
        return False
