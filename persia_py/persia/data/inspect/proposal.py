"""The proposal: the content of ``persia.yml``, with reasons and warnings."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from persia.data.inspect import settings
from persia.data.inspect.features import Feature, LeftOut, propose
from persia.data.inspect.labels import Label
from persia.data.inspect.roles import Roles
from persia.data.inspect.scan import Table
from persia.data.inspect.settings import Setting
from persia.embedding.listed import listed
from persia.runtime.errors import DataError
from persia.runtime.files import is_url


@dataclass
class Proposal:
    """The content of ``persia.yml``.

    Attributes:
        source: The files that were inspected.
        data: The block ``data``.
        features: The block ``features``.
        left_out: The columns that are not features.
        label: The label.
        label_name: The name of the label.
        model: The block ``model``.
        train: The block ``train``.
        options: Further keys of ``train``, which are written as comments.
        alone: The AUC of each column that was scored alone.
        warnings: The warnings for the user.
    """

    source: str
    data: dict[str, Setting]
    features: list[Feature]
    left_out: list[LeftOut]
    label: Label
    label_name: str
    model: Setting
    train: dict[str, Setting]
    options: dict[str, Setting]
    alone: dict[str, float]
    warnings: list[str] = field(default_factory=list)


def make(
    table: Table,
    label: Label,
    roles: Roles,
    paths: list[str],
    test: list[str],
    folder: Path,
    preset: str | None = None,
) -> Proposal:
    """Return the proposal for a table.

    Args:
        table: The statistics of the columns.
        label: The label.
        roles: The columns with a special role.
        paths: The files, as the user specified them.
        test: The files of the test set, as the user specified them; empty if there are none.
        folder: The folder of ``persia.yml``. Paths are relative to it.
        preset: The format that ``--preset`` names.

    Raises:
        DataError: No column can be a feature.
    """
    features, left_out, alone = propose(table, label, roles)
    if not features:
        reasons = [f"{column.column}: {column.reason}" for column in left_out]
        why = listed(reasons, separator="; ") if reasons else "the label is the only column"
        raise DataError(
            f"no column can be a feature: {why}",
            hint="specify data with further columns, or another label: --label COL",
        )
    rows = table.expected_rows
    size = settings.batch_size(rows)
    data = {"train": Setting(_relative(paths, folder), _rows(table))}
    if test:
        data["test"] = Setting(_relative(test, folder), "the test set, evaluated once, at the end of training")
    if preset is not None:
        data["preset"] = Setting(preset, "names and types of the columns are those of this format")
    elif table.files.format in ("csv", "tsv"):
        used = {feature.keys.get("column", feature.name) for feature in features}
        used |= {label.column, *(name for name in (roles.time, roles.group) if name)}
        types = {name: column.declared for name, column in table.columns.items() if column.declared and name in used}
        data["columns"] = Setting(types, "the types of columns of a text file; other columns are read as strings")
    data["split"] = settings.split(table, roles, has_test=bool(test))
    data["batch_size"] = size
    data["epochs"] = settings.epochs(rows)
    options = {}
    if roles.weight is not None:
        options["weight"] = Setting(roles.weight, "remove the # to weight each row by this column in loss and metrics")
    if roles.user is not None:
        options["gauc_group"] = Setting(roles.user, "with `metrics: [auc, gauc]`: also the AUC within each value")
    proposal = Proposal(
        ", ".join(paths),
        data,
        features,
        left_out,
        label,
        _label_name(label),
        settings.model(features),
        settings.train(),
        options,
        alone,
    )
    proposal.warnings = list(_warnings(table, proposal))
    return proposal


def _relative(paths: list[str], folder: Path) -> str | list[str]:
    """Return paths relative to a folder; absolute paths are unchanged."""
    found = [
        path if is_url(path) or Path(path).is_absolute() else Path(os.path.relpath(path, folder)).as_posix()
        for path in paths
    ]
    return found[0] if len(found) == 1 else found


def _rows(table: Table) -> str:
    if table.whole:
        return f"{table.rows:,} rows"
    of = f"of {table.total:,}" if table.total is not None else "of more"
    return f"{table.rows:,} rows {of} were read"


def _label_name(label: Label) -> str:
    name = "".join(letter if " " <= letter <= "~" else "_" for letter in label.column).strip()[:60]
    return name or "label"


def _warnings(table: Table, proposal: Proposal) -> Iterator[str]:
    label = table.columns[proposal.label.column]
    for doubt in proposal.label.doubts:
        yield f"label {label.name}: {doubt}"
    if label.nulls:
        yield f"label {label.name}: rows without a value: {label.nulls:,}; `persia train` refuses them: remove them"
    share = float(proposal.label.positive.mean())
    if share < 0.001 or share > 0.999:
        yield f"label {label.name}: {share:.3%} of the rows are 1; the AUC of the validation set will be uncertain"
    if table.rows < 1000:
        yield f"{table.rows:,} rows are too few: embeddings need thousands of rows"
    for missing in proposal.left_out:
        if missing.warning:
            yield f"column {missing.column} is left out: {missing.reason}"
    repeated = table.repeats.within
    if repeated > 0.01 and "group" not in proposal.data["split"].value and "column" not in proposal.data["split"].value:
        yield (
            f"{repeated:.1%} of the rows occur more than once, so equal rows are in train and valid: "
            "remove repeated rows, or split by a group or by time"
        )
    if table.repeats.across > 0.001:
        yield f"{table.repeats.across:.1%} of the test rows occur in training too, so test metrics are too optimistic"
    for column in table.columns.values():
        if column.stray is not None:
            text, place = column.stray
            yield f"column {column.name}: {column.numeric:.1%} of the values are numbers, but {place} is {text!r}"
        if column.no_time is not None:
            text, place, kind = column.no_time
            yield (
                f"column {column.name}: {place} is {text!r}, which is not a valid {kind}; the column is read as strings"
            )
