"""Faults of a served bundle with a fixed seed. Every score is compared. ``make test-all`` runs them.

``make test`` runs only one fault, the checks of the clients, and ``tests/unit/test_serving_faults.py``, which has the
same kinds of faults for a small model.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import run_faults
import serving_faults
from conftest import ROOT
from serving_job import Answers, Bundles, make_bundles

SEED = 1
OVERLOAD_S = 60.0
ALWAYS = {"F37"}
TIMEOUT_S = {"F40": 600}
"""A longer limit for a fault of many requests."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return make_bundles(tmp_path_factory.mktemp("bundles"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.timeout(TIMEOUT_S.get(name, 300)), *([] if name in ALWAYS else [pytest.mark.nightly])],
        )
        for name in serving_faults.FAULTS
    ],
)
def test_every_score_is_right_after(name: str, bundles: Bundles, no_job: None, tmp_path: Path) -> None:
    if reason := serving_faults.FAULTS[name].missing():
        pytest.skip(reason)
    record, problem = serving_faults.run(name, SEED, tmp_path / "job", bundles, OVERLOAD_S)
    assert problem is None, f"{problem}\nmake chaos F={name} SEED={SEED}"
    assert record.rows_checked > 0
    assert record.rows_wrong == 0


def test_a_score_of_another_bundle_is_found() -> None:
    wanted = {"a": np.array([0.25, 0.5], np.float32), "b": np.array([0.25, 0.75], np.float32)}
    found = Answers()
    found.take(200, {}, b'{"bundle": "a", "scores": [0.25, 0.5]}', wanted)
    assert not found.wrong
    found.take(200, {}, b'{"bundle": "b", "scores": [0.25, 0.5]}', wanted)
    found.take(200, {}, b'{"bundle": "c", "scores": [0.25, 0.5]}', wanted)
    found.take(200, {}, b'{"bundle": "a", "scores": [0.25]}', wanted)
    assert [each[0] for each in found.wrong] == ["b", "c", "c", "a"]
    found.take(503, {"Retry-After": "1"}, b"", wanted)
    found.take(503, {}, b"", wanted)
    found.take(500, {}, b"", wanted)
    assert (found.good, found.checked, found.busy, len(found.failed)) == (4, 7, 1, 2)


@pytest.mark.clone
def test_the_page_lists_every_fault() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    commands = set(re.findall(r"`make chaos F=(\w+) SEED=\d+(?: SECONDS=\d+)?` \|$", page, re.MULTILINE))
    places = page.split("## Where each fault is tested")[1]
    assert commands <= set(run_faults.ALL) <= commands | set(re.findall(r"\bF\d+[a-z]*\b", places))
    tests = re.findall(r"`(tests/[\w/]+\.py)`", places)
    assert tests and not [each for each in tests if not (ROOT / each).exists()]
