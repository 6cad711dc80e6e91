"""The YAML file of ``persia up``: read and check the description of a job on one host."""

import difflib
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from persia.launch.yaml_files import load_yaml
from persia.runtime.errors import ConfigError

_AUTO = "auto"
_MAX_REPLICAS = 64
_MAX_RESTARTS = 100
_Count = Annotated[int, Field(ge=1, le=_MAX_REPLICAS)]


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError("text or a number")


def _check_entry(entry: str) -> str:
    if not shlex.split(entry):  # raises ValueError at a quote that is not closed
        raise ValueError("the path of a script, and arguments")
    return entry


_Entry = Annotated[str, AfterValidator(_check_entry)]
_Text = Annotated[str, BeforeValidator(_as_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataCompose(_Strict):
    """The data script, which sends batches."""

    entry: _Entry
    """The path of the script, with arguments if any."""
    replicas: _Count = 1
    """The number of replicas; each sends its part of the data."""


class Trainer(_Strict):
    """The training script."""

    entry: _Entry
    """The path of the script, with arguments if any."""
    ranks: _Count = 1
    """The number of ranks."""


class JobConfig(_Strict):
    """A job on this host. Paths are relative to the folder of the file."""

    job: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "local"
    """The job's name. Jobs of different names do not see each other."""
    servers: _Count = 1
    """The number of embedding servers."""
    middlewares: _Count = 1
    """The number of middlewares."""
    embedding_config: str
    """The path of ``embedding_config.yml``: the slots."""
    global_config: str | None = None
    """The path of ``global_config.yml``: capacity and other limits."""
    data_compose: DataCompose | None = None
    """None: the trainer makes its own batches."""
    trainer: Trainer | None = None
    """None: the servers run until Ctrl-C, for trainers that are started by hand."""
    env: dict[str, _Text] = Field(default_factory=dict)
    """Variables for every process. true is 1, false is 0."""
    token: str = _AUTO
    """The path of a file with the secret, at least 32 bytes. ``auto`` makes one for this run."""
    run_dir: str | None = None
    """The folder of logs, checkpoints and the summary; None means ``runs/JOB`` below the working directory."""
    restarts: Annotated[int, Field(ge=0, le=_MAX_RESTARTS)] = 3
    """How often a part that died is restarted before the job ends."""


def read_job_config(path: Path) -> JobConfig:
    """Return the job that a file describes, with absolute paths.

    Raises:
        ConfigError: It lists every mistake: where it is, what was found, what is allowed.
    """
    try:
        content = load_yaml(path)
    except ConfigError as error:
        error.hint = _next_step(path)
        raise
    try:
        config = JobConfig.model_validate(content)
    except ValidationError as error:
        mistakes = [_mistake(detail) for detail in error.errors()]
        raise _error(path, mistakes) from error
    return _with_absolute_paths(config, path)


def makes_token(config: JobConfig) -> bool:
    """Return whether a secret is made for this run."""
    return config.token == _AUTO


def _with_absolute_paths(config: JobConfig, path: Path) -> JobConfig:
    folder = path.resolve().parent
    files = {"embedding_config": config.embedding_config, "global_config": config.global_config}
    if config.token != _AUTO:
        files["token"] = config.token
    found = {key: _absolute(folder, name) for key, name in files.items() if name is not None}
    mistakes = [
        f"{key}: found `{files[key]}`, which is no file (seen from {folder})"
        for key, name in found.items()
        if not Path(name).is_file()
    ]
    changes: dict[str, Any] = dict(found)
    for key, part in (("data_compose", config.data_compose), ("trainer", config.trainer)):
        if part is None:
            continue
        name, *arguments = shlex.split(part.entry)
        script = _absolute(folder, name)
        if not Path(script).is_file():
            mistakes.append(f"{key}.entry: found `{name}`, which is no file (seen from {folder})")
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
    error = ConfigError("\n".join([f"{path}: {count}", *(f"  {mistake}" for mistake in mistakes)]))
    error.hint = _next_step(path)
    return error


def _next_step(path: Path) -> str:
    return f"correct it, then run: persia up {path}"


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


_MODELS: dict[tuple[str, ...], type[BaseModel]] = {
    (): JobConfig,
    ("data_compose",): DataCompose,
    ("trainer",): Trainer,
}
