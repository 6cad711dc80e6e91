"""Checks configuration files of any kind: ``persia.yml``, ``embedding_config.yml`` and ``global_config.yml``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from persia.config.document import Document
from persia.runtime.config_files import read_config
from persia.runtime.errors import ConfigError
from persia.runtime.yaml_tree import Entries, TreeError, parse
from persia_core import config as core

PERSIA, SLOTS, LIMITS = "persia.yml", "embedding_config.yml", "global_config.yml"
_KEYS = {
    PERSIA: ("data", "features", "labels", "model", "train", "checkpoint", "run"),
    SLOTS: ("slots_config", "feature_groups", "feature_index_prefix_bit"),
    LIMITS: ("common_config", "embedding_parameter_server_config", "embedding_worker_config"),
}
"""The blocks of each kind of file."""


@dataclass
class Checked:
    """The result of checking files.

    Attributes:
        summary: A line for each valid file, with its main properties.
        warnings: Keys that have no effect or are unusual.
        mistakes: The error messages about all files.
        valid: The files without errors, by kind.
    """

    summary: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    valid: dict[str, list[Path]] = field(default_factory=lambda: {PERSIA: [], SLOTS: [], LIMITS: []})


def kind_of(text: str, path: Path) -> str:
    """Return the kind of a file by its blocks, or by its name if it has no known block.

    Raises:
        ConfigError: Neither blocks nor name determine the kind.
    """
    try:
        root = parse(text)
    except TreeError:
        root = None
    keys = root.first if isinstance(root, Entries) else {}
    counts = {kind: sum(key in keys for key in known) for kind, known in _KEYS.items()}
    best = max(counts, key=lambda kind: counts[kind])
    if counts[best]:
        return best
    if path.name in _KEYS:
        return path.name
    if root is None:
        return PERSIA  # reading it as a persia.yml reports why the text is not a mapping
    kinds = "; ".join(f"{kind} has {', '.join(known)}" for kind, known in _KEYS.items())
    raise ConfigError(
        f"{path}: not a known configuration file: {kinds}", hint="specify a file of one of these three kinds"
    )


def check_files(paths: Sequence[Path], overrides: Sequence[str] = (), kinds: dict[Path, str] | None = None) -> Checked:
    """Check files, and compare the slots of all files that define slots.

    Args:
        paths: The files.
        overrides: The texts after ``--set``, for each ``persia.yml``.
        kinds: The kinds of the files; None determines them by content.

    Raises:
        ConfigError: A file cannot be read, or its kind is unknown.
    """
    checked = Checked()
    valid: dict[str, list[tuple[str, str]]] = {PERSIA: [], SLOTS: [], LIMITS: []}
    for path in paths:
        text, name = read_config(path)
        kind = (kinds or {}).get(path) or kind_of(text, path)
        try:
            _CHECKS[kind](text, name, overrides, checked)
        except ConfigError as error:
            checked.mistakes.append(str(error))
        else:
            valid[kind].append((text, name))
            checked.valid[kind].append(path)
    for ours in valid[PERSIA]:
        for theirs in valid[SLOTS]:
            _compare(ours, theirs, checked)
    return checked


def _compare(ours: tuple[str, str], theirs: tuple[str, str], checked: Checked) -> None:
    from persia.features.slots import differences  # imported here, because it loads NumPy

    if found := differences(ours, theirs):
        lines = "".join(f"\n  {each}" for each in found)
        checked.mistakes.append(f"the slots of {ours[1]} and {theirs[1]} differ:{lines}")


def _check_persia(text: str, name: str, overrides: Sequence[str], checked: Checked) -> None:
    document = Document(text, name, Path(name).absolute().parent, overrides)
    checked.warnings += document.findings.warnings
    document.findings.raise_if_any()
    config = document.config
    assert config is not None  # noqa: S101 - there was no mistake
    slots = config.compiled.embedding_config()
    model = config.model.name or config.model.class_
    checked.summary.append(
        f"{name}: {_count(len(config.features), 'feature')} with {_count(len(slots.slots), 'slot')} in "
        f"{_count(len(slots.tables), 'table')}, {_count(len(config.labels), 'label')}, model {model}"
    )
    checked.summary += _settings(slots)


def _check_slots(text: str, name: str, overrides: Sequence[str], checked: Checked) -> None:
    del overrides
    slots = core.parse_embedding_config(text, name)
    checked.warnings += slots.warnings
    checked.summary.append(f"{name}: {_count(len(slots.slots), 'slot')} in {_count(len(slots.tables), 'table')}")
    checked.summary += _settings(slots)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _settings(slots: core.EmbeddingConfig) -> list[str]:
    pairs = zip(slots.tables, slots.settings, strict=True)
    return [f"  {table}: {', '.join(settings)}" for (table, _), settings in pairs if settings]


def _check_limits(text: str, name: str, overrides: Sequence[str], checked: Checked) -> None:
    del overrides
    limits = core.parse_global_config(text, name)
    checked.warnings += limits.warnings
    checked.summary.append(f"{name}: capacity {limits.capacity:,} rows")


_CHECKS = {PERSIA: _check_persia, SLOTS: _check_slots, LIMITS: _check_limits}
