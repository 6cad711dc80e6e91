"""Objects of the script whose state a checkpoint can store."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object with a state, following torch's convention: a data set, a learning-rate scheduler, a custom counter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``load_state_dict``.

        The state of a data set is JSON; other states may contain tensors.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore this state. A data set does so at its next iteration."""
        ...
