"""The reference from a state dict to the rows of a collection, which the state dict does not contain."""

import uuid
from collections.abc import Iterable

import torch

from persia.runtime.errors import CheckpointError
from persia.runtime.logging import get_logger

_logger = get_logger("collection")

_VERSION = 1
_UNTRAINED = "0" * 32
_BYTES = 1 + 16 + 8  # version, id, step


class RowsVersion:
    """Names the current rows of a collection, so that a state dict can refer to them.

    After rows have changed, they get a new random name when a name is requested. A checkpoint keeps the names of its
    rows.

    Args:
        known: Whether this process knows the rows. It has no name for rows on servers that another process has trained.

    Attributes:
        checked: Whether a state dict with a reference to these rows was loaded.
    """

    def __init__(self, *, known: bool = True) -> None:
        self._known = known
        self._names = {_UNTRAINED}
        self.checked = False

    def changed(self) -> None:
        """Record that the rows have changed."""
        self._names = set()

    def name(self) -> str:
        """Return a name of the rows, 32 hexadecimal digits."""
        if not self._names:
            self._names = {uuid.uuid4().hex}
        return min(self._names)

    def set(self, names: Iterable[str]) -> None:
        """Use the names of the rows from a checkpoint or from other ranks. Each rank may have given its own name."""
        self._names = {*names}
        self.checked = False

    def names(self) -> list[str]:
        """Return all names of the rows."""
        self.name()
        return sorted(self._names)

    def reference(self, step: int) -> torch.Tensor:
        """Return a reference to the rows after ``step``, as a uint8 tensor of constant shape for state dicts."""
        packed = bytes([_VERSION]) + bytes.fromhex(self.name()) + step.to_bytes(8, "little")
        return torch.tensor([*packed], dtype=torch.uint8)

    def check(self, reference: object, step: int) -> None:
        """Check that a reference is to the current rows, which are those after ``step``.

        Raises:
            CheckpointError: The reference is to different rows, or is not a reference.
        """
        packed = b""
        if isinstance(reference, torch.Tensor) and reference.shape == (_BYTES,):
            packed = bytes(reference.detach().cpu().to(torch.uint8).tolist())
        if packed[:1] != bytes([_VERSION]):
            raise CheckpointError(
                "the key of the EmbeddingCollection in the state dict has no reference to rows, but another value "
                f"({type(reference).__name__}); {_HOW}",
                hint="",
            )
        if not self._known:
            _logger.warning(
                "the dense weights were saved after step %d; this process cannot determine whether the rows "
                "on the servers are those of that step",
                int.from_bytes(packed[17:], "little"),
            )
        elif packed[1:17].hex() not in self._names:
            saved = int.from_bytes(packed[17:], "little")
            raise CheckpointError(
                "the state dict does not belong to the rows of this EmbeddingCollection: it was saved with rows after "
                f"step {saved}; the collection has rows after step {step}, perhaps of another run. A state dict "
                f"contains no rows, so the model would get vectors that it was not trained with; {_HOW}",
                hint="",
            )
        self.checked = True


_HOW = (
    "save rows and model together: collection.save(DIR, model=model.state_dict()); load them together: loaded = "
    "collection.load(DIR), then model.load_state_dict(loaded.state('model.pt')). To load the dense weights without "
    "their rows, remove the key that ends with '_extra_state' from the state dict"
)
