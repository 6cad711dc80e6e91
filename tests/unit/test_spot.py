"""The notice of a spot instance: its forms, mistakes, and a run that is saved because of it."""

import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from metadata_server import PATH, Metadata, metadata
from trainer_files import config_of, fit
from waiting import wait_until

from persia.errors import ConfigError, UnreachableError
from persia.runtime import files, polled, preemption
from persia.runtime.polled import AnswerError
from persia.runtime.spot import Notice, SpotWatch, parse
from persia.trainer import StepReport, Trainer


@pytest.fixture
def service() -> Iterator[Metadata]:
    with metadata() as found:
        yield found


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled, "RETRY_S", (0.0, 0.0, 0.0))


URL = f"http://127.0.0.1{PATH}"
AT = datetime(2026, 5, 1, 8, 22, tzinfo=timezone.utc)


@pytest.mark.row("S4-36")
@pytest.mark.parametrize(
    ("status", "body", "notice"),
    [
        (404, "", None),
        (200, '{"action": "terminate", "time": "2026-05-01T08:22:00Z"}', Notice(AT, "terminate")),
        (200, "FALSE", None),
        (200, "TRUE\n", Notice(None, "preempted")),
        (200, '{"DocumentIncarnation": 1, "Events": []}', None),
        (200, '{"Events": [{"EventType": "Reboot", "NotBefore": "Fri, 01 May 2026 08:22:00 GMT"}]}', None),
        (
            200,
            '{"Events": [{"EventType": "Preempt", "NotBefore": "Fri, 01 May 2026 08:22:00 GMT"}]}',
            Notice(AT, "Preempt"),
        ),
        (200, '{"action": "terminate", "time": "2026-05-01T10:22:00+02:00"}', Notice(AT, "terminate")),
        (200, '{"action": "stop", "time": "soon"}', Notice(None, "stop")),
        (200, '{"Events": [{"EventType": "Preempt", "NotBefore": "soon"}]}', Notice(None, "Preempt")),
    ],
)
def test_the_forms_of_the_providers_are_understood(status: int, body: str, notice: Notice | None) -> None:
    assert parse(status, body, url=URL) == notice


@pytest.mark.parametrize(
    ("status", "body"), [(200, "<html>log in</html>"), (200, "[]"), (500, ""), (401, ""), (200, "[" * 50_000)]
)
def test_an_answer_of_another_form_is_no_notice(status: int, body: str) -> None:
    with pytest.raises(AnswerError):
        parse(status, body, url=URL)


def test_404_is_an_error_at_another_address_than_that_of_amazon() -> None:
    assert parse(404, "", url=f"{URL}?a=b") is None
    with pytest.raises(AnswerError, match="expected status 200, found 404"):
        parse(404, "", url="http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01")


@pytest.mark.parametrize(
    ("resources", "resource", "ends"),
    [
        ('["other_1", "ME_0"]', "me_0", True),
        ('["other_1"]', "me_0", False),
        ('["other_1"]', None, True),
        ("null", "me_0", True),
    ],
)
def test_the_events_of_other_machines_are_ignored_on_azure(resources: str, resource: str | None, ends: bool) -> None:
    body = f'{{"Events": [{{"EventType": "Preempt", "Resources": {resources}}}]}}'
    assert parse(200, body, url=URL, resource=resource) == (Notice(None, "Preempt") if ends else None)


@pytest.mark.usefixtures("retries_at_once")
def test_the_first_poll_is_retried(service: Metadata, caplog: pytest.LogCaptureFixture) -> None:
    service.status, service.bodies = 200, iter(["<html>", "<html>", "<html>", "FALSE"])
    with SpotWatch(service.url, every_s=60):
        assert len(service.asked) == 4
    assert caplog.text.count("the response is not a notice: '<html>'; retrying in 0 s") == 3


def test_an_address_that_cannot_be_sent_is_a_mistake_without_a_retry() -> None:
    for url, headers in (("http://h/a b?key=secret", {}), ("http://h/\xe9?key=secret", {}), (URL, {"A": "secret\n"})):
        with pytest.raises(ConfigError, match="cannot be sent") as caught, SpotWatch(url, headers=headers):
            pytest.fail("training began")
        assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("retries_at_once")
def test_no_message_has_the_password_or_the_query_of_an_address(
    service: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    service.status = 500
    with pytest.raises(UnreachableError) as caught, SpotWatch(service.url + "?key=secret"):
        pytest.fail("training began")
    assert f"spot.url: no valid response from {service.url}: expected status 200, found 500" in str(caught.value)
    assert "secret" not in str(caught.value) + caplog.text
    assert files.shown_url("https://me:secret@host:1/path?key=secret#secret") == "https://host:1/path"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/path@1?to=me@home#@", "https://host/path@1"),
        ("https://me:secret@host:1/path@1?to=me@home", "https://host:1/path@1"),
        ("https://me:se@cret@host/path@1", "https://host/path@1"),
        ("https://me:se/cret@host/path", "https://host/path"),
        ("https://me:se?cret@host/path?key=secret", "https://host/path"),
        ("https://me:se#cret@host/path", "https://host/path"),
        ("https://me@[::1]:80/path", "https://[::1]:80/path"),
        ("https://host:port/path", "https://host:port/path"),
        ("//me:secret@host/path", "//host/path"),
        ("https:/me:secret@host/path", "host/path"),
        ("me:secret@host:1/path@1", "host:1/path@1"),
        ("host:1/path@1", "host:1/path@1"),
        ("s3://bucket/prefix@1", "s3://bucket/prefix@1"),
        ("", ""),
    ],
)
def test_an_address_is_shown_without_its_user_and_with_its_path(url: str, shown: str) -> None:
    assert files.shown_url(url) == shown


def test_a_poll_that_raises_what_it_should_not_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    asked = itertools.count()

    def ask() -> int:
        found = next(asked)
        if found == 1:
            raise ValueError("secret")
        return found

    taken: list[int] = []

    def take(answer: int) -> bool:
        taken.append(answer)
        return answer == 2

    with polled.Polled("key", URL, ask, take, every_s=0.001, lost="nothing", hint=""):
        wait_until("the poll after the error", lambda: taken == [0, 2], 10)
    assert "cannot be sent (ValueError); training continues, but nothing" in caplog.text and "secret" not in caplog.text


def test_a_notice_says_how_much_time_is_left() -> None:
    notice = Notice(datetime.now(timezone.utc) + timedelta(seconds=90), "terminate")
    assert notice.left_s is not None and 80 < notice.left_s <= 90
    assert str(notice).startswith("spot notice (terminate): this instance ends at 20")
    assert str(Notice(None, "preempted")) == "spot notice (preempted): this instance ends soon"


@pytest.mark.usefixtures("retries_at_once")
def test_an_address_that_does_not_answer_is_told_before_training(service: Metadata, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/spot"
    config = config_of(tmp_path, spot={"url": url})
    with (
        Trainer(config) as trainer,
        pytest.raises(UnreachableError, match=r"spot\.url: no valid response from http\S+: .*refused") as caught,
    ):
        trainer.fit()
    assert "--set spot=null" in caught.value.hint and not (tmp_path / "runs").exists()
    service.status, service.body = 200, "<html>"
    with pytest.raises(UnreachableError, match=r"the response is not a notice: '<html>'"), SpotWatch(service.url):
        pytest.fail("training began")


def test_an_instance_whose_end_is_announced_starts_no_training(
    service: Metadata, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.announce()
    with Trainer(config_of(tmp_path, spot={"url": service.url})) as trainer, pytest.raises(SystemExit) as left:
        trainer.fit()
    assert left.value.code == 75 and "training does not start" in caplog.text
    assert not (tmp_path / "runs").exists()


def test_headers_and_a_token_are_sent(service: Metadata) -> None:
    service.token = "abc"  # noqa: S105
    assert (
        SpotWatch(service.url, headers={"Metadata-Flavor": "Google"}, token_url=service.url + "/token").poll() is None
    )
    (put, place, wanted), (get, path, headers) = service.asked
    assert (put, place, get, path) == ("PUT", f"{PATH}/token", "GET", PATH)
    assert "x-aws-ec2-metadata-token-ttl-seconds" in wanted
    assert headers["metadata-flavor"] == "Google" and headers["x-aws-ec2-metadata-token"] == "abc"
    with pytest.raises(AnswerError, match="expected status 200, found 401"):
        SpotWatch(service.url).poll()


def test_a_poll_that_fails_later_is_told_once_and_training_continues(
    service: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    refuses = iter([False, True])

    def stop(text: str) -> bool:
        told.append(text)
        return next(refuses)

    caplog.set_level(logging.INFO)
    with SpotWatch(service.url, every_s=0.01, stop=stop):
        service.status = 503
        count = len(service.asked)
        wait_until("some polls", lambda: len(service.asked) > count + 5, 10)
        assert caplog.text.count("training continues, but a notice would be missed") == 1 and not told
        service.announce()
        wait_until("the notice, and another one as nothing could be saved yet", lambda: len(told) == 2, 10)
    assert "responds again" in caplog.text and told[0].startswith("spot notice (terminate)")


@pytest.mark.row("S4-36")
def test_a_run_is_saved_before_its_instance_ends_and_continues_elsewhere(
    service: Metadata, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"epochs": 5}
    rarely = {"every": 1000}
    spot = {"url": service.url, "every_s": 0.01}
    undisturbed = config_of(tmp_path, data=data, checkpoint=rarely, run={"name": "undisturbed"})
    fit(undisturbed)
    config = config_of(tmp_path, data=data, spot=spot, checkpoint=rarely, run={"log_every": 1})
    caplog.set_level(logging.INFO)
    trainer = Trainer(config)
    ends = None
    with pytest.raises(SystemExit) as left, trainer:
        for report in trainer.fit():
            if isinstance(report, StepReport) and report.step == 7:
                ends = service.announce(30)
                wait_until("the notice to arrive", preemption.stop_asked, 10)
    assert left.value.code == 75 and ends is not None and datetime.now(timezone.utc) < ends
    assert trainer.folder is not None
    (saved,) = Path(trainer.folder.saves(config)).glob("step-*")
    step = int(saved.name[5:])
    assert 7 <= step < 60 and f"exiting after step {step}" in caplog.text
    assert "spot notice (terminate): this instance ends at" in caplog.text
    assert trainer.folder.read_json("summary.json")["status"] == "interrupted"

    service.status = 404
    with Trainer(config) as again:
        assert [*again.resume().fit()]
    weights = [
        torch.load(sorted(Path(folder).glob("step-*"), key=lambda path: int(path.name[5:]))[-1] / "dense.pt")
        for folder in (tmp_path / "runs" / "undisturbed" / "checkpoints", trainer.folder.saves(config))
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_no_thread_of_a_watch_is_left(service: Metadata) -> None:
    began = time.monotonic()
    with SpotWatch(service.url, every_s=60):
        pass
    assert time.monotonic() - began < 10
    assert not [each for each in threading.enumerate() if each.name == "persia-spot.url"]
