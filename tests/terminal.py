"""A process on a pseudo-terminal, and methods that type like a person."""

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forking import WANTED, fork_server
from waiting import wait_until

PROMPT = r"\(Pdb\) "
_WAIT_S = 90.0


class Terminal:
    """Starts ``python ARGV`` as the leader of a session, with a terminal as its standard streams.

    Args:
        argv: The arguments of the interpreter.
        env: The whole environment.
        cwd: The working directory.
        spares: The number of processes that a launcher starts, which are forked in advance.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, spares: int = 0) -> None:
        self._master, slave = pty.openpty()
        self._content = ""
        self._seen = 0
        self._changed = threading.Condition()
        environment = {**env, "TERM": "dumb"}
        self.process: Any
        if WANTED and (server := fork_server()).can(environment):
            self.process = server.start(list(argv), environment, str(cwd), (slave, slave, slave), spares=spares)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                env=environment,
                cwd=cwd,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
        os.close(slave)
        threading.Thread(target=self._read, name="terminal", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 4096)
            except OSError:  # EIO: no process has the terminal open
                piece = b""
            if not piece:
                return
            with self._changed:
                self._content += re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", piece.decode(errors="replace")).replace("\r", "")
                self._changed.notify_all()

    @property
    def content(self) -> str:
        """All output that the terminal has shown."""
        return self._content

    def expect(self, pattern: str, timeout: float = _WAIT_S) -> re.Match[str]:
        """Wait until new output of the terminal matches the pattern."""
        return self.expect_each(pattern, timeout=timeout)[0]

    def expect_each(self, *patterns: str, timeout: float = _WAIT_S) -> list[re.Match[str]]:
        """Wait until new output of the terminal matches each pattern, in any order."""
        found: list[re.Match[str] | None] = []

        def shown() -> bool:
            found[:] = [re.compile(pattern).search(self._content, self._seen) for pattern in patterns]
            return all(found)

        deadline = time.monotonic() + timeout
        with self._changed:
            while not (met := self._changed.wait_for(shown, 0.5)) and time.monotonic() < deadline:
                if self.process.poll() is not None:
                    met = self._changed.wait_for(shown, 0.5)
                    break
        lacking = ", ".join(repr(pattern) for pattern, match in zip(patterns, found, strict=True) if not match)
        assert met, f"waited {timeout:g} s for {lacking} after\n{self._content[self._seen :]}\n=== all\n{self._content}"
        matches = [match for match in found if match]
        self._seen = max(match.end() for match in matches)
        return matches

    def type(self, text: str) -> None:
        """Type without Enter."""
        os.write(self._master, text.encode())

    def command(self, text: str, wanted: str, timeout: float = _WAIT_S) -> str:
        """Type a line at a prompt, and return the output until the next prompt. The output must match."""
        start = self._seen
        self.type(f"{text}\n")
        self.expect(wanted, timeout)
        self.expect(PROMPT, timeout)
        return self._content[start : self._seen]

    def wait(self, timeout: float = _WAIT_S) -> int:
        """Return the exit code of the process."""
        wait_until(
            "the process to end", lambda: self.process.poll() is not None, timeout, evidence=lambda: self._content
        )
        code: int = self.process.poll()
        return code

    def close(self) -> None:
        """Kill the process if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self._master)
