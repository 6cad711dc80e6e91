"""What ``persia up`` starts: the description of a job on one host, read from YAML and checked."""

import difflib
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from persia.launch.host import load_yaml
from persia.runtime.errors import ConfigError

_AUTO = "auto"
_MOST_REPLICAS = 64
_MOST_RESTARTS = 100
_Count = Annotated[int, Field(ge=1, le=_MOST_REPLICAS)]


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError("text or a number")


def _as_words(entry: str) -> str:
    if not shlex.split(entry):  # a quote that is not closed is a ValueError, too
        raise ValueError("the path of a script, and arguments")
    return entry


_Entry = Annotated[str, AfterValidator(_as_words)]
_Text = Annotated[str, BeforeValidator(_as_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataCompose(_Strict):
    """The script that sends batches."""

    entry: _Entry
    """Its path, arguments allowed."""
    replicas: _Count = 1
    """How often it runs; each sends its part."""


class Trainer(_Strict):
    """The script that trains."""

    entry: _Entry
    """Its path, arguments allowed."""
    ranks: _Count = 1
    """Processes that train together."""


class StackConfig(_Strict):
    """A job on this host. Paths are relative to the file's folder."""

    job: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "local"
    """Its name; jobs of different names do not see each other."""
    servers: _Count = 1
    """Processes that hold the embedding rows."""
    middlewares: _Count = 1
    """Processes that split requests over the servers."""
    embedding_config: str
    """The slots."""
    global_config: str | None = None
    """Capacity and more."""
    data_compose: DataCompose | None = None
    """None: the trainer makes its own batches."""
    trainer: Trainer | None = None
    """None: keep the servers up for trainers started by hand."""
    env: dict[str, _Text] = Field(default_factory=dict)
    """More variables for every process; true is 1, false is 0."""
    token: str = _AUTO
    """A file with the secret, at least 32 bytes; ``auto`` makes one for this run."""
    run_dir: str | None = None
    """Where logs, checkpoints and the summary go; ``runs/JOB`` below the working directory if not given."""
    restarts: Annotated[int, Field(ge=0, le=_MOST_RESTARTS)] = 3
    """How often a part that died is started again before the run is given up."""


def read_stack(path: Path) -> StackConfig:
    """Return the job a file describes, its paths made absolute.

    Raises:
        ConfigError: With every mistake: where, what is there, what is allowed.
    """
    content = load_yaml(path)
    try:
        config = StackConfig.model_validate(content)
    except ValidationError as error:
        mistakes = [_mistake(detail) for detail in error.errors()]
        raise _refused(path, mistakes) from error
    return _anchored(config, path)


def makes_token(config: StackConfig) -> bool:
    """Return whether the job has a secret of its own, made for this run."""
    return config.token == _AUTO


def _anchored(config: StackConfig, path: Path) -> StackConfig:
    folder = path.resolve().parent
    files = {"embedding_config": config.embedding_config, "global_config": config.global_config}
    if config.token != _AUTO:
        files["token"] = config.token
    found = {key: _under(folder, name) for key, name in files.items() if name is not None}
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
        script = _under(folder, name)
        if not Path(script).is_file():
            mistakes.append(f"{key}.entry: found `{name}`, which is no file (seen from {folder})")
        changes[key] = part.model_copy(update={"entry": shlex.join([script, *arguments])})
    if config.run_dir is not None:
        changes["run_dir"] = _under(folder, config.run_dir)
    if mistakes:
        raise _refused(path, mistakes)
    return config.model_copy(update=changes)


def _under(folder: Path, name: str) -> str:
    return os.path.normpath(folder / Path(name).expanduser())


def _refused(path: Path, mistakes: list[str]) -> ConfigError:
    count = "1 error" if len(mistakes) == 1 else f"{len(mistakes)} errors"
    error = ConfigError("\n".join([f"{path}: {count}", *(f"  {mistake}" for mistake in mistakes)]))
    error.hint = f"correct it, then run: persia up {path}"
    return error


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
    (): StackConfig,
    ("data_compose",): DataCompose,
    ("trainer",): Trainer,
}
