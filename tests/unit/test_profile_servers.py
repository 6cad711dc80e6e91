"""The server that the advice of a profile names."""

from typing import Any

import pytest

from persia.discovery import nats
from persia.errors import UnreachableError
from persia.profile.servers import Servers, blame, parse

METRICS = """# HELP persia_request_duration_seconds time
# TYPE persia_request_duration_seconds histogram
persia_request_duration_seconds_bucket{method="lookup",le="0.5"} 4
persia_request_duration_seconds_bucket{method="lookup",le="+Inf"} 4
persia_request_duration_seconds_sum{method="lookup"} 0.25
persia_request_duration_seconds_count{method="lookup"} 4
persia_request_duration_seconds_sum{method="push"} 0.5
persia_request_duration_seconds_count{method="push"} 3
persia_request_duration_seconds_sum{method="begin"} 7
persia_request_duration_seconds_count{method="begin"} 1
# TYPE persia_lookup_rows_total counter
persia_lookup_rows_total{outcome="hits"} 100
persia_lookup_rows_total{outcome="initial"} 11
"""


def did(**other: float) -> dict[str, float]:
    return {"lookup_s": 0.1, "lookups": 20, "push_s": 0.1, "pushes": 20, "rows": 5000, "log_waits": 0, **other}


def test_what_a_server_did_is_the_difference_of_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = parse(METRICS)
    assert first == {"lookup_s": 0.25, "lookups": 4, "push_s": 0.5, "pushes": 3, "rows": 111, "log_waits": 0}
    later = METRICS.replace("} 100", "} 150") + "persia_log_waits_total 3\n"
    found = Servers({0: "a:1", 1: "b:2"})
    texts = {"a:1": METRICS, "b:2": METRICS}
    monkeypatch.setattr(found, "_read_one", lambda server: (server[0], parse(texts[server[1]])))
    found.begin()
    assert found._reading is not None
    found._reading.join()
    texts["b:2"] = later
    zero = dict.fromkeys(first, 0.0)
    assert found.end() == {"0": zero, "1": {**zero, "rows": 50, "log_waits": 3}}


def test_a_server_that_has_restarted_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The counters of the restarted server begin at 0. Some may already be above their first reading."""
    found = Servers({0: "a:1", 1: "b:2"})
    texts = {"a:1": METRICS, "b:2": METRICS}
    monkeypatch.setattr(found, "_read_one", lambda server: (server[0], parse(texts[server[1]])))
    found.begin()
    assert found._reading is not None
    found._reading.join()
    texts["a:1"] = METRICS.replace("} 100", "} 150")
    texts["b:2"] = METRICS.replace("} 100", "} 900").replace('sum{method="push"} 0.5', 'sum{method="push"} 0.25')
    left = found.end()
    assert [*left] == ["0"] and left["0"]["rows"] == 50
    assert "profile: server 1 is omitted: it has restarted" in capfd.readouterr().err


def test_a_server_that_cannot_be_read_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    found = Servers({3: "127.0.0.1:9"})
    found.begin()
    assert found.end() == {}
    assert "profile: server 3 is omitted: cannot read http://127.0.0.1:9/metrics: " in capfd.readouterr().err


def test_without_nats_servers_are_left_out(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:9")

    def services(url: str, kind: str | None = None, *, job: str | None = None) -> list[nats.Service]:
        raise UnreachableError(f"NATS at {url} is not reachable")

    monkeypatch.setattr(nats, "services", services)
    assert Servers.find().addresses == {}
    assert "profile: the servers are omitted: " in capfd.readouterr().err


def test_a_server_without_metrics_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:9")
    known = [
        nats.Service("persia-server", "a", {"index": "0", "metrics": "a:1"}),
        nats.Service("persia-server", "b", {"index": "1"}),
    ]
    monkeypatch.setattr(nats, "services", lambda *_, **__: known)
    assert Servers.find().addresses == {0: "a:1"}
    assert "profile: servers that serve no metrics are omitted: 1; next: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({}, None),
        ({"rows": 7000}, None),
        ({"rows": 16000}, "server 1 is asked for 76% of the rows, 1.5 times the mean"),
        ({"log_waits": 4}, "server 1 waited 4 times for the disk of its log"),
        ({"log_waits": 4, "rows": 90000}, "disk of its log"),
        ({"lookup_s": 1.0}, "server 1 takes 27.5 ms for a request, the fastest one 5.0 ms"),
        ({"lookup_s": 0.3}, None),
    ],
)
def test_the_server_that_differs_is_named(others: dict[str, float], says: str | None) -> None:
    found = blame({"0": did(), "1": did(**others)})
    assert found is None if says is None else found is not None and says in found


def test_short_requests_and_one_server_say_nothing() -> None:
    short: dict[str, Any] = {"lookup_s": 0.002, "push_s": 0.002}
    assert blame({"0": did(lookup_s=0.0001, push_s=0.0001), "1": did(**short)}) is None
    assert blame({"0": did(rows=10**6)}) is None
    assert blame({}) is None
    assert blame({"0": did(lookups=0, pushes=0), "1": did()}) is None
