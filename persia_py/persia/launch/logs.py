"""Lines of many processes on one terminal, and each process's in a file of its own."""

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_WIDTH = 14


class Logs:
    """Writes ``name | line`` to standard output, in colours on a terminal, and the line to ``folder/name.log``.

    Args:
        folder: Made if it is not there. Files are appended to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._coloured = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._writers: dict[str, Callable[[str], None]] = {}
        self._files = ExitStack()

    def __enter__(self) -> Self:
        """Nothing is open yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files; later lines only go to standard output."""
        with self._lock:
            self._files.close()

    def of(self, name: str, *, shown: bool = True) -> Callable[[str], None]:
        """Return what writes a line of the process called ``name``, from any thread.

        Args:
            name: Of the file, and in front of the line.
            shown: Whether the line goes to standard output, too.
        """
        if name not in self._writers:
            file = self._files.enter_context((self.folder / f"{name}.log").open("a", encoding="utf-8", buffering=1))
            prefix = f"{name:<{_WIDTH}} |"
            if self._coloured:
                prefix = f"\x1b[{_COLOURS[len(self._writers) % len(_COLOURS)]}m{prefix}\x1b[0m"

            def write(line: str) -> None:
                with self._lock:
                    # On a full disk, or with nobody left to read, the job goes on.
                    with suppress(OSError):
                        if not file.closed:
                            file.write(f"{line}\n")
                    with suppress(OSError, ValueError):
                        if shown:
                            sys.stdout.write(f"{prefix} {line}\n")
                            sys.stdout.flush()

            self._writers[name] = write
        return self._writers[name]
