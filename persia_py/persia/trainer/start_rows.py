"""The rows that a new run starts with."""

from pathlib import Path

from persia.checkpoint.foreign import is_imported, open_checkpoint
from persia.config import Config
from persia.ctx import TrainCtx
from persia.runtime.errors import ConfigError
from persia.runtime.settings import settings


def start_folder(config: Config, *, in_job: bool) -> Path | None:
    """Return the checkpoint that ``train.start_from`` names, None if there is none.

    Args:
        config: The configuration.
        in_job: The rows are on servers, which read below ``PERSIA_CKPT_DIR``; else a relative folder is relative to
            that of ``persia.yml``.

    Raises:
        ConfigError: It is a checkpoint of a run, which has steps, a model and optimizer state.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    given = config.train.start_from
    if given is None or settings.rank != 0:
        return None
    folder = Path(settings.checkpoint_root or "", given) if in_job else Path(config.folder, Path(given).expanduser())
    if not is_imported(open_checkpoint(folder)):
        error = ConfigError(f"train.start_from: {folder} is a checkpoint of a run, not of `persia ckpt import`")
        error.hint = (
            f"to start a new run with its rows: persia ckpt rows {folder} --table T -o T.parquet, then: "
            "persia ckpt import T.parquet --table T -o DIR; to continue that run: persia train --resume"
        )
        raise error
    return folder


def load_start_rows(ctx: TrainCtx, config: Config, *, in_job: bool) -> None:
    """Load the rows of :func:`start_folder` into a context that has trained nothing.

    Args:
        ctx: The context, entered; a run that is resumed has its rows already.
        config: The configuration.
        in_job: As in :func:`start_folder`.

    Raises:
        ConfigError: It is a checkpoint of a run.
        CheckpointError: There is no checkpoint, it is damaged, or its tables differ.
    """
    folder = None if ctx.step else start_folder(config, in_job=in_job)
    if folder is not None:
        ctx.load_embedding(folder)
