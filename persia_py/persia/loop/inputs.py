"""A hook by which several ranks agree on the order of the model's inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from persia.backend.inputs import ModelInputs
from persia.embedding.inputs import InputNames
from persia.loop.feeder import FedBatch


class InputAgreement:
    """Makes all ranks use the same order from the first step of a loop: the order of the first rank that knows one.

    A rank knows the order from an earlier loop or a checkpoint, or otherwise from its first batch.

    Args:
        inputs: The record of the order.
        model: Returns the model.
    """

    def __init__(self, inputs: ModelInputs, model: Callable[[], torch.nn.Module | None]) -> None:
        self._inputs = inputs
        self._model = model
        self._agreed = False

    def vote(self, fed_batch: FedBatch | None) -> Any:
        """Return the names that this rank knows, until the ranks agree."""
        if self._agreed:
            return None
        known = self._inputs.of(self._model())
        if known is None and fed_batch is not None:
            known = InputNames.of(fed_batch.batch)
        return None if known is None else known.state()

    def decide(self, step: int, votes: Sequence[Any]) -> bool:
        """Record the names from the first rank that knows them. This never skips a step."""
        del step
        names = next((vote for vote in votes if vote is not None), None)
        if not self._agreed and names is not None:
            self._agreed = True
            self._inputs.set(self._model(), InputNames.from_state(names))
        return False
