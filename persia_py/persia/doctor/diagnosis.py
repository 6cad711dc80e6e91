"""The probable cause of a failed step of ``persia doctor --ladder``, given that the earlier steps have passed."""

import re
from collections.abc import Iterator

from persia.doctor import network, services
from persia.doctor.check import Check
from persia.runtime.exit_codes import ExitCode

_IMAGE = (
    "the model runs here, but not in the image: a package or a file is missing there, or a version differs (persia "
    "doctor --diff-env)"
)
_DIAGNOSES = {
    1: "the fault is in the model, or in the keys of `model`: persia is not involved. Correct the named line",
    2: "the model runs with torch alone, but not with embeddings of persia: check their number, shapes and gradients",
    3: "the model works: the fault is in the data, the features, the optimizers or the storage",
    4: _IMAGE,
    5: _IMAGE,
    6: "the model runs in the image, but the data is missing: persia doctor CONFIG names the files to mount",
    7: "one batch passes in one process, but not on the servers",
    8: "one batch passed, so a later row, the memory or the disk is at fault: see the error above",
    9: "one batch passes on one rank, but not on several: see the network, the devices, and how the ranks differ",
    10: "one batch passed on all ranks: see the log of the rank that failed first",
}
_SERVERS = {
    ExitCode.CONFIG: "the test was refused before it trained: the error above says why, and what to do",
    ExitCode.UNREACHABLE: "a process of the job is missing or does not respond",
    ExitCode.REFUSED: (
        "the servers refuse this process: its token, its version or the slots of its file differ from those of the "
        "servers; start both with the same PERSIA_CONFIG, PERSIA_TOKEN_FILE and image"
    ),
}
"""Diagnoses of the step on the servers of a job, by its exit code."""
_STORAGE = "training passed, saving did not: servers and ranks have to see the same folder as PERSIA_CKPT_DIR"
_CROSS = re.compile(r"✗ (\w+):")


def of(number: int, code: int, output: str) -> Iterator[str]:
    """Yield lines with the diagnosis.

    Args:
        number: The number of the failed step.
        code: Its exit code.
        output: The last lines of its output.
    """
    if number != 7:
        yield _DIAGNOSES[number]
        return
    failed = _CROSS.findall(output)
    known = {int(each): text for each, text in _SERVERS.items()}
    detail = _STORAGE if "checkpoint" in failed else known.get(code, "see the error in the log of the server")
    yield f"{_DIAGNOSES[number]}: {detail}"
    for check in (*network.checks(), *services.checks()):
        if check.status == "fail":
            yield f"{check.name}: {_line(check)}"


def _line(check: Check) -> str:
    return f"{check.found}" + (f" ({check.why})" if check.why else "") + (f"; next: {check.next}" if check.next else "")
