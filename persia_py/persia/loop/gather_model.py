"""The weights of a sharded model at the end of a loop."""

from persia.checkpoint.run_state import RunState


class GatherModel:
    """Gathers the weights of a model that is sharded over the ranks, when all ranks end a loop. A hook of the loop.

    Args:
        state: The state of the run, which has the model.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state

    def on_end(self, complete: bool) -> None:
        """Gather them, if every rank is here."""
        if complete:
            self._state.gather_model()
