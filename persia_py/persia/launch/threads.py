"""The number of torch threads in processes that run side by side on this host.

Without ``OMP_NUM_THREADS``, torch starts one thread in each process for every physical core that the process may use.
The threads of several ranks would then compete for the cores.
"""

from collections.abc import Callable, Mapping

from persia.runtime import processors
from persia.runtime.settings import flag

VARIABLE = "OMP_NUM_THREADS"


def variables(
    processes: int, name: str, say: Callable[[str], None], environment: Mapping[str, str], *, replicas: int = 1
) -> dict[str, str]:
    """Return the variable that gives each process its share of the processors, and log this share.

    Args:
        processes: The number of processes that the caller starts.
        name: The kind of process, for the log, such as ``rank``.
        say: Logs a line.
        environment: The environment of the processes.
        replicas: The number of containers on this host that run the same number of processes each.

    Returns:
        ``OMP_NUM_THREADS``; nothing if the user has set it, or if a single process may use all processors that it sees,
        for which torch's default is right. With ``REPRODUCIBLE`` it is 1. Sums in the dense model may depend on the
        number of threads, and results would otherwise depend on the processors of the host.
    """
    if environment.get(VARIABLE, "").strip():
        return {}
    if flag("REPRODUCIBLE", environment):
        threads, why = 1, "because REPRODUCIBLE is set"
    elif processes * replicas == 1 and not processors.is_limited():
        return {}
    else:
        threads = processors.share(processes, replicas)
        cores, limit = processors.cores(), processors.quota()
        why = f"of {cores} core{'' if cores == 1 else 's'}" + ("" if limit is None else f", limited to {limit:g}")
        why += "" if replicas == 1 else f", with {replicas} replicas on this host"
    which = f"the {name}" if processes == 1 else f"each of {processes} {name}s"
    say(f"torch threads of {which}: {threads}, {why}; {VARIABLE} changes it")
    return {VARIABLE: str(threads)}
