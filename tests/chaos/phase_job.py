"""A job of :mod:`phase_train` with the restarts of :mod:`supervisor`. It may stop early and report the reason."""

import json
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stack import Part, Stack
from supervisor import AGAIN, CHAOS, RANKS, Job

TRAIN, DATA = CHAOS / "phase_train.py", CHAOS / "phase_data.py"
DISK = 24 << 20
"""The size in bytes of a disk that is filled."""
WORDS = 8
"""The number of last lines of a stopped trainer that are recorded."""
_NOISE = (" done", "reducer.cpp")


class StoppedError(Exception):
    """The run has stopped early, and reported the reason.

    Args:
        code: The exit code of the trainers.
        said: The last lines of the trainers.
    """

    def __init__(self, code: int, said: list[str]) -> None:
        super().__init__(f"the run stopped with exit code {code}: {' | '.join(said)}")
        self.code, self.said = code, said


class PhaseJob(Job):
    """A run with a gate.

    Args:
        stack: The stack, which is not started.
        plan: The plan for ``phase_train.py``.
        links: As for :class:`Job`.
        link_nats: As for :class:`Job`.
        mounts: Folders that get a separate small file system. Needs root.
    """

    def __init__(
        self, stack: Stack, plan: dict[str, Any], *, links: bool, link_nats: bool, mounts: Collection[Path] = ()
    ) -> None:
        super().__init__(stack, plan, links=links, link_nats=link_nats)
        self.lost_disk = ""
        self._mounts: list[Path] = []
        if plan["source"] != "stream":
            del self._starts["data-0"]
        for folder in mounts:
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
            self._mounts.append(folder)

    def _start_data(self) -> None:
        self.stack.data(DATA, json.dumps(self.plan["data"]), env=self._env)

    def _start_trainer(self, node: int) -> None:
        self._read = 0
        self.stack.trainer(TRAIN, str(self._folder), json.dumps(self.plan), ranks=RANKS, node=node, env=self._env)

    def start_again(self) -> None:
        """Start the trainers after the run has stopped, as a user would."""
        self._past.append(self.stack.parts["trainer-0"])
        self._starts["trainer-0"]()

    # --- the gate

    def reached(self) -> bool:
        """Whether a rank has reached the gate."""
        return (self._folder / "reached").exists()

    def release(self) -> None:
        """Let the rank continue."""
        (self._folder / "go").touch()

    # --- what the run did

    def lost(self, disk: str) -> bool:
        """Whether the run's files on this disk were removed."""
        return self.lost_disk == disk

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file of the run."""
        path = self._folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def gave_up_a_save(self) -> bool:
        """Whether the run has reported that a checkpoint is missing."""
        return bool(self.said(" abandoned"))

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the run; empty if there is none."""
        path = self.stack.folder / "run" / "summary.json"
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return content

    # --- its end

    def look_after(self) -> None:
        """Record the steps that were done, and restart parts, as a :class:`Job` does.

        Raises:
            StoppedError: The trainers ended with an exit code after which they are not restarted.
        """
        part = self.stack.parts.get("trainer-0")
        if part is not None and not part.process.running and part.process.code not in {0, *AGAIN}:
            raise StoppedError(part.process.code, last_words(part))
        super().look_after()

    def close(self) -> None:
        """End all processes."""
        super().close()
        for folder in self._mounts:
            subprocess.run(["umount", "--lazy", folder], check=True)


def last_words(part: Part) -> list[str]:
    """Return the last lines of a part's output, without the steps."""
    return [line for line in part.lines if not any(word in line for word in _NOISE)][-WORDS:]
