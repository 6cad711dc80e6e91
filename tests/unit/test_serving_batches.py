"""Waiting requests are scored together, and each gets its own response."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from serving_model import SmallModel

from persia.errors import CheckpointError
from persia.proto import inference_pb2 as pb
from persia.serving.batching import Batcher, Scores
from persia.serving.http import HttpApp
from persia.serving.limits import Limits
from persia.serving.location import Found
from persia.serving.manifest import MANIFEST
from persia.serving.metrics import Metrics
from persia.serving.refusals import BusyError, FailedError, InvalidError, LateError, TooLargeError
from persia.serving.reload import Reloader
from persia.serving.rpc import _Inference
from persia.serving.service import Service


class Gate(SmallModel):
    """A small model whose first batch waits until the gate is opened."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)
        self.opened = threading.Event()
        self.entered = threading.Event()

    def score(self, samples: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(30)
        found = super().score(samples)
        if (found[0] == PANIC).any():
            raise PanicError
        found[0][found[0] == NO_NUMBER] = float("nan")
        return found


class PanicError(BaseException):
    """An error like a Rust panic, which is not an Exception."""


PANIC = 999
"""The first score of a batch for which a gate raises ``PanicError``."""
NO_NUMBER = 888
"""The score that a gate replaces by NaN."""


def rows(*users: int) -> list[dict[str, Any]]:
    return [{"user": user, "tags": [], "site": "a", "price": 0.0} for user in users]


def with_batcher(test: Callable[[Batcher, Gate], Awaitable[None]], **limits: Any) -> Gate:
    """Run a test with a batcher whose thread is scoring another request."""
    model = Gate()

    async def main() -> None:
        batcher = Batcher(model, Limits(**limits), Metrics())
        first = batcher.submit(lambda model: rows(1), 30)
        await asyncio.to_thread(model.entered.wait, 30)
        try:
            await test(batcher, model)
        finally:
            model.opened.set()
            await asyncio.to_thread(batcher.close)
        await asyncio.sleep(0)
        assert first.result().values.shape == (1, 1)

    asyncio.run(main())
    return model


def decoded(given: Any) -> Callable[[Any], Any]:
    """Return a function that decodes a request to these rows."""
    return lambda model: given


def users(count: int) -> Callable[[Any], Any]:
    """Return a function that decodes a request with this number of rows."""
    return lambda model: rows(*range(count))


def values(found: Scores) -> list[float]:
    return [float(each) for each in found.values[:, 0]]


def test_requests_that_wait_are_one_batch_and_keep_their_order() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        answers = [batcher.submit(users(n), 30) for n in range(1, 6)]
        model.opened.set()
        found = await asyncio.gather(*answers)
        assert [values(each) for each in found] == [model.scores(rows(*range(n))) for n in range(1, 6)]

    assert with_batcher(test).batches[1] == 15


def test_a_batch_has_no_more_rows_than_the_limit_but_for_one_request() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        answers = [batcher.submit(users(n), 30) for n in (3, 3, 7, 1, 1)]
        model.opened.set()
        await asyncio.gather(*answers)

    assert with_batcher(test, batch_rows=5).batches[1:] == [3, 3, 7, 2]


def test_a_request_that_is_invalid_or_makes_the_model_fail_fails_alone() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        given: list[Any] = [rows(1), [1, 2], rows(POISON), rows(2), rows(*range(50))]
        answers = [batcher.submit(decoded(each), 30) for each in given]
        model.opened.set()
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(each) for each in found] == [Scores, InvalidError, FailedError, Scores, TooLargeError]
        assert [values(found[0]), values(found[3])] == [model.scores(rows(1)), model.scores(rows(2))]  # type: ignore[arg-type]

    with_batcher(test, request_rows=20)


def test_a_panic_fails_its_request_only() -> None:
    def panic(model: Any) -> Any:
        raise PanicError

    async def test(batcher: Batcher, model: Gate) -> None:
        user = PANIC - round(SmallModel().scores(rows(0))[0])
        answers = [batcher.submit(each, 30) for each in (panic, decoded(rows(user)), users(3))]
        model.opened.set()
        found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 30)
        assert [type(each) for each in found] == [FailedError, FailedError, Scores]
        assert not batcher.broken.is_set()

    with_batcher(test)


def test_a_score_that_is_no_number_fails_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        user = NO_NUMBER - round(SmallModel().scores(rows(0))[0])
        answers = [batcher.submit(decoded(each), 30) for each in (rows(1, user), rows(2), rows(user))]
        model.opened.set()
        found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 30)
        assert [type(each) for each in found] == [FailedError, Scores, FailedError]
        assert str(found[0]) == "the model returned a score that is not a finite number"

    with_batcher(test)
    assert len([each for each in caplog.messages if "bundle small-1 returned a score" in each]) == 1


def test_if_the_thread_ends_all_requests_fail_and_the_batcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        def fail(*_: Any) -> None:
            raise PanicError

        monkeypatch.setattr(batcher, "_collect", fail)
        answers = []
        for n in (1, 2):
            batcher.reserve(n)
            answers.append(batcher.submit(users(n), 30, partial(batcher.release, n)))
        model.opened.set()
        found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 30)
        assert [type(each) for each in found] == [FailedError, FailedError]
        assert batcher.broken.is_set()
        batcher.reserve(7)
        with pytest.raises(FailedError):
            await batcher.submit(users(1), 30, lambda: batcher.release(7))
        assert (batcher.waiting, batcher.waiting_bytes) == (0, 0)

    with_batcher(test)


POISON = 666 - round(SmallModel().scores(rows(0))[0])
"""The user whose row makes the model fail."""


def test_another_model_takes_over_between_two_batches() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        before = batcher.submit(lambda model: rows(5), 30)
        other = SmallModel(3.0)
        switched = batcher.switch(other)
        after = batcher.submit(lambda model: rows(5), 30)
        model.opened.set()
        assert (await before).model is model and values(await before) == model.scores(rows(5))
        assert (await after).model is other and values(await after) == other.scores(rows(5))
        assert await asyncio.wrap_future(switched) is model and not model.closed

    with_batcher(test)


class AbortError(Exception):
    """The end of a gRPC call."""


class Context:
    """The context of a gRPC call."""

    def time_remaining(self) -> float:
        return 30.0

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AbortError(code, details)


def test_a_request_for_a_version_is_not_scored_by_the_one_that_took_over() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        reloader: Any = SimpleNamespace(model=model)  # the reloader has not detected the switch yet
        service = Service("small", Limits(), Metrics(), batcher, reloader)
        batcher.switch(SmallModel(3.0))
        body = json.dumps({"inputs": []}).encode()
        path = "/v2/models/small/versions/small-1/infer"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        by_http = HttpApp(service)(scope, receive, send)
        by_grpc = _Inference(service).ModelInfer(
            pb.ModelInferRequest(model_name="small", model_version="small-1"), Context()
        )
        calls = asyncio.gather(by_http, by_grpc, return_exceptions=True)
        await asyncio.sleep(0)
        model.opened.set()
        _, refused = await asyncio.wait_for(calls, 30)
        message = "no version 'small-1' of 'small'; this server has 'small-3'"
        assert (sent[0]["status"], json.loads(sent[1]["body"])) == (404, {"error": message})
        assert isinstance(refused, AbortError) and refused.args == (grpc.StatusCode.NOT_FOUND, message)

    with_batcher(test)


def test_a_switch_that_is_cancelled_loses_no_request() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        other = SmallModel(3.0)
        assert batcher.switch(other).cancel()
        after = batcher.submit(lambda model: rows(5), 30)
        model.opened.set()
        found = await asyncio.wait_for(after, 30)
        assert found.model is other and values(found) == other.scores(rows(5))
        assert model.closed

    with_batcher(test)


def test_a_client_that_left_and_a_late_request_are_not_scored() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        left = batcher.submit(lambda model: rows(7, 7, 7), 30)
        late = batcher.submit(lambda model: rows(8, 8), 0.0)
        good = batcher.submit(lambda model: rows(9), 30)
        left.cancel()
        model.opened.set()
        with pytest.raises(LateError):
            await late
        assert values(await good) == model.scores(rows(9))

    assert with_batcher(test).batches[:2] == [1, 1]


def test_requests_and_their_bytes_are_bounded() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        batcher.reserve(60)
        with pytest.raises(BusyError):
            batcher.reserve(50)
        batcher.grow(40)
        with pytest.raises(BusyError):
            batcher.grow(1)
        batcher.reserve(0)
        with pytest.raises(BusyError):
            batcher.reserve(0)
        batcher.release(100)
        batcher.release(0)
        assert (batcher.waiting, batcher.waiting_bytes) == (0, 0)

    with_batcher(test, waiting=2, waiting_bytes=100)


def test_a_cancelled_request_counts_until_the_thread_has_reached_it() -> None:
    """The body of the request is in memory until then."""

    async def test(batcher: Batcher, model: Gate) -> None:
        reloader: Any = SimpleNamespace(model=model)
        service = Service("small", Limits(), Metrics(), batcher, reloader)
        batcher.reserve(70)
        call = asyncio.ensure_future(service.score(users(2), 70, 30))
        await asyncio.sleep(0)  # lets the request be submitted
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (batcher.waiting, batcher.waiting_bytes) == (1, 70)
        with pytest.raises(BusyError):
            batcher.reserve(40)
        batcher.reserve(5)
        answered = service.score(users(1), 5)
        model.opened.set()
        assert values(await answered) == model.scores(rows(0))
        assert (batcher.waiting, batcher.waiting_bytes) == (0, 0)

    assert 2 not in with_batcher(test, waiting_bytes=100).batches, "what was cancelled is not scored"


def test_a_batch_waits_for_more_rows_if_it_shall() -> None:
    async def test(batcher: Batcher, model: Gate) -> None:
        model.opened.set()
        first = batcher.submit(lambda model: rows(1), 30)
        await asyncio.sleep(0.05)
        second = batcher.submit(lambda model: rows(2), 30)
        await asyncio.gather(first, second)

    assert with_batcher(test, batch_delay_s=2.0, batch_rows=2).batches[1] == 2


@pytest.mark.parametrize(
    ("is_there", "said"),
    [
        (True, "/1 cannot be served: a damaged file; still serving small-1, retrying in 2 s; next: copy it again"),
        (False, "; still serving small-1; next: write a bundle: persia export runs/LATEST -o "),
    ],
)
def test_a_bundle_that_cannot_replace_the_served_one_is_logged_with_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_there: bool, said: str
) -> None:
    def load(path: Path) -> Any:
        raise CheckpointError("a damaged file", hint="copy it again")

    if is_there:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / MANIFEST).touch()
    batcher: Any = None
    reloader = Reloader(tmp_path, (Found(tmp_path / "0", (0, 0, 0)), SmallModel()), load, batcher, Metrics())
    asyncio.run(reloader._look(asked=True))
    assert said in caplog.text
