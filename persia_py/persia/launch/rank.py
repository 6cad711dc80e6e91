"""What runs in the process of one trainer rank: ``python -m persia.launch.rank FILE ARGUMENTS...``.

The script, then the common end of all ranks. SIGTERM before that end exits 75: start me again. A context that saves its
run does so first.
"""

import os
import signal
import sys
import time
from types import FrameType

from persia.launch.script import guarded, run_script
from persia.launch.watch import ONE_SIGNAL
from persia.runtime import preemption
from persia.runtime.exit_codes import ExitCode


def main() -> int:
    """Run the script in ``sys.argv[1]``, then end the run."""
    _end_on_sigterm()
    return guarded(_train)


def _train() -> int:
    try:
        code = run_script(sys.argv[1], sys.argv[2:])
        if code == 0:
            from persia.distributed import run

            run.finish()
        else:
            _tell(f"its script ended with exit code {code}")
    except Exception as error:
        _tell(f"{type(error).__name__}: {error}")
        raise
    return code


def _tell(reason: str) -> None:
    """Let the other ranks know why this one ends, if it ever met them."""
    if "persia.distributed" in sys.modules:
        from persia.distributed import run

        run.fail(reason)


def _end_on_sigterm() -> None:
    first_at: float | None = None

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        del number, frame
        now = time.monotonic()
        if first_at is not None:
            if now - first_at > ONE_SIGNAL:
                os._exit(ExitCode.AGAIN)
            return
        first_at = now
        if not preemption.ask_to_stop():
            sys.stderr.write("SIGTERM: leaving before the end of the run\n")
            raise SystemExit(ExitCode.AGAIN)  # the contexts tell their peers on the way out

    signal.signal(signal.SIGTERM, heard)


if __name__ == "__main__":
    sys.exit(main())
