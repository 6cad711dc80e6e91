"""Runs a user's script inside this process, as ``python FILE ARGUMENTS...`` would."""

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from persia.runtime import own_frames
from persia.runtime.errors import PersiaError
from persia.runtime.exit_codes import ExitCode


def run_script(file: str, arguments: Sequence[str]) -> int:
    """Run the script and return its exit code.

    Args:
        file: The path of the script.
        arguments: The script's ``sys.argv[1:]``.

    Raises:
        BaseException: An exception of the script other than SystemExit.
    """
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).resolve().parent)
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as exit_:
        return exit_code(exit_)
    return 0


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a SystemExit. If it carries a message, print the message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    sys.stderr.write(f"{error.code}\n")
    return 1


def guarded(work: Callable[[], int]) -> int:
    """Return the result of ``work``, or report its error and return an exit code.

    A ``PersiaError`` is printed as one message with the line of the script, and gives its own exit code. Any other
    error gives 1, and :func:`persia.runtime.own_frames.write` prints its cause and the frames of the script.
    """
    try:
        return work()
    except PersiaError as error:
        report(error)
        for frame in own_frames.own_frames(error.__traceback__)[:1]:
            sys.stderr.write(f"  at {own_frames.place(frame)}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        own_frames.write(error)
        return ExitCode.FAILED


def report(error: PersiaError) -> None:
    """Write an error's message and next step to standard error."""
    sys.stderr.write(f"error: {error}\n" + (f"next:  {error.hint}\n" if error.hint else ""))
