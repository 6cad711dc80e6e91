"""Data-compose replicas of a job that trains from a ``persia.yml``: they read and transform rows, and send batches.

A replica reads its part of the training rows. The ranks send it the transform of the run
(``StreamingDataset(transform=...)``), so all replicas compute the same ids and floats. The rows of a step,
``data.batch_size * train.accumulate``, are divided among the ranks.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia.config import Config
from persia.config.document import load_for_job
from persia.ctx import DataCtx
from persia.data.records import RecordReader
from persia.embedding.data import PersiaBatch
from persia.features import Samples, Transform, to_batch
from persia.runtime.errors import CheckpointError, DataError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.trainer import fitting
from persia.trainer.batches import Unusual, weights_of
from persia.trainer.in_order import in_order
from persia.trainer.parts import Parts
from persia.trainer.variables import set_variables

_logger = get_logger("data")


def send(path: Path) -> None:
    """Send the training rows of all epochs to the trainers. Replica ``REPLICA_INDEX`` reads its part of them.

    Args:
        path: A ``persia.yml``.

    Raises:
        ConfigError: The file has errors.
        UsageError: A file of data does not exist, or the trainers send no transform.
        CheckpointError: The transform was fitted for other features.
        DataError: A row is invalid (the message names file and row), or the run is resumed with other data.
    """
    config = load_for_job(path)
    set_variables(config)
    parts = Parts(config)
    parts.train.check_not_empty()
    place, data = settings.place, config.data
    reader = parts.train.reader(
        config.step_rows,
        shuffle=data.shuffle,
        epochs=data.epochs,
        seed=config.train.seed,
        window_rows=data.window_rows,
        shard=(place.replica_index, place.replica_size),
    )
    unusual = Unusual()
    with DataCtx() as ctx:
        transform = _transform_of(config, ctx)
        sent = _resume(reader, ctx.resume())
        for batch, position in _batches(config, parts, reader, transform, ctx.world_size, unusual, sent):
            ctx.send_data(batch, position)
    _log(unusual)


def _resume(reader: RecordReader, position: str) -> int:
    """Set the reader to a position that this module has sent. Return how many pieces of the next batch were sent.

    Raises:
        DataError: The data differs from that of the position, or the position is that of a data script.
    """
    if not position:
        return 0
    try:
        at = json.loads(position)
        sent, state = int(at["pieces"]), {**at["reader"], "of": {"columns": "", **at["reader"]["of"]}}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the ranks have received batches of a data script; data-compose without a data script cannot continue at "
            "the position of that script",
            hint="resume with that data script (PERSIA_DATALOADER_ENTRY), or start a new run",
        ) from error
    identity = reader.state_dict()["of"]
    if state["of"]["columns"] != _short(identity)["columns"]:
        raise DataError(
            "the data differs from that of the checkpoint: other columns are read",
            hint="use the files and settings of the checkpoint, or start a new run",
        )
    reader.load_state_dict({**state, "of": {**state["of"], "columns": identity["columns"]}})
    _logger.info("continuing in epoch %d, at the rows after those that the ranks have received", reader.epoch)
    return sent


def _transform_of(config: Config, ctx: DataCtx) -> Transform:
    if not ctx.transform:
        raise UsageError(
            "the trainers send no transform, and data-compose needs one to make batches of rows",
            hint=(
                "train with StreamingDataset(transform=...), or run a script in data-compose (PERSIA_DATALOADER_ENTRY)"
            ),
        )
    try:
        return config.compiled.load(ctx.transform)
    except CheckpointError as error:
        hint = "start data-compose and the trainers from the same build"
        raise fitting.not_loaded("the transform of the trainers", error, hint) from error


def _short(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a reader with a digest instead of its columns, because each batch carries it."""
    columns = "\n".join(identity["columns"]).encode()
    return {**identity, "columns": hashlib.sha256(columns).hexdigest()[:16]}


@dataclass(frozen=True)
class _Read:
    """Rows that were read.

    Attributes:
        rows: The rows.
        epoch: The epoch of the rows.
        before: The position of the reader before the rows.
        after: The position of the reader after the rows.
    """

    rows: pa.RecordBatch
    epoch: int
    before: dict[str, Any]
    after: dict[str, Any]


def _read(reader: RecordReader) -> Iterator[_Read]:
    before = reader.state_dict()
    for rows in reader:
        after = reader.state_dict()
        yield _Read(rows, reader.epoch, before, after)
        before = after


def _batches(
    config: Config,
    parts: Parts,
    reader: RecordReader,
    transform: Transform,
    ranks: int,
    unusual: Unusual,
    sent: int = 0,
) -> Iterator[tuple[PersiaBatch, str]]:
    """Yield each batch for a rank, in the order of the ranks, and the position after this batch.

    A batch of the reader is divided into one piece for each rank. The first ``sent`` pieces of the first batch are
    omitted.
    """
    weight, data = config.train.weight, config.data

    def make(rows: pa.RecordBatch, first_row: int) -> tuple[Samples, npt.NDArray[np.float32] | None]:
        weights = None if weight is None else weights_of(rows, weight, first_row)
        return transform(rows, first_row=first_row), weights

    def made(read: _Read) -> tuple[_Read, Samples, npt.NDArray[np.float32] | None]:
        try:
            return read, *make(read.rows, 0)
        except DataError as error:
            raise parts.train.with_place(error, make) from error

    identity = _short(reader.state_dict()["of"])
    section = None if data.persistent else _epoch
    for read, samples, weights in in_order(_read(reader), made, data.workers, section=section):
        unusual.add(len(samples), samples.report.counts)
        bounds = pieces(len(samples), ranks)
        if not bounds:
            _logger.warning(
                "at the end of an epoch, %s not sent, because each of the %d ranks needs a row",
                "1 row is" if len(samples) == 1 else f"{len(samples)} rows are",
                ranks,
            )
        for piece, (start, stop) in enumerate(bounds[sent:], sent + 1):
            meta = None if weights is None else weights[start:stop].tobytes()
            at, pieces_sent = (read.before, piece) if piece < ranks else (read.after, 0)
            position = json.dumps({"reader": {**at, "of": identity}, "pieces": pieces_sent})
            yield to_batch(samples.slice(start, stop), meta=meta), position
        sent = 0


def _epoch(read: _Read) -> int:
    return read.epoch


def pieces(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the first row of each rank's piece of a batch, and the end of the piece.

    Pieces differ by at most one row. The result is empty if there are fewer rows than ranks, because all ranks take
    part in a step.
    """
    if rows < ranks:
        return []
    bounds = [rank * rows // ranks for rank in range(ranks + 1)]
    return [*itertools.pairwise(bounds)]


def _log(unusual: Unusual) -> None:
    _logger.info("end of all epochs; rows read and transformed: %d", unusual.rows)
    for feature, kinds in unusual.counts.items():
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        _logger.info("unusual values of feature %r: %s", feature, counts)
