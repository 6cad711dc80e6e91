"""Run a user's script inside this process, as ``python FILE ARGUMENTS...`` would."""

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from persia.runtime.errors import PersiaError
from persia.runtime.exit_codes import ExitCode

_RUNNERS = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>")
"""The files of the stack frames between this module and the script."""


def run_script(file: str, arguments: Sequence[str]) -> int:
    """Run the script and return its exit code.

    Args:
        file: Its path.
        arguments: Its ``sys.argv[1:]``.

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
    """Return the exit code of a SystemExit. If it carries a message, print that."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    sys.stderr.write(f"{error.code}\n")
    return 1


def guarded(work: Callable[[], int]) -> int:
    """Return the result of ``work``, or report its error and return an exit code.

    A ``PersiaError`` is one message and its own code. Any other error is the script's part of its traceback, and 1.
    """
    try:
        return work()
    except PersiaError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_RUNNERS):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return ExitCode.FAILED


def report(error: PersiaError) -> None:
    """Write an error's message and next step to standard error."""
    sys.stderr.write(f"error: {error}\n" + (f"next:  {error.hint}\n" if error.hint else ""))
