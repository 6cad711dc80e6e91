"""Exports the rows of one table of a checkpoint to a Parquet file."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from persia.checkpoint.foreign import open_checkpoint
from persia.embedding.listed import listed
from persia.runtime import files
from persia.runtime.errors import StorageError, UsageError
from persia_core import checkpoint as _core

GROUP_BYTES = 16 << 20
"""The size of the rows that are collected for one row group, in bytes."""


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint.

    Attributes:
        name: The name of the table.
        dim: The number of weights of a row.
        rows: The number of rows.
        slots: The slots that read the table.
        hashed: The slots whose ids are buckets of a hash stack.
        optimizer: The kind of optimizer whose state the rows have; empty if they have none.
    """

    name: str
    dim: int
    rows: int
    slots: tuple[str, ...]
    hashed: tuple[str, ...]
    optimizer: str


def saved_tables(opened: _core.Checkpoint) -> list[SavedTable]:
    """Return the tables of a checkpoint, in the order of its embedding configuration."""
    head = json.loads(opened.manifest)["head"]
    run = head["run"]
    tables = []
    for index, table in enumerate(run["schema"]["tables"]):
        slots = [slot for slot in run["schema"]["slots"] if slot["table"] == index]
        optimizer = (table["settings"].get("optimizer") or run["optimizer"] or {}) if run["optimizer"] else {}
        tables.append(
            SavedTable(
                table["name"],
                table["dim"],
                head["rows"].get(table["name"], 0),
                tuple(slot["name"] for slot in slots),
                tuple(slot["name"] for slot in slots if slot.get("hash_stack")),
                optimizer.get("kind", ""),
            )
        )
    return tables


def export_rows(
    directory: str | os.PathLike[str], table: str, out: Path, *, state: bool = False, force: bool = False
) -> SavedTable:
    """Write the rows of a table to ``out``. The file appears when it is complete.

    Columns: ``id`` (uint64) and ``weights`` (a list of ``dim`` float32); with ``state`` also ``last_used`` (uint64, a
    step) and, if the rows have any, ``state`` (a list of float32). Rows are ordered by shard and id, so equal
    checkpoints give equal rows. One shard, 1/256 of all rows, and one row group are held in memory.

    Args:
        directory: The checkpoint.
        table: The name of the table.
        out: The Parquet file.
        state: Whether to also write the optimizer state and the step of the last push.
        force: Whether to replace ``out`` if it exists.

    Raises:
        CheckpointError: The directory has no checkpoint, or a file is damaged; ``out`` is unchanged.
        UsageError: The table does not exist, ``out`` exists, or its name is not that of a Parquet file.
        StorageError: ``out`` cannot be written; it is unchanged.
    """
    opened = open_checkpoint(directory)
    tables = {each.name: each for each in saved_tables(opened)}
    if table not in tables:
        raise UsageError(f"{directory} has no table {table!r}; its tables are {listed(tables)}")
    if out.suffix != ".parquet":
        raise UsageError(f"{out}: expected the name of a Parquet file, which ends in .parquet")
    if out.exists() and not force:
        raise UsageError(f"{out} already exists; choose another name, or replace it with --force")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        _write(opened, tables[table], temporary, state=state)
        files.publish(temporary, out)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return tables[table]


def _write(opened: _core.Checkpoint, table: SavedTable, path: Path, *, state: bool) -> None:
    writer: pq.ParquetWriter | None = None
    waiting: list[pa.RecordBatch] = []
    metadata = {"persia": json.dumps({"table": table.name, "step": opened.step, "optimizer": table.optimizer})}
    try:
        for batch in _batches(opened, table, state=state):
            if writer is None:
                writer = pq.ParquetWriter(path, batch.schema.with_metadata(metadata), use_dictionary=False)
            waiting.append(batch)
            if sum(each.nbytes for each in waiting) >= GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(waiting, batch.schema))
                waiting.clear()
        if writer is not None and waiting:
            writer.write_table(pa.Table.from_batches(waiting))
    finally:
        if writer is not None:
            writer.close()


def _batches(opened: _core.Checkpoint, table: SavedTable, *, state: bool) -> Iterator[pa.RecordBatch]:
    """Yield the rows of each shard; one empty batch if there are none."""
    names = [file["name"] for file in opened.files if file["name"].endswith(".arrow")]
    found = False
    for name in sorted(names):
        rows = _core.read_rows(opened, name, table.name)
        if rows is not None:
            found = True
            yield _batch(*rows, with_state=state)
    if not found:
        none = np.empty(0, np.uint64)
        yield _batch(none, none, np.empty((0, table.dim), np.float32), np.empty((0, 0), np.float32), with_state=state)


def _batch(
    ids: npt.NDArray[np.uint64],
    last_used: npt.NDArray[np.uint64],
    weights: npt.NDArray[np.float32],
    state: npt.NDArray[np.float32],
    *,
    with_state: bool,
) -> pa.RecordBatch:
    columns: dict[str, Any] = {"id": pa.array(ids), "weights": _lists(weights)}
    if with_state:
        columns["last_used"] = pa.array(last_used)
        if state.shape[1]:
            columns["state"] = _lists(state)
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    return pa.record_batch([*columns.values()], schema=pa.schema(fields))


def _lists(values: npt.NDArray[np.float32]) -> pa.FixedSizeListArray:
    floats = pa.field("element", pa.float32(), nullable=False)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=pa.list_(floats, values.shape[1]))
