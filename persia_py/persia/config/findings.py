"""Mistakes and warnings of a ``persia.yml``, and their places."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from persia.runtime.errors import ConfigError
from persia.runtime.yaml_tree import Place


@dataclass(frozen=True)
class Finding:
    """A mistake, or a warning.

    Attributes:
        place: Where it is.
        path: The key, such as ``train.seed``; empty if it is the whole text.
        message: The value that was found, what is allowed, and the next step.
    """

    place: Place
    path: str
    message: str

    def shown(self, file: str) -> str:
        """Return it as ``FILE:LINE:COLUMN: KEY: MESSAGE``, or with the ``--set`` in place of file and line."""
        place = self.place
        where = f"--set {place.override}" if place.override else f"{file}:{place.line}:{place.column}"
        if not place.override and not place.line:
            where = file
        key = f"{self.path}: " if self.path else ""
        return f"{where}: {key}{self.message}"


class Findings:
    """Collects mistakes and warnings.

    Attributes:
        file: The name of the file in messages.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self._errors: dict[Finding, None] = {}
        self._warnings: dict[Finding, None] = {}
        self._notes: list[str] = []

    def error(self, place: Place, path: str, message: str) -> None:
        """Add a mistake."""
        self._errors[Finding(place, path, message)] = None

    def warn(self, place: Place, path: str, message: str) -> None:
        """Add a warning."""
        self._warnings[Finding(place, path, message)] = None

    def note(self, warning: str) -> None:
        """Add a warning that has its place in it."""
        self._notes.append(warning)

    @property
    def has_errors(self) -> bool:
        """Whether there is a mistake."""
        return bool(self._errors)

    def has(self, path: str) -> bool:
        """Whether a key, or a key below it, has a mistake."""
        return any(one.path == path or one.path.startswith((f"{path}.", f"{path}[")) for one in self._errors)

    @property
    def errors(self) -> list[str]:
        """The mistakes in the order of the file; those of overrides come last."""
        return [one.shown(self.file) for one in _sorted(self._errors)]

    @property
    def warnings(self) -> list[str]:
        """The warnings in the order of the file."""
        return [*self._notes, *(one.shown(self.file) for one in _sorted(self._warnings))]

    def raise_if_any(self) -> None:
        """Raise all mistakes as one error.

        Raises:
            ConfigError: There are some. Its ``findings`` has (line, column, key, message) of each.
        """
        if not self.has_errors:
            return
        count = len(self._errors)
        lines = "".join(f"\n  {line}" for line in self.errors)
        error = ConfigError(f"{self.file}: {count} {'error' if count == 1 else 'errors'}{lines}")
        error.findings = [(one.place.line, one.place.column, one.path, one.message) for one in _sorted(self._errors)]
        error.hint = f"correct it, then run: persia config check {self.file}"
        raise error


def near(word: str, known: Iterable[str]) -> str:
    """Return ``, did you mean `NAME`?`` for the most similar of the known words; empty if none is similar."""
    found = get_close_matches(word[:100], [*known], n=1)
    return f", did you mean `{found[0]}`?" if found else ""


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: (one.place.line == 0, one.place.line, one.place.column))
