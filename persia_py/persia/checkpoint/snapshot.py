"""A checkpoint: rows with their optimizer state, the model, the dense optimizer, random state, data position.

A directory is a checkpoint if it has a ``MANIFEST.json``, which is published last and names every file with its size
and hash. Files are staged and replace an older checkpoint in the same directory atomically.
"""

import contextlib
import io
import json
import math
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from persia.checkpoint.foreign import is_imported, open_checkpoint
from persia.checkpoint.state_keys import fitted
from persia.embedding import inputs
from persia.runtime import files
from persia.runtime.errors import CheckpointError, PersiaError, StorageError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia.runtime.waits import REMIND_S
from persia_core import checkpoint as _core
from persia_core.engine import Engine

_logger = get_logger("checkpoint")

COLLECTION_MODEL = "model.pt"
"""The model in a checkpoint of ``EmbeddingCollection.save(directory, model=...)``."""
DENSE_MODEL = "dense.pt"
"""The model in a checkpoint of a context."""


class Save:
    """A save of the rows as they are at construction; training may continue before it is written.

    ``with Save(...) as save: save.add_state(...)`` writes it at the end of the block.

    Args:
        engine: Its pushes are awaited, so that the cut is of one step.
        directory: The directory, which is created if it is missing.
        step: The last step that was trained.
        cursor: The position of the data loader.

    Attributes:
        what: Its name in messages.

    Raises:
        StorageError: The directory cannot be written to.
        RunLostError: A server no longer answers.
    """

    def __init__(
        self, engine: Engine, directory: str | os.PathLike[str], step: int, cursor: dict[str, Any] | None = None
    ) -> None:
        self.what = f"the save of step {step} into {os.fspath(directory)}"
        self._cursor = json.dumps(cursor)
        self._files: dict[str, io.BytesIO] = {}
        self._inputs: str | None = None
        self._saver = _core.Saver(engine, os.fspath(directory), step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.write()
        else:
            self.abort()

    @contextlib.contextmanager
    def kept(self) -> Iterator[Self]:
        """Abort the checkpoint if the block raises."""
        try:
            yield self
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort the save; the previous content of the directory remains."""
        self._saver.abort()
        self._files.clear()

    def add_state(self, name: str, state: dict[str, Any]) -> None:
        """Add the current ``state`` as the file ``name``, by ``torch.save``.

        Raises:
            UsageError: The name is taken or invalid, or the state cannot be pickled.
        """
        self._add(name, lambda file: torch.save(state, file))
        if name == inputs.FILE:  # also for the manifest: servers of an infer job cannot unpickle the file
            self._inputs = json.dumps(state)

    def add_module(self, name: str, module: torch.nn.Module) -> None:
        """Add the current scripted ``module`` as the file ``name``."""
        self._add(name, lambda file: save_scripted(module, file))

    def _add(self, name: str, write: Callable[[io.BytesIO], None]) -> None:
        self._saver.staged(name)  # refuses invalid names
        if name in self._files:
            raise UsageError(f"file name {name!r}: the checkpoint has a file of that name already; give each its own")
        file = io.BytesIO()
        try:
            write(file)
        except PersiaError:
            raise
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise UsageError(f"{name}: cannot be pickled: {error}") from error
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{name}: cannot be saved: {error}") from error
        self._files[name] = file

    def write(self) -> None:
        """Write rows, files and, last, the manifest; if this fails, the previous content of the directory remains.

        Raises:
            StorageError: It cannot be written.
            RunLostError: A server no longer answers.
        """
        try:
            self._write()
        except BaseException:
            self.abort()
            raise
        self._files.clear()

    def _write(self) -> None:
        self._saver.write_rows()
        for name, content in self._files.items():
            path = Path(self._saver.staged(name))
            try:
                path.write_bytes(content.getbuffer())
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror}") from error
            self._saver.add_file(name)
        created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        unreported = self._saver.commit(self._cursor, created_at, self._inputs)
        if unreported is not None:
            _logger.warning("the checkpoint is written, but servers with a log were not notified: %s", unreported)


class Writing:
    """A save that a separate thread writes.

    Args:
        save: The save; it is aborted if the thread cannot be started.
        work: The work of the thread, if it does more than write the save.

    Attributes:
        what: Its name in messages.
        error: The error of a failed write, which was logged; None otherwise.
    """

    def __init__(self, save: Save, work: Callable[[], None] | None = None) -> None:
        self.what = save.what
        self.error: BaseException | None = None
        self._work = work or save.write
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="persia-save", daemon=True)
        with save.kept():
            self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
            _logger.error("%s failed: %s", self.what, error, exc_info=not isinstance(error, PersiaError))

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait at most this many seconds, and return whether it has ended; a long wait is logged every 30 s."""
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(REMIND_S, left))
            if self._thread.is_alive() and left > REMIND_S:
                _logger.warning(
                    "rank %d still waits for %s after %.0f s",
                    settings.rank,
                    self.what,
                    time.monotonic() - self._started,
                )
        return not self._thread.is_alive()


class Load:
    """A checkpoint whose files were all verified.

    Args:
        directory: The directory of the checkpoint.

    Attributes:
        path: The directory.
        names: Its files.
        generation: The generation of the run at the cut.
        seed: The run's seed; None if it was imported, so that it has no run.
        imported: Whether it has only rows that ``persia ckpt import`` has written.
        tables: The names of its tables.
        step: The step of the cut.
        cursor: The position of the data loader.
        read: The files whose state was read by :meth:`state`.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the message names the file.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        self._opened = open_checkpoint(directory)
        self._opened.verify()
        head = json.loads(self._opened.manifest)["head"]
        self.imported = is_imported(self._opened)
        self.tables = [table["name"] for table in head["run"]["schema"]["tables"]]
        self._has_state = head["run"]["optimizer"] is not None
        self.names: list[str] = [file["name"] for file in self._opened.files]
        self.generation: int = self._opened.generation
        self.seed: int | None = None if self.imported else self._opened.seed
        self.step: int = self._opened.step
        self.cursor: dict[str, Any] | None = json.loads(self._opened.cursor)
        self.read: set[str] = set()

    def state(self, name: str, map_location: str | torch.device | None = None) -> dict[str, Any]:
        """Return the state that :meth:`Save.add_state` saved as ``name``, by default on the CPU.

        Raises:
            CheckpointError: The checkpoint has no such file, or the file has no state dict.
        """
        if name not in self.names:
            others = ", ".join(other for other in self.names if not other.endswith(".arrow")) or "only rows"
            raise CheckpointError(f"{self.path}: the checkpoint has no {name}; apart from rows it has: {others}")
        self.read.add(name)
        return _read_state(Path(self._opened.path_of(name)), map_location)

    @property
    def models(self) -> set[str]:
        """The files with a model that was trained with these rows."""
        return {DENSE_MODEL, COLLECTION_MODEL} & {*self.names}

    def model_name(self, name: str) -> str:
        """Return the model's file: ``name``, or that of a collection if the default one does not exist."""
        from_collection = name == DENSE_MODEL and name not in self.names and COLLECTION_MODEL in self.names
        return COLLECTION_MODEL if from_collection else name

    def restore(self, engine: Engine) -> None:
        """Replace the engine's rows by the checkpoint's; log a warning about tables that it does not have."""
        absent = [table for table in engine.stats()["rows"] if table not in self.tables]
        self._opened.restore(engine)
        if not self._has_state:
            _logger.info("%s: its rows have no optimizer state, which starts as that of new rows", self.path)
        if absent:
            _logger.warning(
                "%s has no table %s, which starts without rows; the checkpoint has %s",
                self.path,
                ", ".join(absent),
                ", ".join(sorted(self.tables)),
            )


def save_scripted(module: Any, to: Path | io.BytesIO) -> None:
    """Write a module as TorchScript.

    Raises:
        UsageError: It cannot be scripted.
    """
    with warnings.catch_warnings():  # torch deprecates TorchScript, but PersiaML's users have scripted modules
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            scripted = torch.jit.script(module)
        except RuntimeError as error:
            raise UsageError(f"{type(module).__name__} cannot be scripted: {error}") from error
        torch.jit.save(scripted, to)


def _read_state(path: Path, map_location: str | torch.device | None) -> dict[str, Any]:
    try:
        # The caller moves a state to its device; the device it was saved from may not exist here.
        state = torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except Exception as error:  # the exceptions for damaged pickles are not documented
        raise CheckpointError(f"{path}: not a state dict that torch can load: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: want a state dict, got {type(state).__name__}")
    return state


def check_module(module: torch.nn.Module, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check that ``module.load_state_dict`` would succeed with the result: the state, with the module's keys.

    Keys of a module in a wrapper, such as ``module.`` of DistributedDataParallel, are those of the module without it.

    Raises:
        CheckpointError: Keys or shapes differ; the message lists all.
    """
    own, state = module.state_dict(), fitted(module, state)
    # The module itself handles extra state that an older version has not saved.
    wrong = [f"{key}: not in the checkpoint" for key in own if key not in state and not key.endswith("_extra_state")]
    wrong += [f"{key}: not in the model" for key in state if key not in own]
    wrong += [
        f"{key}: shape {_shape(state[key])} in the checkpoint, {tuple(value.shape)} in the model"
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and key in state and _shape(state[key]) != tuple(value.shape)
    ]
    if wrong:
        raise CheckpointError(f"{path}: the model differs from the one that was saved: {'; '.join(wrong)}")
    return state


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def check_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Check that ``optimizer.load_state_dict(state)`` would succeed.

    Raises:
        CheckpointError: The class or the parameter groups differ.
    """
    groups = state.get("param_groups", [])
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in groups]
    keys = [sorted(set(group) - {"param_names"}) for group in optimizer.param_groups]
    if own == saved and keys != [sorted(set(group) - {"param_names"}) for group in groups]:
        raise CheckpointError(
            f"{path}: the dense optimizer differs from the one that was saved: its options are "
            f"{', '.join(sorted(groups[0]))} in the checkpoint, {', '.join(keys[0])} here"
        )
    if own != saved:
        raise CheckpointError(
            f"{path}: the dense optimizer differs from the one that was saved: parameters per group {saved} in the "
            f"checkpoint, {own} here"
        )


def dump_state(
    instance: torch.nn.Module | torch.optim.Optimizer,
    directory: Path,
    file_name: str,
    is_jit: bool,
    names: inputs.InputNames | None = None,
) -> None:
    """Write a state dict with the model's inputs, or with ``is_jit`` the scripted module, durably and atomically."""
    if Path(file_name).name != file_name:
        raise UsageError(f"file_name={file_name!r}: want a name without folders")
    temporary = directory / f".{file_name}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if is_jit:
            save_scripted(instance, temporary)
        else:
            torch.save(inputs.annotate(instance.state_dict(), names), temporary)
        files.publish(temporary, directory / file_name)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, UsageError):
            raise
        raise StorageError(f"{directory / file_name}: {error}") from error


def load_state(
    instance: torch.nn.Module | torch.optim.Optimizer, path: Path, map_location: str | torch.device | None
) -> inputs.InputNames | None:
    """Load what :func:`dump_state` wrote, and return the model's inputs.

    Raises:
        CheckpointError: The file is missing, is not a state dict, or does not fit.
    """
    state = _read_state(path, map_location)
    if isinstance(instance, torch.nn.Module):
        state = check_module(instance, state, path)
    else:
        check_optimizer(instance, state, path)
    names = inputs.annotated(state)
    instance.load_state_dict(state)
    return names
