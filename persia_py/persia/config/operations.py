"""The blocks of ``persia.yml`` for operators: ranks over a network, spot instances, costs, memory."""

from typing import Annotated, Literal

from pydantic import Field

from persia.config.block import Block


class CompressionBlock(Block):
    """Compression of the dense gradients that ranks average. All methods are lossy.

    Runs with equal configuration still give bit-identical results with ``train.reproducible``, but these differ from
    the results without compression. Not allowed with ``parallel: fsdp``.
    """

    name: Literal["fp16", "bf16", "powersgd"]
    """``fp16``, ``bf16``: gradients are sent in that type; with ``fp16``, a gradient beyond 65504 becomes infinite, and
    ``train.nonfinite`` applies. ``powersgd``: matrices are sent as products of two thin matrices (Vogels, Karimireddy
    and Jaggi 2019). The error on each rank is added to its next gradient, and is saved in checkpoints."""
    rank: Annotated[int, Field(ge=1)] = 1
    """With ``powersgd``: the number of columns of the thin matrices. More columns lose less and send more data."""
    start_iter: Annotated[int, Field(ge=2)] = 1000
    """With ``powersgd``: the number of steps at the start whose gradients are sent uncompressed."""


class DistBlock(Block):
    """How several ranks average the gradients of the dense model. The block has no effect with one rank."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """The library for collectives. ``auto``: ``nccl`` with GPUs, ``gloo`` without; the log shows the choice."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """The maximum time that a rank waits for others in a collective, in seconds. After that, the missing rank is named
    and the run exits with 70. Time in which all ranks compute, and time at a breakpoint, does not count. None: a day,
    because ``PERSIA_HANG_TIMEOUT`` detects a hang sooner."""
    interface: str | None = None
    """The network interface of each host, such as ``eth0``. None: the interface through which the host reaches NATS, or
    that of ``PERSIA_ADVERTISE``."""
    regions: dict[str, list[int]] | None = None
    """The ranks of each region, such as ``{east: [0, 1], west: [2, 3]}``: gradients are added up in each region, and
    one rank of each region sends the sum to the other regions. Each rank is in one region. The result equals that of
    one all-reduce, except for rounding. Not allowed with ``parallel: fsdp`` or ``powersgd``. None: one all-reduce over
    all ranks."""
    compression: CompressionBlock | None = None
    """The compression of gradients. None: they are sent in float32."""


class FsdpBlock(Block):
    """How the model is sharded with ``parallel: fsdp``. Otherwise the block has no effect."""

    reshard_after_forward: bool = False
    """Shard the weights again between the forward and the backward pass, so that they are gathered twice per step.
    This uses less memory and sends more data. ``true`` is what FSDP1 calls ``FULL_SHARD``, ``false`` is its
    ``SHARD_GRAD_OP``. The whole model is one unit, so there is nothing to prefetch."""


class SpotBlock(Block):
    """Polls for the termination notice of a spot (preemptible) instance, and saves the run before the instance ends.

    After a notice, all ranks finish the step, save the run and exit with 75. One rank of each trainer (a launcher or a
    container) polls.
    """

    url: str
    """The URL, such as ``http://169.254.169.254/latest/meta-data/spot/instance-action``. It must respond when
    training starts. The response formats of Amazon, Google and Azure are supported."""
    every_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two polls."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of each request, such as ``{Metadata-Flavor: Google}`` or ``{Metadata: "true"}`` for Azure."""
    token_url: str | None = None
    """The URL from which a token is fetched for each request, which Amazon's metadata service (IMDSv2) may require:
    ``http://169.254.169.254/latest/api/token``."""
    resource: str | None = None
    """On Azure: the name of this virtual machine. Events whose ``Resources`` list only others are ignored. None: all
    events count, including those of other machines in the availability set or scale set."""


class PriceBlock(Block):
    """Makes checkpoints more frequent while the price of the instances is volatile.

    Rank 0 polls. The price is volatile if the range of the last ten prices is at least the share ``volatile`` of their
    mean.
    """

    url: str
    """A URL that returns a number, or ``{"price": NUMBER}``. It must respond when training starts."""
    every_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds between two polls."""
    volatile: Annotated[float, Field(gt=0)] = 0.2
    """The smallest range of the last prices, as a share of their mean, at which the price counts as volatile."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 100
    """Steps between checkpoints while the price is volatile, instead of ``checkpoint.every``."""


class BudgetBlock(Block):
    """A limit on the cost of a run: price per hour times wall time, summed over all attempts.

    A run whose cost reaches the limit is saved, and exits with 0 and the status ``stopped``, without further
    evaluations.
    """

    usd: Annotated[float, Field(gt=0)]
    """The maximum cost of the run, over all attempts. It is checked before each step."""
    usd_per_hour: Annotated[float, Field(gt=0)]
    """The total price of all machines of the job per hour."""


class MemoryBlock(Block):
    """Logs the memory of each rank, and finds leaks."""

    every: Annotated[int, Field(ge=1)] = 100
    """Steps between two samples."""
    leaks: bool = False
    """Report steady growth once, with the Python lines and the tensors that grew most. Python allocations are recorded
    (tracemalloc), which makes Python code up to twice as slow."""
    limit_mb: Annotated[float, Field(gt=0)] = 100.0
    """With ``leaks``: the minimum growth that is reported, in MB per 1000 steps. Embedding rows do not count."""
