"""A run whose cost reaches ``budget.usd`` is saved and stops. It continues with a larger budget."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import GOOD, mistakes
from conftest import Verb
from metadata_server import metadata
from trainer_files import config_of, fit, summary
from waiting import wait_until

from persia.config import Config
from persia.config.operations import PriceBlock
from persia.ctx import Checkpoints
from persia.errors import ConfigError
from persia.runtime.polled import AnswerError
from persia.trainer import StepReport, Trainer, fitting, price
from persia_core import checkpoint

LONG: dict[str, Any] = {"data": {"epochs": 4}, "checkpoint": {"every": 1000}}


def limited(folder: Path, usd: float, **blocks: Any) -> Config:
    """A run that costs 1 USD a second."""
    return config_of(folder, **{**LONG, "budget": {"usd": usd, "usd_per_hour": 3600}, **blocks})


def each_look_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the time by a constant at each reading of the clock. The test then does not depend on the speed."""
    now = itertools.count()
    monkeypatch.setattr("persia.trainer.budget.monotonic", lambda: next(now) * seconds)


@pytest.mark.row("S4-39")
def test_a_run_that_has_cost_its_limit_is_saved_and_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The test uses the real clock, so the run stops about a second after its start."""
    config = limited(tmp_path, 1.0, data={"epochs": 5000})
    trainer, _ = fit(config)
    found = summary(trainer)
    assert (found["status"], found["reason"]) == ("stopped", "budget")
    assert found["cost_usd"] >= 1.0 and 0 < found["step"] < found["total_steps"]
    assert trainer.folder is not None
    newest = checkpoint.latest(trainer.folder.saves(config))
    assert newest is not None and Path(newest).name == f"step-{found['step']}"
    checkpoint.Checkpoint(newest).verify()
    assert f"the run is saved after step {found['step']}, and stops" in caplog.text
    assert "test" not in found  # no evaluation, which would add to the cost


@pytest.mark.row("S4-39")
def test_a_stopped_run_continues_with_a_larger_budget_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, _ = fit(config_of(tmp_path, **LONG, run={"name": "undisturbed"}))
    each_look_takes(monkeypatch, 0.02)
    first, _ = fit(limited(tmp_path, 1.0))
    spent = summary(first)
    assert spent["status"] == "stopped" and 5 < spent["step"] < spent["total_steps"]
    with Trainer(limited(tmp_path, 1.0)).resume() as again:
        reports = again.fit()
        with pytest.raises(ConfigError, match=r"budget\.usd: the run has cost \d\.\d\d USD, allowed: 1; ") as caught:
            next(reports)
    assert "--set budget.usd=2" in caught.value.hint
    with Trainer(limited(tmp_path, 1000.0)).resume() as last:
        assert [*last.fit()]
        assert last.folder is not None
    found = summary(last)
    assert found["status"] == "finished" and found["cost_usd"] > spent["cost_usd"] and "test" in found
    weights = [
        torch.load(trainer.folder.path / "checkpoints" / f"step-{found['step']}" / "dense.pt")
        for trainer in (undisturbed, last)
        if trainer.folder is not None
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_run_that_ends_within_its_budget_is_finished(tmp_path: Path) -> None:
    trainer, _ = fit(limited(tmp_path, 1e6, data={"epochs": 1}))
    found = summary(trainer)
    assert found["status"] == "finished" and 0 < found["cost_usd"] < 1e4 and "reason" not in found


@pytest.mark.row("S4-10", "S4-39")
def test_the_command_says_why_it_stopped_and_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    limited(tmp_path, 1.0)
    each_look_takes(monkeypatch, 0.02)
    out, _ = verb("train", "persia.yml")
    assert "effective batch: 128 rows per step = 128 per rank x 1 accumulated x 1 rank" in out
    assert "allowed: 1 (budget.usd)" in out and "repeat the command with --resume runs/one --set budget.usd=2\n" in out
    assert json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())["reason"] == "budget"


def test_a_budget_without_a_price_is_refused(persia_yml: Path) -> None:
    assert mistakes(persia_yml, GOOD + "budget: {usd: 5}\n") == [
        "8:9: budget.usd_per_hour: missing, allowed: a number above 0"
    ]
    found = mistakes(persia_yml, GOOD + "budget: {usd: 0, usd_per_hour: 1}\n")
    assert found == ["8:15: budget.usd: found `0`, allowed: a number above 0"]


# --- prices


@pytest.mark.row("S4-37")
@pytest.mark.parametrize(
    ("prices", "volatile"),
    [([1.0], False), ([1.0, 1.0, 1.1], False), ([1.0, 1.3, 1.0], True), ([0.3, 0.1], True), ([], False)],
)
def test_prices_are_volatile_by_their_range(prices: list[float], volatile: bool) -> None:
    assert price.is_volatile(prices, 0.2) == volatile


@pytest.mark.parametrize("body", ["", "free", "-1", "0", "true", '{"cost": 3}', "[1]", "Infinity", "1" + "0" * 400])
def test_an_answer_that_is_no_price_is_refused(body: str) -> None:
    with pytest.raises(AnswerError, match="expected status 200 and a price above 0, found status 200: "):
        price.parse(200, body)
    assert price.parse(200, "0.5") == price.parse(200, '{"price": 0.5}') == 0.5


def test_a_price_that_arrives_while_prices_are_logged_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    interval = price.Interval(PriceBlock(url="http://127.0.0.1/", checkpoint_every=10), 50)

    class Arriving(float):
        def __format__(self, spec: str) -> str:
            interval._add(9.0)  # the polling thread may do this at any time
            return super().__format__(spec)

    for each in (1.0, 2.0, 3.0):
        interval._add(Arriving(each))
    checkpoints = Checkpoints("saves", every=50)
    assert interval.of(checkpoints).decide(1, [interval.vote(None)]) is False
    assert checkpoints.every == 10 and "the price is volatile; the last prices are 1, 2, 3" in caplog.text


def test_the_time_in_which_features_are_fitted_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, fitted = [0.0], fitting.fit

    def fit_slowly(*args: Any) -> fitting.Fitted:
        now[0] += 100.0
        return fitted(*args)

    monkeypatch.setattr("persia.trainer.budget.monotonic", lambda: now[0])
    monkeypatch.setattr(fitting, "fit", fit_slowly)
    trainer, _ = fit(limited(tmp_path, 1e6, data={"epochs": 1}))
    assert summary(trainer)["cost_usd"] == 100.0


@pytest.mark.row("S4-37")
def test_a_volatile_price_makes_checkpoints_more_frequent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with metadata() as feed:
        feed.status, feed.body = 200, "1.0"
        config = config_of(
            tmp_path,
            data={"epochs": 20},
            checkpoint={"every": 50, "keep": 99},
            price={"url": feed.url, "every_s": 0.005, "checkpoint_every": 10},
            run={"log_every": 1},
        )
        with Trainer(config) as trainer:
            for report in trainer.fit():
                if isinstance(report, StepReport) and report.step in (60, 120):
                    feed.bodies = itertools.cycle(["1.0", "1.5"] if report.step == 60 else ["1.0"])
                    count = len(feed.asked)
                    wait_until("new prices", lambda: len(feed.asked) > count + price.LOOKED_AT + 1, 20)  # noqa: B023
            assert trainer.folder is not None
            saved = sorted(int(path.name[5:]) for path in Path(trainer.folder.saves(config)).glob("step-*"))
    assert saved[0] == 50 and {70, 80, 90} <= {*saved}, saved
    assert (
        "from step 61 on, a checkpoint is written every 10 steps instead of every 50, because the price is volatile;"
        in caplog.text
    )
    assert "instead of every 10, because the price is no longer volatile;" in caplog.text
