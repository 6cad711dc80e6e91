"""A checkpoint: rows with their optimizer state, the model, the dense optimizer, random state, data position.

A directory is a checkpoint if it has a ``MANIFEST.json``, which is published last and names every file with its size
and hash. Files are staged aside and replace an older checkpoint in the same directory as a whole or not at all.
"""

import json
import os
import random
import warnings
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from persia.embedding.optim import Optimizer
from persia.errors import CheckpointError, StorageError, UsageError
from persia_core import checkpoint as _core
from persia_core.engine import Engine


class Save:
    """Writes one checkpoint: rows on entry, then what is added, and the manifest on a clean exit.

    Args:
        engine: Its pushes are waited for, so that the cut is of one step.
        directory: Made if missing.
        step: The last step that was trained.
        cursor: Where the data loader stands.
    """

    def __init__(
        self, engine: Engine, directory: str | os.PathLike[str], step: int, cursor: dict[str, Any] | None = None
    ) -> None:
        self._engine = engine
        self._directory = Path(directory)
        self._step = step
        self._cursor = json.dumps(cursor)
        self._saver: _core.Saver | None = None

    def __enter__(self) -> Self:
        """Wait for pushes in flight and write the rows."""
        self._saver = _core.Saver(self._engine, os.fspath(self._directory), self._step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the manifest, or remove what was staged if the block failed."""
        saver, self._saver = self._saver, None
        if saver is None:
            return
        if kind is None:
            saver.commit(self._cursor, datetime.now(timezone.utc).isoformat(timespec="seconds"))
        else:
            saver.abort()

    def add_state(self, name: str, state: dict[str, Any]) -> None:
        """Add ``state`` as the file ``name``, by ``torch.save``."""
        self._add(name, lambda path: torch.save(state, path))

    def add_module(self, name: str, module: torch.nn.Module) -> None:
        """Add the scripted ``module`` as the file ``name``."""
        self._add(name, lambda path: _save_scripted(module, path))

    def _add(self, name: str, write: Any) -> None:
        if self._saver is None:
            raise UsageError("files are added to a checkpoint inside its `with` block")
        path = Path(self._saver.staged(name))
        try:
            write(path)
        except UsageError:
            raise
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{path}: {error}") from error
        self._saver.add_file(name)


class Load:
    """A checkpoint whose every file was verified.

    Args:
        directory: Where it is.

    Attributes:
        path: The directory.
        names: Its files.
        epoch: The run's epoch when it was saved.
        seed: The run's seed.
        step: The step it was cut at.
        cursor: Where the data loader stood.

    Raises:
        CheckpointError: No checkpoint there, or damaged; the file is named.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        self._opened = _core.Checkpoint(os.fspath(directory))
        self._opened.verify()
        self.names: list[str] = [file["name"] for file in self._opened.files]
        self.epoch: int = self._opened.epoch
        self.seed: int = self._opened.seed
        self.step: int = self._opened.step
        self.cursor: dict[str, Any] | None = json.loads(self._opened.cursor)

    def state(self, name: str, map_location: str | torch.device | None = None) -> dict[str, Any]:
        """Return what :meth:`Save.add_state` saved as ``name``.

        Raises:
            CheckpointError: No such file in the checkpoint, or no state dict.
        """
        if name not in self.names:
            others = ", ".join(other for other in self.names if not other.endswith(".arrow")) or "only rows"
            raise CheckpointError(f"{self.path}: the checkpoint has no {name}; besides rows it has: {others}")
        return _read_state(Path(self._opened.path_of(name)), map_location)

    def restore(self, engine: Engine) -> None:
        """Replace the engine's rows and step by the checkpoint's."""
        self._opened.restore(engine)


def _save_scripted(module: Any, path: Path) -> None:
    with warnings.catch_warnings():  # torch advises against TorchScript; PersiaML's users have it
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            scripted = torch.jit.script(module)
        except RuntimeError as error:
            raise UsageError(f"{type(module).__name__} cannot be scripted: {error}") from error
        scripted.save(os.fspath(path))


def _read_state(path: Path, map_location: str | torch.device | None) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except Exception as error:  # what damaged pickles raise is not documented
        raise CheckpointError(f"{path}: not a state dict that torch can load: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: want a state dict, got {type(state).__name__}")
    return state


def check_module(module: torch.nn.Module, state: dict[str, Any], path: Path) -> None:
    """Check that ``module.load_state_dict(state)`` would succeed.

    Raises:
        CheckpointError: Keys or shapes differ; all are listed.
    """
    own = module.state_dict()
    wrong = [f"{key}: not in the checkpoint" for key in own if key not in state]
    wrong += [f"{key}: not in the model" for key in state if key not in own]
    wrong += [
        f"{key}: shape {_shape(state[key])} in the checkpoint, {tuple(value.shape)} in the model"
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and key in state and _shape(state[key]) != tuple(value.shape)
    ]
    if wrong:
        raise CheckpointError(f"{path}: the model differs from the one that was saved: {'; '.join(wrong)}")


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def check_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Check that ``optimizer.load_state_dict(state)`` would succeed.

    Raises:
        CheckpointError: It is of another class, or the parameter groups differ.
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


def random_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's generators, and the embedding learning rate."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "embedding_lr": optimizer.lr,
    }


def restore_random_state(state: dict[str, Any], optimizer: Optimizer) -> None:
    """Continue with what :func:`random_state` returned."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    optimizer.update_lr(state["embedding_lr"])


def dump_state(
    instance: torch.nn.Module | torch.optim.Optimizer, directory: Path, file_name: str, is_jit: bool
) -> None:
    """Write a state dict, or with ``is_jit`` the scripted module, durably and whole or not at all."""
    if Path(file_name).name != file_name:
        raise UsageError(f"file_name={file_name!r}: want a name without folders")
    temporary = directory / f".{file_name}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if is_jit:
            _save_scripted(instance, temporary)
        else:
            torch.save(instance.state_dict(), temporary)
        _publish(temporary, directory / file_name)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, UsageError):
            raise
        raise StorageError(f"{directory / file_name}: {error}") from error


def _publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name so that a power cut leaves the old one or the new one."""
    for step in (temporary, path.parent):
        descriptor = os.open(step, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if step is temporary:
            temporary.replace(path)


def load_state(
    instance: torch.nn.Module | torch.optim.Optimizer, path: Path, map_location: str | torch.device | None
) -> None:
    """Load what :func:`dump_state` wrote.

    Raises:
        CheckpointError: No such file, no state dict, or it does not fit.
    """
    state = _read_state(path, map_location)
    if isinstance(instance, torch.nn.Module):
        check_module(instance, state, path)
    else:
        check_optimizer(instance, state, path)
    instance.load_state_dict(state)
