"""Connections of an infer context. ``tests/integration/test_infer.py`` tests its look-ups with servers."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from persia.backend import serving
from persia.ctx import InferCtx
from persia.errors import UsageError


def test_threads_of_a_server_connect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    made: list[Any] = []

    def connected(ctx: InferCtx) -> Any:
        made.append(SimpleNamespace())
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # wait for the other thread, which must not reach this line
        return made[-1]

    def on_enter(ctx: InferCtx) -> None:
        ctx._evaluation = SimpleNamespace()  # type: ignore[assignment]

    monkeypatch.setattr(InferCtx, "_connected", connected)
    monkeypatch.setattr(InferCtx, "_on_enter", on_enter)
    ctx = InferCtx(["middleware:8887"])
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda _: ctx._backend, range(2))]
    assert len(made) == 1 and all(each is made[0] for each in found)


def test_an_engine_that_is_of_no_use_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    engine = SimpleNamespace(served=None, close=lambda abandon: closed.append(abandon))
    monkeypatch.setattr(serving, "Engine", SimpleNamespace(serving=lambda *_, **__: engine))
    with pytest.raises(UsageError, match="serve no checkpoint"):
        serving.ServingBackend(["middleware:8887"])
    assert closed == [True]
