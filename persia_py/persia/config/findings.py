"""Errors and warnings about a ``persia.yml``, with their places."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from persia.runtime.errors import ConfigError
from persia.runtime.yaml_tree import Place


@dataclass(frozen=True)
class Finding:
    """An error or a warning.

    Attributes:
        place: The place of the key.
        path: The key, such as ``train.seed``; empty for the whole text.
        message: The value found, the allowed values, and the next step.
    """

    place: Place
    path: str
    message: str

    def shown(self, file: str) -> str:
        """Return the finding as ``FILE:LINE:COLUMN: KEY: MESSAGE``, or with ``--set`` instead of file and line."""
        place = self.place
        where = f"--set {place.override}" if place.override else f"{file}:{place.line}:{place.column}"
        if not place.override and not place.line:
            where = file
        key = f"{self.path}: " if self.path else ""
        return f"{where}: {key}{self.message}"


class Findings:
    """Collects errors and warnings.

    Attributes:
        file: The name of the file in messages.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self._errors: dict[Finding, None] = {}
        self._warnings: dict[Finding, None] = {}
        self._notes: list[str] = []

    def error(self, place: Place, path: str, message: str) -> None:
        """Add an error."""
        self._errors[Finding(place, path, message)] = None

    def warn(self, place: Place, path: str, message: str) -> None:
        """Add a warning."""
        self._warnings[Finding(place, path, message)] = None

    def note(self, warning: str) -> None:
        """Add a warning whose text already contains the place."""
        self._notes.append(warning)

    @property
    def has_errors(self) -> bool:
        """Whether any error was added."""
        return bool(self._errors)

    def has(self, path: str) -> bool:
        """Whether a key, or a key below it, has an error."""
        return any(one.path == path or one.path.startswith((f"{path}.", f"{path}[")) for one in self._errors)

    @property
    def errors(self) -> list[str]:
        """The errors in the order of the file. Those of overrides come last."""
        return [one.shown(self.file) for one in _sorted(self._errors)]

    @property
    def warnings(self) -> list[str]:
        """The warnings in the order of the file."""
        return [*self._notes, *(one.shown(self.file) for one in _sorted(self._warnings))]

    def raise_if_any(self) -> None:
        """Raise all errors as one error.

        Raises:
            ConfigError: Errors were added. Its ``findings`` has (line, column, key, message) of each.
        """
        if not self.has_errors:
            return
        count = len(self._errors)
        lines = "".join(f"\n  {line}" for line in self.errors)
        hint = "correct the values of --set"
        if not all(one.place.override for one in self._errors):
            hint = f"correct each error, then run: persia config check {shlex.quote(str(self.file))}"
        error = ConfigError(f"{self.file}: {count} {'error' if count == 1 else 'errors'}{lines}", hint=hint)
        error.findings = [(one.place.line, one.place.column, one.path, one.message) for one in _sorted(self._errors)]
        raise error


def near(word: str, known: Iterable[str]) -> str:
    """Return ``, did you mean `NAME`?`` for the most similar of the known words; empty if none is similar."""
    found = get_close_matches(word[:100], [*known], n=1)
    return f", did you mean `{found[0]}`?" if found else ""


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: (one.place.line == 0, one.place.line, one.place.column))
