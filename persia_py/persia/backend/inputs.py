"""The parts of a batch that the models of this process get, and their order."""

import weakref

import torch

from persia.distributed.wrapped import unwrap_model
from persia.embedding.inputs import Arrangement, InputNames, NamedBatch
from persia.runtime.logging import get_logger

_logger = get_logger("ctx")

_of_models: "weakref.WeakKeyDictionary[torch.nn.Module, InputNames]" = weakref.WeakKeyDictionary()


class ModelInputs:
    """The inputs of each model that is trained on the rows of one backend.

    A model keeps its inputs after its training context has ended.
    """

    def __init__(self) -> None:
        self._last: InputNames | None = None

    def of(self, model: torch.nn.Module | None) -> InputNames | None:
        """Return the inputs on which ``model`` is trained; None means the model that was trained last."""
        return self._last if model is None else _of_models.get(unwrap_model(model))

    def for_evaluation(self, model: torch.nn.Module | None) -> InputNames | None:
        """Like :meth:`of`, but a model not trained in this process gets the inputs of the model trained last."""
        return self.of(model) or self._last

    def set(self, model: torch.nn.Module | None, names: InputNames | None) -> None:
        """Record the inputs of a model, from its first training batch or a checkpoint; None changes nothing."""
        if names is None:
            return
        self._last = names
        if model is not None:
            _of_models[unwrap_model(model)] = names


class Arranger:
    """Selects the inputs of a context's model from batches."""

    def __init__(self) -> None:
        # The inputs of the first evaluated batch, for a model that is not trained in this process.
        self._first_batch: InputNames | None = None
        self._unchecked = ""  # the parts that the last warning named

    def arrange(
        self, batch: NamedBatch, inputs: ModelInputs, model: torch.nn.Module | None, *, training: bool, whole: bool
    ) -> Arrangement:
        """Select the inputs of ``model`` from a batch. The first training batch determines them.

        A batch for evaluation may have a subset of these inputs, or other inputs.

        Raises:
            DataError: A training batch has other inputs.
        """
        names = inputs.of(model) if training else inputs.for_evaluation(model) or self._first_batch
        if names is None:
            names = InputNames.of(batch)
            if training:
                inputs.set(model, names)
            elif whole:
                self._first_batch = names
        places = names.arrange(batch, whole=whole)
        if places.unchecked and places.unchecked != self._unchecked:
            self._unchecked = places.unchecked
            _logger.warning(
                "%s are taken by position, because only some of the batches name them; name them in every batch",
                places.unchecked,
            )
        return places
