"""The common part of both protocols: the bundle, its readiness, and the scores of requests."""

import time
from dataclasses import dataclass
from typing import Any

from persia.serving.batching import Batcher, Decode, Scores
from persia.serving.limits import Limits
from persia.serving.metrics import Metrics
from persia.serving.refusals import StoppingError, UnknownError
from persia.serving.reload import Reloader
from persia.serving.tensors import OFFSETS


@dataclass
class Service:
    """A serving process.

    Attributes:
        name: The name of the model.
        limits: The limits.
        metrics: The metrics.
        batcher: The batcher, which scores requests.
        reloader: The reloader, which has the served model.
        expected: The required value of the header ``authorization``; None admits every request.
        draining: Whether the process will stop soon: it is not ready, but still serves new requests.
        stopping: Whether the process is stopping: it is not ready, and refuses new requests.
    """

    name: str
    limits: Limits
    metrics: Metrics
    batcher: Batcher
    reloader: Reloader
    expected: bytes | None = None
    draining: bool = False
    stopping: bool = False

    @property
    def ready(self) -> bool:
        """Whether clients should send requests."""
        return not (self.draining or self.stopping)

    @property
    def model(self) -> Any:
        """The served model."""
        return self.reloader.model

    def check_model(self, name: str, version: str | None) -> None:
        """Check that a model is served.

        Raises:
            UnknownError: The model is not served.
        """
        if name != self.name:
            raise UnknownError(f"no model {name!r}; this server has {self.name!r}")
        self._check_version(version, self.model)

    def for_version(self, version: str | None, decode: Decode) -> Decode:
        """Return a decode function that refuses other versions: a newer bundle may be loaded while a request waits.

        Args:
            version: The version in the request; None or empty accepts any.
            decode: Returns the rows of the request for a model.
        """

        def checked(model: Any) -> Any:
            self._check_version(version, model)
            return decode(model)

        return checked

    def _check_version(self, version: str | None, model: Any) -> None:
        if version and version != model.identity:
            raise UnknownError(f"no version {version!r} of {self.name!r}; this server has {model.identity!r}")

    async def score(self, decode: Decode, size: int, timeout_s: float | None = None) -> Scores:
        """Return the scores of an accepted request. The batcher releases the request when it is done.

        If the call is canceled, the rows stay in memory until the thread of the batcher reaches them.

        Args:
            decode: Returns the rows of the request for a model.
            size: The size that was accepted, in bytes.
            timeout_s: Seconds that the client waits, at most the limit; None means the limit.

        Raises:
            RefusedError: The request gets no scores.
        """
        if self.stopping:
            self.batcher.release(size)
            raise StoppingError("the server is stopping; send the request to another server")
        timeout = self.limits.timeout_s if timeout_s is None else min(timeout_s, self.limits.timeout_s)
        return await self.batcher.submit(decode, timeout, lambda: self.batcher.release(size))

    def answered(self, api: str, outcome: str, began: float) -> None:
        """Record the end of a request that began at this time of :func:`time.monotonic`."""
        self.metrics.answered(api, outcome, time.monotonic() - began)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the model: name, datatype, and shape, where -1 means any size."""

    name: str
    datatype: str
    shape: list[int]


def inputs(model: Any) -> list[TensorInfo]:
    """Return the input tensors of a model."""
    found = []
    for column in model.inputs:
        found.append(TensorInfo(column.name, column.datatype, [-1]))
        if column.is_list:
            found.append(TensorInfo(f"{column.name}{OFFSETS}", "INT64", [-1]))
    return found


def outputs(model: Any) -> list[TensorInfo]:
    """Return the output tensors of a model: the scores of each label."""
    return [TensorInfo(name, "FP32", [-1]) for name in output_names(model)]


def output_names(model: Any) -> list[str]:
    """Return the names of the scores, as in ``persia predict``: ``score``, or ``score_LABEL`` for each label."""
    labels = list(model.labels)
    return ["score"] if len(labels) == 1 else [f"score_{label}" for label in labels]
