"""What runs in the process of one trainer rank: ``python -m persia.launch.rank FILE ARGUMENTS...``.

The script, then the common end of all ranks. SIGTERM before that end exits 75: start me again. A training loop that
saves its run does so first.
"""

import os
import signal
import sys
from types import FrameType

from persia.launch.script import guarded, run_script

AGAIN = 75
"""Exit code: this attempt is over, start again."""


def main() -> int:
    """Run the script in ``sys.argv[1]``, then end the run."""
    _end_on_sigterm()
    return guarded(_train)


def _train() -> int:
    try:
        code = run_script(sys.argv[1], sys.argv[2:])
        if code == 0:
            from persia import distributed

            distributed.finish()
        else:
            _tell(f"its script ended with exit code {code}")
    except Exception as error:
        _tell(f"{type(error).__name__}: {error}")
        raise
    return code


def _tell(reason: str) -> None:
    """Let the other ranks know why this one ends, if it ever met them."""
    if "persia.distributed" in sys.modules:
        from persia import distributed

        distributed.fail(reason)


def _end_on_sigterm() -> None:
    def first(number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGTERM, second)
        if "persia.stopping" in sys.modules:
            from persia import stopping

            if stopping.ask_to_stop():
                return
        sys.stderr.write("SIGTERM: leaving before the end of the run\n")
        raise SystemExit(AGAIN)  # the contexts tell their peers on the way out

    def second(number: int, frame: FrameType | None) -> None:
        del number, frame
        os._exit(AGAIN)

    signal.signal(signal.SIGTERM, first)


if __name__ == "__main__":
    sys.exit(main())
