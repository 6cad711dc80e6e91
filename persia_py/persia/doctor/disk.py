"""Disks: whether checkpoints and runs can be written, and whether they will fit."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from persia.checkpoint import storage
from persia.config import Config
from persia.doctor.check import Check
from persia.runtime import job
from persia.runtime.errors import PersiaError, StorageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings

_SLOW_S = 1.0
"""Seconds from which one small durable write is worth a warning; each save makes several."""


def checks(config: Config | None, folders: list[Path] | None = None) -> Iterator[Check]:
    """Yield a check of each folder that training writes to.

    Args:
        config: The configuration, if one is given.
        folders: Folders to check in place of those of the configuration and of the environment.
    """
    given: list[tuple[str, Path]] = [("disk", each) for each in folders or ()]
    if not given:
        try:
            storage.check_root()
        except StorageError as error:
            yield Check("PERSIA_CKPT_DIR", "fail", str(error), "", error.hint, ExitCode.FAILED)
            return
        # In a job the folders of the environment are used, not those of the configuration.
        in_job = settings.nats_url is not None
        given = [*_of_environment(), *(_of_config(config) if config is not None and not in_job else ())]
    for name, folder in given or [("disk", Path.cwd())]:
        yield written(name, folder)
    if config is not None:
        yield space(config)


def _of_environment() -> list[tuple[str, Path]]:
    places = {"PERSIA_CKPT_DIR": settings.checkpoint_root, "PERSIA_RUN_DIR": settings.run_dir}
    return [(name, Path(value)) for name, value in places.items() if value is not None]


def _of_config(config: Config) -> list[tuple[str, Path]]:
    saves = config.checkpoint.dir
    places = [("run.dir", Path(config.run.dir).expanduser())]
    return places + ([] if saves is None else [("checkpoint.dir", Path(saves).expanduser())])


def written(name: str, folder: Path) -> Check:
    """Check that a folder can be written: a small file is written, synced, renamed and deleted.

    Args:
        name: Where the folder was named.
        folder: The folder; one that is missing is not made.
    """
    began = time.monotonic()
    try:
        if name == "checkpoint.dir":
            storage.check_parent(folder.absolute(), name)
        free = storage.validate(folder)
    except StorageError as error:
        return Check(name, "fail", str(error), "", error.hint, ExitCode.FAILED)
    seconds = time.monotonic() - began
    found = f"{folder}: written, synced, renamed and deleted in {seconds * 1000:.0f} ms, {size(free)} free"
    if seconds > _SLOW_S:
        return Check(name, "warn", found, "durable writes are slow here; each save makes several", "use a local disk")
    return Check(name, "ok", found)


def space(config: Config) -> Check:
    """Compare the free space where checkpoints are written with the size that a checkpoint can have at most.

    Args:
        config: The configuration.
    """
    from persia.trainer.checkpoint_size import at_most

    folder, remedy = _of_checkpoints(config)
    try:
        most, rows = at_most(config)
    except PersiaError as error:
        return Check("free space", "skip", "no estimate", str(error).splitlines()[0])
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    needed = most * (config.checkpoint.keep + 1)
    found = (
        f"{folder}: {size(free)} free; a checkpoint takes at most {size(most)} ({rows:,} rows of train, each id new), "
        f"{config.checkpoint.keep + 1} of them {size(needed)}"
    )
    if free < needed:
        why = "checkpoints may fill the disk; the number of different ids is not known before training"
        return Check(
            "free space",
            "warn",
            found,
            why,
            f"{remedy}; or keep fewer: --set checkpoint.keep=1",
        )
    return Check("free space", "ok", found)


def _of_checkpoints(config: Config) -> tuple[Path, str]:
    """Return the folder below which the checkpoints of a run are written, and how to give another one."""
    if settings.nats_url is not None:
        folder = Path(settings.checkpoint_root) if settings.checkpoint_root else job.run_dir()
        return folder, "give the folder more space, or another one: PERSIA_CKPT_DIR=FOLDER, in all processes of the job"
    folder = Path(config.checkpoint.dir or config.run.dir).expanduser()
    return folder, "give another folder: --set checkpoint.dir=FOLDER"


def size(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
