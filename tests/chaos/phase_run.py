"""Runs a case and verifies its result."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from phase_cases import TRY_S, Case
from phase_check import compared, problems
from phase_faults import disk_of
from phase_job import PhaseJob, StoppedError
from stack import Stack

from persia.runtime.exit_codes import ExitCode

END_S = 150.0
"""Seconds from the fault to the end of the run. A run that takes longer counts as hung."""

NewStack = Callable[..., Stack]


@dataclass(frozen=True)
class Result:
    """The result of a case; ``runs/chaos-phases.jsonl`` has one in each line.

    Attributes:
        seed: The case.
        fault: Its fault.
        phase: Its phase.
        outcome: ``exact``, ``stopped`` (with a message), ``wrong``, or ``failed`` (the run hung, or ended without a
            message).
        compared: The number of compared rows, counts and values.
        restarts: The number of restarts of the trainers.
        seconds: The duration of the run.
        text: The case in words.
        problem: The problem, or how the run stopped; empty if all values are exact.
    """

    seed: int
    fault: str
    phase: str
    outcome: str
    compared: int
    restarts: int
    seconds: float
    text: str
    problem: str

    @property
    def good(self) -> bool:
        """Whether the outcome is allowed."""
        return self.outcome == "exact" or (self.outcome == "stopped" and self.fault in MAY_STOP)


MAY_STOP = {
    "full run": r"cannot write the summary of the run to \S+/summary\.json: No space left|\S+/RUN: No space left",
    "full checkpoints": r"not finished: its last checkpoint, of step \d+, cannot be written: .*No space left",
}
"""Faults after which the run may stop with code 1: its name, summary or last checkpoint cannot be written. A restart
must be exact."""


def run(case: Case, new_stack: NewStack) -> Result:
    """Run a case, and verify its result."""
    started = time.monotonic()
    job = new_job(case, new_stack)
    outcome, problem, rows = "exact", "", 0
    try:
        job.start()
        try:
            inject(job, case)
            job.wait("the end of the run", lambda: job.finished, END_S)
        except StoppedError as error:
            outcome, problem = "stopped", f"{error}\n{job.logs()}"
            if case.fault in MAY_STOP:
                said = " ".join(error.said)
                if error.code != ExitCode.FAILED or not re.search(MAY_STOP[case.fault], said):
                    raise
                job.start_again()
                job.wait("the end of the run that was started again", lambda: job.finished, END_S)
        if outcome == "exact" or case.fault in MAY_STOP:
            job.wait_healthy()
            rows = compared(job, case.data)
            if wrong := problems(job, case.data):
                outcome, problem = "wrong", "\n".join([*wrong, job.logs()])
    except (AssertionError, StoppedError) as error:
        outcome, problem = "failed", str(error)
    except (OSError, psutil.Error) as error:
        outcome, problem = "failed", f"the fault could not be injected: {error!r}\n{job.logs()}"
    finally:
        job.close()
    return Result(
        case.seed,
        case.fault,
        case.phase,
        outcome,
        rows,
        job.trainer_starts - 1,
        round(time.monotonic() - started, 1),
        case.text,
        problem,
    )


def new_job(case: Case, new_stack: NewStack) -> PhaseJob:
    """Return the job of a case, not started."""
    options: dict[str, Any] = {"tcp": True, "env": {"PERSIA_RPC_TIMEOUT": str(4 * TRY_S)}} if case.links else {}
    capacity = case.data.budget * 256
    stack = new_stack(servers=2, middlewares=1, slots=case.data.slots(), capacity=capacity, log=case.log, **options)
    mounts = [disk_of(case.target, stack.folder, case.victim)] if case.what.kind == "full" else []
    nats = case.links and case.target == "NATS"
    job = PhaseJob(stack, case.plan, links=case.links, link_nats=nats, mounts=mounts)
    if case.what.kind == "lost":
        job.lost_disk = case.target
    return job


def inject(job: PhaseJob, case: Case) -> None:
    """Wait for the phase, inject the fault, and let the run continue."""
    job.wait(f"the gate {json.dumps(case.gate)}", job.reached, job.patience)
    end = case.what.begin(job, case)
    at = next((each["phase"] for each in reversed(job.lines("phases.jsonl")) if each["phase"] != "save"), "")
    assert case.gate["hold"] or at == case.phase, f"the fault came when the run was in the phase {at!r} already"
    try:
        if case.during:
            job.release()
        job.let_pass(case.length)
    finally:
        end()
    if not case.during:
        job.wait_healthy()
        job.release()
