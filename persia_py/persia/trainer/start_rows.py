"""The rows from which a new run starts."""

import shlex
from pathlib import Path

from persia.checkpoint.foreign import is_imported, open_checkpoint
from persia.config import Config
from persia.ctx import TrainCtx
from persia.runtime.errors import ConfigError
from persia.runtime.files import is_url
from persia.runtime.places import Place, below
from persia.runtime.settings import settings
from persia.trainer.run_folder import is_run


def start_folder(config: Config, *, in_job: bool) -> Place | None:
    """Return the checkpoint in ``train.start_from``, a folder or a URL.

    Return None if the setting is empty, and on every rank except rank 0.

    Args:
        config: The configuration.
        in_job: Whether the rows are on servers. A relative path is then relative to ``PERSIA_CKPT_DIR``, otherwise to
            the folder of ``persia.yml``.

    Raises:
        ConfigError: The path is a run, or a checkpoint of a run, which also has steps, a model and optimizer state.
        CheckpointError: The path has no checkpoint, or a damaged one.
    """
    given = config.train.start_from
    if given is None or settings.rank != 0:
        return None
    if in_job:
        folder = below(settings.checkpoint_root, given)
    else:
        folder = below(config.folder, given if is_url(given) else Path(given).expanduser())
    of_run = isinstance(folder, Path) and is_run(folder)
    if of_run or not is_imported(open_checkpoint(folder)):
        kind = "run" if of_run else "checkpoint of a run"
        given = shlex.quote(str(folder))
        run = shlex.quote(str(folder)) if of_run else "RUN"
        raise ConfigError(
            f"train.start_from: {folder} is a {kind}, not a checkpoint of `persia ckpt import`",
            hint=(
                f"to start a new run with its rows: persia ckpt rows {given} --table T -o T.parquet, then: persia ckpt "
                "import T.parquet --table T -o DIR, and set train.start_from: DIR; to continue that run: persia train "
                f"persia.yml --resume {run}"
            ),
        )
    return folder


def load_start_rows(ctx: TrainCtx, config: Config, *, in_job: bool) -> None:
    """Load the rows of :func:`start_folder` into a context that has not trained yet.

    Args:
        ctx: The entered context; a resumed run already has its rows.
        config: The configuration.
        in_job: As in :func:`start_folder`.

    Raises:
        ConfigError: The checkpoint is that of a run.
        CheckpointError: The path has no checkpoint, the checkpoint is damaged, or its tables differ.
    """
    folder = None if ctx.step else start_folder(config, in_job=in_job)
    if folder is not None:
        ctx.load_embedding(folder)
