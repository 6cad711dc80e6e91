"""Record batches of equal size, in an order that depends on the seed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia.data.records.files import Files, Unit
from persia.data.records.split import PARTS, Split, mix, parts_in
from persia.embedding.listed import listed
from persia.runtime.errors import DataError, UsageError

WINDOW_ROWS = 1 << 18
"""The default number of rows that are shuffled together."""


class RecordReader:
    """Reads one part of files as record batches of equal size, epoch after epoch.

    With ``shuffle``, the units of the files have a different order in each epoch, and rows are shuffled within windows
    of ``window_rows``. A unit is a row group of a Parquet file, or a whole file of another format. Memory is bounded by
    one window and Arrow's read-ahead. The order depends on the arguments and files only.

    With several readers of the same files, ``shard=(index, count)`` reads one of ``count`` parts: every ``count``-th
    unit, or every ``count``-th row of each unit if there are fewer units than that.

    A reader can be resumed: :meth:`state_dict` returns the position after the last batch that was yielded. A resumed
    reader reads at most one unit and one window again.

    Args:
        files: The files that are read.
        batch_size: The number of rows in a batch. Only the last batch of an epoch may have fewer.
        split: The rule that assigns parts; None means that all rows are in ``part``.
        part: ``train``, ``valid`` or ``test``.
        epochs: The number of passes over the files.
        shuffle: Whether to shuffle rows; otherwise they come in the order of the files.
        seed: The seed of the order.
        window_rows: The number of rows that are shuffled together, rounded up to whole batches.
        shard: The index of this reader, and the number of readers.

    Raises:
        UsageError: An argument is out of range, or the part does not exist.
    """

    def __init__(
        self,
        files: Files,
        batch_size: int,
        *,
        split: Split | None = None,
        part: str = "train",
        epochs: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        window_rows: int = WINDOW_ROWS,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        numbers = {"batch_size": batch_size, "epochs": epochs, "window_rows": window_rows}
        wrong = [f"{name}={number}: must be at least 1" for name, number in numbers.items() if number < 1]
        if part not in PARTS:
            wrong.append(f"part={part!r}: expected one of {', '.join(PARTS)}")
        if not 0 <= shard[0] < shard[1]:
            wrong.append(f"shard={shard}: expected (index, count) with 0 <= index < count")
        lacking = [] if split is None else [name for name in split.columns if name not in files.schema.names]
        wrong += [f"the split needs the column {name!r}, which is not read" for name in lacking]
        if wrong:
            raise UsageError("RecordReader: " + "; ".join(wrong))
        self.files = files
        self._batch_size = batch_size
        self._split = split
        self._part = part
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self._window = -(-window_rows // batch_size) * batch_size if shuffle else batch_size
        self._shard = shard
        self._identity = {
            "files": files.digest,
            "columns": files.schema.names,
            "batch_size": batch_size,
            "split": None if split is None else split.identity(),
            "part": part,
            "shuffle": shuffle,
            "seed": seed,
            "window_rows": self._window,
            "shard": [*shard],
        }
        self._position = {"epoch": 0, "unit": 0, "skip": 0, "batches": 0, "rows": 0}
        self._finished = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, JSON-serializable."""
        return {**self._position, "of": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in ``state``, a result of :meth:`state_dict`.

        Raises:
            DataError: The position belongs to other files, or to a reader with other arguments.
        """
        given = state["of"]
        if other := [name for name, value in self._identity.items() if given.get(name) != value]:
            raise DataError(
                "the data differs from that of the checkpoint: "
                f"{'; '.join(_difference(name, given.get(name), self._identity[name]) for name in other)}",
                hint="use the files and settings of the checkpoint, or start a new run",
            )
        self._position, self._finished = {name: int(state[name]) for name in self._position}, False

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position["epoch"]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches after the position, to the end of the last epoch.

        After an iteration to the end, the next one starts at the beginning. A reader that loads the position after the
        last batch yields nothing.
        """
        if self._finished:
            self._position, self._finished = dict.fromkeys(self._position, 0), False
        for epoch in range(self.epoch, self._epochs):
            yield from self._read_epoch(epoch)
        self._finished = True

    def _read_epoch(self, epoch: int) -> Iterator[pa.RecordBatch]:
        start = dict(self._position)
        for table, start_of_next in self._windows(epoch, start):
            shuffled = self._shuffled(table, epoch, start["rows"])
            batches = range(0, table.num_rows, self._batch_size)
            for number, first in enumerate(batches):
                if number < start["batches"]:
                    continue
                self._position = {**start, "batches": number + 1}
                if number + 1 == len(batches):
                    self._position = start_of_next
                yield shuffled.slice(first, self._batch_size).combine_chunks().to_batches()[0]
            start = start_of_next
        self._position = {"epoch": epoch + 1, "unit": 0, "skip": 0, "batches": 0, "rows": 0}

    def _shuffled(self, table: pa.Table, epoch: int, first: int) -> pa.Table:
        if not self._shuffle:
            return table
        rows = np.arange(first, first + table.num_rows, dtype=np.uint64)
        return table.take(pa.array(np.argsort(self._hashes(rows, epoch), kind="stable")))

    def _hashes(self, numbers: npt.NDArray[np.uint64], epoch: int) -> npt.NDArray[np.uint64]:
        return mix(mix(numbers, self._seed), epoch)

    def _windows(self, epoch: int, start: dict[str, int]) -> Iterator[tuple[pa.Table, dict[str, int]]]:
        """Yield each window with the position of the next one."""
        kept: list[pa.RecordBatch] = []
        missing, rows = self._window, start["rows"]
        order = self._order(epoch)
        for index in range(start["unit"], len(order)):
            skip = start["skip"] if index == start["unit"] else 0
            done = skip  # the number of rows of the unit in this and earlier windows
            for batch in self._rows(order[index], skip):
                while batch.num_rows >= missing:
                    kept.append(batch.slice(0, missing))
                    batch, done, rows = batch.slice(missing), done + missing, rows + self._window
                    yield (
                        pa.Table.from_batches(kept),
                        {"epoch": epoch, "unit": index, "skip": done, "batches": 0, "rows": rows},
                    )
                    kept, missing = [], self._window
                if batch.num_rows:
                    kept.append(batch)
                    missing, done = missing - batch.num_rows, done + batch.num_rows
        if kept:
            end = {"epoch": epoch, "unit": len(order), "skip": 0, "batches": 0, "rows": rows + self._window - missing}
            yield pa.Table.from_batches(kept), end

    def _order(self, epoch: int) -> list[Unit]:
        """Return this reader's units in the order of an epoch."""
        units = self.files.units
        if self._shuffle:
            numbers = self._hashes(np.arange(len(units), dtype=np.uint64), epoch)
            units = [units[index] for index in np.argsort(numbers, kind="stable")]
        index, count = self._shard
        return units if self._divides_rows else units[index::count]

    @property
    def _divides_rows(self) -> bool:
        return len(self.files.units) < self._shard[1]

    def _rows(self, unit: Unit, skip: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit that belong to the part, without the first ``skip``."""
        first = unit.first_row
        index, count = self._shard
        for batch in self.files.read(unit):
            wanted = np.ones(batch.num_rows, bool)
            if self._split is not None:
                wanted &= parts_in(self._split, unit, batch, first) == PARTS.index(self._part)
            if self._divides_rows:
                wanted &= np.arange(first, first + batch.num_rows) % count == index
            first += batch.num_rows
            kept = batch if wanted.all() else batch.filter(pa.array(wanted))
            dropped = min(skip, kept.num_rows)
            skip -= dropped
            if dropped < kept.num_rows:
                yield kept.slice(dropped)


def _difference(name: str, then: object, now: object) -> str:
    """Return how a value of a reader differs from that of a checkpoint, for a message."""
    if name == "files":  # the values are digests
        return "files: the names or sizes differ"
    if not (isinstance(then, list) and isinstance(now, list) and name == "columns"):
        return f"{name}: {then!r} in the checkpoint, {now!r} now"
    gone, new = [each for each in then if each not in now], [each for each in now if each not in then]
    if not gone and not new:
        return f"{name}: in another order"
    return f"{name}: only in the checkpoint: {listed(gone)}, only now: {listed(new)}"
