"""Selects the stack frames of an error that are in the user's files, and shows the error in a few lines."""

import contextlib
import os
import site
import sys
import sysconfig
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType

from persia.runtime.settings import settings

_PACKAGE = str(Path(__file__).parents[1])


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders whose files do not belong to the user."""
    found = [_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), site.getusersitepackages()]
    found += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    found += [folder for folder in sys.path if folder and next(Path(folder).glob("*.dist-info"), None)]
    return tuple(f"{os.path.normpath(folder)}{os.sep}" for folder in dict.fromkeys(found) if folder)


def is_own(filename: str) -> bool:
    """Whether a file belongs to the user: not to Python, an installed package, or persia."""
    path = str(Path(filename).absolute())
    return not path.startswith(_libraries()) and "site-packages" not in path and Path(filename).is_file()


def own_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return the stack frames in the user's files, innermost first."""
    return [frame for frame in reversed(traceback.extract_tb(trace)) if is_own(frame.filename)]


def root_cause(error: BaseException) -> BaseException:
    """Return the error at the start of a chain of errors."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return error
        error = before
        seen.add(id(error))


def place(frame: traceback.FrameSummary) -> str:
    """Return a frame as ``FILE:LINE in FUNCTION: CODE``."""
    path = Path(frame.filename).absolute()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno} in {frame.name}: {frame.line or ''}".rstrip(": ")


def shows_all() -> bool:
    """Whether ``LOG_LEVEL`` requests full tracebacks."""
    return os.environ.get("LOG_LEVEL", "").strip().upper() in {"DEBUG", "TRACE"}


def short(error: BaseException) -> str:
    """Return an error in a few lines: its message, its cause, and the user's stack frames, innermost first.

    If no stack frame is in the user's files, the innermost one is shown.
    """
    lines = [f"error: {_named(error)}"]
    cause = root_cause(error)
    if cause is not error:
        lines.append(f"cause: {_named(cause)}")
    frames = own_frames(cause.__traceback__) or own_frames(error.__traceback__)
    lines += [f"  at {place(frame)}" for frame in frames]
    if not frames:
        last = traceback.extract_tb(cause.__traceback__ or error.__traceback__)[-1:]
        lines += [f"  at {frame.filename}:{frame.lineno} in {frame.name}" for frame in last]
    return "\n".join(lines)


def _named(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).rstrip()


def write(error: BaseException) -> None:
    """Write an error to standard error, in full if :func:`shows_all`, and refer to the troubleshooting page.

    If the error is shortened, the full traceback is written to a file, because the error may not occur again.
    """
    whole = "".join(traceback.format_exception(error))
    if shows_all():
        sys.stderr.write(whole)
    else:
        sys.stderr.write(f"{short(error)}\nwhole traceback: {_kept(whole) or 'set LOG_LEVEL=DEBUG'}\n")
    sys.stderr.write(f"{HELP}\n")


def _kept(whole: str) -> str | None:
    """Write a traceback into ``PERSIA_RUN_DIR``, or into the folder for temporary files; return None if this fails."""
    name = f"persia-traceback-rank{os.environ.get('RANK', '').strip() or 0}-{os.getpid()}.txt"
    for folder in (settings.run_dir, tempfile.gettempdir()):
        if folder is not None and Path(folder).is_dir():
            with contextlib.suppress(OSError):
                path = Path(folder, name)
                path.write_text(whole, encoding="utf-8")
                return str(path)
    return None


HELP = "help:  the page Troubleshooting of the documentation; for a report, add the output of: persia doctor --env"
"""A hint on where to get help."""
