"""A checkpoint: rows with their optimizer state, the model, the dense optimizer, random state, data position.

A directory, or a URL of an object store, is a checkpoint if it has a ``MANIFEST.json``, which is published last and
lists every file with its size and hash. Files are staged and replace an older checkpoint at the same place atomically.
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
from persia.embedding.listed import listed
from persia.runtime import files, flight
from persia.runtime.errors import CheckpointError, PersiaError, StorageError, UsageError
from persia.runtime.logging import get_logger, next_step
from persia.runtime.places import Place, Url, place
from persia.runtime.settings import settings
from persia.runtime.waits import REMIND_S
from persia_core import checkpoint as _core
from persia_core.engine import Engine

_logger = get_logger("checkpoint")

COLLECTION_MODEL = "model.pt"
"""The file name of the model in a checkpoint of ``EmbeddingCollection.save(directory, model=...)``."""
DENSE_MODEL = "dense.pt"
"""The file name of the model in a checkpoint of a context."""


class Save:
    """A save of the rows as they are at construction. Training may continue before the files are written.

    ``with Save(...) as save: save.add_state(...)`` writes the checkpoint at the end of the block.

    Args:
        engine: The engine. Its pushes are awaited, because the cut must capture one step.
        directory: The URL, or the directory, which is created if it is missing.
        step: The last step that was trained.
        cursor: The position of the data loader.

    Attributes:
        what: The name of the save in messages.

    Raises:
        StorageError: The directory cannot be written to.
        RunLostError: A server no longer responds.
    """

    def __init__(
        self, engine: Engine, directory: str | os.PathLike[str], step: int, cursor: dict[str, Any] | None = None
    ) -> None:
        self.what = f"the save of step {step} into {os.fspath(directory)}"
        self._step = step
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
        """Keep the save open after the block; abort it if the block raises."""
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
            StorageError: A tensor cannot be copied from its device.
        """
        self._add(name, lambda file: torch.save(state, file))
        # The manifest also gets the names of inputs, because servers of an infer job cannot unpickle the file.
        if name == inputs.FILE:
            self._inputs = json.dumps(state)

    def add_module(self, name: str, module: torch.nn.Module) -> None:
        """Add the current scripted ``module`` as the file ``name``."""
        self._add(name, lambda file: save_scripted(module, file))

    def _add(self, name: str, write: Callable[[io.BytesIO], None]) -> None:
        self._saver.check_name(name)
        if name in self._files:
            raise UsageError(f"file name {name!r}: the checkpoint already has a file of that name; choose another name")
        file = io.BytesIO()
        try:
            write(file)
        except PersiaError:
            raise
        except _UNPICKLED as error:
            raise _unpickled(name, error) from error
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"cannot save {name}: {error}", hint="check the device of the model and the memory of this process"
            ) from error
        self._files[name] = file

    def write(self) -> None:
        """Write rows, files and, last, the manifest; if this fails, the previous content of the directory remains.

        Raises:
            StorageError: The checkpoint cannot be written.
            RunLostError: A server no longer responds.
        """
        try:
            with flight.Call(flight.WRITE, self._step):
                self._write()
        except BaseException:
            self.abort()
            raise
        self._files.clear()

    def _write(self) -> None:
        self._saver.write_rows()
        for name, content in self._files.items():
            self._saver.add_content(name, content.getvalue())
        created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        unreported = self._saver.commit(self._cursor, created_at, self._inputs)
        if unreported is not None:
            _logger.warning(
                "%s is complete, but a server with a log (durability: log) was not notified, so it keeps the log of "
                "the requests before the save: %s",
                self.what,
                unreported,
            )


class Writing:
    """A save that a separate thread writes.

    Args:
        save: The save, which is aborted if the thread cannot be started.
        work: The function that the thread runs, if it does more than write the save.

    Attributes:
        what: The name of the save in messages.
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
            whole = not isinstance(error, PersiaError)
            _logger.error("%s failed: %s%s", self.what, error, next_step(error), exc_info=whole)

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait at most this many seconds, and return whether the write has ended. A long wait is logged every 30 s."""
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(REMIND_S, left))
            if self._thread.is_alive() and left > REMIND_S:
                _logger.warning(
                    "rank %d still waits for %s, which began %.0f s ago",
                    settings.rank,
                    self.what,
                    time.monotonic() - self._started,
                )
        return not self._thread.is_alive()


class Load:
    """A checkpoint whose files have all been verified.

    Args:
        directory: The directory or the URL of the checkpoint. Files of an object store are read into memory, and not
            copied to a disk. This process reads the model, and the servers read the rows, one shard at a time.

    Attributes:
        path: The directory or the URL.
        names: The names of its files.
        generation: The generation of the run at the cut.
        seed: The run's seed; None for an imported checkpoint, which has no run.
        imported: Whether it contains only rows that ``persia ckpt import`` has written.
        tables: The names of its tables.
        step: The step of the cut.
        cursor: The position of the data loader.
        read: The files whose state was read by :meth:`state`.

    Raises:
        CheckpointError: The directory has no checkpoint, or a damaged one; the message names the file.
        StorageError: A file cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = place(directory)
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
            named = [other for other in self.names if not other.endswith(".arrow")]
            others = listed(named) if named else "nothing"
            raise CheckpointError(
                f"{self.path}: the checkpoint has no {name}; apart from rows it has {others}",
                hint="read a file that the checkpoint has, or load another checkpoint",
            )
        self.read.add(name)
        if isinstance(self.path, Url):
            return _read_state(self.path / name, map_location, io.BytesIO(self._opened.read(name)))
        return _read_state(Path(self._opened.path_of(name)), map_location)

    @property
    def models(self) -> set[str]:
        """The files that hold a model that was trained with these rows."""
        return {DENSE_MODEL, COLLECTION_MODEL} & {*self.names}

    def model_name(self, name: str) -> str:
        """Return the model's file: ``name``, or that of a collection if ``name`` is the default and does not exist."""
        from_collection = name == DENSE_MODEL and name not in self.names and COLLECTION_MODEL in self.names
        return COLLECTION_MODEL if from_collection else name

    def restore(self, engine: Engine) -> None:
        """Replace the rows of the engine with those of the checkpoint.

        Log a warning about tables that the checkpoint does not have.
        """
        absent = [table for table in engine.stats()["rows"] if table not in self.tables]
        self._opened.restore(engine)
        if not self._has_state:
            _logger.info("%s: the rows have no optimizer state; they get the optimizer state of new rows", self.path)
        if absent:
            _logger.warning(
                "%s lacks some tables of this run, which start without rows: %s; the tables of the checkpoint: %s",
                self.path,
                listed(absent),
                listed(sorted(self.tables)),
            )


_UNPICKLED = (AttributeError, TypeError, pickle.PicklingError)
"""The errors of ``torch.save`` for an object that cannot be pickled."""


def _unpickled(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"cannot save {name}: its state has an object that cannot be pickled: {error}; leave this object out of "
        "state_dict()"
    )


def save_scripted(module: Any, to: Path | io.BytesIO) -> None:
    """Write a module as TorchScript.

    Raises:
        UsageError: The module cannot be scripted.
    """
    with warnings.catch_warnings():  # torch deprecates TorchScript, but users of PersiaML have scripted modules
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            scripted = torch.jit.script(module)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise UsageError(
                f"{type(module).__name__} cannot be scripted: {error}",
                hint="save its state dict instead: leave out with_jit_model or is_jit",
            ) from error
        torch.jit.save(scripted, to)


_STATE_DICT = "load a file that torch.save has written from a state dict"


def _read_state(
    path: Place, map_location: str | torch.device | None, content: io.BytesIO | None = None
) -> dict[str, Any]:
    try:
        # The caller moves the state to the device of the model; the device from which it was saved may not exist in
        # this process.
        state = torch.load(content or path, map_location=map_location or "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file", hint="correct the path of the state dict") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror or error}", hint="check the path of the state dict and its owner"
        ) from error
    except Exception as error:  # the exceptions for damaged pickles are not documented
        hint = _STATE_DICT if map_location is None else f"check map_location; {_STATE_DICT}"
        raise CheckpointError(f"{path}: not a state dict that torch can load: {error}", hint=hint) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a state dict, found {type(state).__name__}", hint=_STATE_DICT)
    return state


def check_module(module: torch.nn.Module, state: dict[str, Any], path: Place) -> dict[str, Any]:
    """Return the state with the keys of ``module``, after checking that ``module.load_state_dict`` would accept it.

    The prefixes of wrappers, such as ``module.`` of DistributedDataParallel, are ignored.

    Raises:
        CheckpointError: Keys or shapes differ; the message lists the first differences and the number of the other
            differences.
    """
    own, state = module.state_dict(), fitted(module, state)
    # The module handles the absence of extra state that an older version did not save.
    wrong = [f"{key}: not in the checkpoint" for key in own if key not in state and not key.endswith("_extra_state")]
    wrong += [f"{key}: not in the model" for key in state if key not in own]
    wrong += [
        f"{key}: shape {_shape(state[key])} in the checkpoint, {tuple(value.shape)} in the model"
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and key in state and _shape(state[key]) != tuple(value.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{path}: the model differs from the one that was saved: {listed(wrong, separator='; ')}",
            hint="create the model with the class and the sizes of the saved one, or load a checkpoint of this model",
        )
    return state


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


_OPTIMIZER = (
    "create the optimizer with the class and the parameter groups of the saved one, or load a checkpoint of this "
    "optimizer"
)


def check_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Place) -> None:
    """Check that ``optimizer.load_state_dict(state)`` would succeed.

    Raises:
        CheckpointError: The class or the parameter groups differ.
    """
    groups = state.get("param_groups", [])
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in groups]
    keys = [sorted(set(group) - {"param_names"}) for group in optimizer.param_groups]
    there = [sorted(set(group) - {"param_names"}) for group in groups]
    if own == saved and keys != there:
        number = next(number for number, key in enumerate(keys) if key != there[number])
        only = [sorted({*a[number]} - {*b[number]}) for a, b in ((there, keys), (keys, there))]
        sides = [
            f"{', '.join(options)} only {where}"
            for options, where in zip(only, ("in the checkpoint", "here"), strict=True)
            if options
        ]
        raise CheckpointError(
            f"{path}: the dense optimizer differs from the one that was saved: parameter group {number} has the "
            f"options {' and '.join(sides)}",
            hint="before loading, create the optimizer with the class of the saved one, and its learning-rate "
            "scheduler if it had one; the options may also differ between versions of torch",
        )
    if own != saved:
        before, now = (", ".join(map(str, counts)) or "no group" for counts in (saved, own))
        raise CheckpointError(
            f"{path}: the dense optimizer differs from the one that was saved: the numbers of parameters by group are "
            f"{before} in the checkpoint, {now} here",
            hint=_OPTIMIZER,
        )


def dump_state(
    instance: torch.nn.Module | torch.optim.Optimizer,
    directory: Path,
    file_name: str,
    is_jit: bool,
    names: inputs.InputNames | None = None,
) -> None:
    """Write a state dict with the model's inputs, or with ``is_jit`` the scripted module, durably and atomically.

    Raises:
        UsageError: The name has folders, the state cannot be pickled, or the module cannot be scripted.
        StorageError: The file cannot be written.
    """
    if Path(file_name).name != file_name:
        raise UsageError(f"file_name={file_name!r}: expected a name without folders")
    temporary = directory / f".{file_name}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if is_jit:
            save_scripted(instance, temporary)
        else:
            torch.save(inputs.annotate(instance.state_dict(), names), temporary)
        files.publish(temporary, directory / file_name)
    except _UNPICKLED as error:
        temporary.unlink(missing_ok=True)
        raise _unpickled(file_name, error) from error
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, UsageError):
            raise
        raise StorageError(f"cannot write {directory / file_name}: {error}") from error


def load_state(
    instance: torch.nn.Module | torch.optim.Optimizer, path: Path, map_location: str | torch.device | None
) -> inputs.InputNames | None:
    """Load what :func:`dump_state` wrote, and return the model's inputs.

    Raises:
        CheckpointError: The file is missing, cannot be read, is not a state dict, or does not fit.
    """
    state = _read_state(path, map_location)
    if isinstance(instance, torch.nn.Module):
        state = check_module(instance, state, path)
    else:
        check_optimizer(instance, state, path)
    names = inputs.annotated(state)
    instance.load_state_dict(state)
    return names
