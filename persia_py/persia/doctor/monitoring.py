"""Checks of the targets that Prometheus scrapes in a job, and of the groups of a push gateway."""

import http.client
import json
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, delete_from_gateway, push_to_gateway

from persia.discovery.nats import status_command
from persia.doctor.check import Check
from persia.runtime.exit_codes import ExitCode

_ANSWER_S = 10.0
"""Seconds within which Prometheus and the gateway must respond."""
_REFUSED = "connection refused"
"""The text in the error of a target whose host responds, but on whose port nothing listens."""
_OTHER = "unexpected response, from another program or another version:"
_TEST = "persia_push_test"
_TEST_VALUE = 42.0
_STALE_S = 120.0
"""Seconds after which a running target should have been scraped again."""

EXPECTED = {
    "persia-server": (
        "persia_process_info",
        "persia_recovered_ratio",
        "persia_generation",
        "persia_rows",
        "persia_memory_bytes",
    ),
    "persia-middleware": ("persia_process_info",),
    "persia-trainer": (
        "persia_trainer_step",
        "persia_trainer_steps_total",
        "persia_trainer_samples_total",
        "persia_trainer_step_duration_seconds_count",
        "persia_trainer_stage_seconds_total",
    ),
    "persia-data": ("persia_data_batches_total", "persia_data_send_duration_seconds_count"),
    "persia-serving": ("persia_serving_bundle", "persia_serving_waiting_requests", "persia_serving_rows_total"),
}
"""Series that each process has from its start, by the label ``service`` or ``job`` of its target."""

_NEEDED = ("persia-server", "persia-middleware", "persia-trainer")

_Unanswered = (OSError, ValueError, KeyError, TypeError, http.client.HTTPException)
"""The exceptions that a missing or different server causes."""


def checks(prometheus: str | None, gateway: str | None) -> Iterator[Check]:
    """Yield the checks.

    Args:
        prometheus: The URL of a Prometheus server; None skips its checks.
        gateway: The URL of a push gateway; None skips its check.
    """
    for name, given, of in (("prometheus", prometheus, _of_prometheus), ("gateway", gateway, _of_gateway)):
        if given is None:
            continue
        if "@" in given:
            why = "a user and a password in the address are not supported"
            remedy = f"--{name} http://HOST:PORT, at an address that requires no password"
            yield Check(name, "fail", "an address with an @", why, remedy)
        else:
            yield from of(_url(given))


def _of_prometheus(url: str) -> Iterator[Check]:
    try:
        targets = _get(f"{url}/api/v1/targets?state=active")["data"]["activeTargets"]
        series = _get(f"{url}/api/v1/query", query='group by (__name__, job, instance) ({__name__=~"persia_.+"})')
        found: dict[tuple[str, str], set[str]] = {}
        for each in series["data"]["result"]:
            labels = each["metric"]
            found.setdefault((labels["job"], labels["instance"]), set()).add(labels["__name__"])
        kinds = set()
        for target in sorted(targets, key=lambda each: (_kind(each), each["labels"]["instance"])):
            labels, kind = target["labels"], _kind(target)
            kinds.add(kind)
            yield from _target(kind, target, found.get((labels["job"], labels["instance"]), set()))
        rules = _get(f"{url}/api/v1/rules", type="alert")["data"]["groups"]
    except _Unanswered as error:
        why = "its targets cannot be queried"
        remedy = "correct the address; for that of the stack: docker compose up --detach prometheus"
        yield Check("prometheus", "fail", f"{url}: {_text(error)}", why, remedy, ExitCode.UNREACHABLE)
        return
    for kind in _NEEDED:
        if kind not in kinds:
            why = "no such process runs, or Prometheus does not find it"
            yield Check(kind, "warn", "no target", why, f"{status_command()}; {url}/service-discovery")
    yield _rules([rule["name"] for group in rules for rule in group["rules"]])


def _rules(names: list[str]) -> Check:
    """Return the check that the alert rules of Persia are loaded."""
    if own := [name for name in names if name.startswith("Persia")]:
        return Check("alert rules", "ok", f"{len(own)} loaded")
    why = "Prometheus ignores missing files of rule_files; relative paths are relative to its configuration file"
    remedy = "rule_files: [/PATH/OF/CLONE/services/monitor/alerts.yml], then restart Prometheus"
    return Check("alert rules", "warn", "no rule of Persia is loaded", why, remedy)


def _kind(target: dict[str, Any]) -> str:
    return str(target["labels"].get("service", target["labels"]["job"]))


def _target(kind: str, target: dict[str, Any], has: set[str]) -> Iterator[Check]:
    """Yield the check of a target and of the series that it should have."""
    name = f"{kind} {target['labels']['instance']}"
    if target["health"] == "unknown":
        yield Check(name, "warn", "not scraped yet", f"at {target['scrapeUrl']}", "run this again in a minute")
        return
    if target["health"] != "up":
        if kind == "persia-data" and _REFUSED in target["lastError"]:
            why = "the replica has sent all data, or has not started; the target remains while its container exists"
            remedy = f"if data is still expected: {status_command()}"
            yield Check(name, "warn", f"down: {target['lastError']}", why, remedy)
            return
        why = f"Prometheus cannot read {target['scrapeUrl']}"
        remedy = f"{status_command()}; then curl that address from the container of Prometheus"
        yield Check(name, "fail", f"down: {target['lastError']}", why, remedy, ExitCode.UNREACHABLE)
        return
    age = time.time() - datetime.fromisoformat(_python_time(target["lastScrape"])).timestamp()
    absent = [series for series in EXPECTED.get(kind, ()) if series not in has]
    if absent:
        why = "the target answers, but it is another program or version, or it has not begun to work"
        what, remedy = f"up; missing series: {', '.join(absent)}", f"curl {target['scrapeUrl']}"
        yield Check(name, "fail", what, why, remedy, ExitCode.UNREACHABLE)
    elif age > _STALE_S:
        yield Check(
            name, "warn", f"up, last scraped {age:.0f} s ago", "Prometheus lags", "check the load of Prometheus"
        )
    else:
        yield Check(name, "ok", f"up, scraped {max(0.0, age):.0f} s ago")


def _of_gateway(url: str) -> Iterator[Check]:
    try:
        groups = _groups(url)
        for group in sorted(groups, key=lambda each: sorted(each["labels"].items())):
            labels = group["labels"]
            age = time.time() - float(group["push_time_seconds"]["metrics"][0]["value"])
            yield Check(f"pushed {labels['job']} {labels.get('instance', '')}".rstrip(), "ok", f"{age:.0f} s ago")
        yield _push_test(url)
    except _Unanswered as error:
        why = "short runs cannot push their metrics to it"
        remedy = "correct the address; for that of the stack: docker compose up --detach pushgateway"
        yield Check("gateway", "fail", f"{url}: {_text(error)}", why, remedy, ExitCode.UNREACHABLE)


def _push_test(url: str) -> Check:
    """Push a gauge, read it back and delete it."""
    registry = CollectorRegistry()
    Gauge(_TEST, "A test of the push gateway", registry=registry).set(_TEST_VALUE)
    key = {"instance": uuid.uuid4().hex}
    push_to_gateway(url, job=_TEST, registry=registry, grouping_key=key, timeout=_ANSWER_S)
    try:
        mine = [each for each in _groups(url) if each["labels"].get("instance") == key["instance"]]
        read = [float(each[_TEST]["metrics"][0]["value"]) for each in mine]
    finally:
        delete_from_gateway(url, job=_TEST, grouping_key=key, timeout=_ANSWER_S)
    if read == [_TEST_VALUE]:
        return Check("push test", "ok", f"{_TEST_VALUE:g} was pushed and read back")
    why = "the gateway accepted the push, but does not return it: are there several gateways behind one address?"
    return Check("push test", "fail", f"pushed {_TEST_VALUE:g}, read {read or 'nothing'}", why, f"open {url}")


def _groups(url: str) -> list[dict[str, Any]]:
    return list(_get(f"{url}/api/v1/metrics")["data"])


def _get(url: str, **parameters: str) -> dict[str, Any]:
    """Return the response to a GET request, which is JSON with the status ``success``."""
    whole = f"{url}?{urllib.parse.urlencode(parameters)}" if parameters else url
    with urllib.request.urlopen(whole, timeout=_ANSWER_S) as answer:  # noqa: S310 - _url allows http and https only
        body = answer.read()
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("status") != "success":
        raise ValueError(f"{_OTHER} {body[:40]!r}")
    return content


def _url(given: str) -> str:
    """Return a URL with its scheme, and without a trailing slash."""
    return (given if given.startswith(("http://", "https://")) else f"http://{given}").rstrip("/")


def _python_time(text: str) -> str:
    """Convert Go's time format for Python 3.10: at most 6 digits of a second, and an offset."""
    whole, dot, rest = text.replace("Z", "+00:00").partition(".")
    if not dot:
        return whole
    digits = len(rest) - len(rest.lstrip("0123456789"))
    return f"{whole}.{rest[:digits][:6]:0<6}{rest[digits:]}"


def _text(error: BaseException) -> str:
    if isinstance(error, KeyError | TypeError):
        return f"{_OTHER} {type(error).__name__}: {error}"
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error) or type(error).__name__
