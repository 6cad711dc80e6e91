"""The YAML file of ``persia up``: reads and checks the description of a job on one host.

The file is a ``persia.yml``, or has the keys of :class:`JobConfig`.
"""

import difflib
import os
import re
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from persia.launch.yaml_files import load_yaml
from persia.runtime.errors import ConfigError, UsageError

_AUTO = "auto"
_NAME = r"^[A-Za-z0-9._-]{1,64}$"
MAX_REPLICAS = 64
"""The maximum number of processes of one kind."""
_MAX_RESTARTS = 100
_Count = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError("a string or a number")


def _check_entry(entry: str) -> str:
    try:
        words = shlex.split(entry)
    except ValueError:  # an unclosed quote
        words = []
    if not words:
        raise ValueError("the path of a script, and arguments, with every quote closed")
    return entry


_Entry = Annotated[str, AfterValidator(_check_entry)]
_Text = Annotated[str, BeforeValidator(_as_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataCompose(_Strict):
    """The data script, which sends batches."""

    entry: _Entry | None = None
    """The path of the script, optionally with arguments. None sends the rows of ``config``."""
    replicas: _Count = 1
    """The number of replicas; each sends a part of the data."""


class Trainer(_Strict):
    """The training script."""

    entry: _Entry | None = None
    """The path of the script, optionally with arguments. None trains from ``config``."""
    ranks: _Count = 1
    """The number of ranks."""


class JobConfig(_Strict):
    """A job on this host. Paths are relative to the folder of the file."""

    job: Annotated[str, Field(pattern=_NAME)] = "local"
    """The name of the job. Jobs with different names are isolated from each other."""
    servers: _Count = 1
    """The number of embedding servers."""
    middlewares: _Count = 1
    """The number of middlewares."""
    config: str | None = None
    """The path of a ``persia.yml``, whose features define the slots."""
    embedding_config: str | None = None
    """The path of ``embedding_config.yml``, which defines the slots if ``config`` is not set."""
    global_config: str | None = None
    """The path of ``global_config.yml``: capacity and other limits."""
    data_compose: DataCompose | None = None
    """None means that the trainer makes its own batches. A trainer without an entry has one data-compose replica
    then."""
    trainer: Trainer | None = None
    """None means that the servers run until Ctrl-C, for trainers that are started separately."""
    env: dict[str, _Text] = Field(default_factory=dict)
    """Environment variables for every process. true becomes 1, false becomes 0."""
    token: str = _AUTO
    """The path of a file with the secret, at least 32 bytes. ``auto`` generates a secret for this run."""
    run_dir: str | None = None
    """The folder of logs, checkpoints and the summary; None means ``runs/JOB`` below the working directory."""
    restarts: Annotated[int, Field(ge=0, le=_MAX_RESTARTS)] = 3
    """The number of times that each process is restarted after a failure before the job ends."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of processes of a job from a ``persia.yml``, and its name. None means the default in each case.

    Attributes:
        servers: The number of embedding servers, by default 1.
        middlewares: The number of middlewares, by default 1.
        data_compose: The number of data-compose replicas, by default 1.
        ranks: The number of ranks, by default 1.
        name: The name of the run; by default ``run.name``, or the start time in UTC. An interrupted run of this name is
            resumed.
    """

    servers: int | None = None
    middlewares: int | None = None
    data_compose: int | None = None
    ranks: int | None = None
    name: str | None = None


def read_job_config(path: Path, sizes: Sizes | None = None, *, folder: Path | None = None) -> JobConfig:
    """Return the job that a file describes, with absolute paths.

    Args:
        path: A ``persia.yml``, or a file with the keys of :class:`JobConfig`.
        sizes: The numbers of processes, for a ``persia.yml``; None means the defaults.
        folder: The folder to which paths in a ``persia.yml`` are relative; None means its folder.

    Raises:
        ConfigError: The file is invalid. The message lists every error: its line, the value found, the values allowed.
        UsageError: ``sizes`` is given with a file that sets the numbers itself.
    """
    sizes = sizes or Sizes()
    try:
        content = load_yaml(path)
        if _is_persia_yml(content):
            return _job_of(path, sizes, folder)
    except ConfigError as error:
        error.hint = _next_step(path)
        raise
    if given := [name for name in ("servers", "middlewares", "data_compose", "ranks", "name") if getattr(sizes, name)]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"{options}: {path} is not a persia.yml, and sets these values itself", hint=f"change the values in {path}"
        )
    mistakes = _without_slots(content)
    try:
        config = JobConfig.model_validate(content)
    except ValidationError as error:
        mistakes = [*(_mistake(detail) for detail in error.errors()), *mistakes]
    if mistakes:
        raise _error(path, mistakes)
    if config.trainer is not None and config.trainer.entry is None and config.data_compose is None:
        # A trainer without an entry trains from a persia.yml, whose batches come from data-compose.
        config = config.model_copy(update={"data_compose": DataCompose()})
    return _with_absolute_paths(config, path)


def is_persia_yml(path: Path) -> bool:
    """Return whether a file is a ``persia.yml``, and not one with the keys of :class:`JobConfig`.

    Raises:
        ConfigError: The file cannot be read, or is not YAML.
    """
    try:
        return _is_persia_yml(load_yaml(path))
    except ConfigError as error:
        error.hint = _next_step(path)
        raise


def _is_persia_yml(content: object) -> bool:
    return isinstance(content, dict) and not _PERSIA_YML.isdisjoint(content)


def _job_of(path: Path, sizes: Sizes, folder: Path | None) -> JobConfig:
    """Return the job that trains from a ``persia.yml``."""
    from persia.config import load_config
    from persia.config.document import open_document

    # With a folder, the file is a copy. The warnings about the original file have already been logged.
    config = load_config(path) if folder is None else open_document(path, folder=folder).checked()
    name = sizes.name or config.run.name or f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    if not re.fullmatch(_NAME, name):
        origin = "--name" if sizes.name else "run.name"
        raise ConfigError(f"{origin}: found `{name}`, allowed: 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    try:
        return JobConfig(
            job=name,
            servers=sizes.servers or 1,
            middlewares=sizes.middlewares or 1,
            config=str(path.resolve()),
            data_compose=DataCompose(replicas=sizes.data_compose or 1),
            trainer=Trainer(ranks=sizes.ranks or 1),
            run_dir=str(Path(config.run.dir).expanduser().absolute() / name),
        )
    except ValidationError as error:
        raise ConfigError("; ".join(_mistake(detail) for detail in error.errors())) from error


def _without_slots(content: Any) -> list[str]:
    """Return the errors in ``config`` and in the keys that it replaces."""
    if not isinstance(content, dict):
        return []
    whole, slots = (content.get(key) is not None for key in ("config", "embedding_config"))
    if whole and slots:
        return [
            f"config is {content['config']}, and embedding_config is {content['embedding_config']}: slots come from "
            "one file; remove one of the two"
        ]
    if whole:
        return []
    parts = {key: content.get(key) for key in ("data_compose", "trainer")}
    lacking = [f"{key}.entry" for key, part in parts.items() if isinstance(part, dict) and part.get("entry") is None]
    return [f"{key}: missing" for key in ([] if slots else ["embedding_config"]) + lacking]


def makes_token(config: JobConfig) -> bool:
    """Return whether a secret is generated for this run."""
    return config.token == _AUTO


def _with_absolute_paths(config: JobConfig, path: Path) -> JobConfig:
    folder = path.resolve().parent
    keys = ("config", "embedding_config", "global_config")
    files = {key: getattr(config, key) for key in keys}
    if config.token != _AUTO:
        files["token"] = config.token
    found = {key: _absolute(folder, name) for key, name in files.items() if name is not None}
    mistakes = [
        f"{key}: found `{files[key]}`, which is not a file (relative to {folder})"
        for key, name in found.items()
        if not Path(name).is_file()
    ]
    changes: dict[str, Any] = dict(found)
    for key, part in (("data_compose", config.data_compose), ("trainer", config.trainer)):
        if part is None or part.entry is None:
            continue
        name, *arguments = shlex.split(part.entry)
        script = _absolute(folder, name)
        if not Path(script).is_file():
            mistakes.append(f"{key}.entry: found `{name}`, which is not a file (relative to {folder})")
        changes[key] = part.model_copy(update={"entry": shlex.join([script, *arguments])})
    if config.run_dir is not None:
        changes["run_dir"] = _absolute(folder, config.run_dir)
    if mistakes:
        raise _error(path, mistakes)
    return config.model_copy(update=changes)


def _absolute(folder: Path, name: str) -> str:
    return os.path.normpath(folder / Path(name).expanduser())


def _error(path: Path, mistakes: list[str]) -> ConfigError:
    count = "1 error" if len(mistakes) == 1 else f"{len(mistakes)} errors"
    told = "\n".join([f"{path}: {count}", *(f"  {mistake}" for mistake in mistakes)])
    return ConfigError(told, hint=_next_step(path))


def _next_step(path: Path) -> str:
    if not path.is_file():
        return "correct the path: persia up FILE"
    return f"correct each error, then run: persia up {shlex.quote(str(path))}"


def _mistake(detail: Any) -> str:
    place = [str(part) for part in detail["loc"]]
    where = ".".join(place) or "the file"
    if detail["type"] == "extra_forbidden":
        known = list(_MODELS[tuple(place[:-1])].model_fields)
        near = difflib.get_close_matches(place[-1], known, n=1)
        return f"{where}: unknown key, " + (f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}")
    if detail["type"] == "missing":
        return f"{where}: missing"
    allowed = detail["msg"]
    for prefix in ("Value error, ", "Input should be ", "String should "):
        allowed = allowed.removeprefix(prefix)
    return f"{where}: found `{detail['input']}`, allowed: {allowed}"


_PERSIA_YML = {"data", "features", "labels", "model", "train"}
"""Keys from which a ``persia.yml`` is recognized."""

_MODELS: dict[tuple[str, ...], type[BaseModel]] = {
    (): JobConfig,
    ("data_compose",): DataCompose,
    ("trainer",): Trainer,
}
