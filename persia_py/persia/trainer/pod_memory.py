"""Estimates the memory of the pods of a job on Kubernetes, with :mod:`persia.trainer.sizing`."""

from collections.abc import Iterator
from dataclasses import dataclass

from persia.config import Config
from persia.trainer import sizing

_MIB = 1 << 20
SERVER_BASE = 512 * _MIB
"""The memory of a server in addition to its rows, in bytes: memory kept from past requests, and buffers."""
MIDDLEWARE_BASE = 256 * _MIB
"""The memory of a middleware, in bytes."""
SHM = 1024 * _MIB
"""The size of ``/dev/shm`` in a pod with Python, which counts as its memory, in bytes."""


@dataclass(frozen=True)
class Pod:
    """The memory of each pod of a workload.

    Attributes:
        api: The API version of the workload.
        kind: The kind of the workload.
        name: The name of the workload and of its container.
        request: The memory that a node must have free for the pod, in bytes.
        limit: The memory above which the pod is killed, in bytes.
    """

    api: str
    kind: str
    name: str
    request: int
    limit: int


def pods_of(config: Config, servers: int, trainers: int, ranks: int) -> tuple[sizing.Sizing, list[Pod]]:
    """Estimate the memory of the pods of a job, reading the data of the configuration as a run does.

    Args:
        config: The configuration.
        servers: The number of embedding servers.
        trainers: The number of pods with ranks.
        ranks: The number of ranks in each of these pods.

    Raises:
        DataError: A value cannot be used, or there are no rows.
        ConfigError: The model cannot be created.
    """
    found = sizing.of_config(config, sizing.Place(servers, ranks_here=ranks, ranks=trainers * ranks))
    rows = round(found.server / sizing.FULL)
    trainer = round(ranks * found.trainer / sizing.FULL)
    requests = trainers * ranks * found.batches
    data = sizing.BASE + trainers * ranks * found.batches
    return found, [
        # While a checkpoint is written, changed rows are copied. At most all rows are copied.
        Pod("apps/v1", "StatefulSet", "server", SERVER_BASE + rows, SERVER_BASE + rows + found.server),
        Pod("apps/v1", "Deployment", "middleware", MIDDLEWARE_BASE + requests, 2 * (MIDDLEWARE_BASE + requests)),
        Pod("batch/v1", "Job", "trainer", trainer, trainer + SHM),
        Pod("batch/v1", "Job", "data-compose", data, data + SHM),
    ]


def patch(pods: list[Pod]) -> Iterator[str]:
    """Yield the lines of a Kustomize patch that sets the memory of the workloads."""
    for number, pod in enumerate(pods):
        if number:
            yield "---"
        yield f"apiVersion: {pod.api}"
        yield f"kind: {pod.kind}"
        yield f"metadata: {{name: {pod.name}}}"
        yield "spec:"
        yield "  template:"
        yield "    spec:"
        yield "      containers:"
        yield f"        - name: {pod.name}"
        request, limit = _mib(pod.request), _mib(pod.limit)
        yield f"          resources: {{requests: {{memory: {request}}}, limits: {{memory: {limit}}}}}"


def _mib(size: int) -> str:
    return f"{-(-size // _MIB)}Mi"
