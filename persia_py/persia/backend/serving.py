"""The rows of an infer job: servers that serve a checkpoint, reached through a list of middlewares, without NATS."""

import json
import os
from collections.abc import Sequence

from persia.backend.base import Backend, Device, RowSettings
from persia.embedding.config import Configuration
from persia.embedding.inputs import InputNames
from persia.runtime import tokens
from persia.runtime.errors import IncompatibleError, PersiaError, UnreachableError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.places import Place
from persia.runtime.settings import settings
from persia_core.config import GlobalConfig
from persia_core.data import Batch
from persia_core.engine import Engine
from persia_core.forward import Pipeline, TrainingBatch

_logger = get_logger("serving")

_CHANGES = "an infer job only reads the rows of its checkpoint"


class ServingBackend(Backend):
    """An engine over the servers of an infer job.

    The constructor waits until a middleware and all servers respond, for at most ``PERSIA_START_TIMEOUT`` seconds
    without progress.

    Args:
        addresses: The addresses of middlewares. A process uses one of them, and changes to another if it fails.
        device: The device on which look-ups are pooled; None means the CPU.

    Raises:
        UnreachableError: A server, or every middleware, does not respond; the message names it.
        IncompatibleError: A server serves no checkpoint, or a different one.
        AuthError: The token or a certificate is refused.
    """

    def __init__(self, addresses: Sequence[str], device: Device | None = None) -> None:
        try:
            engine = Engine.serving(
                [*addresses],
                token_file=tokens.token_file(),
                rpc_timeout_s=settings.rpc_timeout,
                start_timeout_s=settings.start_timeout,
            )
        except PersiaError as error:
            raise _hinted(error) from None
        try:
            self._serve(engine, addresses, device)
        except BaseException:
            engine.close(abandon=True)
            raise

    def _serve(self, engine: Engine, addresses: Sequence[str], device: Device | None) -> None:
        served = engine.served
        if served is None:
            raise UsageError(
                f"the servers reached through {', '.join(addresses)} serve no checkpoint; start them with job_type: "
                "Infer in global_config.yml"
            )
        path, step, names = served
        source = f"the checkpoint {path}"
        super().__init__(Configuration(source, "", engine.configuration, GlobalConfig()), device)
        self.engine = engine
        self.trained_step = step
        if device is not None:
            device.serve(engine)
        if names is None:
            _logger.warning(
                "%s does not record the order of the model's inputs, so every batch must have its features in the "
                "order of training. Checkpoints that TrainCtx saves in this version record the order",
                source,
            )
        else:
            self.inputs.set(None, InputNames.from_state(json.loads(names)))
        _logger.info("serving step %d of %s, through %s", step, source, ", ".join(addresses))

    def _begin(self, rows: RowSettings, after_generation: int, step: int, seed: int) -> None:
        del after_generation, step, seed
        if rows.optimizer is not None:
            raise UsageError(f"cannot enter TrainCtx inside InferCtx: {_CHANGES}; train in a job with job_type: Train")

    def lookup(self, batch: Batch, device_id: int | None = None) -> TrainingBatch:
        """Look up a batch, on the context's device or another device."""
        try:
            return super().lookup(batch, device_id)
        except PersiaError as error:
            raise _hinted(error) from None

    def open_loop(self, staleness: int, reproducible: bool, buffer: int, *, hooks: str = "") -> Pipeline:
        """Refuse to train.

        Raises:
            UsageError: Always.
        """
        del staleness, reproducible, buffer, hooks
        raise UsageError(f"cannot train inside InferCtx: {_CHANGES}; train in a job with job_type: Train")

    def check_alone(self, what: str) -> None:
        """Refuse to drop rows.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"cannot call {what} inside InferCtx: {_CHANGES}; call it in a job with job_type: Train")

    def check_loads(self, what: str) -> None:
        """Refuse to load rows.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"cannot call {what} inside InferCtx: its servers loaded {self.configuration.source} when they started. To "
            "load only the model, use load_torch_state_dict; to serve other rows, start the servers with another "
            "infer_config.embedding_checkpoint"
        )

    def checkpoint_dir(self, directory: str | os.PathLike[str]) -> Place:
        """Refuse to save.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"cannot save a checkpoint into {os.fspath(directory)} inside InferCtx: {_CHANGES}; save it in a job with "
            "job_type: Train"
        )

    def close(self, error: BaseException | None = None) -> None:
        """End the engine's threads."""
        self.engine.close(abandon=error is not None)


def _hinted(error: PersiaError) -> PersiaError:
    """Return the error with a hint for an infer job."""
    if isinstance(error, UnreachableError):
        error.hint = (
            "start the servers and middlewares of the infer job, or correct the addresses of its middlewares "
            "(the argument of InferCtx, or EMBEDDING_WORKER_SERVICE)"
        )
    elif isinstance(error, IncompatibleError):
        error.hint = ""  # the message already has the reason
    return error
