"""Serving, which this version does not support."""

from typing import Any, NoReturn

from persia.ctx.embedding import EmbeddingCtx
from persia.runtime.errors import UsageError


class InferCtx(EmbeddingCtx):
    """Serving from embedding servers, which this version does not support."""

    def __init__(self, embedding_worker_address_list: list[str], *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        del embedding_worker_address_list, args, kwargs
        self.wait_for_serving()

    def wait_for_serving(self) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "InferCtx: serving from embedding servers is not supported in this version; evaluate with eval_ctx, in the "
            "embedded mode after load_checkpoint, with servers on the rows that a TrainCtx of their job made or loaded"
        )
