"""The hook that ends a training loop after SIGTERM or Ctrl-C."""

from persia.runtime import preemption


class Preemption:
    """Ends a loop between two steps after SIGTERM or Ctrl-C.

    A hook of the training loop, for runs that save checkpoints.
    """

    def on_start(self, loop: object) -> None:
        """Let a signal end the process only between two steps, once the first step is done."""
        del loop
        preemption.begin_loop()

    def before_step(self) -> None:
        """Record that the previous batch was trained on, or will not be."""
        preemption.set_in_step(False)

    def after_lookup(self, step: int) -> None:
        """Record that a batch is returned for training."""
        del step
        preemption.set_in_step(True)

    def after_step(self, step: int) -> None:
        """Record that a step is done and can be saved."""
        del step
        preemption.step_done()

    def on_end(self, complete: bool) -> None:
        """Exit if this process was asked to stop and the loop is complete; otherwise signals act immediately again."""
        try:
            if complete:
                preemption.exit_if_requested()
        finally:
            preemption.end_loop()
