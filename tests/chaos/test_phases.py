"""The generated test of faults and phases: cases by seed, and tests that its verification can fail.

``make test`` runs the cases of :data:`ALWAYS`, ``make test-all`` also those of :data:`NIGHTLY`, and ``make
chaos-phases`` any case.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import phase_check
import pytest
import torch
from conftest import Configure
from ledger_data import Sum
from phase_cases import BIG, CELLS, ELSEWHERE, PHASES, case_of, cell_of, table
from phase_data import Data
from phase_faults import FAULTS
from phase_run import run
from phase_simulation import states
from stack import MakeStack, Stack

from persia.ctx import Checkpoints, TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD

ALWAYS = {
    934: "kill server between",
    413: "kill server restored",
    355: "kill server evaluation",
    2529: "kill server loop",
    556: "kill server save",
    1689: "kill rank 0 save",
    2144: "kill rank end",
    27: "kill middleware save",
    472: "lost log between",
    269: "full checkpoints save",
    194: "duplicate server loop",
    176: "kill data-compose before",
}
"""The cases of ``make test``: those in which a fault has caused a loss of rows, or could cause one."""
WITH_LOG = {2529, 2144, 472}
"""The cases of :data:`ALWAYS` in which servers have a log."""
NIGHTLY = {seed: " ".join(cell_of(seed)) for seed in range(1, len(CELLS) + 1) if seed not in ALWAYS}
"""The cases of ``make test-all``: one of every cell."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, id=f"{seed}-{name}") for seed, name in ALWAYS.items()),
        *(pytest.param(seed, id=f"{seed}-{name}", marks=pytest.mark.nightly) for seed, name in NIGHTLY.items()),
    ],
)
def test_all_is_exact_or_the_run_says_that_it_stopped(seed: int, make_stack: MakeStack) -> None:
    case = case_of(seed)
    if reason := case.what.missing():
        pytest.skip(reason)

    def new_stack(**options: Any) -> Stack:
        return make_stack(start=False, **options)

    result = run(case, new_stack)
    assert result.good, f"{case.text}: {result.outcome}\n{result.problem}\nmake chaos-phases SEEDS={seed}"
    assert result.compared > 1000


@pytest.mark.parametrize("seed", ALWAYS)
def test_a_chosen_seed_is_still_the_case_that_it_was_chosen_for(seed: int) -> None:
    assert " ".join(cell_of(seed)) == ALWAYS[seed]
    assert (case_of(seed).log is not None) == (seed in WITH_LOG)


def test_every_cell_has_seeds_or_a_reason() -> None:
    cells = {(fault, phase): what for fault, phase, what in table()}
    assert cells.keys() == {(fault, phase) for fault in FAULTS for phase in PHASES}
    assert {cell_of(seed) for seed in range(1, len(CELLS) + 1)} == set(CELLS)
    for (_, phase), what in cells.items():
        assert what.startswith("seed ") or (phase in ELSEWHERE and what == ELSEWHERE[phase])


def test_a_seed_is_always_the_same_case() -> None:
    assert case_of(7) == case_of(7) != case_of(8)


# --- the verification itself


class Alone(IterableDataset):
    """All batches of a run of one rank."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data

    def __iter__(self) -> Any:
        for number in range(self.data.steps):
            yield self.data.batch(number)


DATA = Data(
    seed=3, steps=20, ordered=True, budget=1, min_counts={"many": 1, "one": 2}, ttls={"many": 3, "one": 0}, ranks=1
)


def saved(configure: Configure, folder: Path, data: Data) -> Path:
    """Train on the data without servers. Return the last checkpoint."""
    configure(data.slots(), capacity=256 * data.budget)
    model = Sum()
    with TrainCtx(
        SGD(1.0),
        torch.optim.SGD(model.parameters(), lr=1.0),
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig((0.0, 0.0), weight_bound=0.0),
        checkpoints=Checkpoints(folder, every=7),
    ) as ctx:
        for batch in DataLoader(Alone(data), reproducible=True):
            output, _ = ctx.forward(batch)
            ctx.backward(output.sum())
    return folder / f"step-{data.steps}"


def wrong(save: Path, data: Data) -> list[str]:
    return [*phase_check._wrong_in_save(save, [*states(data)])]


def test_the_simulation_is_what_the_store_does(configure: Configure, tmp_path: Path) -> None:
    """The run has rows that are evicted or expire, and ids that wait for admission."""
    save = saved(configure, tmp_path / "saves", DATA)
    (last,) = [tables for tables in states(DATA) if tables.step == DATA.steps]
    rows, counts = phase_check.content(save)
    assert rows == last.rows() and len(rows) > 50
    assert counts == last.counts() and len(counts) > 20
    assert wrong(save, DATA) == []
    roomy = list(states(dataclasses.replace(DATA, budget=BIG)))[-1]
    assert len(last.rows()) < len(roomy.rows()), "rows are evicted"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"twice": 5}, "value"),
        ({"ttls": {"many": 0, "one": 0}}, "row"),
        ({"min_counts": {"many": 1, "one": 3}}, "admission count"),
        ({"budget": 2}, "row"),
    ],
)
def test_the_judgement_finds(other: dict[str, Any], named: str, configure: Configure, tmp_path: Path) -> None:
    """The verification finds a run that differs from the simulated one."""
    save = saved(configure, tmp_path / "saves", dataclasses.replace(DATA, **other))
    found = wrong(save, DATA)
    assert any(named in line for line in found), found


def test_the_judgement_finds_a_use_that_was_not_noted(configure: Configure, tmp_path: Path) -> None:
    save = saved(configure, tmp_path / "saves", DATA)
    simulated = list(states(DATA))
    key = next(key for key, (used, _) in simulated[-1].rows().items() if used == DATA.steps)
    simulated[-1]._shard(key[1]).rows[key].last_used -= 1
    (found,) = phase_check._wrong_in_save(save, simulated)
    assert "last use" in found


def test_the_judgement_finds_a_save_under_the_name_of_another(configure: Configure, tmp_path: Path) -> None:
    save = saved(configure, tmp_path / "saves", DATA)
    other = shutil.copytree(save, save.with_name("step-14"), dirs_exist_ok=True)
    found = wrong(Path(other), DATA)
    assert any("is of step 20" in line for line in found) and any("row" in line for line in found), found
