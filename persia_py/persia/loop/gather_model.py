"""Gathers the weights of a sharded model at the end of a loop."""

from persia.checkpoint.run_state import RunState
from persia.runtime.settings import settings


class GatherModel:
    """A hook that gathers the weights of a model that is sharded over the ranks, when all ranks end a loop.

    Args:
        state: The state of the run, which has the model.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state

    @property
    def identity(self) -> str:
        """A text that must be equal on all ranks, because ranks that write digests gather the weights."""
        name = type(self).__name__
        return f"{name}(PERSIA_DIGEST={settings.digest_every})" if self._state.is_sharded else name

    def on_end(self, complete: bool) -> None:
        """Gather the weights if the end is a collective call of all ranks."""
        if complete:
            self._state.gather_model()
