"""The folder of a run: its files, and how it is found."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from persia.checkpoint import storage
from persia.config import Config
from persia.config.document import open_document
from persia.config.show import to_yaml
from persia.runtime import job
from persia.runtime.errors import CheckpointError, ConfigError, PersiaError, StorageError, UsageError
from persia.runtime.files import is_url, make_folders, write_whole
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia_core import checkpoint as _core

CONFIG = "persia.yml"
"""The whole configuration of a run, with defaults and overrides."""
FACTS = "run.json"
"""Information that is not in the configuration: its source, files and rows of train, the digest of the transform, and
where the checkpoints of a job are."""
SUMMARY = "summary.json"
"""The state and the results of a run."""
METRICS = "metrics.jsonl"
"""A line for each report."""
CHECKPOINTS, BEST = "checkpoints", "best"
"""The folders of the checkpoints, and of the checkpoint with the best metric of the valid part."""
SYNTHETIC = "synthetic"
"""Below the runs: those with random batches."""
LATEST = "LATEST"
"""The file next to the runs that names the newest one that has a checkpoint."""
_REPLACED = {CONFIG, FACTS, SUMMARY, METRICS, CHECKPOINTS, BEST, "transform.json", "tensorboard", "profile", "flight"}
"""The content of the folder of a run that failed before its first step."""

_logger = get_logger("trainer")


class RunFolder:
    """A run's folder.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._replaces = False

    @classmethod
    def new(cls, config: Config) -> "RunFolder":
        """Return the folder of a new run; it is not created yet. A run that failed before its first step is replaced.

        Raises:
            UsageError: There is another run of this name.
        """
        parent = Path(config.run.dir).expanduser() / (SYNTHETIC if config.data.synthetic else "")
        name = config.run.name
        if name is not None:
            folder = cls(parent / name)
            if folder.path.exists():
                folder._check_replaceable(config)
                folder._replaces = True
            return folder
        started = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
        names = [started, *(f"{started}-{number}" for number in range(2, 1000))]
        return cls(parent / next(each for each in names if not (parent / each).exists()))

    def _check_replaceable(self, config: Config) -> None:
        """Check that the run of this folder has failed or was interrupted before it had anything to keep.

        Raises:
            UsageError: It has not; the message says what the folder has.
        """
        summary = self.read_json(SUMMARY) if (self.path / SUMMARY).is_file() else {}
        saves = {self.path, self.saves(config), self._own_saves()}
        if summary.get("step") or any(next(place.rglob("MANIFEST.json"), None) for place in saves):
            error = UsageError(f"{self.shown}: there is a run of this name already")
            error.hint = f"continue it with --resume {self.shown}, or give another one: --set run.name=NAME"
            raise error
        has_begun = (self.path / METRICS).is_file() and (self.path / METRICS).stat().st_size > 0
        others = {each.name for each in self.path.iterdir()} - _REPLACED if self.path.is_dir() else {"no folder"}
        if summary.get("status") in ("failed", "interrupted") and not has_begun and not others:
            return
        status = f"it is {summary['status']}" if "status" in summary else "it has no summary"
        error = UsageError(f"{self.shown}: there is a run of this name already; {status}, and has no checkpoint")
        error.hint = f"give another name: --set run.name=NAME; or, if you need nothing of it: rm -r {self.shown}"
        raise error

    def _own_saves(self) -> Path:
        """Return the folder of the checkpoints by the configuration in the folder, if that can be read."""
        try:
            return self.saves(self.config())
        except PersiaError:
            return self.path

    @property
    def shown(self) -> str:
        """The path as a user would type it."""
        try:
            return str(self.path.relative_to(Path.cwd()))
        except ValueError:
            return str(self.path)

    def saves(self, config: Config) -> Path:
        """Return the folder of the checkpoints: a folder of the run's name in ``checkpoint.dir``, if that is given."""
        if (of_job := self.read_json(FACTS).get("checkpoints")) is not None:
            return Path(of_job)
        given = config.checkpoint.dir
        if given is None:
            return self.path / CHECKPOINTS
        parent = Path(given).expanduser().absolute()
        return parent / (SYNTHETIC if config.data.synthetic else "") / self.path.name

    @property
    def best(self) -> Path:
        """The folder of the best checkpoint."""
        return Path(self.read_json(FACTS).get("checkpoints", self.path), BEST)

    def make(self, config: Config, files: Mapping[str, str]) -> None:
        """Create the folder with its configuration and other files.

        Raises:
            StorageError: It cannot be created; incomplete files are removed.
        """
        with self._naming():
            make_folders(self.path.parent)
            if self._replaces:
                self._check_replaceable(config)  # it may have started since
                _logger.warning("%s: replacing the run of this name, which ended before its first step", self.shown)
                shutil.rmtree(self.path)
            self.path.mkdir()
        try:
            for name, content in {CONFIG: resolved(config), METRICS: "", **files}.items():
                self.write(name, content)
        except StorageError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def name_latest(self) -> None:
        """Name the run in ``LATEST``, unless that names one that started later. The run has a checkpoint.

        Raises:
            StorageError: It cannot be written.
        """
        latest = self.path.parent / LATEST
        with self._naming():
            named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
            if named not in ("", self.path.name) and _started(self.path.parent / named) > _started(self.path):
                return
            write_whole(latest, f"{self.path.name}\n".encode())

    def check_storage(self, config: Config) -> None:
        """Check that the run and its saves can be written, before any work is done. Nothing is made.

        Raises:
            StorageError: One of them cannot.
        """
        given = config.checkpoint.dir
        if given is not None:
            storage.check_parent(Path(given).expanduser().absolute(), "checkpoint.dir")
        for folder in (self.saves(config), self.path):
            storage.validate(folder)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of the run atomically.

        Raises:
            StorageError: It cannot be written; the previous content remains.
        """
        with self._naming():
            write_whole(self.path / name, content if isinstance(content, bytes) else content.encode())

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file of the run atomically."""
        self.write(name, json_text(content))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; a missing one is empty.

        Raises:
            CheckpointError: It is damaged.
        """
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name}: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.path / name}: want an object, got {type(content).__name__}")
        return content

    def config(self) -> Config:
        """Return the configuration of the run; modules of the user are found where they were in training."""
        return open_document(self.path / CONFIG, folder=self.read_json(FACTS).get("folder")).checked()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{error.filename or self.path}: {error.strerror or error}") from error


def _started(path: Path) -> str:
    """Return when a run has started, as ISO 8601 in UTC; empty if that is not known."""
    try:
        return str(RunFolder(path).read_json(SUMMARY).get("started", ""))
    except CheckpointError:
        return ""


def json_text(content: Any) -> str:
    """Return JSON in the format of a run's files."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def resolved(config: Config) -> str:
    """Return the whole configuration as YAML, with absolute paths, so that it can be read from another folder."""
    return "# The configuration of this run, with all defaults. Written by persia.\n" + to_yaml(config)


def _content(config: Config) -> dict[str, Any]:
    content: dict[str, Any] = config.model_dump(mode="json", by_alias=True)
    data = content["data"]
    for part in ("train", "valid", "test"):
        if data[part] is not None:
            paths = [data[part]] if isinstance(data[part], str) else data[part]
            whole = [path if is_url(path) else str(config.folder / Path(path).expanduser()) for path in paths]
            data[part] = whole[0] if isinstance(data[part], str) else whole
    if content["checkpoint"]["dir"] is not None:
        content["checkpoint"]["dir"] = str(Path(content["checkpoint"]["dir"]).expanduser().absolute())
    train = content["train"]
    if train["start_from"] is not None and settings.nats_url is None:
        train["start_from"] = str(config.folder / Path(train["start_from"]).expanduser())
    return content


MAY_CHANGE = (
    *("data.train", "data.valid", "data.test", "data.epochs", "checkpoint", "run", "env"),
    *("dist", "nccl", "profile", "precision", "parallel"),
    *(f"train.{key}" for key in ("early_stop", "evaluate_every", "metrics", "gauc_group", "staleness", "threads")),
    *(f"train.{key}" for key in ("micro_batch", "nonfinite", "detect_anomaly")),
)
"""Keys that a resumed run may change. The files of ``data.train`` are compared by their names and sizes."""


def check_same(before: Config, now: Config) -> None:
    """Check that a run can be resumed with a configuration.

    Raises:
        ConfigError: Keys that determine the model, the rows or the order of the data differ; the message has both
            values.
    """
    old, new = _flat("", _content(before)), _flat("", _content(now))
    changed = [
        f"{key}: {old.get(key)!r} then, {new.get(key)!r} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not any(key == each or key.startswith(f"{each}.") for each in MAY_CHANGE)
    ]
    if changed:
        error = ConfigError("the configuration differs from that of the run: " + "; ".join(changed))
        error.hint = "give the run's own persia.yml, or start a new run: without --resume, or a job with another --name"
        raise error


def _flat(prefix: str, content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in content.items():
        place = f"{prefix}.{key}" if prefix else key
        found |= _flat(place, value) if isinstance(value, dict) and value else {place: value}
    return found


@dataclass(frozen=True)
class Found:
    """A run, and the checkpoint in it that is used.

    Attributes:
        folder: The run's folder.
        checkpoint: The checkpoint.
        step: Its step.
        is_best: Whether it is the one with the best metric, not the newest.
    """

    folder: RunFolder
    checkpoint: Path
    step: int
    is_best: bool

    def __str__(self) -> str:
        """Return run and checkpoint in one line."""
        path = self.checkpoint.absolute()
        shown = path.relative_to(self.folder.path) if path.is_relative_to(self.folder.path) else path
        return f"{self.folder.shown}: {'the best checkpoint, ' if self.is_best else ''}{shown}"


def find_run(given: str | Path) -> RunFolder:
    """Return a run by its folder, by its ``LATEST`` file, or by a checkpoint in it.

    Raises:
        UsageError: There is no run.
    """
    return _find(Path(given))[0]


def find_checkpoint(given: str | Path) -> Found:
    """Return a run and the checkpoint that is used: the one given, else the best one, else the newest.

    Raises:
        UsageError: There is no run, or it has no checkpoint.
        CheckpointError: ``LATEST`` names a checkpoint that does not exist.
    """
    folder, checkpoint = _find(Path(given))
    if checkpoint is not None:
        return Found(folder, checkpoint, _core.Checkpoint(checkpoint).step, checkpoint.parent == folder.best)
    for parent in (folder.best, saves_of(folder)):
        newest = _core.latest(parent) if parent.is_dir() else None
        if newest is not None:
            return Found(folder, Path(newest), _core.Checkpoint(newest).step, parent == folder.best)
    why = (folder.read_json(SUMMARY).get("error") or "").partition("\n")[0]
    error = UsageError(f"{folder.shown}: the run has no checkpoint" + (f"; it failed: {why}" if why else " yet"))
    error.hint = (
        f"train it: persia train persia.yml --resume {folder.shown}; or give another run of {folder.path.parent}"
    )
    raise error


def saves_of(folder: RunFolder) -> Path:
    """Return the folder of the checkpoints of a run."""
    return folder.saves(folder.config())


def of_one_process(path: Path) -> bool:
    """Whether a folder has a run that is no job: its checkpoints are in it, or where ``checkpoint.dir`` says."""
    folder = RunFolder(path)
    in_job = (path / job.RUN).exists() or "checkpoints" in folder.read_json(FACTS)
    return (path / CONFIG).is_file() and not in_job


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run, or ``LATEST`` beside it, and not a checkpoint."""
    if path.name == LATEST and path.is_file():
        path = path.parent / path.read_text(encoding="utf-8").strip()
    return (path / CONFIG).is_file() and (path / METRICS).is_file()


def _find(path: Path) -> tuple[RunFolder, Path | None]:
    if path.name == LATEST and path.is_file():
        name = path.read_text(encoding="utf-8").strip()
        if (path.parent / name / CONFIG).is_file():
            return RunFolder(path.parent / name), None
        checkpoint = path.parent / name
        path = checkpoint if checkpoint.is_dir() else path
    for parent in (path, path.parent, path.parent.parent):
        if (parent / CONFIG).is_file() and (parent / METRICS).is_file():
            if parent == path or path.name in (CHECKPOINTS, BEST):
                newest = None if parent == path else _core.latest(path)
                return RunFolder(parent), None if newest is None else Path(newest)
            return RunFolder(parent), path
    error = UsageError(f"{path}: no run; want the folder of a run such as runs/LATEST, or a checkpoint in it")
    runs = sorted((each.parent for each in Path("runs").glob(f"*/{METRICS}")), key=_started)
    error.hint = f"the newest run is {runs[-1]}" if runs else "train one first: persia train persia.yml"
    raise error
