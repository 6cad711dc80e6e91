"""The order in which a model receives the parts of a batch: that of its first training batch, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from persia.embedding.listed import MOST, listed
from persia.runtime.errors import CheckpointError, DataError

FILE = "inputs.state"
"""The file of a checkpoint that holds the names. No state dict of a user can have this name."""

_METADATA = "persia.inputs"

Names = tuple[str | None, ...]
"""Names of dense inputs or labels; None for an input or label without a name."""
Part = TypeVar("Part")


class NamedBatch(Protocol):
    """A batch whose parts may have names."""

    @property
    def slots(self) -> list[str]:
        """The names of the id features, in the order of the batch."""

    @property
    def dense_names(self) -> list[str | None]:
        """The names of the dense inputs."""

    @property
    def label_names(self) -> list[str | None]:
        """The names of the labels."""


@dataclass(frozen=True)
class Arrangement:
    """The positions of inputs in a batch: for each input of the model, its index in the batch; None means unchanged.

    Attributes:
        id_features: The positions of the id features.
        dense: The positions of the dense inputs.
        labels: The positions of the labels.
        unchecked: The kinds of parts that were taken by position, because only the batch or only the model's inputs
            have names.
    """

    id_features: list[int] | None = None
    dense: list[int] | None = None
    labels: list[int] | None = None
    unchecked: str = ""


@dataclass(frozen=True)
class InputNames:
    """The names of a model's inputs, in the order of the model.

    Attributes:
        id_features: The names of the id features.
        dense: The names of the dense inputs; None if they are unknown.
        labels: The names of the labels; None if they are unknown.
    """

    id_features: tuple[str, ...]
    dense: Names | None = None
    labels: Names | None = None

    @classmethod
    def of(cls, batch: NamedBatch) -> "InputNames":
        """Return the names of the parts of a batch, in its order."""
        return cls(tuple(batch.slots), tuple(batch.dense_names), tuple(batch.label_names) or None)

    @classmethod
    def from_state(cls, state: Any) -> "InputNames":
        """Restore the names from a result of :meth:`state`.

        Raises:
            CheckpointError: The state does not hold names of inputs.
        """
        try:
            dense, labels = (None if state[key] is None else tuple(state[key]) for key in ("dense", "labels"))
            return cls(tuple(map(str, state["id_features"])), dense, labels)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the saved names of the model's inputs are not valid: {type(error).__name__}: {error}",
                hint="load another checkpoint",
            ) from error

    def state(self) -> dict[str, list[str | None] | None]:
        """Return the names as plain lists, for a checkpoint."""
        return {
            "id_features": [*self.id_features],
            "dense": None if self.dense is None else [*self.dense],
            "labels": None if self.labels is None else [*self.labels],
        }

    def arrange(self, batch: NamedBatch, *, whole: bool = True) -> Arrangement:
        """Find the inputs of the model in a batch.

        Args:
            batch: The batch.
            whole: Whether to refuse a batch with other inputs. Otherwise the inputs of the model come first, in the
                model's order, and other inputs follow.

        Raises:
            DataError: The batch has other parts; for each kind that differs, the message names them.
        """
        given = InputNames(tuple(batch.slots), tuple(batch.dense_names), tuple(batch.label_names))
        dense = given.dense if self.dense is None else self.dense
        labels = given.labels if self.labels is None or not given.labels else self.labels
        if (self.id_features, dense, labels) == (given.id_features, given.dense, given.labels):
            return Arrangement()
        kinds = ("id features", "dense inputs", "labels")
        pairs = (
            (self.id_features, given.id_features),
            (dense or (), given.dense or ()),
            (labels or (), given.labels or ()),
        )
        found = [_places(*pair, more=kind == "labels") for kind, pair in zip(kinds, pairs, strict=True)]
        if not whole:
            found = [
                _known_first(*pair) if places is None else places for pair, places in zip(pairs, found, strict=True)
            ]
        wrong = [
            f"{kind}: {_difference(batch_has, model_gets)}"
            for kind, (model_gets, batch_has), places in zip(kinds, pairs, found, strict=True)
            if places is None
        ]
        if wrong:
            raise DataError(
                f"the inputs of the batch differ from those that the model was trained on: {'; '.join(wrong)}. Every "
                "batch needs the same inputs: named inputs in any order, unnamed ones at the same positions. For a "
                "feature without ids, pass an empty array for each sample"
            )
        unchecked = [
            kind
            for kind, (model_gets, batch_has) in zip(kinds, pairs, strict=True)
            if len(batch_has) > 1 and (any(model_gets) != any(batch_has))
        ]
        ids, dense_at, labels_at = (None if each == sorted(each or ()) else each for each in found)
        return Arrangement(ids, dense_at, labels_at, " and ".join(unchecked))


def _places(model_gets: Names, batch_has: Names, *, more: bool) -> list[int] | None:
    """Return the position of each input in the batch; None if it cannot be determined.

    With ``more``, the batch may have additional parts, which follow. If its parts have no names, it may also have fewer
    parts.
    """
    same = [*range(len(batch_has))]
    if all(model_gets) and all(batch_has):
        others = [name for name in batch_has if name not in model_gets]
        if not {*model_gets} <= {*batch_has} or (others and not more):
            return None
        return [batch_has.index(name) for name in (*model_gets, *others)]
    if len(model_gets) != len(batch_has) and not more:
        return None
    pairs = [*zip(model_gets, batch_has, strict=False)]
    moved = {name for name, other in pairs if name is not None and name != other} & {*batch_has}
    if moved or any(name and other and name != other for name, other in pairs):
        return None
    return same


def _known_first(model_gets: Names, batch_has: Names) -> list[int]:
    """Return the order of a batch's parts in which those of the model come first, in the model's order."""
    known = {name: place for place, name in enumerate(model_gets) if name is not None}
    return sorted(range(len(batch_has)), key=lambda place: known.get(batch_has[place] or "", len(model_gets)))


def _difference(batch_has: Names, model_gets: Names) -> str:
    """Return both lists of inputs, for a message. For long lists, return only the names that one of them lacks."""
    if max(len(batch_has), len(model_gets)) <= MOST:
        return f"{_listed(batch_has)} in the batch, {_listed(model_gets)} in training"
    only_batch = [name for name in batch_has if name not in model_gets]
    only_model = [name for name in model_gets if name not in batch_has]
    return (
        f"{len(batch_has)} in the batch, {len(model_gets)} in training; only in the batch: "
        f"{_bounded(only_batch)}; only in training: {_bounded(only_model)}"
    )


def _listed(names: Sequence[str | None]) -> str:
    return ", ".join(map(_shown, names)) or "none"


def _bounded(names: Sequence[str | None]) -> str:
    return listed([*map(_shown, names)]) or "none"


def _shown(name: str | None) -> str:
    return "one without a name" if name is None else repr(name)


def arranged(parts: list[Part], places: list[int] | None) -> list[Part]:
    """Return the parts of a batch in the order of the model's inputs."""
    return parts if places is None else [parts[place] for place in places]


def annotate(state: dict[str, Any], names: InputNames | None) -> dict[str, Any]:
    """Add the names to the metadata of a module's state dict, which torch saves too; return the state dict."""
    metadata = getattr(state, "_metadata", None)
    if names is not None and metadata is not None:
        metadata[_METADATA] = names.state()
    return state


def annotated(state: dict[str, Any]) -> InputNames | None:
    """Return the names in the metadata of a state dict; None if it has none."""
    metadata = getattr(state, "_metadata", None) or {}
    return InputNames.from_state(metadata[_METADATA]) if _METADATA in metadata else None
