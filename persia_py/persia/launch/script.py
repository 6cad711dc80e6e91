"""Running a user's script inside this process as if Python had been given it."""

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from persia.runtime.errors import PersiaError

_RUNNERS = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>")
"""Where the frames come from that lie between this module and the script."""


def run_script(file: str, arguments: Sequence[str]) -> int:
    """Run the script and return the exit code it asked for, 0 when it came to its end.

    Args:
        file: Its path.
        arguments: What it finds in ``sys.argv[1:]``.

    Raises:
        BaseException: Whatever it raises but SystemExit.
    """
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).resolve().parent)
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as exit_:
        return exit_code(exit_)
    return 0


def exit_code(error: SystemExit) -> int:
    """Return the process exit code that a SystemExit stands for; a message in it is printed."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    sys.stderr.write(f"{error.code}\n")
    return 1


def guarded(work: Callable[[], int]) -> int:
    """Return the result of ``work``; an error becomes a message and its exit code.

    What persia raises on purpose is told in one or two lines. Anything else is told with the script's part of its
    traceback, and gives 1.
    """
    try:
        return work()
    except PersiaError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_RUNNERS):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1


def report(error: PersiaError) -> None:
    """Write an error's message, and what to do next, to standard error."""
    sys.stderr.write(f"error: {error}\n" + (f"next:  {error.hint}\n" if error.hint else ""))
