"""The hook that ends a training loop after SIGTERM or Ctrl-C."""

from persia.runtime import preemption


class Preemption:
    """Lets SIGTERM and Ctrl-C end a loop between two steps. A hook of the training loop, in a run that saves itself."""

    def on_start(self, loop: object) -> None:
        """After the first step, signals are only recorded from here on."""
        del loop
        preemption.begin_loop()

    def before_step(self) -> None:
        """Record that the batch was trained on, or will not be."""
        preemption.set_in_step(False)

    def after_lookup(self, step: int) -> None:
        """Record that a batch is returned for training."""
        del step
        preemption.set_in_step(True)

    def after_step(self, step: int) -> None:
        """Record that a step is done, so that there is something to save."""
        del step
        preemption.step_done()

    def on_end(self, complete: bool) -> None:
        """Leave, if this process was asked to stop and the loop is complete; else signals act immediately again."""
        try:
            if complete:
                preemption.exit_if_requested()
        finally:
            preemption.end_loop()
