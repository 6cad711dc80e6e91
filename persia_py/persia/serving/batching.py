"""Scores waiting requests together, in one thread.

The event loop submits requests. The thread takes all waiting requests, computes their ids and floats, scores them as
one batch, and returns the scores. A request that is invalid or makes the model fail does not affect other requests. A
batch is scored by one bundle. The bundle can be replaced between two batches.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from persia.features import Samples
from persia.runtime.errors import PersiaError
from persia.runtime.logging import get_logger
from persia.serving.limits import Limits
from persia.serving.metrics import Metrics
from persia.serving.refusals import BusyError, FailedError, InvalidError, LateError, RefusedError, TooLargeError

_logger = get_logger("serving")

_BROKEN = "the server has failed and stops; its log has the cause"


class Model(Protocol):
    """The interface of the served model: a bundle."""

    @property
    def identity(self) -> str:
        """The unique name of this bundle."""

    @property
    def exported_at(self) -> float:
        """The time at which this bundle was exported, as Unix time."""

    def transform(self, data: Any) -> Samples:
        """Return ids and floats of rows, which are a table, a list of records, or JSON text.

        Raises:
            PersiaError: The rows are invalid.
        """

    def score(self, samples: Samples) -> tuple[npt.NDArray[np.float32], int, int]:
        """Return the scores, ``[rows, labels]``, the number of unique ids, and the number of ids without a row."""

    def close(self) -> None:
        """Release files and memory."""


Decode = Callable[[Any], Any]
"""Returns the rows of a request for a given model."""


@dataclass(frozen=True)
class Scores:
    """The scores of a request.

    Attributes:
        model: The bundle that has computed them.
        values: Scores, float32 ``[rows, labels]``.
        unusual: The number of values that each feature replaced, by feature and kind.
    """

    model: Any
    values: npt.NDArray[np.float32]
    unusual: dict[str, dict[str, int]]


@dataclass(eq=False, slots=True)
class _Job:
    """A request: its rows, its timeout and deadline, the future of its response, and the callback for its end."""

    decode: Decode
    timeout_s: float
    deadline: float
    answer: "asyncio.Future[Scores]"
    ended: Callable[[], None]
    samples: Samples | None = None
    result: Scores | RefusedError | None = None


@dataclass(eq=False, slots=True)
class _Switch:
    """A switch to another model."""

    model: Any
    done: "Future[Any]" = field(default_factory=Future)


class Batcher:
    """The queue of requests, and the thread that scores them.

    Attributes:
        broken: An event that is set if the thread has ended without :meth:`close`. All requests then fail.
    """

    def __init__(self, model: Any, limits: Limits, metrics: Metrics) -> None:
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._queue: queue.SimpleQueue[_Job | _Switch | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._waiting = 0
        self._bytes = 0
        self._not_finite_of: Any = None
        self.broken = asyncio.Event()
        self._jobs: set[_Job] = set()  # jobs in the thread, including canceled jobs
        self._thread = threading.Thread(target=self._run, name="persia-serving", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of accepted requests without a response, including canceled requests that the thread still has."""
        return self._waiting

    @property
    def waiting_bytes(self) -> int:
        """The size of these requests, in bytes."""
        return self._bytes

    def reserve(self, size: int) -> None:
        """Accept a request of this size, which must then be submitted or released.

        Raises:
            BusyError: Too many requests or bytes are waiting.
        """
        limits = self._limits
        if self._waiting >= limits.waiting or self._bytes + size > limits.waiting_bytes:
            own = f" of {size} bytes" if size else ""
            raise BusyError(
                f"this request{own} exceeds the limits: {self._waiting} of {limits.waiting} requests and "
                f"{self._bytes} of {limits.waiting_bytes} bytes are already waiting; try again later"
            )
        self._waiting += 1
        self._bytes += size

    def grow(self, size: int) -> None:
        """Accept additional bytes of an accepted request.

        Raises:
            BusyError: Too many bytes are waiting.
        """
        if self._bytes + size > self._limits.waiting_bytes:
            raise BusyError(
                f"{size} more bytes of this request exceed the limit: {self._bytes} of {self._limits.waiting_bytes} "
                "bytes are already waiting; try again later"
            )
        self._bytes += size

    def release(self, size: int) -> None:
        """Release an accepted request after its response."""
        self._waiting -= 1
        self._bytes -= size

    def submit(
        self, decode: Decode, timeout_s: float, ended: Callable[[], None] = lambda: None
    ) -> "asyncio.Future[Scores]":
        """Submit an accepted request, and return the future of its scores.

        Args:
            decode: Returns the rows of the request; called in the thread of the batcher.
            timeout_s: Seconds after which the request is refused if it is still waiting.
            ended: Called once, when the thread no longer has the request. For a canceled future, this is later.
        """
        answer = self._loop.create_future()
        if self.broken.is_set():
            answer.set_exception(FailedError(_BROKEN))
            ended()
            return answer
        job = _Job(decode, timeout_s, time.monotonic() + timeout_s, answer, ended)
        self._jobs.add(job)
        self._queue.put(job)
        return answer

    def switch(self, model: Any) -> "Future[Any]":
        """Score all later batches with another model.

        The result is a future of the previous model, which is not closed.
        """
        switch = _Switch(model)
        self._queue.put(switch)
        return switch.done

    def close(self) -> None:
        """Complete the submitted requests, end the thread, and close the model."""
        self._queue.put(None)
        self._thread.join()
        self._model.close()

    def _run(self) -> None:
        try:
            self._answer_all()
        except BaseException as error:
            _logger.critical("the scoring thread has ended: %s: %s", type(error).__name__, error, exc_info=error)
            self._loop.call_soon_threadsafe(self._break)

    def _break(self) -> None:
        """Fail all requests, in the event loop."""
        self.broken.set()
        for job in self._jobs:
            job.result = FailedError(_BROKEN)
        self._deliver([*self._jobs])

    def _deliver(self, jobs: list[_Job]) -> None:
        """Complete the responses of jobs that the thread no longer has, in the event loop."""
        for job in jobs:
            if job not in self._jobs:  # the job failed together with the thread
                continue
            self._jobs.remove(job)
            job.ended()
            if job.answer.done():
                continue
            if isinstance(job.result, Scores):
                job.answer.set_result(job.result)
            elif job.result is not None:
                job.answer.set_exception(job.result)

    def _answer_all(self) -> None:
        """Process requests until the batcher is closed."""
        ahead: _Job | _Switch | None = None
        while True:
            found = ahead or self._queue.get()
            ahead = None
            if found is None:
                return
            if isinstance(found, _Switch):
                before, self._model = self._model, found.model
                if found.done.set_running_or_notify_cancel():
                    found.done.set_result(before)
                else:  # the process is stopping, so the previous model is no longer needed
                    before.close()
                continue
            jobs, ahead, ends = self._collect(found)
            if jobs:
                self._score(jobs)
            if ends:
                return

    def _collect(self, first: _Job) -> "tuple[list[_Job], _Job | _Switch | None, bool]":
        """Return the jobs of a batch, a job or switch that was already taken, and whether the batcher was closed."""
        limit, delay = self._limits.batch_rows, self._limits.batch_delay_s
        until = time.monotonic() + delay
        refused: list[_Job] = []
        jobs: list[_Job] = []
        rows, found = 0, first
        try:
            while True:
                self._prepare(found)
                if found.samples is None:
                    refused.append(found)
                else:
                    count = len(found.samples)
                    if jobs and rows + count > limit:
                        return jobs, found, False
                    jobs.append(found)
                    rows += count
                if rows >= limit:
                    return jobs, None, False
                try:
                    left = until - time.monotonic() if delay else 0.0
                    following = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
                except queue.Empty:
                    return jobs, None, False
                if not isinstance(following, _Job):
                    return jobs, following, following is None
                found = following
        finally:
            if refused:
                self._loop.call_soon_threadsafe(self._deliver, refused)

    def _prepare(self, job: _Job) -> None:
        """Compute ids and floats of a job, or refuse it."""
        if job.samples is not None or job.result is not None:
            return
        if job.answer.cancelled():
            job.result = LateError("the client has disconnected")
        elif time.monotonic() > job.deadline:
            text = f"the request waited longer than its timeout of {job.timeout_s:.3g} s; try again later"
            job.result = LateError(text)
        else:
            try:
                samples = self._model.transform(job.decode(self._model))
                if len(samples) > (limit := self._limits.request_rows):
                    raise TooLargeError(f"the request has {len(samples)} rows, the limit is {limit}")
                job.samples = samples
            except RefusedError as error:
                job.result = error
            except (PersiaError, ValueError, TypeError) as error:
                job.result = InvalidError(str(error))
            except BaseException as error:  # a Rust panic is not an Exception
                job.result = self._failed(error)

    def _score(self, jobs: list[_Job]) -> None:
        began = time.monotonic()
        try:
            rows = self._score_together(jobs)
        except BaseException as error:
            rows = 0
            if len(jobs) == 1:
                jobs[0].result = self._failed(error)
            else:
                for job in jobs:
                    try:
                        rows += self._score_together([job])
                    except BaseException as alone:
                        job.result = self._failed(alone)
        self._metrics.rows.inc(rows)
        self._metrics.batch_rows.observe(rows)
        self._metrics.batch_seconds.observe(time.monotonic() - began)
        self._loop.call_soon_threadsafe(self._deliver, jobs)

    def _score_together(self, jobs: list[_Job]) -> int:
        """Set the results of jobs, and return the number of rows."""
        parts = [job.samples for job in jobs if job.samples is not None]
        samples = parts[0] if len(parts) == 1 else Samples.concat(parts)
        values, ids, unseen = self._model.score(samples)
        self._metrics.ids.inc(ids)
        self._metrics.unseen_ids.inc(unseen)
        counts = samples.report.counts
        for feature, kinds in counts.items():
            for kind, count in kinds.items():
                self._metrics.unusual.labels(feature, kind).inc(count)
        at = 0
        for job, part in zip(jobs, parts, strict=True):
            unusual = part.report.counts if counts else {}
            own = values[at : at + len(part)]
            job.result = Scores(self._model, own, unusual) if np.isfinite(own).all() else self._not_finite()
            at += len(part)
        return at

    def _failed(self, error: BaseException) -> FailedError:
        _logger.error("the model failed: %s: %s", type(error).__name__, error, exc_info=error)
        return FailedError("the model failed; the server's log has the cause")

    def _not_finite(self) -> FailedError:
        if self._not_finite_of is not self._model:  # logged once for each bundle
            self._not_finite_of = self._model
            text = "bundle %s returned a score that is not finite; requests with such scores fail"
            _logger.error(text, self._model.identity)
        return FailedError("the model returned a score that is not a finite number")
