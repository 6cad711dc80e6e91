"""The rows on which the scores of a bundle are compared with those of evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from persia.config import Config
from persia.config.blocks import Paths
from persia.runtime.errors import DataError, PersiaError
from persia.serving.manifest import Input
from persia.trainer.parts import Part, Parts, open_given

COMPARED = 4096
"""The maximum number of rows that are compared."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows and their source.

    Attributes:
        rows: The inputs of the rows. The last row has no values.
        part: ``valid`` or ``test``, ``train`` if there is no other set, or ``given``.
    """

    rows: pa.Table
    part: str


def read(config: Config, given: Paths | None, types: Mapping[str, pa.DataType]) -> HeldOut:
    """Read the first rows of files; None means the test set, the validation set or the training rows.

    A row without values is added, because bundles must also agree with evaluation on missing values.

    Args:
        config: The configuration.
        given: The files to use instead of those of the configuration.
        types: The types of columns of text files.

    Raises:
        DataError: There are no rows.
        UsageError: A file does not exist.
    """
    inputs = config.compiled.columns(labels=False)
    if given is not None:
        part = Part(open_given(config, given, inputs, types), None, "test", config.origin)
        name = "given"
    else:
        try:
            parts = Parts(config)
        except PersiaError as error:
            error.hint = error.hint or "specify files with rows, which need no labels: --held-out FILE"
            raise
        part = parts.test or parts.valid or parts.train
        name = part.name
    batches: list[pa.RecordBatch] = []
    for batch in part.reader(COMPARED):
        batches.append(batch.select(inputs))
        if sum(each.num_rows for each in batches) >= COMPARED:
            break
    if not batches:
        empty = f"the {name} set has no rows" if given is None else "the given files have no rows"
        raise DataError(f"{empty} to compare scores on", hint="specify files with rows: --held-out FILE")
    rows = pa.Table.from_batches(batches).slice(0, COMPARED - 1)
    schema = pa.schema([field.with_nullable(True).with_metadata(None) for field in rows.schema])
    nothing = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
    return HeldOut(pa.concat_tables([rows.cast(schema), nothing]).combine_chunks(), name)


def inputs_of(config: Config, rows: pa.Table) -> tuple[Input, ...]:
    """Return the columns of rows, each with the features that read it."""
    users: dict[str, list[str]] = {name: [] for name in rows.schema.names}
    for use in config.origin.uses:
        block, _, feature = use.by.partition(".")
        if block == "features" and use.column in users:
            users[use.column].append(feature)
    return tuple(Input(field.name, _type_of(field.type), tuple(users[field.name])) for field in rows.schema)


def _type_of(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        kind = pa.string()
    return str(kind)
