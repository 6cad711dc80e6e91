"""The processors that this process may use, and its share of them among the processes of this host."""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")
_UNLIMITED = "max"


def visible() -> int:
    """Return the number of processors in the affinity mask of this process."""
    return len(os.sched_getaffinity(0))


def cores(root: Path | None = None) -> int:
    """Return the number of physical cores in the affinity mask; hyperthreads of a core count once.

    Args:
        root: The folder of the processors in sysfs.

    Returns:
        The number of cores, or that of :func:`visible` if the kernel does not show the cores.
    """
    mask = os.sched_getaffinity(0)
    siblings = [_read((root or _CPUS) / f"cpu{each}" / "topology" / "thread_siblings_list").strip() for each in mask]
    return len({*siblings}) if all(siblings) else len(mask)


def is_limited() -> bool:
    """Whether the control groups of this process allow fewer processors than its affinity mask."""
    allowed = quota()
    return allowed is not None and allowed < visible()


def quota(root: Path = _CGROUPS, of_process: Path = _OF_PROCESS) -> float | None:
    """Return the number of processors that the control groups of this process allow, as with ``docker run --cpus 1.5``.

    Args:
        root: The mount point of control groups.
        of_process: The file that lists the control groups of this process.

    Returns:
        The smallest limit of these groups and their parents; None if there is no limit.
    """
    limits = []
    for line in _read(of_process).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # control groups version 2
            limits += [_limit(*_words(folder / "cpu.max")) for folder in _upwards(root, path)]
        elif "cpu" in controllers.split(","):  # control groups version 1
            for folder in _upwards(root / "cpu", path):
                words = (*_words(folder / "cpu.cfs_quota_us")[:1], *_words(folder / "cpu.cfs_period_us")[:1])
                limits.append(_limit(*words))
    return min((limit for limit in limits if limit is not None), default=None)


def share(processes: int, replicas: int = 1) -> int:
    """Return the number of physical cores for each of several processes, at least 1.

    Args:
        processes: The number of processes that share the control group of this process.
        replicas: The number of containers on this host that run the same number of processes each, in separate control
            groups.
    """
    found = cores() / (processes * replicas)
    allowed = quota()
    return max(1, int(found if allowed is None else min(found, allowed / processes)))


def _upwards(root: Path, path: str) -> list[Path]:
    """Return the folder of a group and those of its parents. In a container, the folder of the group may not exist."""
    inner = root / path.lstrip("/")
    return [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]


def _limit(allowed: str = "", period: str = "") -> float | None:
    """Return a limit from microseconds of processor time per period of microseconds."""
    if allowed == _UNLIMITED or not allowed.isdecimal() or not period.isdecimal():
        return None
    return int(allowed) / int(period) if int(allowed) > 0 < int(period) else None


def _words(file: Path) -> list[str]:
    return _read(file).split()[:2]


def _read(file: Path) -> str:
    """Return the content of a kernel file; an empty text if this kernel lacks the file or the control group."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
