"""The faults of ``persia serve`` by name. Each fault disturbs a process that serves a bundle under load.

``run("F36", 7, folder, bundles)`` starts the process and its clients, injects the fault, and returns the result. Every
score is compared with that of the bundle that the response names. The seed determines the damage and the requests.
"""

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from faults import NEEDS, STORM_S, Record, fill
from raw_http import framed, rest, send_malformed
from serving_job import CLIENT_S, CLIENTS, MEMORY, Bundles, Served, export

from persia.errors import StorageError
from persia.serving import parity

DISK = 24 << 20
"""The size in bytes of the disk that is filled."""
RELOADS = 10
REMOVED = 0.3
"""The share of reloads in which the highest version is removed."""
SLOW_CLIENTS = 40
LEAVING_CLIENTS = 300
MALFORMED = 100_000
MALFORMED_CLIENTS = 4
BY_CONNECTION = 20
"""The malformed requests of a connection. One of them breaks the framing of HTTP, which ends a connection."""
WARM = 300
"""The number of responses after which the memory of a process is measured the first time."""
LARGE_ROWS = 500
"""The rows of a request that keeps the process busy, so that few clients saturate it."""
SATURATED_S = 4.0
"""Seconds in which the rate is measured that the process can serve."""
OVERLOAD_CLIENTS = 32
OVERLOAD_OPTIONS = ("--waiting", "8")


@dataclass(frozen=True)
class ServingFault:
    """A fault of serving.

    Attributes:
        what: Its description in the table.
        inject: The function that injects it.
        goes_on: Whether all requests of the clients must succeed without a restart of the process.
        options: Options of ``persia serve``.
        clients: The number of clients that request scores all the time.
        needs: The requirement for this machine, one of ``faults.NEEDS``.
    """

    what: str
    inject: Callable[[Served, random.Random, float], None]
    goes_on: bool = True
    options: tuple[str, ...] = ()
    clients: int = CLIENTS
    needs: str = ""

    def missing(self) -> str | None:
        """Return the reason why the fault cannot be injected here, or None."""
        return f"it needs {self.needs}" if self.needs and not NEEDS[self.needs]() else None


def killed_loading(job: Served, rng: random.Random, seconds: float) -> None:
    """Kill the process three times after it has mapped the first bundle, and before it serves it."""
    del rng, seconds
    for _ in range(3):
        job.wait("the bundle to be loaded", lambda: job.maps(1))
        assert not job.serves, "the bundle was loaded before the process was killed"
        job.kill()
        job.look_after()
    job.more()
    job.recovered += 3


def killed_reloading(job: Served, rng: random.Random, seconds: float) -> None:
    """Kill the process three times after it has mapped a newer bundle, and before it serves it."""
    del rng, seconds
    for version in (2, 3, 4):
        job.more()
        newer = job.place(version)
        job.wait("the newer bundle to be loaded", lambda version=version: job.maps(version))  # type: ignore[misc]
        assert f"{version}, bundle" not in job.part.output, "the newer bundle was loaded before the process was killed"
        job.kill()
        job.recover(newer)


def damaged(job: Served, rng: random.Random, seconds: float) -> None:
    """Copy half of a newer version, then three newer ones with a changed byte each, and then repair one of them."""
    del seconds
    served = job.bundles.identities[0]
    job.more()
    source = job.source(1)
    for version in (2, 3, 4, 5):
        job.note_fault()
        new = job.versions / f".{version}"
        shutil.copytree(source, new)
        victim = rng.choice(sorted(file.name for file in new.iterdir() if version > 2 or file.name != "manifest.json"))
        content = bytearray((new / victim).read_bytes())
        at = rng.randrange(len(content))
        if version == 2:
            (new / victim).write_bytes(content[:at])
        else:
            content[at] ^= 1 << rng.randrange(8)
            (new / victim).write_bytes(content)
        new.rename(job.versions / str(version))
        job.says(f"{version} cannot be served: {job.versions / str(version) / victim}: ")
        job.recover(served)
    assert job.answers.bundles == {served}
    shutil.rmtree(job.versions / "5")
    job.more(bundle=job.place(5, 1))


def disk_full(job: Served, rng: random.Random, seconds: float) -> None:
    """Fill the disk of the bundles while a newer version is copied to it, and while one is exported to it."""
    del rng, seconds
    served = job.bundles.identities[0]
    job.more()
    job.note_fault()
    filler = job.versions / "filler"
    fill(filler)
    no_space = os.strerror(errno.ENOSPC)
    with pytest.raises((OSError, shutil.Error), match=no_space):
        job.place(2)
    with pytest.raises(StorageError, match=no_space):
        export(job.bundles.folder, "b", job.versions / "3")
    assert not (job.versions / "3").exists()
    job.recover(served)
    filler.unlink()
    shutil.rmtree(job.versions / ".2")
    job.more(bundle=job.place(2))


def reloads(job: Served, rng: random.Random, seconds: float) -> None:
    """Replace the bundle ten times under load: by a higher version, or by the removal of the highest one."""
    del seconds
    job.more()
    served = [job.bundles.identities[0]]
    for number in range(2, RELOADS + 2):
        job.note_fault()
        if len(served) > 1 and rng.random() < REMOVED:
            highest = max(int(each.name) for each in job.versions.iterdir() if each.name.isdecimal())
            (job.versions / str(highest)).rename(job.versions / f".gone-{highest}")
            served.pop()
        else:
            served.append(job.place(number, job.bundles.identities.index(served[-1]) ^ 1))
        job.recover(served[-1])
    assert job.answers.bundles == {*job.bundles.identities}


def request(job: Served, at: int = 0) -> bytes:
    """Return a request for scores as bytes."""
    return framed(job.bundles.bodies[at])


def slow_clients(job: Served, rng: random.Random, seconds: float) -> None:
    """Send a part of a request and then nothing. Each client must be disconnected without a response."""
    del seconds
    job.more()
    text = request(job)
    with ExitStack() as held:
        slow = [held.enter_context(connect(job)) for _ in range(SLOW_CLIENTS)]
        for connection in slow:
            job.note_fault()
            connection.sendall(text[: rng.randrange(1, len(text))])
        for connection in slow:
            assert not rest(connection), "a response to a part of a request"
            job.recovered += 1
    job.more()


def leaving_clients(job: Served, rng: random.Random, seconds: float) -> None:
    """Send a request, or a part of it, and disconnect without reading."""
    del seconds
    job.more()
    text = request(job)
    for number in range(LEAVING_CLIENTS):
        job.note_fault()
        with connect(job) as connection:
            connection.sendall(text if number % 2 else text[: rng.randrange(1, len(text))])
        job.recovered += 1
    job.more()


def malformed_requests(job: Served, rng: random.Random, seconds: float, count: int = MALFORMED) -> None:
    """Send malformed requests, several on each connection. No response may be a failure of the server.

    During the whole fault, the memory of the process may grow by less than :data:`MEMORY`.
    """
    del seconds
    job.more()
    before, most = job.memory(), 0
    seeds = [rng.getrandbits(64) for _ in range(count // BY_CONNECTION)]

    def send(number: int) -> None:
        with connect(job) as connection:
            body = job.bundles.bodies[number % len(job.bundles.bodies)]
            send_malformed(connection, random.Random(seeds[number]), body, BY_CONNECTION)

    with ThreadPoolExecutor(MALFORMED_CLIENTS) as clients:
        sent = [clients.submit(send, number) for number in range(len(seeds))]
        for one in sent:
            job.injected += BY_CONNECTION
            job.wait("a malformed request to be refused", one.done)
            try:
                one.result()
            except BaseException:
                clients.shutdown(cancel_futures=True)
                raise
            job.recovered += BY_CONNECTION
            most = max(most, job.memory())
            assert most - before < MEMORY, f"the memory grew by {(most - before) >> 20} MiB"
    job.more()


def overload(job: Served, rng: random.Random, seconds: float) -> None:
    """Request scores at twice the rate that the process can serve. It must refuse excess requests with 503."""
    job.more()
    with loaded(job, 2) as served:
        before = len(served.good)
        pause(job, SATURATED_S)
        rate = (len(served.good) - before) / SATURATED_S
    assert rate > 0, "no response"
    job.note_fault()
    with loaded(job, OVERLOAD_CLIENTS, 2 * rate, rng) as load:
        pause(job, seconds)
    assert not load.failed, load.failed[:5]
    assert load.busy > 0.2 * len(load.good), f"{load.busy} of {load.busy + len(load.good)} requests were refused"
    assert len(load.good) > 0.5 * rate * seconds, f"{len(load.good)} responses in {seconds:g} s, {rate:.0f}/s before"
    job.recover()


@dataclass
class Load:
    """The results of large requests: the times of good responses, the number of refusals, and all failures."""

    good: list[float]
    failed: list[str]
    busy: int = 0

    def take(self, status: int, headers: Any, content: bytes, scores: dict[str, float]) -> None:
        """Record a response. All its scores must equal the score of the bundle that it names."""
        if status == 503 and headers.get("Retry-After"):
            self.busy += 1
            return
        if status != 200:
            self.failed.append(f"{status}: {content[:200]!r}")
            return
        found = json.loads(content)
        wanted = scores[found["bundle"]]
        if len(found["scores"]) == LARGE_ROWS and all(abs(one - wanted) <= parity.SAME for one in found["scores"]):
            self.good.append(time.monotonic())
        else:
            self.failed.append(f"wrong scores: {found['scores'][:5]}, expected {wanted}")


@contextmanager
def loaded(job: Served, clients: int, rate: float = 0.0, rng: random.Random | None = None) -> Iterator[Load]:
    """Send large requests until the end of the block, one after another, or at random times at a given rate."""
    record = json.loads(job.bundles.bodies[0])[1]
    body = json.dumps([record] * LARGE_ROWS).encode()
    scores = {name: float(each[0][1]) for name, each in job.bundles.scores.items()}
    load, lock, over = Load([], []), threading.Lock(), threading.Event()
    draw = rng or random.Random(0)
    due = [time.monotonic()]

    def begin() -> None:
        with lock:
            at = due[0] = due[0] + (draw.expovariate(rate) if rate else 0.0)
        over.wait(max(0.0, at - time.monotonic()))

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", job.port, timeout=CLIENT_S)
        while not over.is_set():
            begin()
            connection.request("POST", "/score", body)
            answer = connection.getresponse()
            content = answer.read()
            with lock:
                load.take(answer.status, answer.headers, content, scores)
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        over.set()
        for thread in threads:
            thread.join(2 * CLIENT_S)


def pause(job: Served, seconds: float) -> None:
    """Wait, and supervise the process meanwhile."""
    until = time.monotonic() + seconds
    job.wait(f"{seconds:g} s to pass", lambda: time.monotonic() > until, seconds + CLIENT_S)


def connect(job: Served) -> socket.socket:
    """Return a connection to the process."""
    return socket.create_connection(("127.0.0.1", job.port), timeout=CLIENT_S)


FAULTS: dict[str, ServingFault] = {
    "F33": ServingFault("serving killed while it loads its first bundle, three times", killed_loading, goes_on=False),
    "F34": ServingFault("serving killed while it loads a newer bundle, three times", killed_reloading, goes_on=False),
    "F35": ServingFault("a newer bundle that is half copied, or has a changed byte", damaged),
    "F36": ServingFault("disk of the bundles full", disk_full, needs="root"),
    "F37": ServingFault("the bundle replaced ten times under load", reloads),
    "F38": ServingFault("forty clients that stop within a request", slow_clients, options=("--timeout-s", "2")),
    "F39": ServingFault("300 clients that leave before the response", leaving_clients),
    "F40": ServingFault("100,000 malformed requests", malformed_requests, clients=1),
    "F41": ServingFault("twice the load that serving can take", overload, options=OVERLOAD_OPTIONS),
}


def run(name: str, seed: int, folder: Path, bundles: Bundles, seconds: float = STORM_S) -> tuple[Record, str | None]:
    """Serve a bundle through a fault.

    Args:
        name: One of :data:`FAULTS`.
        seed: Determines the damage and the requests.
        folder: A new folder for versions and logs.
        bundles: The bundles that are served.
        seconds: The duration of the overload.

    Returns:
        The result, in which a row is a score, and its problem, which is None if there is no problem.
    """
    fault = FAULTS[name]
    job = Served(folder, bundles, *fault.options, clients=fault.clients)
    problem: str | None = None
    with ExitStack() as mounted:
        if fault.inject is disk_full:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", job.versions], check=True)
            mounted.callback(unmount, job.versions)
        mounted.callback(job.close)
        try:
            job.start()
            if fault.goes_on:
                job.more(WARM)
                before = job.memory()
            fault.inject(job, random.Random(seed), seconds)
            if fault.goes_on:
                grown = job.memory() - before
                assert grown < MEMORY, f"the memory grew by {grown >> 20} MiB"
            job.end_clients()
            job.wait("no request to wait", lambda: not job.metric("persia_serving_waiting_requests"))
            assert not job.metric("persia_serving_waiting_bytes")
            job.finish()
            check(job, fault)
        except AssertionError as error:
            problem = str(error)
    found = job.answers
    pause_s = round(found.longest_pause_s, 2)
    return Record(name, seed, job.injected, job.recovered, pause_s, found.checked, len(found.wrong)), problem


def unmount(folder: Path) -> None:
    """Remove the disk of a fault."""
    subprocess.run(["umount", folder], check=True)


def check(job: Served, fault: ServingFault) -> None:
    """Check the conditions at the end of every run."""
    found = job.answers
    assert not found.wrong, f"{len(found.wrong)} scores are wrong: {found.wrong[:5]}\n{job.logs()}"
    assert found.checked > 0
    refused = [each for each in found.failed if each[0].isdecimal()]
    assert not refused, f"{len(refused)} requests failed: {refused[:5]}\n{job.logs()}"
    assert job.injected > 0, "nothing was done to the process"
    assert job.recovered == job.injected, f"{job.injected} faults, {job.recovered} recoveries"
    if fault.goes_on:
        assert not found.failed, f"{len(found.failed)} requests failed: {found.failed[:5]}\n{job.logs()}"
        assert job.starts == 1, f"the process was started {job.starts} times\n{job.logs()}"
        assert fault.inject is overload or not found.busy, f"{found.busy} requests were refused"
