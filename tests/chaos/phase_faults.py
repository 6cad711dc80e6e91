"""The faults of the generated test. Each fault is a function that begins it and returns a function that ends it.

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
"""The share of NATS's messages that are lost. Equal shares are late, and delivered twice."""


def nothing() -> None:
    """Do nothing: the supervisor restarts killed parts, so the fault needs no end."""


def kill(job: PhaseJob, case: "Case") -> End:
    """Kill a part or a rank by SIGKILL. The supervisor restarts it immediately."""
    job.note_fault()
    if case.rank is not None:
        job.rank(case.rank).kill()
    else:
        job.stack.kill(case.part)
    return nothing


def freeze(job: PhaseJob, case: "Case") -> End:
    """Send SIGSTOP to a rank, or to a part and its children. Send SIGCONT at the end."""
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
            with suppress(psutil.NoSuchProcess):  # the launcher killed the process in the meantime
                process.resume()

    return thaw


def _links(job: PhaseJob, case: "Case") -> list[Link]:
    if case.target == "NATS":
        assert job.nats_link is not None
        return [job.nats_link]
    return [job.links[case.part or "middleware-0"]]


def cut(job: PhaseJob, case: "Case") -> End:
    """Reset every connection, and block new connections until the end."""
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
    """Delay each message in both directions. If the target is a rank, delay only its messages."""
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
    """Delay responses, so requests are sent again and arrive twice. If the target is NATS, disturb its messages."""
    job.note_fault()
    if case.target == "NATS":
        assert job.nats_link is not None
        job.nats_link.disturb(_SHARE, case.seed)
        return lambda: job.nats_link.disturb(0.0, 0)  # type: ignore[union-attr]
    (link,) = _links(job, case)
    link.hold("replies")
    return link.heal


def full(job: PhaseJob, case: "Case") -> End:
    """Fill the disk, so no byte can be written."""
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
    """Make every sync of a file take longer, in servers and in rank 0."""
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
    """Replace the disk by an empty one. Kill and restart the part or rank on its machine, if there is one.

    A process that still runs keeps its open files, like the files of a removed disk.
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
        begin: Injects the fault, and returns the function that ends it.
        kind: The first word of its name.
        target: The kind of its target.
        needs: The program that the fault needs, if any.
        root: Whether the fault needs root.
    """

    begin: Callable[[PhaseJob, "Case"], End]
    kind: str
    target: str
    needs: str = ""
    root: bool = False

    def missing(self) -> str | None:
        """Return the reason why the fault cannot be injected here, or None."""
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
    """Return the folder that represents a disk: of checkpoints, of a server's log and generation, of the run's name."""
    return {
        "checkpoints": stack_folder / "checkpoints",
        "log": stack_folder / "servers" / str(server),
        "run": stack_folder / "run",
    }[target]
