"""Checks across the keys of a ``persia.yml``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia.config.blocks import SplitBlock
from persia.config.checker import Checker, node_at
from persia.config.findings import Findings, near
from persia.config.operation_checks import Operations
from persia.embedding.listed import listed
from persia.runtime.criteo import CRITEO_HEADER
from persia.runtime.errors import UsageError
from persia.runtime.files import is_url, shown_url
from persia.runtime.places import Url, check_scheme
from persia.runtime.yaml_tree import Entries, Items, Node, Place, Scalar, number
from persia_core.features import Features

_SPLIT_KEYS = {"hash": ("fractions", "group", "seed"), "time": ("column", "valid", "test"), "file": ()}
"""The keys of ``data.split``, apart from ``by``, that each method reads."""
_LAYERS = ("bottom_mlp", "top_mlp", "deep_mlp")
"""Arguments of built-in models that are layer sizes."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "GPU_NUM", "PYTHONPATH"}
"""Variables that take effect only when a process starts."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def check(root: Entries, values: Mapping[str, Any], features: Features | None, findings: Findings) -> None:
    """Report keys that contradict each other.

    Args:
        root: The tree of the file, with overrides.
        values: The parsed blocks. A value with an error is None.
        features: The features and labels; None if they have errors.
        findings: Collects the errors and warnings.
    """
    checks = _Checks(root, values, findings)
    checks.check_split()
    checks.check_files()
    checks.check_workers()
    checks.check_training()
    checks.check_run()
    checks.check_env()
    Operations(root, values, findings).check()
    checks.check_columns(features)
    checks.check_leaks()
    checks.check_micro_batch()
    checks.check_dims()
    checks.check_layers()


@dataclass(frozen=True)
class ColumnUse:
    """A column and the key that reads it.

    Attributes:
        column: The name of the column.
        by: The key that names it, such as ``features.price.column``.
        place: The place of that key.
        of: The feature, the label or the key that reads it, such as ``features.price``.
    """

    column: str
    by: str
    place: Place
    of: str


def uses_of(root: Entries) -> Iterator[ColumnUse]:
    """Yield the columns that features, labels, the split and the training block read."""
    for block in ("features", "labels"):
        node = root.get(block)
        for key, one in node.entries if isinstance(node, Entries) else []:
            inner = one if isinstance(one, Entries) else Entries(one.place, [])
            kind = inner.get("type")
            if isinstance(kind, Scalar) and kind.text == "cross":
                continue
            path = f"{block}.{key.text}"
            column, weights = inner.get("column"), inner.get("weights")
            if isinstance(column, Scalar):
                yield ColumnUse(column.text, f"{path}.column", column.place, path)
            else:
                yield ColumnUse(key.text, path, key.place, path)
            if block == "features" and isinstance(weights, Scalar):
                yield ColumnUse(weights.text, f"{path}.weights", weights.place, path)
    for path in ("data.split.group", "data.split.column", "train.gauc_group", "train.weight"):
        node = node_at(root, path)
        if isinstance(node, Scalar) and not node.is_null:
            yield ColumnUse(node.text, path, node.place, path)


class _Checks(Checker):
    def __init__(self, root: Entries, values: Mapping[str, Any], findings: Findings) -> None:
        super().__init__(root, values, findings)
        self._data: Mapping[str, Any] = values.get("data") or {}
        self._train: Mapping[str, Any] = values.get("train") or {}

    def check_split(self) -> None:
        """Check that the keys fit the split method, and that there are rows to divide."""
        split = self._data.get("split")
        if not split or split["by"] is None:
            return
        by, default = split["by"], SplitBlock()
        for key, value in split.items():
            if key == "by" or key in _SPLIT_KEYS[by] or value in (None, getattr(default, key)):
                continue
            other = next(way for way, keys in _SPLIT_KEYS.items() if key in keys)
            self._error(f"data.split.{key}", f"found together with `by: {by}`; allowed only with `by: {other}`")
        own = {part for part in ("valid", "test") if self._data.get(part) is not None}
        if by == "file" and not own:
            self._error("data.split.by", "found `file`, but neither data.valid nor data.test; set one of them")
        if by != "file" and len(own) == 2 and self._is_given("data.split", SplitBlock().model_dump(), split):
            message = "found together with data.valid and data.test, so no rows are divided"
            self._error("data.split", f"{message}: remove this key")
        if by == "hash":
            self._check_fractions(split["fractions"])
        if by == "time":
            self._check_times(split, own)

    def _is_given(self, path: str, default: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
        """Whether the file has a block with values other than the defaults."""
        return self._node(path) is not None and any(values[key] not in (None, default[key]) for key in values)

    def _check_fractions(self, fractions: tuple[float, float, float] | None) -> None:
        if fractions is None:
            return
        total = sum(fractions)
        if abs(total - 1) > 1e-6:
            self._error("data.split.fractions", f"the sum is {total:g}, allowed: 1")
        elif not fractions[0]:
            self._error("data.split.fractions", "the share of train is 0; allowed: above 0")

    def _check_times(self, split: Mapping[str, Any], own: set[str]) -> None:
        if split["column"] is None and not self._findings.has("data.split.column"):
            self._error("data.split.column", "missing, allowed: the column that holds the time")
        bounds = {part: split[part] for part in ("valid", "test")}
        for part in own:
            if bounds[part] is not None:
                self._error(
                    f"data.split.{part}", f"found together with data.{part}, whose files are the {part} set: remove one"
                )
        if all(bound is None for bound in bounds.values()) and len(own) < 2:
            lacking = [part for part in bounds if part not in own]
            message = f"missing, allowed: the start of {lacking[0]}, such as `{lacking[0]}: 2024-05-01`"
            self._error(f"data.split.{lacking[0]}", message)
        first, second = bounds["valid"], bounds["test"]
        if first is not None and second is not None:
            if isinstance(first, str) != isinstance(second, str):
                self._error(
                    "data.split.test",
                    f"found {second!r}, but data.split.valid is {first!r}: expected two strings or two numbers",
                )
            elif second < first:
                self._error("data.split.test", f"found {second!r}, which is before valid ({first!r})")

    def check_files(self) -> None:
        """Check that keys for text files are used with text files only."""
        data = self._data
        is_text = data.get("format") in ("csv", "tsv") or data.get("preset") or data.get("format") is None
        for key in ("columns", "header"):
            if not is_text and data.get(key):
                message = f"found together with `format: {data['format']}`, whose files have names and types of columns"
                self._error(f"data.{key}", f"{message}: remove this key")
        if data.get("preset"):
            for key in ("header", "format"):
                if data.get(key) is not None:
                    message = f"found together with `preset: {data['preset']}`, which determines the {key}"
                    self._error(f"data.{key}", f"{message}: remove this key")
        repeated = [name for name in data.get("header") or [] if data["header"].count(name) > 1]
        if repeated:
            self._error("data.header", f"`{repeated[0]}` appears more than once; column names must differ")

    def check_workers(self) -> None:
        """Check the keys for reading ahead."""
        data = self._data
        if data.get("pin") is False:
            message = "found `false`, allowed: true: a batch always goes to a GPU through page-locked memory"
            self._error("data.pin", f"{message}; remove the key")
        if data.get("persistent") is False and data.get("workers") == 1:
            self._warn("data.persistent", "has no effect with `workers: 1`, which starts no threads")
        if data.get("synthetic") and (data.get("workers") or 1) > 1:
            self._warn("data.workers", "has no effect with `synthetic: true`, which converts only the first batches")

    def check_training(self) -> None:
        """Check the metrics, early stopping, the learning-rate schedule, and the reproducible mode."""
        train, metrics = self._train, self._train.get("metrics")
        stop = train.get("early_stop") or {}
        if metrics is not None:
            repeated = [name for name in metrics if metrics.count(name) > 1]
            if repeated:
                self._error("train.metrics", f"`{repeated[0]}` appears more than once: list it once")
            wants = "gauc" in metrics or stop.get("metric") == "gauc"
            path = "train.early_stop.metric" if stop.get("metric") == "gauc" else "train.metrics"
            if wants and train.get("gauc_group") is None and not self._findings.has("train.gauc_group"):
                self._error(path, "`gauc` needs `train.gauc_group`, the column of the groups, such as the user")
            elif not wants and train.get("gauc_group") is not None:
                message = "found, but `train.metrics` has no `gauc`: add `gauc`, or remove this key"
                self._error("train.gauc_group", message)
        if stop.get("metric") not in (None, "loss") and (label := self._first_label()) is not None:
            message = f"is `{stop['metric']}`, but the first label, `{label}`, has `loss: mse`; allowed: loss"
            self._error("train.early_stop.metric", message)
        if stop and not self._has_valid():
            message = "there is no validation set to evaluate on: set data.valid, or the valid part of data.split"
            self._error("train.early_stop", message)
        for key in ("embedding_optimizer", "dense_optimizer"):
            chosen = train.get(key) or {}
            if chosen.get("nesterov") and not (chosen.get("momentum") and chosen.get("dampening") == 0):
                self._error(f"train.{key}.nesterov", "needs `momentum` above 0, and `dampening: 0`")
        staleness = self._node("train.staleness")
        if train.get("reproducible") and isinstance(staleness, Scalar) and (train.get("staleness") or 1) > 1:
            message = f"found {train['staleness']}, but training is reproducible, so the staleness is 1"
            self._findings.warn(staleness.place, "train.staleness", message)

    def _first_label(self) -> str | None:
        """Return the name of the first label if its values are not 0 and 1."""
        labels = self._node("labels")
        if not isinstance(labels, Entries) or not labels.entries:
            return None
        key, label = labels.entries[0]
        loss = label.get("loss") if isinstance(label, Entries) else None
        return key.text if isinstance(loss, Scalar) and loss.text == "mse" else None

    def _has_valid(self) -> bool:
        split = self._data.get("split")
        if not split or self._data.get("valid") is not None or None in (split["by"], split["fractions"]):
            return True
        if split["by"] == "hash":
            return bool(split["fractions"][1] > 0)
        return bool(split["by"] == "time" and split["valid"] is not None)

    def check_run(self) -> None:
        """Check the names and paths of files that are read and written."""
        for path in ("data.train", "data.valid", "data.test", "run.dir", "checkpoint.dir"):
            node = self._node(path)
            for one in node.items if isinstance(node, Items) else [node]:
                if isinstance(one, Scalar) and one.text.startswith("~") and not one.is_null:
                    self._check_home(one, path)
        run: Mapping[str, Any] = self._values.get("run") or {}
        name = run.get("name")
        if name is not None and (not _RUN_NAME.fullmatch(name) or name == "LATEST"):
            allowed = "up to 80 letters, digits, `.`, `_` and `-`, the first a letter or a digit; not LATEST"
            self._error("run.name", f"found `{name}`, allowed: {allowed}")
        checkpoint: Mapping[str, Any] = self._values.get("checkpoint") or {}
        if is_url(run.get("dir") or ""):
            hint = "checkpoint.dir may be a URL such as s3://bucket/prefix"
            self._error("run.dir", f"found `{shown_url(run['dir'])}`, allowed: a folder; {hint}")
        saves, upload = checkpoint.get("dir"), checkpoint.get("upload_to")
        if saves is not None and is_url(saves):
            try:
                check_scheme(Url(saves))
            except UsageError:
                allowed = "a folder, or a URL such as s3://bucket/prefix"
                self._error("checkpoint.dir", f"found `{shown_url(saves)}`, allowed: {allowed}")
            if upload is not None:
                message = f"found together with the URL `{shown_url(saves)}` in checkpoint.dir: remove one of the two"
                self._error("checkpoint.upload_to", message)
        if upload is not None and not is_url(upload):
            self._error("checkpoint.upload_to", f"found `{upload}`, allowed: a URL such as s3://bucket/prefix")

    def _check_home(self, node: Scalar, path: str) -> None:
        try:
            Path(node.text).expanduser()
        except RuntimeError:
            message = f"found `{node.text}`, but `{node.text.split('/')[0]}` has no known home folder"
            self._findings.error(node.place, path, f"{message}: write an absolute path")

    def check_env(self) -> None:
        """Check that names are valid in a shell, and that no variable changes the place of the process in its job."""
        for name in self._values.get("env") or {}:
            if not _VARIABLE.fullmatch(name):
                self._error(
                    f"env.{name}", f"found `{name}`, allowed: letters, digits and _, not beginning with a digit"
                )
            elif name.startswith("PERSIA_") or name in _PLACES:
                self._error(f"env.{name}", "is read before this file: set it in the environment of the process")

    def check_columns(self, features: Features | None) -> None:
        """Check that every column that is read exists, if the file declares its columns."""
        given = CRITEO_HEADER if self._data.get("preset") == "criteo" else self._data.get("header")
        header: list[str] = [*(given or ())]
        uses = [*uses_of(self._root)]
        for use in uses if header else []:
            if use.column not in header:
                key = "data.preset" if self._data.get("preset") else "data.header"
                message = f"no column `{use.column}` in `{key}`{near(use.column, header)}"
                self._findings.error(use.place, use.by, message)
        if features is None:
            return
        read = {*features.columns(), *(use.column for use in uses)}
        block = self._node("data.columns")
        for name, _ in block.entries if isinstance(block, Entries) else []:
            if name.text not in read:
                message = f"nothing reads this column{near(name.text, read)}"
                self._findings.warn(name.place, f"data.columns.{name.text}", message)

    def check_leaks(self) -> None:
        """Check that no feature, group or weight reads the column of a label, which is unknown at prediction time."""
        labels = {use.column: use.of for use in uses_of(self._root) if use.by.startswith("labels.")}
        for use in uses_of(self._root):
            if use.column in labels and not use.by.startswith("labels."):
                message = f"reads `{use.column}`, the column of `{labels[use.column]}`, which is unknown at prediction"
                self._findings.error(use.place, use.by, f"{message}; choose another column, or remove this key")

    def check_micro_batch(self) -> None:
        """Check that ``micro_batch`` is smaller than a batch."""
        rows, batch = self._train.get("micro_batch"), self._data.get("batch_size")
        node = self._node("train.micro_batch")
        if rows is not None and batch is not None and rows >= batch and node is not None:
            message = f"found {rows}, which has no effect, because data.batch_size is {batch}"
            self._findings.warn(node.place, "train.micro_batch", message)

    def check_dims(self) -> None:
        """Check that the embeddings of a DLRM and the output of its bottom MLP have equal sizes, for dot products."""
        model = self._values.get("model") or {}
        if model.get("name") != "dlrm":
            return
        dims: dict[str, tuple[float, Place]] = {}
        for key, one in self._entries("features"):
            dim = one.get("dim") if isinstance(one, Entries) else None
            value = number(dim.text) if isinstance(dim, Scalar) else None
            if dim is not None and value:
                dims[key] = (value, dim.place)
        sizes = {value for value, _ in dims.values()}
        if len(sizes) > 1:
            found = listed([f"{name} {value:g}" for name, (value, _) in dims.items()])
            message = f"`dlrm` needs one dim for all features, found {found}; set the same dim, or use `name: dcnv2`"
            self._error("model.name", message)
        elif sizes and self._has_dense():
            self._check_last("bottom_mlp", model.get("bottom_mlp"), int(min(sizes)), "the dim of the features")
        self._check_last("top_mlp", model.get("top_mlp"), len(self._entries("labels")), "the number of labels")

    def check_layers(self) -> None:
        """Check that layers of the built-in models have at least one unit."""
        for key in _LAYERS if (self._values.get("model") or {}).get("name") else ():
            node = self._node(f"model.{key}")
            for index, item in enumerate(node.items if isinstance(node, Items) else []):
                size = number(item.text) if isinstance(item, Scalar) else None
                if size is not None and size < 1 and size == int(size):
                    message = f"found {item.found()}, allowed: a whole number of at least 1"
                    self._findings.error(item.place, f"model.{key}[{index}]", message)

    def _has_dense(self) -> bool:
        kinds = [one.get("type") for _, one in self._entries("features") if isinstance(one, Entries)]
        return any(isinstance(kind, Scalar) and kind.text == "dense" for kind in kinds)

    def _check_last(self, key: str, layers: object, wanted: int, what: str) -> None:
        """Check that the last layer of an MLP has the size that other keys determine."""
        if isinstance(layers, list) and layers and wanted and layers[-1] != wanted:
            self._error(f"model.{key}", f"its last size is {layers[-1]}, allowed: {wanted}, {what}")

    def _entries(self, block: str) -> list[tuple[str, Node]]:
        """Return the entries of a block of the file."""
        node = self._root.get(block)
        return [(key.text, one) for key, one in node.entries] if isinstance(node, Entries) else []
