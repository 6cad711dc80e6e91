"""Checks of disks: whether checkpoints and runs can be written, and whether they will fit."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from persia.checkpoint import storage
from persia.config import Config
from persia.doctor.check import Check
from persia.runtime import job
from persia.runtime.errors import PersiaError, StorageError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.places import Place, Url, check_scheme, place
from persia.runtime.settings import settings

_SLOW_S = 1.0
"""The duration in seconds from which one small durable write causes a warning; each save makes several."""
_SLOW_FSYNC_MS = 50.0
_SYNCS = 9
"""The number of durable writes of 4 KiB that are measured."""
_BLOCK, _BLOCKS = 4 << 20, 16
"""The size and the number of the blocks of the durable write whose speed is measured."""


def checks(config: Config | None, folders: list[Place] | None = None, *, measure: bool = False) -> Iterator[Check]:
    """Yield a check of each folder to which training writes, and with a configuration one of the free space.

    Args:
        config: The configuration, if one is given.
        folders: Folders to check instead of those of the configuration and of the environment.
        measure: Whether to measure the writing speed too.
    """
    given: list[tuple[str, Place]] = [("disk", each) for each in folders or ()]
    if not given:
        try:
            storage.check_root()
        except StorageError as error:
            yield Check("PERSIA_CKPT_DIR", "fail", str(error), "", error.hint, ExitCode.FAILED)
            return
        # In a job, the folders in the environment are used instead of those in the configuration.
        in_job = settings.nats_url is not None
        given = [*_of_environment(), *(_of_config(config) if config is not None and not in_job else ())]
    for name, folder in given or [("disk", Path.cwd())]:
        found = written(name, folder)
        yield found
        if measure and found.status != "fail" and isinstance(folder, Path):
            yield measured(name, folder)
    if config is not None:
        yield space(config)


def _of_environment() -> list[tuple[str, Place]]:
    places = {"PERSIA_CKPT_DIR": settings.checkpoint_root, "PERSIA_RUN_DIR": settings.run_dir}
    return [(name, place(value)) for name, value in places.items() if value is not None]


def _of_config(config: Config) -> list[tuple[str, Place]]:
    saves = config.checkpoint.dir
    places: list[tuple[str, Place]] = [("run.dir", Path(config.run.dir).expanduser())]
    return places + ([] if saves is None else [("checkpoint.dir", _expanded(saves))])


def written(name: str, folder: Place) -> Check:
    """Check that a folder can be written to. A small file is written, synced, renamed and deleted; at a URL, an object.

    Args:
        name: The setting that names the folder.
        folder: The folder, which is not created if missing.
    """
    began = time.monotonic()
    try:
        if isinstance(folder, Url):
            check_scheme(folder)
            storage.validate_url(folder)
            return Check(name, "ok", f"{folder}: an object put and deleted in {_since(began)}")
        if name == "checkpoint.dir":
            storage.check_parent(folder.absolute(), name)
        free = storage.validate(folder)
    except (StorageError, UsageError) as error:
        return Check(name, "fail", str(error), "", error.hint, ExitCode.FAILED)
    seconds = time.monotonic() - began
    found = f"{folder}: written, synced, renamed and deleted in {seconds * 1000:.0f} ms, {size(free)} free"
    if seconds > _SLOW_S:
        return Check(name, "warn", found, "durable writes are slow, and each save makes several", "use a local disk")
    return Check(name, "ok", found)


def measured(name: str, folder: Path) -> Check:
    """Measure the time of a durable write of 4 KiB in a folder, and the speed of a durable write of 64 MiB.

    Args:
        name: The setting that names the folder.
        folder: The folder; if it is missing, its nearest existing parent is used. The file is removed.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    block, times = os.urandom(_BLOCK), []
    with tempfile.NamedTemporaryFile(dir=there, prefix=".persia-measure-") as file:
        for _ in range(_SYNCS):
            began = time.monotonic()
            file.write(block[:4096])
            file.flush()
            os.fsync(file.fileno())
            times.append(time.monotonic() - began)
        began = time.monotonic()
        for _ in range(_BLOCKS):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.monotonic() - began
    times.sort()
    middle, longest = times[len(times) // 2] * 1000, times[-1] * 1000
    speed = _BLOCK * _BLOCKS / seconds / 1e6
    found = f"{there}: fsync {middle:.1f} ms (longest of {_SYNCS}: {longest:.1f} ms), {speed:,.0f} MB/s written durably"
    if middle > _SLOW_FSYNC_MS:
        why = "with log_sync: always, the log of a server waits for an fsync; each checkpoint waits for several"
        return Check(f"{name} speed", "warn", found, why, "use a local disk, or set log_sync: every_second")
    return Check(f"{name} speed", "ok", found)


def space(config: Config) -> Check:
    """Compare the free space for checkpoints with the estimated size of the checkpoints that exist at one time.

    Args:
        config: The configuration.
    """
    from persia.trainer.checkpoint_size import estimate

    folder, remedy = _of_checkpoints(config)
    if isinstance(folder, Url):
        return Check("free space", "skip", f"{folder}: the free space of an object store is not known")
    try:
        one, rows = estimate(config)
    except PersiaError as error:
        return Check("free space", "skip", "no estimate", str(error).splitlines()[0])
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    count = config.checkpoint.keep + 1 + (config.train.early_stop is not None)  # plus one in progress, plus the best
    needed = one * count
    found = (
        f"{folder}: {size(free)} free; a checkpoint takes {size(one)} if each of {rows:,} training rows has one new "
        f"id per feature, and {count} checkpoints take {size(needed)}"
    )
    if free < needed:
        why = "checkpoints may fill the disk; the number of distinct ids is not known before training"
        return Check(
            "free space",
            "warn",
            found,
            why,
            f"{remedy}; or keep fewer: --set checkpoint.keep=1",
        )
    return Check("free space", "ok", found)


def _of_checkpoints(config: Config) -> tuple[Place, str]:
    """Return the folder below which the checkpoints of a run are written, and how to choose another one."""
    if settings.nats_url is not None:
        folder = place(settings.checkpoint_root) if settings.checkpoint_root else job.run_dir()
        return folder, "free some space, or choose another folder: PERSIA_CKPT_DIR=FOLDER, in all processes of the job"
    return _expanded(config.checkpoint.dir or config.run.dir), "choose another folder: --set checkpoint.dir=FOLDER"


def _expanded(given: str) -> Place:
    found = place(given)
    return found if isinstance(found, Url) else found.expanduser()


def _since(began: float) -> str:
    return f"{(time.monotonic() - began) * 1000:.0f} ms"


def size(count: float) -> str:
    """Return a size in bytes with a suitable unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
