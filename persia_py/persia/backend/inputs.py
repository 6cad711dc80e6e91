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
        """Return the inputs that ``model`` is trained on; without a model, those of the last training."""
        return self._last if model is None else _of_models.get(unwrap_model(model))

    def for_evaluation(self, model: torch.nn.Module | None) -> InputNames | None:
        """Like :meth:`of`; a model that was not trained here, such as a copy, gets the inputs of the last one."""
        return self.of(model) or self._last

    def set(self, model: torch.nn.Module | None, names: InputNames | None) -> None:
        """Record the inputs of a model, from its first training batch or a checkpoint; None changes nothing."""
        if names is None:
            return
        self._last = names
        if model is not None:
            _of_models[unwrap_model(model)] = names


class Arranger:
    """Finds the inputs of a context's model in batches."""

    def __init__(self) -> None:
        self._first_batch: InputNames | None = None  # if the model was not trained here
        self._unchecked = ""  # the parts that were logged

    def arrange(
        self, batch: NamedBatch, inputs: ModelInputs, model: torch.nn.Module | None, *, training: bool, whole: bool
    ) -> Arrangement:
        """Find the inputs of ``model``. The first training batch determines them.

        A batch that is not for the whole model may have some of its inputs, or others.

        Raises:
            DataError: The batch has other inputs.
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
