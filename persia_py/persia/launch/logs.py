"""The output of several processes: on one terminal, and in one rotated file for each process."""

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from persia.runtime.log_files import LineFile

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_WIDTH = 14


class Logs:
    """Writes each line to ``folder/name.log``, and as ``name | line`` to standard output, in color on a terminal.

    Args:
        folder: The folder, which is created if missing. Output is appended to existing files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._coloured = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._writers: dict[str, Callable[[str], None]] = {}
        self._files = ExitStack()
        self._closed = False

    def __enter__(self) -> Self:
        """Return the object. A file is opened when its writer is first requested."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files. Later lines go to standard output only."""
        with self._lock:
            self._closed = True
            self._files.close()

    def writer(self, name: str, *, shown: bool = True, stamped: bool = False) -> Callable[[str], None]:
        """Return a function that writes a line of the process ``name``. It may be called from any thread.

        Args:
            name: The name of the file, and the prefix of the lines.
            shown: Whether lines also go to standard output.
            stamped: Whether to add the UTC time to each line in the file, because the lines themselves have no time.
        """
        if name not in self._writers:
            file = LineFile(self.folder / f"{name}.log")
            self._files.callback(file.close)
            prefix = f"{name:<{_WIDTH}} |"
            if self._coloured:
                prefix = f"\x1b[{_COLOURS[len(self._writers) % len(_COLOURS)]}m{prefix}\x1b[0m"

            def write(line: str) -> None:
                with self._lock:
                    # A full disk or a closed pipe must not end the job.
                    if not self._closed:
                        time = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z " if stamped else ""
                        file.write_line(f"{time}{line}")
                    with suppress(OSError, ValueError):
                        if shown:
                            sys.stdout.write(f"{prefix} {line}\n")
                            sys.stdout.flush()

            self._writers[name] = write
        return self._writers[name]
