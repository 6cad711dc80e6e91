"""The faults of the generated test: each is a function that begins the fault and returns a function to end it.

A fault has a kind and a target, such as ``kill`` and ``server``. The seed selects one of several equivalent targets,
and the duration of a fault.
"""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from links import Link
from phase_job import PhaseJob

if TYPE_CHECKING:
    from phase_cases import Case

End = Callable[[], None]
_SHARE = 0.3
"""The shares of NATS's messages that are doubled, and that are lost or late."""


def nothing() -> None:
    """End a fault that has no end, because the supervisor restarts what was killed."""


def kill(job: PhaseJob, case: "Case") -> End:
    """SIGKILL. The part is restarted immediately."""
    job.note_fault()
    if case.rank is not None:
        job.rank(case.rank).kill()
    else:
        job.stack.kill(case.part)
    return nothing


def freeze(job: PhaseJob, case: "Case") -> End:
    """SIGSTOP to a part and its children; SIGCONT at the end."""
    job.note_fault()
    if case.rank is not None:
        frozen = [job.rank(case.rank)]
    else:
        root = psutil.Process(job.stack.parts[case.part].process.pid)
        frozen = [root, *root.children(recursive=True)]
    for process in frozen:
        process.suspend()

    def thaw() -> None:
        for process in frozen:
            with suppress(psutil.NoSuchProcess):  # its launcher killed it in the meantime
                process.resume()

    return thaw


def _links(job: PhaseJob, case: "Case") -> list[Link]:
    if case.target == "NATS":
        assert job.nats_link is not None
        return [job.nats_link]
    return [job.links[case.part or "middleware-0"]]


def cut(job: PhaseJob, case: "Case") -> End:
    """Reset every connection; new ones are blocked until the end."""
    job.note_fault()
    links = _links(job, case)
    for link in links:
        link.hold("requests", "replies")
        link.reset()

    def heal() -> None:
        for link in links:
            link.reset()
            link.heal()

    return heal


def delay(job: PhaseJob, case: "Case") -> End:
    """Each message is late, in both directions; if the target is a rank, only its messages."""
    job.note_fault()
    links = _links(job, case)
    for link in links:
        link.slow = None if case.rank is None else job.rank(case.rank)
        link.delay_s = case.amount

    def heal() -> None:
        for link in links:
            link.delay_s = 0.0

    return heal


def duplicate(job: PhaseJob, case: "Case") -> End:
    """Requests arrive twice, because their answers come after the sender has given up. NATS's messages arrive twice."""
    job.note_fault()
    if case.target == "NATS":
        assert job.nats_link is not None
        job.nats_link.disturb(_SHARE, case.seed)
        return lambda: job.nats_link.disturb(0.0, 0)  # type: ignore[union-attr]
    (link,) = _links(job, case)
    link.hold("replies")
    return link.heal


def full(job: PhaseJob, case: "Case") -> End:
    """No byte can be written to the disk."""
    job.note_fault()
    filler = case.folder(job) / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return lambda: filler.unlink(missing_ok=True)


def slow(job: PhaseJob, case: "Case") -> End:
    """Every sync of a file takes longer, in servers and in rank 0."""
    job.note_fault()
    pids = [part.process.pid for name, part in job.stack.parts.items() if name.startswith("server")]
    pids.append(job.rank(0).pid)
    late = f"inject=fsync,fdatasync:delay_enter={int(case.amount * 1e6)}"
    tracers = [
        subprocess.Popen(
            ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync", "-e", late, "-p", str(pid)],
            stderr=subprocess.DEVNULL,
        )
        for pid in pids
    ]

    def end() -> None:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()

    return end


def lost(job: PhaseJob, case: "Case") -> End:
    """The disk is replaced by an empty one; the part on its machine is killed, and started again.

    A process that still runs keeps the files that it has open, like those of a disk that was removed.
    """
    job.note_fault()
    folder = case.folder(job)
    if case.rank is not None:
        job.rank(case.rank).kill()
    elif case.part:
        job.take_away(case.part)
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.lost"))
    folder.mkdir()
    if case.part and case.rank is None:
        job.bring_back(case.part)
    return nothing


@dataclass(frozen=True)
class Fault:
    """A fault of the table.

    Attributes:
        begin: Injects it, and returns the function that ends it.
        kind: Its first word.
        target: The kind of its target.
        needs: The program that it needs, if any.
        root: Whether it needs root.
    """

    begin: Callable[[PhaseJob, "Case"], End]
    kind: str
    target: str
    needs: str = ""
    root: bool = False

    def missing(self) -> str | None:
        """Return the reason why it cannot be injected here, or None."""
        if self.root and os.geteuid() != 0:
            return "it needs root"
        if self.needs and shutil.which(self.needs) is None:
            return f"it needs {self.needs}"
        return None


PARTS = ("server", "middleware", "rank", "rank 0", "data-compose", "NATS")
LINKS = ("server", "middleware", "NATS")

FAULTS = {
    f"{fault.kind} {fault.target}": fault
    for fault in (
        *(Fault(kill, "kill", part) for part in PARTS),
        *(Fault(freeze, "freeze", part) for part in PARTS),
        *(Fault(cut, "cut", part) for part in LINKS),
        *(Fault(delay, "delay", part) for part in LINKS),
        *(Fault(duplicate, "duplicate", part) for part in LINKS),
        *(Fault(full, "full", disk, root=True) for disk in ("checkpoints", "log", "run")),
        *(Fault(slow, "slow", disk, needs="strace", root=True) for disk in ("checkpoints", "log")),
        *(Fault(lost, "lost", disk) for disk in ("checkpoints", "log", "run")),
        *(Fault(delay, "delay", rank) for rank in ("rank", "rank 0")),
    )
}
"""All faults by name."""


def disk_of(target: str, stack_folder: Path, server: int) -> Path:
    """Return the folder that stands for a disk: of checkpoints, of a server's log and generation, of the run's name."""
    return {
        "checkpoints": stack_folder / "checkpoints",
        "log": stack_folder / "servers" / str(server),
        "run": stack_folder / "run",
    }[target]
