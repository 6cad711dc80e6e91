"""A served bundle under load: ``persia serve`` as a real process, and clients that compare every score.

Until the end of the run, ``Served`` restarts a killed process, as a container engine does. Its clients continuously
request scores. Each response names a bundle, and its scores must be those of that bundle.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow.parquet as pq
from stack import Part, start
from waiting import wait_until

import persia
from persia.data import synth
from persia.launch.local_job import Command
from persia.serving import Bundle, parity
from persia.trainer import Trainer
from persia.utils import find_free_port

KILLED = {-signal.SIGKILL}
PATIENCE_S = 120.0
"""Seconds in which an awaited event must occur."""
CLIENTS = 4
ROWS_PER_REQUEST = 5
REQUESTS = 20
"""The number of different requests."""
CLIENT_S = 30.0
"""Seconds after which a client without a response gives up."""
MEMORY = 64 << 20
"""The bytes by which the memory of the process may grow under a fault."""
CONFIG = """
data: {train: clicks.parquet, batch_size: 256}
features: {id0: {type: id, dim: 8}, id1: {type: id, dim: 8}, dense0: {type: dense}, dense1: {type: dense}}
labels: {label: {}}
"""

Floats = npt.NDArray[np.float32]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Bundles:
    """Two bundles of the same columns with different scores.

    Attributes:
        folder: The parent folder of the bundles ``a`` and ``b``. ``runs/a`` is a run that can be exported.
        identities: Their identities, ``a`` first.
        bodies: Different requests, as JSON records.
        scores: For each identity the scores of each request, float32 ``[rows]``.
    """

    folder: Path
    identities: tuple[str, str]
    bodies: list[bytes]
    scores: dict[str, list[Floats]]


def make_bundles(folder: Path) -> Bundles:
    """Train two models and export them to a folder, unless they exist. Compute the scores of the requests."""
    table = folder / "clicks.parquet"
    if not (folder / "b").exists():
        synth.write(table, 4_000, synth.Teacher((200, 2_000), dense=2, positive=0.3))
        (folder / "persia.yml").write_text(CONFIG)
        for name, seed in (("a", 0), ("b", 1)):
            keys = [f"run.name={name}", f"run.dir={folder / 'runs'}", f"train.seed={seed}", "data.epochs=1"]
            with Trainer(persia.load_config(folder / "persia.yml", keys)) as trainer:
                for _ in trainer.fit():
                    pass
            export(folder, name, folder / name)
    count = REQUESTS * ROWS_PER_REQUEST
    rows = pq.read_table(table).slice(0, count).drop_columns(["label"]).to_pylist()
    for number, row in enumerate(rows):
        row |= {"id0": 10**9 + number} if number % 3 == 0 else {}  # an id that did not occur in training
        row |= {"dense0": None} if number % 7 == 0 else {}
    parts = [rows[at : at + ROWS_PER_REQUEST] for at in range(0, count, ROWS_PER_REQUEST)]
    scores, identities = {}, []
    for name in ("a", "b"):
        with Bundle.open(folder / name) as bundle:
            scores[bundle.identity] = [bundle.score(part) for part in parts]
            identities.append(bundle.identity)
    pairs = zip(*scores.values(), strict=True)
    assert all(parity.difference(one, other) > 100 * parity.SAME for one, other in pairs), "the bundles are too alike"
    return Bundles(folder, (identities[0], identities[1]), [json.dumps(part).encode() for part in parts], scores)


def export(folder: Path, run: str, to: Path) -> None:
    """Export one of the two runs."""
    with Trainer(persia.load_config(folder / "runs" / run / "persia.yml", folder=folder)) as trainer:
        trainer.resume(folder / "runs" / run).export(to)


@dataclass
class Answers:
    """The responses so far.

    Attributes:
        good: The number of responses with scores.
        checked: The number of compared scores.
        wrong: The scores that are not those of the named bundle.
        failed: All other results: a status, or the error of a connection.
        busy: The number of refusals with 503 and ``Retry-After``.
        last: The bundle that the last response named.
        bundles: All bundles that responses named.
        longest_pause_s: The longest time between two successive good responses.
    """

    good: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    busy: int = 0
    last: str = ""
    bundles: set[str] = field(default_factory=set)
    longest_pause_s: float = 0.0
    _at: float | None = None

    def take(self, status: int, headers: Any, content: bytes, wanted: dict[str, Floats]) -> None:
        """Record a response, and compare its scores with those of the bundle that it names."""
        if status == 503 and headers.get("Retry-After"):
            self.busy += 1
            return
        if status != 200:
            self.failed.append(f"{status}: {content[:200]!r}")
            return
        found = json.loads(content)
        named, scores = found["bundle"], np.array(found["scores"], np.float32)
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - (self._at or now))
        self._at = now
        self.good += 1
        self.last = named
        self.bundles.add(named)
        self.checked += len(scores)
        if named not in wanted or scores.shape != wanted[named].shape:
            self.wrong.extend([f"{named}: {len(scores)} scores of an unknown bundle or of other rows"] * len(scores))
            return
        far = np.abs(scores - wanted[named]) > parity.SAME
        self.wrong.extend(f"{named}: {one}, expected {other}" for one, other in zip(scores[far], wanted[named][far]))  # noqa: B905


class Served:
    """``persia serve`` over a folder of versions, and its clients.

    Args:
        folder: The folder for the versions and the logs.
        bundles: The bundles to serve. Version 1 is the first of them.
        options: Options of ``persia serve``.
        clients: The number of clients that continuously request scores.
    """

    def __init__(self, folder: Path, bundles: Bundles, *options: str, clients: int = CLIENTS) -> None:
        self.folder = folder
        self.bundles = bundles
        self.versions = folder / "models"
        self.versions.mkdir(parents=True)
        self.port = find_free_port()
        self.answers = Answers()
        self.injected = self.recovered = self.starts = 0
        self._options = options
        self._clients = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(clients)]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._past: list[Part] = []
        self._part: Part | None = None

    # --- its process

    def start(self) -> None:
        """Serve version 1, and start the clients, without waiting."""
        if not (self.versions / "1").exists():
            self.place(1)
        self._start()
        for client in self._clients:
            client.start()

    def _start(self) -> None:
        words = [
            sys.executable,
            str(Path(sys.executable).with_name("persia")),
            "serve",
            str(self.versions),
            "--grpc",
            "none",
        ]
        words += ["--http", f"127.0.0.1:{self.port}", *self._options]
        self._part = start(Command("serving", words, {**os.environ, "LOG_FORMAT": "text"}), self.folder)
        self.starts += 1

    @property
    def part(self) -> Part:
        """The process that runs now."""
        assert self._part is not None
        return self._part

    @property
    def serves(self) -> bool:
        """Whether the process has loaded its first bundle."""
        return ": http" in self.part.output

    def look_after(self) -> None:
        """Restart the process if it was killed. Any other end is a failure."""
        if not self.part.process.running:
            assert self.part.process.code in KILLED, f"{self.part.process.outcome()}\n{self.part.output}"
            self._past.append(self.part)
            self._start()

    def wait(self, what: str, condition: Callable[[], Found | None], patience_s: float = PATIENCE_S) -> Found:
        """Wait for a condition, and supervise the process meanwhile."""

        def looked() -> Found | None:
            self.look_after()
            return condition()

        return wait_until(what, looked, patience_s, evidence=self.logs, interval=0.002)

    def says(self, text: str) -> None:
        """Wait until the process that runs has logged a text."""
        self.wait(f"{text!r}", lambda: text in self.part.output)

    def maps(self, version: int) -> bool:
        """Whether the running process has mapped files of a version."""
        try:
            text = Path(f"/proc/{self.part.process.pid}/maps").read_text()
        except OSError:
            return False
        return f"{self.versions / str(version)}/" in text

    def kill(self) -> None:
        """Kill the process."""
        self.note_fault()
        part = self.part
        part.process.signal(signal.SIGKILL)
        part.wait()

    def memory(self) -> int:
        """Return the resident memory of the process in bytes."""
        return int(psutil.Process(self.part.process.pid).memory_info().rss)

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=CLIENT_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))

    # --- its versions

    def place(self, version: int, which: int | None = None) -> str:
        """Copy a bundle to a version atomically, and return the identity of the bundle.

        Args:
            version: The number of the version. Odd versions have the first bundle, even versions the second one.
            which: 0 or 1 selects the bundle explicitly.
        """
        at = (version + 1) % 2 if which is None else which
        new = self.versions / f".{version}"
        shutil.copytree(self.source(at), new)
        new.rename(self.versions / str(version))
        return self.bundles.identities[at]

    def source(self, at: int) -> Path:
        """Return the folder of a bundle: 0 or 1."""
        return self.bundles.folder / "ab"[at]

    # --- the faults and the end

    def note_fault(self) -> None:
        """Count a fault."""
        self.injected += 1

    def more(self, count: int = 20, bundle: str | None = None) -> None:
        """Wait for more good responses. If a bundle is given, the last response must name it."""
        before = self.answers.good
        self.wait(
            f"{count} more responses" + (f" by {bundle}" if bundle else ""),
            lambda: self.answers.good >= before + count and bundle in (None, self.answers.last),
        )

    def recover(self, bundle: str | None = None) -> None:
        """Wait for good responses after a fault."""
        self.more(bundle=bundle)
        self.recovered += 1

    def finish(self) -> None:
        """End the clients, and then the process by SIGTERM. The process must exit with 0."""
        self.end_clients()
        self.part.process.signal(signal.SIGTERM)
        code = self.part.wait()
        assert code == 0, f"exit code {code}\n{self.logs()}"
        assert "Traceback" not in self.logs(), self.logs()

    def end_clients(self) -> None:
        """End the clients after their current request."""
        self._over.set()
        for client in self._clients:
            if client.ident is not None:
                client.join(2 * CLIENT_S)

    def close(self) -> None:
        """End all remaining threads and processes."""
        self.end_clients()
        if self._part is not None and self.part.process.running:
            self.part.process.signal(signal.SIGKILL)
            self.part.wait()

    def logs(self) -> str:
        """Return the output of all processes, for the report of a failure."""
        return "\n".join(f"--- serving {number}\n{part.output}" for number, part in enumerate([*self._past, self.part]))

    # --- its clients

    def _ask(self, seed: int) -> None:
        number = seed
        connection = HTTPConnection("127.0.0.1", self.port, timeout=CLIENT_S)
        while not self._over.is_set():
            number = (number + 1) % REQUESTS
            wanted = {name: scores[number] for name, scores in self.bundles.scores.items()}
            try:
                connection.request("POST", "/score", self.bundles.bodies[number])
                answer = connection.getresponse()
                status, headers, content = answer.status, answer.headers, answer.read()
            except (OSError, HTTPException) as error:
                connection.close()
                if self.serves_since_start:
                    with self._lock:
                        self.answers.failed.append(f"{type(error).__name__}: {error}")
                self._over.wait(0.02)
                continue
            with self._lock:
                self.answers.take(status, headers, content, wanted)
        connection.close()

    @property
    def serves_since_start(self) -> bool:
        """Whether there has been a good response. Before the first one, a refused connection is no failure."""
        return self.answers.good > 0
