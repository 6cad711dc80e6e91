"""What a checkpoint can keep of an object of the script."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object with a state, by torch's convention: a data set, a learning-rate scheduler, a counter of one's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes. That of a data set is JSON; others may hold tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from this state; a data set does at its next iteration."""
        ...
