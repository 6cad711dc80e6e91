"""The process of one trainer rank: ``python -m persia.launch.rank_main FILE ARGUMENTS...``.

The process runs the script or, without one, trains from ``PERSIA_CONFIG``, then ends the run together with the other
ranks. If SIGTERM arrives before that, the process exits with 75, which requests a restart. A context with checkpoints
saves the run first.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from persia.debug import ranks
from persia.launch.supervision import ONE_SIGNAL
from persia.launch.user_script import guarded, run_script
from persia.runtime import post_mortem, preemption
from persia.runtime.config_files import persia_config
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import settings


def main() -> int:
    """Run the script in ``sys.argv[1]``, or the built-in one, then end the run."""
    handle_sigterm()
    ranks.register(settings.rank, settings.world_size)
    words = sys.argv[1:]
    return guarded(lambda: finished(lambda: run_script(words[0], words[1:]) if words else _train_from_config()))


def finished(train: Callable[[], int]) -> int:
    """Train, then end the run together with the other ranks. Report a failure to them. Return the exit code."""
    try:
        code = train()
        if code == 0:
            from persia.distributed import run

            run.finish()
        else:
            _report_failure(f"its script ended with exit code {code}")
    except Exception as error:
        post_mortem.examine(error)
        _report_failure(f"{type(error).__name__}: {error}")
        raise
    return code


def _train_from_config() -> int:
    from persia.trainer import rank

    if (path := persia_config()) is None:
        raise UsageError(
            "no script is given, and PERSIA_CONFIG is not set",
            hint="specify the path of a script, or set PERSIA_CONFIG to the path of a persia.yml",
        )
    rank.train(path)
    return 0


def _report_failure(reason: str) -> None:
    """Report to the other ranks why this rank ends, if the script has connected to them."""
    if "persia.distributed" in sys.modules:
        from persia.distributed import run

        run.fail(reason)


def handle_sigterm() -> None:
    """End the rank on SIGTERM, or immediately on a second one that arrives more than ``ONE_SIGNAL`` seconds later."""
    first_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        del number
        now = time.monotonic()
        if first_at is not None:
            if now - first_at > ONE_SIGNAL:
                os._exit(ExitCode.AGAIN)
            return
        first_at = now
        if not preemption.request_stop():
            os.write(2, b"SIGTERM: leaving before the end of the run\n")
            if "persia.distributed" not in sys.modules and _is_importing(frame):
                os._exit(ExitCode.AGAIN)  # PyTorch would change an exception during its import, and nothing is open yet
            raise SystemExit(ExitCode.AGAIN)  # contexts report this exit to the other ranks

    signal.signal(signal.SIGTERM, handle)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame, or one of its callers, is importing a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    sys.exit(main())
