"""The base of all contexts: entry, exit, nesting, and the engine."""

from enum import Enum
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from persia.backend.base import Backend, Device
from persia.backend.local import LocalBackend
from persia.embedding.config import Configuration
from persia.profile.comm import Comm
from persia.runtime import contexts, post_mortem, preemption
from persia.runtime.contexts import ends_well
from persia.runtime.errors import UsageError
from persia.runtime.settings import settings
from persia_core import forward as _forward
from persia_core.engine import Engine

_WRITTEN_S = 15.0
"""Seconds that the end of a context waits for a save after an error; a launcher gives its ranks 45."""


class PreprocessMode(Enum):
    """The purpose of a context's look-ups."""

    TRAIN = 1
    EVAL = 2
    INFERENCE = 3


class BaseCtx:
    """Owns the engine inside its ``with`` block.

    Args:
        threadpool_worker_size: Accepted for compatibility with PersiaML, without effect: the engine chooses the number
            of threads.
        device_id: The CUDA device of the model; None, or a negative number, means the CPU. Batches are returned on this
            device, and gradients are summed on it. The outermost context makes it PyTorch's current device; nested
            contexts use the outermost one's.
        embedding_dtype: The dtype of the embedding tensors on that device: float32, float16 or bfloat16.
        configuration: The slots, and the limits of the job; None reads them from the ``persia.yml`` that
            ``PERSIA_CONFIG`` names, or else from ``embedding_config.yml``, and from ``global_config.yml``. A nested
            context uses those of the outermost context.

    Attributes:
        device_id: The CUDA device; None on the CPU.
        common_context: The backend that nested contexts share; None outside the ``with`` block.

    Raises:
        DeviceError: This build or machine has no such device.
        UsageError: ``embedding_dtype`` is unknown, or is given without a device.
    """

    def __init__(
        self,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        embedding_dtype: torch.dtype = torch.float32,
        configuration: Configuration | None = None,
    ) -> None:
        del threadpool_worker_size
        if device_id is not None and device_id < 0:
            device_id = None
        if device_id is not None:
            _forward.check_device(device_id)
        elif embedding_dtype != torch.float32:
            raise UsageError(
                f"embedding_dtype={embedding_dtype}: without device_id embedding tensors are float32; pass device_id, "
                "or leave embedding_dtype out"
            )
        self.device_id = device_id
        self._device = None if device_id is None else Device(device_id, embedding_dtype)
        self.common_context: Backend | None = None
        self._configuration = configuration
        self._owner = False

    def __enter__(self) -> Self:
        """Make this the current context. The outermost context starts the engine."""
        if self in contexts.stack:
            raise UsageError("this context is already entered; create a new one to nest contexts")
        self._owner = not contexts.stack
        if self._owner and self.device_id is not None:
            torch.cuda.set_device(self.device_id)  # must precede the process group, which uses the device
        self.common_context = self._open_backend() if self._owner else contexts.stack[-1].common_context
        contexts.stack.append(self)
        try:
            self._on_enter()
        except BaseException as error:
            self._release(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the context. The outermost one stops the engine."""
        try:
            if self._owner and isinstance(value, Exception):
                post_mortem.examine(value)
            self._on_exit()
            self._stop_if_requested(value)
            if self._owner and (value is None or ends_well(value)):
                self._backend.finish_checkpoint()
        except BaseException as error:
            value = value or error
            raise
        finally:
            self._release(None if value is None or ends_well(value) else value)

    def _open_backend(self) -> Backend:
        """Create the backend that the outermost context shares with all contexts inside it."""
        if settings.nats_url is not None:
            from persia.backend.remote import RemoteBackend  # imported here, because it imports gRPC

            return RemoteBackend(trains=False, device=self._device, configuration=self._configuration)
        return LocalBackend(self._configuration, self._device)

    def _on_enter(self) -> None:
        """A hook for subclasses, called on entry."""

    def _on_exit(self) -> None:
        """A hook for subclasses, called on exit."""

    def _stop_if_requested(self, left_by: BaseException | None) -> None:
        """A hook for subclasses, which raises SystemExit if this process was asked to stop."""

    def _release(self, error: BaseException | None) -> None:
        contexts.stack.remove(self)
        backend, self.common_context = self.common_context, None
        if self._owner and backend is not None:
            try:
                if error is not None:
                    with preemption.leaving():
                        backend.finish_checkpoint_within(_WRITTEN_S)
            finally:
                backend.closed = True
                backend.close(error)

    @property
    def _backend(self) -> Backend:
        if self.common_context is None:
            raise UsageError(f"{type(self).__name__} is used outside its `with` block")
        return self.common_context

    def comm_stats(self) -> dict[str, Any]:
        """Return times of look-ups, pushes and waits for ranks: see :meth:`persia.profile.comm.Comm.stats`."""
        return Comm(lambda: self.engine, lambda: getattr(self, "model", None)).stats()

    @property
    def engine(self) -> Engine:
        """The engine of this context."""
        return self._backend.engine


def cnt_ctx() -> BaseCtx | None:
    """Return the innermost entered context, or None."""
    context: BaseCtx | None = contexts.stack[-1] if contexts.stack else None
    return context
