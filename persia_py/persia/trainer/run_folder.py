"""The folder of a run: its files, and how a run is found."""

import json
import shlex
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
from persia.runtime.places import Place, Url, place
from persia.runtime.settings import settings
from persia_core import checkpoint as _core

CONFIG = "persia.yml"
"""The file with the complete configuration of a run, including defaults and overrides."""
FACTS = "run.json"
"""The file with information that is not in the configuration: its source, training files and rows, the digest of the
transform, and the folder of the checkpoints of a job."""
SUMMARY = "summary.json"
"""The file with the state and the results of a run."""
METRICS = "metrics.jsonl"
"""The file with a line for each report."""
CHECKPOINTS, BEST = "checkpoints", "best"
"""The folders of the checkpoints, and of the checkpoint with the best metric of the validation set."""
SYNTHETIC = "synthetic"
"""The subfolder of ``run.dir`` for runs with random batches."""
LATEST = "LATEST"
"""The file in the folder of the runs that points to the newest run with a checkpoint."""
_REPLACED = {
    *(CONFIG, FACTS, SUMMARY, METRICS, CHECKPOINTS, BEST),
    *("transform.json", "tensorboard", "profile", "flight", "logs"),
}
"""The files in the folder of a run that failed before its first step, which may be replaced."""

_logger = get_logger("trainer")


class RunFolder:
    """The folder of a run.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._replaces = False

    @classmethod
    def new(cls, config: Config) -> "RunFolder":
        """Return the folder of a new run, which is not created yet.

        A run of this name that failed or was interrupted before its first step will be replaced.

        Raises:
            UsageError: Another run of this name exists.
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
        """Check that the run in this folder failed or was interrupted before it had results to keep.

        Raises:
            UsageError: The folder has a run to keep; the message describes it.
        """
        summary = self.read_json(SUMMARY) if (self.path / SUMMARY).is_file() else {}
        saves = {self.path, self.saves(config), self._own_saves()}
        if summary.get("step") or any(_has_checkpoint(each) for each in saves):
            given = shlex.quote(self.shown)
            raise UsageError(
                f"{self.shown}: a run of this name already exists",
                hint=f"continue the run with --resume {given}, or choose another name: --set run.name=NAME",
            )
        has_begun = (self.path / METRICS).is_file() and (self.path / METRICS).stat().st_size > 0
        others = {each.name for each in self.path.iterdir()} - _REPLACED if self.path.is_dir() else {"no folder"}
        if summary.get("status") in ("failed", "interrupted") and not has_begun and not others:
            return
        status = f"the status {summary['status']}" if "status" in summary else "no summary"
        removal = f"rm -r {shlex.quote(self.shown)}"
        raise UsageError(
            f"{self.shown}: a run of this name already exists, with {status} and without a checkpoint",
            hint=f"choose another name: --set run.name=NAME; or, if you do not need the run: {removal}",
        )

    def _own_saves(self) -> Place:
        """Return the folder of the checkpoints, according to the configuration in the folder, if it can be read."""
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

    def saves(self, config: Config) -> Place:
        """Return the folder or the URL of the checkpoints.

        It is that of the job or, in a run of one process, below ``checkpoint.dir`` if that is set, else in the folder.
        """
        if (of_job := self.read_json(FACTS).get("checkpoints")) is not None:
            return place(of_job)
        given = config.checkpoint.dir
        if given is None:
            return self.path / CHECKPOINTS
        parent = Url(given) if is_url(given) else Path(given).expanduser().absolute()
        return (parent / SYNTHETIC if config.data.synthetic else parent) / self.path.name

    @property
    def best(self) -> Place:
        """The folder or the URL below which the best checkpoint is."""
        return place(self.read_json(FACTS).get("checkpoints", self.path)) / BEST

    def make(self, config: Config, files: Mapping[str, str]) -> None:
        """Create the folder with its configuration and other files.

        Raises:
            StorageError: The folder cannot be created; incomplete files are removed.
        """
        with self._naming():
            make_folders(self.path.parent)
            if self._replaces:
                self._check_replaceable(config)  # another process may have started the run
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
        """Point ``LATEST`` to this run, which has a checkpoint, unless it points to a run that started later.

        Raises:
            StorageError: ``LATEST`` cannot be written.
        """
        latest = self.path.parent / LATEST
        with self._naming():
            named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
            if named not in ("", self.path.name) and _started(self.path.parent / named) > _started(self.path):
                return
            write_whole(latest, f"{self.path.name}\n".encode())

    def check_storage(self, config: Config) -> None:
        """Check that the run and its checkpoints can be written, before any work is done. Nothing is created.

        Raises:
            StorageError: The run or its checkpoints cannot be written.
        """
        given = config.checkpoint.dir
        if given is not None and not is_url(given):
            storage.check_parent(Path(given).expanduser().absolute(), "checkpoint.dir")
        for folder in (self.saves(config), self.path):
            if isinstance(folder, Url):
                storage.validate_url(folder)
            else:
                storage.validate(folder)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of the run atomically.

        Raises:
            StorageError: The file cannot be written; the previous content remains.
        """
        with self._naming():
            write_whole(self.path / name, content if isinstance(content, bytes) else content.encode())

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file of the run atomically."""
        self.write(name, json_text(content))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; return an empty dictionary if it is missing.

        Raises:
            CheckpointError: The file is damaged, or cannot be read.
        """
        path, hint = self.path / name, "restore the file, or start a new run"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            hint = f"check the file and its permissions: ls -l {shlex.quote(str(path))}"
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
        except ValueError as error:
            raise CheckpointError(f"cannot read {path}: {error}", hint=hint) from error
        if not isinstance(content, dict):
            found = type(content).__name__
            raise CheckpointError(f"{path}: expected a JSON object, found {found}", hint=hint)
        return content

    def config(self) -> Config:
        """Return the configuration of the run. The user's modules are imported from their place in training."""
        return open_document(self.path / CONFIG, folder=self.read_json(FACTS).get("folder")).checked()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write {error.filename or self.path}: {error.strerror or error}") from error


def _started(path: Path) -> str:
    """Return the start time of a run, as ISO 8601 in UTC; empty if unknown."""
    try:
        return str(RunFolder(path).read_json(SUMMARY).get("started", ""))
    except CheckpointError:
        return ""


def _has_checkpoint(where: Place) -> bool:
    if isinstance(where, Url):
        return bool(_core.listing(where, verify=False))
    return next(where.rglob("MANIFEST.json"), None) is not None


def json_text(content: Any) -> str:
    """Return JSON in the format of a run's files."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def resolved(config: Config) -> str:
    """Return the complete configuration as YAML. Its paths are absolute, because it may be read from another folder."""
    return "# The configuration of this run, with all defaults. Written by persia.\n" + to_yaml(config)


def _content(config: Config) -> dict[str, Any]:
    content: dict[str, Any] = config.model_dump(mode="json", by_alias=True)
    data = content["data"]
    for part in ("train", "valid", "test"):
        if data[part] is not None:
            paths = [data[part]] if isinstance(data[part], str) else data[part]
            whole = [path if is_url(path) else str(config.folder / Path(path).expanduser()) for path in paths]
            data[part] = whole[0] if isinstance(data[part], str) else whole
    if content["checkpoint"]["dir"] is not None and not is_url(content["checkpoint"]["dir"]):
        content["checkpoint"]["dir"] = str(Path(content["checkpoint"]["dir"]).expanduser().absolute())
    train = content["train"]
    if train["start_from"] is not None and settings.nats_url is None and not is_url(train["start_from"]):
        train["start_from"] = str(config.folder / Path(train["start_from"]).expanduser())
    return content


MAY_CHANGE = (
    *("data.train", "data.valid", "data.test", "data.epochs", "checkpoint", "run", "env"),
    *("data.workers", "data.prefetch", "data.persistent", "data.pin"),
    *("model.activation_checkpointing", "model.attention"),
    *("dist", "nccl", "profile", "precision", "parallel", "fsdp", "memory", "spot", "price", "budget"),
    *(f"train.{key}" for key in ("early_stop", "evaluate_every", "metrics", "gauc_group", "staleness", "threads")),
    *(f"train.{key}" for key in ("micro_batch", "nonfinite", "detect_anomaly")),
)
"""Keys that a resumed run may change. The files of ``data.train`` are compared by name and size."""


def check_same(run: str, before: Config, now: Config) -> None:
    """Check that a run can be resumed with a configuration.

    Args:
        run: The folder of the run, for the message.
        before: The configuration with which the run was trained so far.
        now: The new configuration.

    Raises:
        ConfigError: Keys that determine the model, the rows or the order of the data differ; the message shows both
            values.
    """
    old, new = _flat("", _content(before)), _flat("", _content(now))
    changed = [
        f"{key}: {old.get(key)!r} in the run, {new.get(key)!r} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not any(key == each or key.startswith(f"{each}.") for each in MAY_CHANGE)
    ]
    if changed:
        raise ConfigError(
            f"the configuration differs from that of the run {run}: {'; '.join(changed)}",
            hint="use the persia.yml in the folder of the run, or start a new run: leave out --resume, or give the job "
            "another --name",
        )


def _flat(prefix: str, content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in content.items():
        place = f"{prefix}.{key}" if prefix else key
        found |= _flat(place, value) if isinstance(value, dict) and value else {place: value}
    return found


@dataclass(frozen=True)
class Found:
    """A run, and the one of its checkpoints that is used.

    Attributes:
        folder: The run's folder.
        checkpoint: The checkpoint.
        step: The step of the checkpoint.
        is_best: Whether the checkpoint is the one with the best metric, not the newest.
    """

    folder: RunFolder
    checkpoint: Place
    step: int
    is_best: bool

    def __str__(self) -> str:
        """Return run and checkpoint in one line."""
        shown = self.checkpoint
        if isinstance(shown, Path):
            path = shown.absolute()
            shown = path.relative_to(self.folder.path) if path.is_relative_to(self.folder.path) else path
        return f"{self.folder.shown}: {'the best checkpoint, ' if self.is_best else ''}{shown}"


def find_run(given: str | Path) -> RunFolder:
    """Return a run by its folder, by its ``LATEST`` file, or by a checkpoint in it.

    Raises:
        UsageError: The run does not exist.
        StorageError: ``LATEST`` cannot be read.
    """
    return _find(Path(given))[0]


def find_checkpoint(given: str | Path) -> Found:
    """Return a run and the checkpoint that is used.

    If ``given`` is a checkpoint, this checkpoint is used. For a run, the best checkpoint is used, or the newest one if
    the run has no best checkpoint.

    Raises:
        UsageError: The run does not exist, or has no checkpoint.
        CheckpointError: ``LATEST`` points to a checkpoint that does not exist.
    """
    folder, checkpoint = _find(Path(given))
    if checkpoint is not None:
        return Found(folder, checkpoint, _core.Checkpoint(checkpoint).step, checkpoint.parent == folder.best)
    for parent in (folder.best, saves_of(folder)):
        newest = _core.latest(parent) if isinstance(parent, Url) or parent.is_dir() else None
        if newest is not None:
            return Found(folder, place(newest), _core.Checkpoint(newest).step, parent == folder.best)
    why = (folder.read_json(SUMMARY).get("error") or "").partition("\n")[0]
    raise UsageError(
        f"{folder.shown}: the run has no checkpoint" + (f"; it failed: {why}" if why else ""),
        hint=(
            f"continue the run: persia train persia.yml --resume {shlex.quote(folder.shown)}; "
            f"or choose another run in {folder.path.parent}"
        ),
    )


def saves_of(folder: RunFolder) -> Place:
    """Return the folder of the checkpoints of a run."""
    return folder.saves(folder.config())


def of_one_process(path: Path) -> bool:
    """Whether a folder has a run that one process has trained, and not a job."""
    return (path / CONFIG).is_file() and not of_job(path)


def of_job(path: Path) -> bool:
    """Whether a folder has a run of a job."""
    return (path / job.RUN).exists() or "checkpoints" in RunFolder(path).read_json(FACTS)


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run or a ``LATEST`` file, and not a checkpoint."""
    if path.name == LATEST and path.is_file():
        path = job.target_of(path)
    return (path / CONFIG).is_file() and (path / METRICS).is_file()


def _find(path: Path) -> tuple[RunFolder, Path | None]:
    if path.name == LATEST and path.is_file():
        target = job.target_of(path)
        if (target / CONFIG).is_file():
            return RunFolder(target), None
        path = target if target.is_dir() else path
    for parent in (path, path.parent, path.parent.parent):
        if (parent / CONFIG).is_file() and (parent / METRICS).is_file():
            if parent == path or path.name in (CHECKPOINTS, BEST):
                newest = None if parent == path else _core.latest(path)
                return RunFolder(parent), None if newest is None else Path(newest)
            return RunFolder(parent), path
    runs = sorted((each.parent for each in Path("runs").glob(f"*/{METRICS}")), key=_started)
    raise UsageError(
        f"{path}: no run; expected the folder of a run, the file LATEST next to it, or a checkpoint in it",
        hint=f"the newest run is {runs[-1]}" if runs else "train one first: persia train persia.yml",
    )
