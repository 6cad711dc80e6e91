"""Reads files, and makes a proposal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia.data.inspect import document, labels, proposal, report, roles, scan
from persia.data.inspect.proposal import Proposal
from persia.data.inspect.scan import Table
from persia.data.records import presets
from persia.data.records.files import open_files
from persia.embedding.listed import listed
from persia.runtime.errors import DataError


@dataclass
class Inspection:
    """The result of :func:`inspect`.

    Attributes:
        table: The statistics of the columns.
        proposal: The proposed content of ``persia.yml``.
    """

    table: Table
    proposal: Proposal

    @property
    def yaml(self) -> str:
        """The text of the proposed ``persia.yml``."""
        return document.write(self.proposal)

    def as_dict(self) -> dict[str, Any]:
        """Return columns and proposal, JSON-serializable."""
        return report.as_dict(self.table, self.proposal)

    def show(self) -> None:
        """Print the columns and the warnings: a table on a terminal, otherwise plain text."""
        report.show(self.table, self.proposal)


def inspect(
    paths: str | Sequence[str],
    *,
    label: str | None = None,
    test: str | Sequence[str] = (),
    preset: str | None = None,
    rows: int = scan.ROWS,
    folder: Path | None = None,
) -> Inspection:
    """Read files once, and propose a ``persia.yml`` for them.

    Args:
        paths: Files, folders, globs or ``s3://`` addresses of training data.
        label: The column of the label, ``COL=VALUE`` or ``COL>NUMBER``; None chooses one.
        test: Files of test data, if they are separate.
        preset: ``criteo`` for files in that format.
        rows: The maximum number of rows that are read.
        folder: The folder of ``persia.yml``. Paths in it are relative to this folder. None means the working directory.

    Raises:
        UsageError: A file, column or preset does not exist, or it is unclear which column is the label.
        DataError: A file is empty or damaged, or no column can be the label or a feature.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    tests = [test] if isinstance(test, str) else list(test)
    opened = presets.options(preset)
    files = open_files(given, **opened)
    table = scan.scan(files, rows, typed="types" in opened)
    if table.rows == 1:
        raise DataError(
            f"only one row was read from {listed(files.paths)}, which is too few for a proposal",
            hint="specify more data, or a larger --rows",
        )
    chosen = labels.choose(table, label)
    if tests:
        other = open_files(tests, columns=files.schema.names, **opened)
        scan.count_repeats(table, other)
    found = roles.find(table, chosen)
    made = proposal.make(table, chosen, found, given, tests, folder or Path.cwd(), preset)
    return Inspection(table, made)
