"""Writes the scores of the rows of files to a Parquet file."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from persia.config.blocks import Paths
from persia.runtime.errors import PersiaError, StorageError, UsageError
from persia.trainer.batches import Unusual
from persia.trainer.trainer import Trainer

_LISTED = 5
"""The number of files that a message lists."""


@dataclass(frozen=True)
class Written:
    """The result of writing scores.

    Attributes:
        path: The file.
        columns: The names of the columns with scores.
        unusual: The number of rows, and counts of unusual values.
        without_row: The share of ids without a row.
    """

    path: Path
    columns: list[str]
    unusual: Unusual
    without_row: float


def check_out(out: Path, *, force: bool) -> None:
    """Check that a file for scores can be written, before any work is done.

    Raises:
        UsageError: The file exists and ``force`` is false, its folder does not exist, or its extension is not
            supported.
    """
    if out.suffix != ".parquet":
        raise UsageError(f"{out}: expected a name that ends in .parquet")
    if not out.parent.is_dir():
        hint = f"create it: mkdir -p {shlex.quote(str(out.parent))}"
        raise UsageError(f"{out}: there is no folder {out.parent}", hint=hint)
    if out.exists() and not force:
        raise UsageError(f"{out} already exists", hint="choose another name, or replace it with --force")


def write(
    trainer: Trainer,
    source: Paths,
    out: Path,
    *,
    keep: Sequence[str] | None = None,
    strict: bool = True,
    force: bool = False,
) -> Written:
    """Write the rows of files, with a column of scores for each label, named ``score`` or ``score_LABEL``.

    The file appears when it is complete; memory is bounded.

    Args:
        trainer: The trainer, which has a trained model.
        source: The files.
        out: A file that ends in ``.parquet``.
        keep: The columns to keep from each row; None keeps all.
        strict: Whether to refuse values of a wrong type.
        force: Whether to replace an existing file.

    Raises:
        UsageError: ``out`` exists, its folder does not, it has another extension, a column has the name of a score, or
            the files have no rows.
        DataError: A row is invalid; the message names file and row. Nothing is written.
        StorageError: The file cannot be written; the incomplete file is removed.
    """
    check_out(out, force=force)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    writer: pq.ParquetWriter | None = None
    scores = score_columns([name for name, _, _ in trainer.config.compiled.labels])
    predictions = trainer.predict(source, strict=strict, columns=None if keep is None else [*keep])
    try:
        part.touch()  # raises an error before the model is loaded, if the folder is not writable
        try:
            for table, found in predictions:
                kept = table if keep is None else table.select([*dict.fromkeys(keep)])
                for label, column in scores.items():
                    if column in kept.schema.names:
                        raise UsageError(
                            f"the rows already have a column {column!r}, the name of a column of scores",
                            hint=f"choose the columns to keep, without {column}: --keep COLUMN",
                        )
                    kept = kept.append_column(column, pa.array(found[label], pa.float32()))
                writer = writer or pq.ParquetWriter(part, kept.schema)
                writer.write_batch(kept)
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            files = [source] if isinstance(source, str) else [*source]
            more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
            raise UsageError(f"{', '.join(files[:_LISTED])}{more}: no rows to score", hint="specify files with rows")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        if isinstance(error, PersiaError):  # a read failed, and the error already names the file
            raise
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return Written(out, [*scores.values()], predictions.unusual, predictions.without_row)


def score_columns(labels: list[str]) -> dict[str, str]:
    """Return the name of the column with the scores of each label."""
    return {labels[0]: "score"} if len(labels) == 1 else {label: f"score_{label}" for label in labels}
