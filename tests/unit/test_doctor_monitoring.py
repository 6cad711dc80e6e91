"""``persia doctor --prometheus --gateway`` with responses like those of the two programs."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import Verb
from prometheus_client.parser import text_string_to_metric_families

from persia.doctor import job_status, monitoring
from persia.doctor.check import Check

NOW = "2026-01-02T03:04:05.123456789Z"


class Server:
    """Responds to GET with JSON by path, and stores pushed data."""

    def __init__(self, answers: dict[str, Callable[[], Any]], *, loses: bool = False) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        groups = self.groups

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                found = [*groups.values()] if path == "/api/v1/metrics" and path not in answers else answers[path]()
                body = found if isinstance(found, bytes) else json.dumps({"status": "success", "data": found}).encode()
                self.reply(body)

            def do_PUT(self) -> None:
                text = self.rfile.read(int(self.headers["content-length"])).decode()
                _, _, _, job, _, instance = self.path.split("/")
                group: dict[str, Any] = {"labels": {"job": job, "instance": instance}}
                group["push_time_seconds"] = {"metrics": [{"value": str(time.time())}]}
                for family in text_string_to_metric_families(text):
                    group[family.name] = {"metrics": [{"value": str(each.value)} for each in family.samples]}
                if not loses:
                    groups[self.path] = group
                self.reply(b"")

            def do_DELETE(self) -> None:
                groups.pop(self.path, None)
                self.reply(b"")

            def reply(self, body: bytes) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Server] = []

    def start(answers: dict[str, Callable[[], Any]], **options: bool) -> Server:
        made.append(Server(answers, **options))
        return made[-1]

    yield start
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def target(job: str, instance: str, health: str = "up", error: str = "", age_s: float = 3.0) -> dict[str, Any]:
    scraped = datetime.now(timezone.utc) - timedelta(seconds=age_s)
    return {
        "labels": {"job": job, "instance": instance},
        "scrapeUrl": f"http://{instance}/metrics",
        "health": health,
        "lastError": error,
        "lastScrape": scraped.strftime("%Y-%m-%dT%H:%M:%S.%f") + "789Z",
    }


def prometheus(
    serve: Serve, targets: list[dict[str, Any]], has: dict[tuple[str, str], tuple[str, ...]], *rules: str
) -> str:
    result = [
        {"metric": {"__name__": name, "job": job, "instance": instance}}
        for (job, instance), names in has.items()
        for name in names
    ]
    answers: dict[str, Callable[[], Any]] = {
        "/api/v1/targets": lambda: {"activeTargets": targets},
        "/api/v1/query": lambda: {"result": result},
        "/api/v1/rules": lambda: {"groups": [{"rules": [{"name": name} for name in rules]}]},
    }
    return serve(answers).url


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.row("S4-41")
def test_targets_up_and_down_and_series_that_are_absent(serve: Serve, verb: Verb) -> None:
    server, trainer = monitoring.EXPECTED["persia-server"], monitoring.EXPECTED["persia-trainer"]
    refused = "dial tcp 10.0.0.9:9464: connect: connection refused"
    url = prometheus(
        serve,
        [
            target("persia-server", "10.0.0.1:9464"),
            target("persia-server", "10.0.0.9:9464", "down", refused),
            target("persia-trainer", "10.0.0.2:9464"),
            target("persia-data", "10.0.0.4:9464", "unknown"),
            target("persia-data", "10.0.0.5:9464", "down", refused),
            target("persia-data", "10.0.0.6:9464", "down", "context deadline exceeded"),
            target("other", "10.0.0.3:80", age_s=3600),
        ],
        {
            ("persia-server", "10.0.0.1:9464"): server,
            ("persia-trainer", "10.0.0.2:9464"): tuple(name for name in trainer if "stage" not in name),
        },
    )
    found = by_name(monitoring.checks(url, None))
    assert found["persia-server 10.0.0.1:9464"].status == "ok"
    assert found["persia-server 10.0.0.1:9464"].found in {f"up, scraped {seconds} s ago" for seconds in (3, 4, 5)}
    down = found["persia-server 10.0.0.9:9464"]
    assert (down.status, down.found) == ("fail", f"down: {refused}")
    lacks = found["persia-trainer 10.0.0.2:9464"]
    assert (lacks.status, lacks.found) == ("fail", "up; missing series: persia_trainer_stage_seconds_total")
    assert found["persia-data 10.0.0.4:9464"].status == found["other 10.0.0.3:80"].status == "warn"
    ended, hangs = found["persia-data 10.0.0.5:9464"], found["persia-data 10.0.0.6:9464"]
    assert (ended.status, ended.found, hangs.status) == ("warn", f"down: {refused}", "fail")
    assert (found["persia-middleware"].status, found["persia-middleware"].found) == ("warn", "no target")
    out, _ = verb("doctor", "--prometheus", url, code=3)
    assert "down: dial tcp" in out and "next:" in out
    out, _ = verb("doctor", "--prometheus", url, "--json", code=3)
    assert {each["name"] for each in json.loads(out)} >= {"persia-server 10.0.0.1:9464", "persia-middleware"}


def test_a_prometheus_without_the_alert_rules_is_a_warning(serve: Serve) -> None:
    """Prometheus ignores a path of ``rule_files`` at which there is no file."""
    found = by_name(monitoring.checks(prometheus(serve, [], {}, "DiskFull"), None))["alert rules"]
    assert (found.status, found.found) == ("warn", "no rule of Persia is loaded") and "rule_files" in found.next
    found = by_name(monitoring.checks(prometheus(serve, [], {}, "PersiaSlowRank", "DiskFull"), None))["alert rules"]
    assert (found.status, found.found) == ("ok", "1 loaded")


@pytest.mark.row("S4-42", "S4-44")
def test_the_gateway_lists_its_groups_and_takes_42(serve: Serve, verb: Verb) -> None:
    gateway = serve({})
    pushed = {"labels": {"job": "clicks", "instance": "trainer-0"}}
    gateway.groups["old"] = {**pushed, "push_time_seconds": {"metrics": [{"value": str(time.time() - 100)}]}}
    found = by_name(monitoring.checks(None, gateway.url.removeprefix("http://")))
    assert found["pushed clicks trainer-0"].found in ("100 s ago", "101 s ago")
    assert found["push test"].found == "42 was pushed and read back"
    assert [*gateway.groups] == ["old"], "the test is deleted"
    assert "42 was pushed" in verb("doctor", "--gateway", gateway.url)[0]
    lost = by_name(monitoring.checks(None, serve({}, loses=True).url))["push test"]
    assert (lost.status, lost.found) == ("fail", "pushed 42, read nothing")


@pytest.mark.row("S4-41")
def test_who_does_not_answer_and_who_is_another_program(serve: Serve, verb: Verb) -> None:
    out, _ = verb("doctor", "--prometheus", "http://127.0.0.1:1", "--gateway", "127.0.0.1:1", code=3)
    assert out.count("Connection refused") == 2 and "docker compose up --detach prometheus" in out
    other: dict[str, Callable[[], Any]] = {"/api/v1/targets": lambda: b"<html>", "/api/v1/metrics": lambda: b"[]"}
    url = serve(other).url
    found = by_name(monitoring.checks(url, url))
    assert [found[name].status for name in ("prometheus", "gateway")] == ["fail", "fail"]
    assert "unexpected response, from another program or another version: b'<html>'" in found["prometheus"].found


@pytest.mark.parametrize("option", ["--prometheus", "--gateway"])
def test_an_address_with_a_password_is_refused_and_not_shown(verb: Verb, option: str) -> None:
    out, _ = verb("doctor", option, "http://me:pass/word@10.0.0.1:9091", code=2)
    assert "an address with an @" in out and "not supported" in out
    assert "word" not in out.replace("password", "")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (NOW, "2026-01-02T03:04:05.123456+00:00"),
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05+00:00"),
        ("2026-01-02T03:04:05.5+01:00", "2026-01-02T03:04:05.500000+01:00"),
    ],
)
def test_times_of_go(text: str, read: str) -> None:
    assert monitoring._python_time(text) == read
    assert datetime.fromisoformat(monitoring._python_time(text)).tzinfo is not None


def server(index: int, rows: int) -> job_status.Process:
    where = f"10.0.0.{index}"
    given = ("persia-server", "clicks", index, 3, f"{where}:8888", f"{where}:9464", "h", "1", "1", "", "serving")
    return job_status.Process(*given, 4, rows, [])


@pytest.mark.row("S4-08")
def test_a_server_that_holds_many_more_rows_than_the_others_is_a_problem() -> None:
    def told(processes: list[job_status.Process]) -> list[str]:
        return [problem.text for problem in job_status.problems_of(processes)]

    rest: tuple[Any, ...] = ("clicks", 0, 1, "a:1", "", "h", "1", "1", "", "serving", None, None, [])
    others = [job_status.Process(kind, *rest) for kind in ("persia-middleware", "persia-trainer")]
    even = [server(index, rows) for index, rows in enumerate((9_000, 11_000, 10_000))]
    assert told([*even, *others]) == []
    uneven = [server(index, rows) for index, rows in enumerate((2_000, 26_000, 2_000))]
    skewed = "persia-server 1 holds 26,000 of 30,000 rows, 2.6 times the mean of 3 servers"
    assert told([*uneven, *others]) == [skewed]
    few = [server(index, rows) for index, rows in enumerate((2, 26, 2))]
    assert told([*few, *others]) == []


def test_targets_for_prometheus() -> None:
    without = job_status.Process("persia-data", "clicks", 0, 1, "", "", "h", "1", "1", "", "announced", None, None, [])
    targets = json.loads(job_status.Status([server(2, 1), without], []).targets())
    labels = {"service": "persia-server", "replica": "2", "persia_job": "clicks"}
    assert targets == [{"targets": ["10.0.0.2:9464"], "labels": labels}]
