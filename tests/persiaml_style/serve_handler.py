"""A TorchServe handler in PersiaML's style. Rows come from an infer job, the dense model from TorchServe."""

from typing import Any

import torch
from ts.torch_handler.base_handler import BaseHandler

from persia.ctx import InferCtx
from persia.service import get_embedding_worker_services


class Handler(BaseHandler):  # type: ignore[misc]  # torchserve has no types
    """Scores one serialized :class:`~persia.embedding.data.PersiaBatch` for each request."""

    def initialize(self, context: Any) -> None:
        """Load the scripted model, and connect to the infer job."""
        super().initialize(context)
        self.rows = InferCtx(get_embedding_worker_services())
        self.rows.wait_for_serving()

    def preprocess(self, data: list[dict[str, Any]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors of a request."""
        looked = self.rows.get_embedding_from_bytes(bytes(data[0]["batch"]), None)
        dense, embeddings, _ = self.rows.prepare_features(looked)
        return dense, embeddings

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the model."""
        del args, kwargs
        with torch.no_grad():
            scores: torch.Tensor = self.model(*data)
        return scores

    def postprocess(self, data: torch.Tensor) -> list[list[float]]:
        """Return one list of scores."""
        return [data.flatten().tolist()]
