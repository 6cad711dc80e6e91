"""``persia status``: the processes that it finds and misses, and its exit code."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc
import pytest
import torch
from conftest import Batches, TinyModel, Verb
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from stack import LiveStack, MakeStack, Stack
from waiting import wait_until

import persia
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD


def run(*arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "persia", "status", *arguments],
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


class Announced:
    """Responds to ``$SRV.INFO`` for processes that do not exist, in the format of the NATS services API."""

    def __init__(self, stack: Stack, processes: list[tuple[str, dict[str, str]]]) -> None:
        self._client = stack.nats_client()
        self._client.connect()
        self._processes, self._closed = processes, False
        self._client.subscribe("$SRV.INFO", callback=self._answer)
        self._client.ping()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._client.wait()
        except Exception:
            assert self._closed

    def _answer(self, message: Any) -> None:
        for number, (kind, metadata) in enumerate(self._processes):
            payload = {"name": kind, "id": f"id{number}", "metadata": metadata}
            self._client.publish(message.reply, payload=json.dumps(payload).encode())
        self._client.publish(message.reply, payload=b"no JSON")
        self._client.publish(message.reply, payload=b'{"name": "another-program", "id": "x", "metadata": {}}')

    def close(self) -> None:
        self._closed = True
        self._client.close()
        self._thread.join(10)


@pytest.fixture
def healthy() -> Iterator[str]:
    """The address of a process that reports that it is serving."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(10)


def said(index: int, replicas: int, address: str = "", **more: str) -> dict[str, str]:
    base = {"job": "test", "index": str(index), "replicas": str(replicas), "address": address}
    return base | {"version": persia.__version__, "protocol": "1", "host": "h"} | more


def test_what_is_missing_and_what_disagrees(make_stack: MakeStack, healthy: str) -> None:
    stack = make_stack(nats_only=True)
    announced = Announced(
        stack,
        [
            ("persia-server", said(0, 3, healthy)),
            ("persia-server", said(2, 3, "127.0.0.1:1", version="0.0.9")),
            ("persia-middleware", said(0, 1, healthy)),
            ("persia-data", said(0, 1)),
            ("persia-data", said(0, 1)),
            ("persia-trainer", said(0, 2, healthy, job="other", threads="13")),
        ],
    )
    done = run(env=stack.settings)
    assert done.returncode == 1, done.stderr
    assert "threads" not in done.stdout, "there is no rank"
    assert "persia-server 1 of 3 is missing" in done.stdout
    assert "persia-server 2 at 127.0.0.1:1: unavailable" in done.stdout
    assert f"different values of version: 0.0.9: persia-server 2; {persia.__version__}: " in done.stdout
    assert "persia-data 0 runs 2 times" in done.stdout
    assert "trainer" not in done.stdout, "another job's"
    assert healthy in done.stdout and "serving" in done.stdout
    every = json.loads(run("--all", "--json", env=stack.settings).stdout)
    assert {one["job"] for one in every["processes"]} == {"test", "other"}
    assert "job other: persia-trainer 1 of 2 is missing" in every["problems"]
    assert {one["threads"] for one in every["processes"] if one["service"] == "persia-trainer"} == {13}
    head, *lines = run("--all", env=stack.settings).stdout.splitlines()
    assert head.split()[-1] == "threads" and [line.split()[-1] for line in lines if "-trainer" in line][:1] == ["13"]
    announced.close()


def test_nats_that_is_not_there(no_job: None, verb: Verb) -> None:
    began = time.monotonic()
    _, errors = verb("status", "--nats-url", "nats://127.0.0.1:1", code=3)  # starts no process
    assert time.monotonic() - began < 5
    assert errors.splitlines()[0] == "error: NATS at 127.0.0.1:1 is not reachable: [Errno 111] Connection refused"
    assert "Traceback" not in errors


@pytest.mark.parametrize("url", ["", "127.0.0.1:4222", "http://127.0.0.1:4222", "nats://127.0.0.1:x"])
def test_an_address_that_is_none(no_job: None, url: str) -> None:
    done = run(env={"PERSIA_NATS_URL": url})
    assert done.returncode == 2 and "PERSIA_NATS_URL" in done.stderr and "Traceback" not in done.stderr


def test_a_password_that_is_wrong(make_stack: MakeStack) -> None:
    stack = make_stack(nats_only=True)
    other = stack.folder / "other"
    other.write_text("x" * 40)
    done = run(env=stack.settings | {"PERSIA_TOKEN_FILE": str(other)})
    assert done.returncode == 5, done.stderr
    assert "refuses the password" in done.stderr


@pytest.mark.live
def test_a_stack_that_serves(any_stack: Stack | LiveStack) -> None:
    done = run("--json", env=any_stack.settings)
    found = json.loads(done.stdout)
    assert not found["problems"] and done.returncode == 0
    kinds = {one["service"]: one for one in found["processes"]}
    for kind in ("persia-server", "persia-middleware"):
        assert kinds[kind]["health"] == "serving" and kinds[kind]["metrics"]
        assert kinds[kind]["version"] == persia.__version__ and kinds[kind]["host"]


def test_the_vocabulary_of_each_table(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack(servers=2)
    stack.use(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    model = TinyModel()
    dense = torch.optim.SGD(model.parameters(), 0.1)
    with TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx:
        for batch in DataLoader(Batches(4)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        ctx.engine.drain()
        held = ctx.engine.stats()["tables"]

        def complete() -> "subprocess.CompletedProcess[str] | None":
            """Return the status, or None if a process has not responded within 2 s, as on a busy machine."""
            done = run(env=stack.settings)
            rows = [rf"^{name} +{table['rows']:,} " for name, table in held.items()]
            wanted = [*rows, "^persia-trainer .* 17 *$"]
            return done if all(re.search(each, done.stdout, re.MULTILINE) for each in wanted) else None

        shown = wait_until("the status of all", complete, 120)
    rank = next(line for line in shown.stdout.splitlines() if line.startswith("persia-trainer"))
    assert rank.split()[-1] == "17", "its torch threads"
    for name, table in held.items():
        line = next(line.split() for line in shown.stdout.splitlines() if line.startswith(f"{name} "))
        share = table["lookups"]["hits"] / sum(table["lookups"].values())
        assert line[1] == f"{table['rows']:,}" and table["rows"] > 0
        assert line[4:] == [f"{table['inserted']:,}", "0", "0", f"{share:.1%}", "-", "-"], shown.stdout

    def served() -> list[dict[str, Any]]:
        processes = json.loads(run("--json", env=stack.settings).stdout)["processes"]
        return [part for one in processes for part in one["tables"]]

    parts = wait_until("both servers", lambda: found if len(found := served()) == 4 else None, 60)
    assert sum(part["rows"] for part in parts) == sum(table["rows"] for table in held.values())


def test_a_server_that_was_killed_is_missed(make_stack: MakeStack) -> None:
    stack = make_stack(servers=2)
    stack.kill("server-1")
    done = run(env=stack.settings)
    assert done.returncode == 1
    assert "persia-server 1 of 2 is missing" in done.stdout, done.stdout
