"""A checkpoint outside the folder of a run, with a matching configuration."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from persia.checkpoint import snapshot
from persia.checkpoint.policy import STATE
from persia.config import Config
from persia.ctx import eval_ctx
from persia.features import Transform
from persia.runtime.errors import CheckpointError
from persia.trainer import fitting, models
from persia.trainer.exporting.export import Trained
from persia.trainer.objective import Objective
from persia.trainer.parts import Parts

_OTHER_FILE = (
    "specify the transform of the checkpoint's run: --transform RUN/transform.json, or leave out --transform to fit "
    "the features again"
)


@contextlib.contextmanager
def of_checkpoint(
    config: Config, checkpoint: Path, *, transform: Path | None = None, model: torch.nn.Module | None = None
) -> Iterator[Trained]:
    """Provide the model of a checkpoint inside the block.

    Args:
        config: The configuration of the features, labels and model.
        checkpoint: The checkpoint, of ``persia train``, a :class:`persia.ctx.TrainCtx` or an ``EmbeddingCollection``.
        transform: The file of the transform; None fits the features over ``data.train``, if they need to be fitted.
        model: A model instead of the ``model`` block.

    Raises:
        CheckpointError: The path has no checkpoint, or the checkpoint has other features or another model.
        DataError: The features cannot be fitted.
    """
    fitted = _transform(config, transform)
    _check_digest(checkpoint, fitted)
    built = models.build(config) if model is None else model
    threads = torch.get_num_threads()
    torch.set_num_threads(config.train.threads)
    try:
        with eval_ctx(model=built, configuration=models.slots_of(config)) as ctx:
            ctx.load_checkpoint(checkpoint.absolute())
            objective = Objective(config.compiled.labels)
            yield Trained(config, config.run.name or checkpoint.parent.name, checkpoint, ctx, built, objective, fitted)
    finally:
        torch.set_num_threads(threads)


def _transform(config: Config, file: Path | None) -> Transform:
    if file is None:
        return fitting.fit(config, Parts(config)).transform
    try:
        return config.compiled.load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read the transform {file}: {why}", hint=_OTHER_FILE) from error
    except CheckpointError as error:
        raise fitting.not_loaded(str(file), error, _OTHER_FILE) from error


def _check_digest(checkpoint: Path, transform: Transform) -> None:
    """Compare a transform with that of a checkpoint of ``persia train``.

    Other checkpoints do not record a transform.
    """
    loaded = snapshot.Load(checkpoint)
    trained = loaded.state(STATE).get("trainer") if STATE in loaded.names else None
    if isinstance(trained, dict) and trained.get("digest") not in (None, transform.digest):
        raise CheckpointError(
            f"{checkpoint}: the checkpoint was trained with the transform {trained['digest']}, but the current "
            f"transform is {transform.digest}: ids, floats or labels would differ",
            hint="specify the transform of the checkpoint's run: --transform RUN/transform.json",
        )
