"""The content of ``run.json``: facts about a run that its ``persia.yml`` does not contain."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from persia.config import Config
from persia.data.records import Files
from persia.features import Transform
from persia.runtime.errors import CheckpointError, DataError
from persia.runtime.logging import get_logger
from persia.trainer.run_folder import FACTS, RunFolder

_NAMED: Mapping[str, pa.DataType] = MappingProxyType(
    {
        str(kind): kind
        for kind in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.date32()),
        )
    }
)
_logger = get_logger("trainer")

_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")


def facts_of(config: Config, files: Files, transform: Transform, rows: int, *, given: bool) -> dict[str, Any]:
    """Return the facts of a new run, JSON-serializable.

    Args:
        config: The configuration.
        files: The training files.
        transform: The transform.
        rows: The number of training rows.
        given: Whether a script has passed the model.
    """
    model = config.model.name or config.model.class_
    return {
        "folder": str(config.folder),
        "model": "given by a script" if given else model,
        "model_given_by_script": given,
        "set": [*config.origin.overrides],
        "rows": rows,
        "steps_per_epoch": -(-rows // config.step_rows),
        "transform": transform.digest,
        "train_files": files.sizes,
        "train_paths": [*files.paths],
        "column_types": _types_of(files.schema),
    }


def _types_of(schema: pa.Schema) -> dict[str, str]:
    """Return the type of each column in the terms of a text file; :func:`types_in` omits lists and other types."""
    found = {}
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            kind = pa.string()
        elif pa.types.is_decimal(kind):
            kind = pa.float64()
        elif pa.types.is_date64(kind):
            kind = pa.date32()
        found[field.name] = str(kind)
    return found


def types_in(facts: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """Return the column types that a text file of this run may have; none for a run of an older version."""
    found = {}
    for name, kind in (facts.get("column_types") or {}).items():
        if kind in _NAMED:
            found[name] = _NAMED[kind]
        elif (time := _TIMESTAMP.fullmatch(kind)) is not None:
            found[name] = pa.timestamp(time[1], time[2])
    return found


def check_files(folder: RunFolder, files: Files) -> None:
    """Check that files are those on which the run was trained, by name, size and order.

    The part of a row may depend on its file and row number, so the rows of other files may be divided differently.

    Raises:
        CheckpointError: The run has no record of its training files.
        DataError: The files differ; the message names the differences.
    """
    before = folder.read_json(FACTS).get("train_files")
    hint = (
        "to evaluate the model on rows of your choice, specify the files: "
        f"persia eval {shlex.quote(folder.shown)} FILE, or evaluate(FILE); to train on these files, start a new run"
    )
    if before is None:
        raise CheckpointError(f"{folder.shown}: {FACTS} is missing, or lacks the list of training files", hint=hint)
    then, now = Counter((str(name), int(size)) for name, size in before), Counter(files.sizes)
    if [*map(tuple, before)] == files.sizes:
        return
    gone, new = dict((then - now).keys()), dict((now - then).keys())
    listed = {
        "added": [name for name in new if name not in gone],
        "missing": [name for name in gone if name not in new],
        "of another size": [name for name in new if name in gone],
    }
    shown = "; ".join(f"{what}: {_few(names)}" for what, names in listed.items() if names) or "their order differs"
    raise DataError(f"the files of data.train are not those on which {folder.shown} was trained: {shown}", hint=hint)


def warn_of_trained(folder: RunFolder, files: Files) -> None:
    """Warn if the run was trained on one of the files, which is recognized by its path, or by its name and size."""
    facts = folder.read_json(FACTS)
    paths = {*(facts.get("train_paths") or ())}
    sizes = {(str(name), int(size)) for name, size in facts.get("train_files") or ()}
    trained = [path for path, size in zip(files.paths, files.sizes, strict=True) if path in paths or size in sizes]
    if trained:
        _logger.warning(
            "%s was trained on %s: metrics of rows that a model was trained on are too optimistic. Specify files with "
            "other rows, or omit the files to evaluate the test set",
            folder.shown,
            _few(trained),
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
