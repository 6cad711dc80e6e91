"""The smallest reproduction of a run: its configuration, one batch of its rows, and the commands that train on it."""

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from persia.config import Config
from persia.config.document import open_document
from persia.doctor.dump.archive import Archive
from persia.runtime.config_files import CONFIG as PERSIA_CONFIG
from persia.runtime.config_files import find_persia_yml
from persia.runtime.errors import UsageError
from persia.trainer import one_batch
from persia.trainer.run_folder import CONFIG, RunFolder, resolved

FOLDER = "repro"
"""The folder in the archive."""
_TINY = "model={name: tiny}"
_COMMANDS = f"""\
#!/bin/sh
# Train on one batch, first with the smallest model, then with that of the run. If the first command fails, the cause is
# not in the model.
set -eu
cd "$(dirname "$0")"
persia train {CONFIG} --local --test --set {shlex.quote(_TINY)}
persia train {CONFIG} --local --test
"""


def collect(archive: Archive, folder: Path | None, ignored: Mapping[str, str] = MappingProxyType({})) -> int:
    """Add the reproduction of a run, and return the largest number of rows of a part. The rows are not redacted.

    Args:
        archive: Receives the files, below :data:`FOLDER`.
        folder: The folder of the run; None means the ``persia.yml`` of this process.
        ignored: The variables whose files exist only in the containers of the stack.

    Raises:
        UsageError: There is no configuration here, or a file of its data does not exist.
        DataError: A part of the data has no rows, or a file is damaged.
        StorageError: The rows do not fit into the archive.
    """
    config = _config(folder, ignored.get(PERSIA_CONFIG))
    config = config.with_blocks(train=config.train.model_copy(update={"start_from": None}))
    with one_batch.private_folder() as scratch:
        short = one_batch.shortened(config, scratch)
        for path in sorted(scratch.glob("*.parquet")):
            archive.add_raw(f"{FOLDER}/{path.name}", path.read_bytes())
        archive.add(f"{FOLDER}/{CONFIG}", resolved(short).replace(f"{scratch}/", ""), strict=True)
    sources = _sources(config)
    if not sources and config.model.class_ is not None:
        archive.skip(
            f"{FOLDER}/{config.model.class_}", f"it is not below {config.folder}: install it to repeat the run"
        )
    for name, path in sources.items():
        archive.collect(f"{FOLDER}/{name}", partial(path.read_text, encoding="utf-8"))
    archive.add(f"{FOLDER}/run.sh", _COMMANDS)
    return config.step_rows


def _config(folder: Path | None, of_containers: str | None) -> Config:
    if folder is not None and (folder / CONFIG).is_file():
        return RunFolder(folder).config()
    if of_containers is not None:  # another persia.yml of this folder would reproduce something else
        raise UsageError(
            f"--repro: {PERSIA_CONFIG}={of_containers} is no file on this host, but a path in the containers",
            hint="run the command in a container: docker compose run --rm --no-deps --no-TTY trainer persia dump "
            f"--repro -o - > dump.tar.gz; or set {PERSIA_CONFIG} to the path of the file on this host",
        )
    path = find_persia_yml()
    if path is None:
        raise UsageError(
            f"--repro: there is no persia.yml to reproduce: none in {'' if folder is None else f'{folder} or in '}"
            f"{Path.cwd()}, and PERSIA_CONFIG is not set",
            hint="specify the folder of a run of persia train: persia dump runs/NAME --repro; or set PERSIA_CONFIG",
        )
    return open_document(path, []).checked()


def _sources(config: Config) -> dict[str, Path]:
    """Return the files of the model's class, by their names relative to the folder of ``persia.yml``.

    If the class is in a package, these are all Python files of the package. Other modules that the class imports are
    not included.
    """
    if config.model.class_ is None:
        return {}
    top, _, rest = config.model.class_.partition(":")[0].partition(".")
    single, package = config.folder / f"{top}.py", config.folder / top
    if single.is_file() and not rest:
        return {single.name: single}
    return {str(path.relative_to(config.folder)): path for path in sorted(package.rglob("*.py"))}
