"""Reads ``persia.yml``: the file, overrides, and the source of each value."""

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from persia.config import overrides as changes
from persia.config.blocks import Config, Origin, Use
from persia.config.checks import check, uses_of
from persia.config.findings import Findings
from persia.config.optimizers import initial_accumulator_value
from persia.config.reader import FREE, Reader
from persia.config.render import Rendered
from persia.runtime.config_files import CONFIG_FOLDER, read_config
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger
from persia.runtime.settings import variable
from persia.runtime.yaml_tree import NOWHERE, Entries, Items, Node, Place, Scalar, TreeError, node_of, parse, value_of
from persia_core.features import Features

_logger = get_logger("config")


class Document:
    """A ``persia.yml`` with overrides, read and checked.

    Attributes:
        name: The name of the file in messages.
        findings: All errors and warnings.
        tree: All keys with defaults, in the order of the reference. The place of a node is the source of its value.
        config: The configuration; None if there are errors.
    """

    def __init__(self, source: str | Node, name: str, folder: Path, overrides: Sequence[str] = ()) -> None:
        """Read and check the document.

        Args:
            source: The text of the file, or a tree that a program created.
            name: The name of the file.
            folder: The folder of the file.
            overrides: The texts after ``--set``.
        """
        self.name, self._folder = name, folder
        self.findings = Findings(name)
        self.tree = Entries(NOWHERE, [])
        self.config: Config | None = None
        try:
            root = parse(source) if isinstance(source, str) else source
        except TreeError as error:
            self.findings.error(error.place, "", str(error))
            return
        if not isinstance(root, Entries):
            message = f"found {root.found()}, allowed: a mapping (`key: value` lines)"
            self.findings.error(root.place, "", message)
            return
        written = root.first
        if overrides:
            root = Entries(root.place, [*root.entries])
            changes.apply(root, overrides, self.findings)
        is_written = all(root.first.get(key) is written.get(key) for key in FREE)
        self._read(root, source if isinstance(source, str) and is_written else None, overrides)

    def checked(self) -> Config:
        """Return the configuration.

        Raises:
            ConfigError: There are errors. The message has all of them.
        """
        self.findings.raise_if_any()
        assert self.config is not None  # noqa: S101 - there was no mistake
        return self.config

    def _read(self, root: Entries, text: str | None, overrides: Sequence[str]) -> None:
        """Read all blocks of the tree. Features and labels are read from the text, if it is available."""
        reader = Reader(self.findings, self._folder)
        values = reader.read(root)
        features = self._features(root, text, reader.guessed)
        if features is not None:
            for warning in features.warnings:
                self.findings.note(warning)
        self.tree = reader.tree
        check(root, values, features, self.findings)
        if self.findings.has_errors or features is None:
            return
        _resolve(values, self.tree)
        described = Entries(NOWHERE, [(key, node) for key, node in self.tree.entries if key.text in FREE])
        for key, node in described.entries:
            values[key.text] = value_of(node)
        origin = self._origin(root, overrides)
        self.config = Config.model_validate(values).located(self._folder, features, Rendered(described).text, origin)

    def _origin(self, root: Entries, overrides: Sequence[str]) -> Origin:
        """Return where features and labels are defined, and which keys read which columns."""
        places = {}
        for block in FREE:
            node = root.get(block)
            for key, _ in node.entries if isinstance(node, Entries) else []:
                places[f"{block}.{key.text}"] = key.place.shown(self.name)
        places |= {path: place.shown(self.name) for path, place in _model_places(root)}
        uses = [Use(each.column, each.of, each.place.shown(self.name)) for each in uses_of(root)]
        return Origin(places, uses, [*overrides])

    def _features(self, root: Entries, text: str | None, guessed: Set[str]) -> Features | None:
        """Return the features and labels, or report their errors with the places in the file."""
        rendered = None
        if text is None:
            free = [(key, node) for key, node in root.entries if key.text in FREE]
            others = [(key, Scalar(key.place, "x")) for key, _ in root.entries if key.text not in FREE]
            rendered = Rendered(Entries(NOWHERE, [*free, *others]))
            text = rendered.text
        try:
            return Features.parse(text, self.name)
        except ConfigError as error:
            for line, column, path, message in error.findings:
                place = Place(line, column) if rendered is None else rendered.origin(line, column)
                if path in guessed and root.get(path) is None:
                    continue  # reported with an unknown key that probably means this key
                # An error without a path is about YAML that only the Rust parser refuses.
                if path.partition(".")[0] in FREE or not path:
                    self.findings.error(place, path, message)
        return None


def _model_places(root: Entries) -> Iterator[tuple[str, Place]]:
    """Yield ``model``, its keys and the items of their lists, with their places."""
    model = root.get("model")
    if model is not None:
        yield "model", model.place
    for key, node in model.entries if isinstance(model, Entries) else []:
        yield f"model.{key.text}", node.place if node.place.override else key.place
        for index, item in enumerate(node.items if isinstance(node, Items) else []):
            yield f"model.{key.text}[{index}]", item.place


def _resolve(values: dict[str, Any], tree: Entries) -> None:
    """Compute the values that follow from other values, unless the file sets them."""
    train: dict[str, Any] = values["train"]
    rows: dict[str, Any] = train["embedding_optimizer"]
    shown = tree.at("train", "embedding_optimizer")
    if rows["name"] == "adagrad" and rows["initial_accumulator_value"] is None:
        rows["initial_accumulator_value"] = initial_accumulator_value(
            values["data"]["batch_size"] * train["accumulate"]
        )
        shown.put("initial_accumulator_value", node_of(rows["initial_accumulator_value"]))
    if train["reproducible"]:
        train["staleness"] = 1
        tree.at("train").put("staleness", node_of(1))


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, folder: str | os.PathLike[str] | None = None
) -> Config:
    """Read a ``persia.yml``.

    Args:
        path: The file.
        overrides: Changes such as ``train.seed=7``. The value is YAML.
        folder: The folder to which paths of data, and the user's modules, are relative; None means the file's folder.

    Raises:
        ConfigError: The file cannot be read, or has errors. The message has all errors with file, line and column, and
            ``findings`` has (line, column, key, message) of each. For the value of an override, the line is 0.
    """
    document = open_document(path, overrides, folder=folder)
    config = document.checked()
    for warning in document.findings.warnings:
        _logger.warning("%s", warning)
    return config


def load_for_job(path: str | os.PathLike[str]) -> Config:
    """Read the ``persia.yml`` of a job, like :func:`load_config`.

    If ``PERSIA_CONFIG_FOLDER`` is set, the file is a copy, and the process that created it has already logged the
    warnings.

    Args:
        path: The file.

    Raises:
        ConfigError: The file cannot be read, or has errors.
    """
    folder = variable(CONFIG_FOLDER)
    return load_config(path) if folder is None else open_document(path, folder=folder).checked()


def open_document(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, folder: str | os.PathLike[str] | None = None
) -> Document:
    """Read a ``persia.yml``, and keep its errors and warnings. The arguments are those of :func:`load_config`.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        text, name = read_config(Path(path))
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            error.hint = "correct the path, or create a file from your data: persia data inspect FILE"
        raise
    return Document(text, name, Path(path).absolute().parent if folder is None else Path(folder).absolute(), overrides)


def validate_config(config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> tuple[bool, list[str]]:
    """Check a configuration, and return whether it is valid, and its errors.

    Args:
        config: A configuration, the content of a ``persia.yml`` as a dictionary, or the path of a ``persia.yml``.

    Raises:
        ConfigError: The file cannot be read.
    """
    if isinstance(config, str | os.PathLike):
        document = open_document(config)
    else:
        folder = Path.cwd()
        if isinstance(config, Config):
            folder = config.folder if config.is_located else folder
            config = config.model_dump(by_alias=True, exclude_unset=True)
        try:
            root = node_of(config)
        except TreeError as error:
            return False, [str(error)]
        document = Document(root, "the configuration", folder)
    return not document.findings.has_errors, document.findings.errors
