"""Faults with a fixed seed, each verified by the ledger.

``make test`` runs the faults of :data:`ALWAYS`, one for each kind of recovery. ``make test-all`` also runs the other
faults, and ``make chaos-all`` the long ones, with other seeds.
"""

import dataclasses
import json
from typing import Any

import faults
import pytest
from stack import MakeStack, Stack
from supervisor import STACK, Job, Ledger

SEED = 1
LONG = {"F7", "F10l", "F20", "F22", "F24", "F26", "F26d", "F26l", "equal"}
NAMES = [name for name in faults.FAULTS if name not in LONG]
ALWAYS = {"F2l", "F8"}
"""A server with a log, and a data-compose. ``test_phases.py`` always kills servers, middlewares and ranks."""
TIMEOUT_S = {"F30": 660}
"""A longer limit for a test that starts the trainers four times and whose own waits report more than a timeout."""


def marked(name: str) -> Any:
    """Return the parameter of a fault."""
    marks = [pytest.mark.timeout(TIMEOUT_S.get(name, 240))]
    return pytest.param(name, marks=marks if name in ALWAYS else [*marks, pytest.mark.nightly])


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_every_row_is_right_after(name: str, make_stack: MakeStack) -> None:
    if reason := faults.FAULTS[name].missing():
        pytest.skip(reason)

    def new_stack(**options: Any) -> Stack:
        return make_stack(start=False, **options)

    record, problem = faults.run(name, SEED, new_stack)
    assert problem is None, f"{problem}\nmake chaos F={name} SEED={SEED}"
    assert record.rows_checked > 0
    assert record.rows_wrong == 0


def test_the_ledger_finds_a_batch_that_was_trained_on_twice(make_stack: MakeStack) -> None:
    job = Job(make_stack(start=False, **STACK), {"steps": 60, "every": 20}, twice=17)
    ledger = job.start().finish()
    assert ledger.steps == 60
    assert 0 < ledger.rows_wrong < ledger.rows_checked
    assert any("want" in line for line in ledger.wrong)


def test_a_recovery_is_one_that_was_seen(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(make_stack(start=False, **STACK), {"steps": 60})
    monkeypatch.setattr(Job, "finished", True)
    monkeypatch.setattr(Job, "look_after", lambda _: None)
    (job.stack.folder / "ledger" / "ledger.json").write_text(
        json.dumps(dataclasses.asdict(Ledger(1, 0, [], 60, -60.0)))
    )
    for step in (20, 55):  # no step was observed after the first fault; no step can follow the second
        job.furthest = step
        job.note_fault()
    job.finish()
    assert (job.injected, job.recovered, job.late) == (2, 0, 1)
