"""A command that outlives its terminal: ``persia train --follow``.

The output of the command is written to a file, and shown from this file.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from persia.runtime.errors import PersiaError, StorageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.files import make_folders

_PERIOD_S = 0.1
"""Seconds between two reads of the file."""
_PIECE = 1 << 16
"""The number of bytes that are read at a time."""
_OR_ANOTHER = "or choose another folder: --set run.dir=FOLDER"


class Background:
    """A command that runs in the background.

    Args:
        process: The process of the command. It leads a separate session, and terminals and Ctrl-C do not affect it.
        log: The file with its output and errors.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self.log = process, log
        self._shown = -1  # the number of bytes shown; -1 until the start was reported

    def follow(self) -> int:
        """Copy the output of the command to standard output until the command ends, and return its exit code.

        On a terminal, Ctrl-C asks whether to end the command. If the user declines, or without a terminal, the command
        continues and the result is 130. The result is also 130 if the reader of standard output has ended.
        """
        while True:
            try:
                return self._follow()
            except KeyboardInterrupt:
                if not _wants_end():
                    self._say_detached()
                    return ExitCode.INTERRUPTED
                self.process.send_signal(signal.SIGINT)
            except BrokenPipeError:  # the reader of `persia train --follow | head` has ended
                with Path(os.devnull).open("wb") as nowhere:  # Python flushes standard output again when it exits
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())
                self._say_detached()
                return ExitCode.INTERRUPTED

    def _follow(self) -> int:
        if self._shown < 0:
            sys.stderr.write(f"training in the background: pid {self.process.pid}, output in {self.log}\n")
            self._shown = 0
        with self.log.open("rb") as file:
            while True:
                code = self.process.poll()  # if it has ended now, the file has all output
                file.seek(self._shown)
                while piece := file.read(_PIECE):
                    sys.stdout.buffer.write(piece)
                    self._shown += len(piece)
                sys.stdout.buffer.flush()
                if code is not None:
                    return code if code >= 0 else 128 - code
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_PERIOD_S)

    def _say_detached(self) -> None:
        pid, log = self.process.pid, shlex.quote(str(self.log))
        sys.stderr.write(
            f"\ntraining continues: pid {pid}\n"
            f"to follow it: tail --follow --lines=+1 --pid={pid} {log}\nto end it: kill -INT {pid}\n"
        )


def _wants_end() -> bool:
    """Ask at the terminal whether to end the training; a second Ctrl-C means no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write("\nCtrl-C: training continues in the background. End it? [y/N] ")
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False


def start(words: Sequence[str], folder: Path) -> Background:
    """Start a command of ``persia`` in the background.

    Args:
        words: The command and its arguments.
        folder: The folder for the file with its output.

    Raises:
        StorageError: The folder or the file cannot be created.
        PersiaError: The operating system refuses to start a process.
    """
    # A shell without job control makes its background jobs and their children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = folder / f"train-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{os.getpid()}.log"
    columns = str(shutil.get_terminal_size().columns)
    try:
        make_folders(folder.absolute())
    except OSError as error:
        raise StorageError(
            f"cannot create the folder {folder} for the output of the training: {error.strerror or error}",
            hint=f"check the owner and the free space of its parent folder, {_OR_ANOTHER}",
        ) from error
    try:
        file = log.open("xb")
    except OSError as error:
        raise StorageError(
            f"cannot create the file {log} for the output of the training: {error.strerror or error}",
            hint=f"check the owner and the free space of {folder}, {_OR_ANOTHER}",
        ) from error
    try:
        with file:
            process = subprocess.Popen(
                [sys.executable, "-m", "persia", *words],
                env={"COLUMNS": columns, **os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        with contextlib.suppress(OSError):
            log.unlink()
        raise PersiaError(
            f"cannot start a process for the training in the background: {error.strerror or error}",
            hint="train in this process: repeat the command without --follow",
        ) from error
    return Background(process, log)
