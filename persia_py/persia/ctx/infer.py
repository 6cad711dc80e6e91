"""Look-ups of an infer job, for serving."""

import threading
from typing import Any

from typing_extensions import Self

from persia.backend.base import Backend
from persia.backend.evaluation import Evaluation
from persia.backend.serving import ServingBackend
from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import EmbeddingCtx
from persia.embedding.inputs import Arrangement
from persia.runtime import contexts
from persia.runtime.errors import UsageError
from persia_core import forward as _forward

_LOADS = "infer_config.embedding_checkpoint"
"""The key that selects the rows, for messages."""


class InferCtx(EmbeddingCtx):
    """Looks up embeddings on the servers of an infer job (``job_type: Infer``), without NATS.

    Slots, tables and the order of the model's inputs are those of the checkpoint that the servers serve, so this
    process needs no configuration file. A process that has loaded a model calls :meth:`wait_for_serving`, and then
    :meth:`get_embedding_from_bytes` for each request; a ``with`` block is optional. An id without a row reads as zeros,
    as in evaluation.

    Args:
        embedding_worker_address_list: Addresses of middlewares, ``host:port`` or ``unix:/path``, such as those of
            :func:`persia.service.get_embedding_worker_services`.
        *args: Passed to :class:`EmbeddingCtx`, after ``preprocess_mode``.
        **kwargs: Passed to :class:`EmbeddingCtx`.

    Raises:
        UsageError: The list of addresses is empty or is not a list.
    """

    def __init__(self, embedding_worker_address_list: list[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(PreprocessMode.INFERENCE, *args, **kwargs)
        given: Any = embedding_worker_address_list  # a string would be interpreted as a list of characters
        self._addresses = [] if isinstance(given, str) else ["".join(str(each).split()) for each in given]
        self._ended = False
        self._connecting = threading.RLock()  # threads of a serving process share this context
        if not all(self._addresses) or not self._addresses:
            raise UsageError(
                f"InferCtx({given!r}): expected a list of the addresses of middlewares, such as "
                "['embedding_worker:8887']"
            )

    def wait_for_serving(self) -> None:
        """Wait until a middleware and all servers respond, and connect to the checkpoint that they currently serve.

        Raises:
            UnreachableError: A process makes no progress for ``PERSIA_START_TIMEOUT`` seconds. The message names it.
            IncompatibleError: The servers serve no checkpoint, or different ones.
        """
        with self._connecting:
            old, self.common_context = self.common_context, self._connected()
            if old is None:
                self._on_enter()
                return
            old.closed = True
            old.close(None)
            self._evaluation = Evaluation(self._backend, _LOADS)

    def __enter__(self) -> Self:
        """Make this the current context."""
        if contexts.stack:
            raise UsageError(
                "cannot enter InferCtx inside another context, because it uses its own servers; leave the other "
                "context first, or use InferCtx without a `with` block"
            )
        return super().__enter__()

    def _connected(self) -> Backend:
        return ServingBackend(self._addresses, self._device)

    def _open_backend(self) -> Backend:
        return self.common_context or self._connected()

    def _on_enter(self) -> None:
        self._owner = True
        super()._on_enter()
        self._evaluation = Evaluation(self._backend, _LOADS)

    def _on_exit(self) -> None:
        self._ended = True
        super()._on_exit()

    @property
    def _backend(self) -> Backend:
        # Only the first connection takes the lock. Later look-ups do not wait while another thread reconnects.
        if self._evaluation is None and not self._ended:
            with self._connecting:
                if self.common_context is None:
                    self.wait_for_serving()
        return super()._backend

    def _arrange(self, batch: "_forward.TrainingBatch", *, whole: bool) -> Arrangement:
        del whole  # an infer context always requires all inputs, because a request without some would get a wrong score
        return super()._arrange(batch, whole=True)
