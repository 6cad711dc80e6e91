"""The blocks of ``persia.yml``, typed. Each field is one key; its docstring is the key's reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from typing_extensions import Self

from persia.config.block import Block
from persia.config.operations import BudgetBlock, DistBlock, FsdpBlock, MemoryBlock, PriceBlock, SpotBlock
from persia.runtime.settings import MAX_STALENESS
from persia_core.features import Features

Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Paths = str | list[str]
ColumnType = Literal["int64", "float64", "string", "bool", "timestamp", "date"]


class SplitBlock(Block):
    """How the rows of ``data.train`` are divided into the parts train, valid and test."""

    by: Literal["hash", "time", "file"] = "hash"
    """``hash``: by a hash of ``group``, or of the file name and the row number. ``time``: by ``column``. ``file``: the
    files of ``data.train``, ``data.valid`` and ``data.test`` are the parts."""
    fractions: tuple[Fraction, Fraction, Fraction] = (0.8, 0.1, 0.1)
    """With ``hash``: the shares of train, valid and test; their sum is 1."""
    group: str | None = None
    """With ``hash``: a column, such as the user. Rows with equal values are in the same part."""
    column: str | None = None
    """With ``time``: the column that holds the time."""
    valid: str | int | float | None = None
    """With ``time``: the start of valid, such as 2024-05-01. It is a number only if the column has numbers."""
    test: str | int | float | None = None
    """With ``time``: the start of test, in the same form as ``valid``."""
    seed: Seed = 0
    """With ``hash``: the seed of the hash."""


class DataBlock(Block):
    """The source of the rows."""

    train: Paths
    """Files, folders, globs or ``s3://`` URLs; relative paths are relative to the folder of ``persia.yml``."""
    valid: Paths | None = None
    """Files of the validation set. None: ``split`` takes the set from ``train``, or, with ``by: file``, there is no
    validation set."""
    test: Paths | None = None
    """Files of the test set. None: ``split`` takes the set from ``train``, or, with ``by: file``, there is no test
    set."""
    format: Literal["parquet", "csv", "tsv", "ipc"] | None = None
    """The format of the files. None: the extension of the first file determines it. A file with the extension of
    another format is refused."""
    preset: Literal["criteo"] | None = None
    """``criteo``: tab-separated files without a header, with the columns label, I1 to I13, C1 to C26."""
    columns: dict[str, ColumnType] = Field(default_factory=dict)
    """The types of the columns of text files. Columns that are not listed are strings, unless ``preset`` gives their
    types."""
    header: list[str] | None = None
    """The names of the columns, for text files whose first line is not a header."""
    split: SplitBlock = SplitBlock()
    """How ``train`` is divided."""
    shuffle: bool = True
    """Shuffle the training rows, in a new order for each epoch."""
    window_rows: Annotated[int, Field(ge=1)] = 1 << 18
    """The number of rows that are shuffled together. A larger value shuffles better and uses more memory."""
    batch_size: Annotated[int, Field(ge=1)] = 4096
    """The number of rows in a batch, over all ranks. With ``train.accumulate``, a step has several batches."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """The number of passes over the training rows."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """The number of threads that convert training rows to ids and floats, in the trainer, or in a job in each
    data-compose. Arrow uses separate threads to read and decode files. Batches and their order do not depend on it."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The number of batches that are prepared ahead of training. In a job: the number of batches from each data-compose
    that wait at each rank. Each worker prepares one more. None: 4, or 10 in a job."""
    persistent: bool = True
    """Keep the threads of ``workers`` for the whole run. With ``false`` they end with each epoch: the last batch of an
    epoch is ready before the first row of the next is converted."""
    pin: bool = True
    """Copy batches to a GPU through page-locked memory, which is reused for later batches. Only ``true`` is allowed.
    Without a GPU it has no effect."""
    synthetic: bool = False
    """Train on rows that are drawn at random from the first batches, without reading more data. This shows whether the
    data limits the speed. Such a run is below ``synthetic`` in ``run.dir``. Not allowed in a job."""


class OptimizerBlock(BaseModel):
    """An optimizer. ``name`` selects it; the other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str
    """For rows: ``adagrad``, ``adam``, ``sgd``. For the model: ``adam``, ``adamw``, ``adagrad``, ``sgd``."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The other keys, which are the arguments of the optimizer."""
        return dict(self.__pydantic_extra__ or {})


class ModelBlock(BaseModel):
    """The model. ``name`` or ``class`` selects it; the other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True, use_attribute_docstrings=True)

    name: str | None = None
    """``dlrm``, ``dcnv2``, ``autoint``, or ``tiny`` for tests: one linear layer."""
    class_: Annotated[str | None, Field(alias="class")] = None
    """Your own model as ``module:Class``. The module is searched for in the folder of ``persia.yml``, then in those of
    ``sys.path``."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The other keys, which are the arguments of the model."""
        return dict(self.__pydantic_extra__ or {})


class EarlyStopBlock(Block):
    """Stops training when a metric of the validation set no longer improves. Keeps the model of the best evaluation."""

    metric: Literal["auc", "log_loss", "ne", "gauc", "loss"] = "auc"
    """The metric that must improve: a metric of the first label, or ``loss``, the loss of all labels together."""
    patience: Annotated[int, Field(ge=1)] = 3
    """The number of evaluations in a row without an improvement after which training stops."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """The difference that an improvement must exceed."""


class TrainBlock(Block):
    """How the model is trained."""

    embedding_optimizer: OptimizerBlock = OptimizerBlock(name="adagrad")
    """The optimizer of rows."""
    dense_optimizer: OptimizerBlock = OptimizerBlock(name="adam")
    """The optimizer of the weights of the model."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The schedule of both learning rates over all epochs, after ``warmup``."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """The number of steps in which both learning rates rise from 0."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """The maximum norm of the gradient of the model's weights. Gradients of embeddings are not clipped."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """The number of batches in a step. Their gradients are added up, for model and rows. The result equals that of one
    batch of ``accumulate * data.batch_size`` rows, except for rounding. The model runs on one batch at a time."""
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    """The number of rows that the model processes at a time on a rank. A smaller number needs less memory. Gradients
    are added up over the batch. None: the whole batch. If memory runs out, all ranks halve the number together;
    ``docs/training.md`` lists the exceptions."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """What happens if the loss or a gradient is NaN or infinite: training ends, or all ranks skip the step. Model and
    rows do not change. With ``precision: fp16``, gradients that overflow because of the loss scale skip the step in
    both cases. The 25th skipped step in a row ends training."""
    detect_anomaly: bool = False
    """Let torch find the operation whose gradient has NaN. Training takes several times as long."""
    staleness: Annotated[int, Field(ge=1, le=MAX_STALENESS)] = 4
    """The maximum staleness of look-ups: when a look-up is served, at most ``staleness - 1`` pushes are in flight."""
    reproducible: bool = False
    """Give bit-identical results for runs with equal configuration and data. ``staleness`` is then 1."""
    seed: Seed = 0
    """The seed of the initial weights of the model and of the rows, and of the order of the data."""
    threads: Annotated[int, Field(ge=1)] = 1
    """The number of threads that torch uses for the model."""
    start_from: str | None = None
    """A checkpoint written by ``persia ckpt import``. A new run starts from its rows. A relative path is relative to
    the folder of ``persia.yml``, or in a job to ``PERSIA_CKPT_DIR``. In a job, an absolute path must be below that
    folder. None: new rows."""
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the validation set. None: at most ten evaluations in a run, at equal distances; with
    more than ten epochs, one at the end of each epoch."""
    early_stop: EarlyStopBlock | None = None
    """The condition for stopping early. None: training ends after all epochs."""
    metrics: list[Literal["auc", "log_loss", "ne", "calibration", "gauc"]] = Field(
        default_factory=lambda: ["auc", "log_loss", "ne", "calibration"]  # type: ignore[arg-type]
    )
    """The metrics that an evaluation reports. For a label with ``loss: mse``, these are ``mse`` and ``mae``, and
    ``calibration`` if it is listed."""
    gauc_group: str | None = None
    """The column whose values are the groups of ``gauc``, such as the user."""
    weight: str | None = None
    """The column that holds a weight for each row, used in the loss and in the metrics."""


class CheckpointBlock(Block):
    """The checkpoints of a run."""

    dir: str | None = None
    """The folder, or a URL such as ``s3://bucket/prefix``, below which each run has its checkpoints, under its
    name. A relative path is relative to the working directory. Rank 0 and every server write to a URL. None:
    ``checkpoints`` in the run's folder. In a job, only a URL has an effect."""
    every: Annotated[int, Field(ge=1)] = 1000
    """Steps between checkpoints. A checkpoint is always written at the end of training."""
    keep: Annotated[int, Field(ge=1)] = 3
    """The number of checkpoints that are kept, in addition to the best one."""
    keep_days: Annotated[float, Field(gt=0, le=36_500)] | None = None
    """The maximum age of a checkpoint in days. Older ones are deleted too, except the newest and the best. None: no
    limit."""
    verify: bool = False
    """Read each checkpoint after it is written, and compare every hash. A checkpoint whose hashes differ counts as
    failed."""
    upload_to: str | None = None
    """A URL such as ``s3://bucket/prefix`` below which each checkpoint is uploaded, under the name of the run."""
    allow_previous: bool = False
    """If the newest checkpoint is damaged, resume after the newest intact one, with a warning. Otherwise a resume is
    refused."""


class NcclBlock(Block):
    """Settings of NCCL: environment variables of the ranks. A variable of the environment overrides its key."""

    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """``NCCL_DEBUG``: the log level of NCCL."""
    debug_subsys: str | None = None
    """``NCCL_DEBUG_SUBSYS``: the parts that log, such as ``INIT,NET`` or ``ALL``."""
    ib_disable: bool | None = None
    """``NCCL_IB_DISABLE``: use TCP instead of InfiniBand."""
    socket_ifname: str | None = None
    """``NCCL_SOCKET_IFNAME``: the prefix of interface names; ``=eth0`` matches exactly, ``^lo`` excludes. None:
    ``dist.interface``."""
    topo_file: str | None = None
    """``NCCL_TOPO_FILE``: a topology file. A relative path is relative to the folder of ``persia.yml``."""


class ProfileBlock(Block):
    """Records some steps of training: their times, and a trace that TensorBoard and Perfetto can open.

    ``persia train --profile`` adds the block with its defaults. ``persia profile report RUN`` shows the bottleneck of
    the run.
    """

    wait: Annotated[int, Field(ge=0)] = 5
    """The number of steps at the start that are not recorded."""
    warmup: Annotated[int, Field(ge=0)] = 5
    """The number of following steps in which torch's profiler runs but its results are discarded."""
    active: Annotated[int, Field(ge=1)] = 20
    """The number of steps that are recorded."""
    stack: bool = False
    """Record the Python stack of each operation in the trace. This slows down the recorded steps."""
    memory: bool = False
    """Also record which operations allocate memory. ``persia profile memory RUN`` shows the table."""


class RunBlock(Block):
    """The folder of a run, and its output."""

    dir: str = "runs"
    """The folder of all runs. A relative path is relative to the working directory. In containers and on Kubernetes,
    ``PERSIA_RUN_DIR`` is the folder of the run, and ``dir`` and ``name`` have no effect."""
    name: str | None = None
    """The name of the run's folder. None: the time of the start."""
    log_every: Annotated[int, Field(ge=1)] = 50
    """Steps between two lines of ``metrics.jsonl``."""
    tensorboard: bool = False
    """Also write event files for TensorBoard."""


@dataclass(frozen=True)
class Use:
    """A column that a key of the file reads.

    Attributes:
        column: The name of the column.
        by: The key that reads it, such as ``features.price``.
        place: Where the key is: ``persia.yml:18``, or the ``--set`` that gave it.
    """

    column: str
    by: str
    place: str


@dataclass(frozen=True)
class Origin:
    """The places of the keys of a configuration, for messages about its data.

    Attributes:
        places: The place of each feature and label, under ``features.NAME`` and ``labels.NAME``. Also the places of the
            model, its arguments and the items of their lists, under ``model``, ``model.KEY`` and ``model.KEY[0]``.
        uses: The columns that are read.
        overrides: The texts after ``--set``.
    """

    places: Mapping[str, str] = field(default_factory=dict)
    uses: Sequence[Use] = ()
    overrides: Sequence[str] = ()

    def used_by(self) -> dict[str, list[str]]:
        """Return the key and place that read each column, in the form of messages."""
        found: dict[str, list[str]] = {}
        for use in self.uses:
            found.setdefault(use.column, []).append(f"{use.by} ({use.place})")
        return found


class Config(Block):
    """A complete ``persia.yml``."""

    data: DataBlock
    """The source of the rows."""
    features: dict[str, Any]
    """The features: see docs/transforms.md."""
    labels: dict[str, Any]
    """The labels: see docs/transforms.md."""
    model: ModelBlock = ModelBlock(name="dcnv2")
    """The model."""
    train: TrainBlock = TrainBlock()
    """How the model is trained."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The precision of the model's forward pass in training: with ``bf16`` and ``fp16``, torch's autocast computes
    matrix products in that type. ``fp16`` also scales the loss. Weights, embeddings and evaluations are float32."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several ranks train the model. ``ddp``: each rank has all weights. ``fsdp``: gradients, optimizer state and,
    between steps, weights are sharded over the ranks. Both write the same checkpoints."""
    checkpoint: CheckpointBlock = CheckpointBlock()
    """Checkpoints of a run."""
    run: RunBlock = RunBlock()
    """The folder of a run, and its output."""
    fsdp: FsdpBlock = FsdpBlock()
    """How the model is sharded with ``parallel: fsdp``."""
    dist: DistBlock = DistBlock()
    """How several ranks average dense gradients."""
    nccl: NcclBlock = NcclBlock()
    """Settings of NCCL."""
    profile: ProfileBlock | None = None
    """Which steps are recorded. None: none."""
    memory: MemoryBlock | None = None
    """How memory is logged. None: memory is not logged."""
    spot: SpotBlock | None = None
    """Where the termination of a spot instance is announced. None: nothing is polled."""
    price: PriceBlock | None = None
    """Where the price of instances is polled. None: it is not polled."""
    budget: BudgetBlock | None = None
    """The limit on the cost of the run. None: there is no limit."""
    env: dict[str, str | None] = Field(default_factory=dict)
    """Environment variables that the model or the data needs. A variable without a value (``NAME:``) must be set in the
    environment. Use this for secrets, because a run keeps a copy of this file."""

    _folder: Path = PrivateAttr()
    _compiled: Features = PrivateAttr()
    _described: str = PrivateAttr()
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def step_rows(self) -> int:
        """The number of rows of a step, over all ranks."""
        return self.data.batch_size * self.train.accumulate

    @property
    def is_located(self) -> bool:
        """Whether the configuration was read from a file, and not built by a program."""
        return self.__pydantic_private__ is not None and "_folder" in self.__pydantic_private__

    @property
    def folder(self) -> Path:
        """The folder of the file. Paths of data are relative to it."""
        return self._folder

    @property
    def compiled(self) -> Features:
        """The features and labels, compiled."""
        return self._compiled

    @property
    def described(self) -> str:
        """The blocks ``features`` and ``labels`` as YAML, after overrides."""
        return self._described

    @property
    def origin(self) -> Origin:
        """Where the keys of the file are."""
        return self._origin

    def __eq__(self, other: object) -> bool:
        """Whether all keys have equal values."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # keys hold lists

    def located(self, folder: Path, compiled: Features, described: str, origin: Origin) -> Self:
        """Return this configuration with the information that :func:`load_config` adds to the keys."""
        self._folder, self._compiled, self._described, self._origin = folder, compiled, described, origin
        return self

    def with_data(self, **keys: Any) -> Self:
        """Return this configuration with other values of keys of ``data``."""
        return self.with_blocks(data=self.data.model_copy(update=keys))

    def with_blocks(self, **blocks: Any) -> Self:
        """Return this configuration with new values of ``blocks``; ``features`` and ``labels`` cannot be replaced."""
        return self.model_copy(update=blocks).located(self.folder, self.compiled, self.described, self.origin)


RESERVED = ("serving", "publish")
"""Block names that are reserved for later versions."""
