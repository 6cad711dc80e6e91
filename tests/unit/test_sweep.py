"""``persia train --sweep`` trains a run for each combination once, and compares them on the validation set."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Verb
from trainer_files import write_clicks, write_config

from persia.errors import UsageError
from persia.trainer import sweep

LR = "train.dense_optimizer.lr=0.0001,0.05"
"""The better one comes last, so that the order of the table is not that of the options."""


def table(out: str) -> list[list[str]]:
    """Return the rows of the table that was printed."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def summaries(folder: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/sweep-*/summary.json")}


@pytest.mark.row("S1-21")
def test_a_sweep_is_sorted_by_the_metric_and_resumes(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write_clicks(tmp_path / "clicks.parquet")
    path = str(write_config(tmp_path))
    words = ("train", path, "--sweep", LR, "--sweep", "model.deep_mlp=[8],[4, 4]")
    out, _ = verb(*words)
    rows, found = table(out), summaries(tmp_path)
    assert len(rows) == len(found) == 4 and all(each["status"] == "finished" for each in found.values())
    assert {row[2] for row in rows} == {"[8]", "[4, 4]"}
    aucs = [float(row[3]) for row in rows]
    assert aucs == sorted(aucs, reverse=True) and aucs[0] > aucs[-1]
    for row in rows:
        name = row[-1].rpartition("/")[2]
        assert f"{found[name]['valid']['labels']['label']['auc']:.4f}" == row[3]
    best = f"--set train.dense_optimizer.lr={rows[0][1]}"
    assert f"next: persia train {path} {best} --set" in out
    assert out.count("(finished before)") == 0
    again, _ = verb(*words)
    assert again.count("(finished before)") == 4 and table(again) == rows
    assert summaries(tmp_path) == found, "no run was touched"
    wider, _ = verb("train", path, "--sweep", f"{LR},0.01", "--sweep", "model.deep_mlp=[8],[4, 4]")
    assert wider.count("(finished before)") == 4 and len(table(wider)) == 6


@pytest.mark.row("S1-21")
def test_an_interrupted_trial_continues(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clicks(tmp_path / "clicks.parquet")
    path = write_config(tmp_path)
    from persia.trainer import training

    report, calls = training.Training._report_steps, []

    def stop(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return report(self, *arguments)

    monkeypatch.setattr(training.Training, "_report_steps", stop)
    _, errors = verb("train", str(path), "--sweep", LR, code=130)
    assert "interrupted in trial 1 of 2" in errors and f"next:  persia train {path} --sweep {LR}" in errors
    (interrupted,) = summaries(tmp_path).values()
    assert interrupted["status"] != "finished"
    monkeypatch.setattr(training.Training, "_report_steps", report)
    verb("train", str(path), "--sweep", LR)
    found = summaries(tmp_path)
    assert len(found) == 2 and all(each["status"] == "finished" for each in found.values())


@pytest.mark.row("S1-21")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("DataError('it breaks')", 2, "it breaks\n"),
        ("DataError('it breaks', hint='mend it')", 2, "it breaks\n  next:  mend it\n"),
        ("DataError()", 2, "DataError\n"),
        ("ValueError('it breaks')", 1, "ValueError: it breaks\n"),
    ],
)
def test_a_trial_that_fails_does_not_end_the_others(
    tmp_path: Path, verb: Verb, error: str, code: int, said: str
) -> None:
    write_clicks(tmp_path / "clicks.parquet", 600)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom persia.errors import DataError\nclass Mine(torch.nn.Module):\n"
        "    def __init__(self, num_dense, embedding_dims, breaks: bool):\n        super().__init__()\n"
        "        self.breaks = breaks\n        self.top = torch.nn.Linear(num_dense + sum(embedding_dims), 1)\n"
        f"    def forward(self, dense, embeddings):\n        if self.breaks:\n            raise {error}\n"
        "        return self.top(torch.cat([*dense, *embeddings], 1))\n"
    )
    path = write_config(tmp_path, model={"class": "mine:Mine", "breaks": False})
    out, _ = verb("train", str(path), "--sweep", "model.breaks=true,false", code=code)
    rows = table(out)
    assert f"failed: {said}" in out
    assert [row[4] for row in rows] == ["finished", "failed"] and rows[1][2] == "-", "without a value it comes last"


@pytest.mark.row("S1-21")
def test_many_trials_need_a_confirmation(tmp_path: Path, verb: Verb) -> None:
    path = str(write_config(tmp_path))
    seeds = "train.seed=" + ",".join(map(str, range(21)))
    _, errors = verb("train", path, "--sweep", seeds, code=2)
    assert "21 trials, but more than 20 need a confirmation" in errors and "--yes" in errors


@pytest.mark.row("S1-21")
@pytest.mark.parametrize(("metric", "order"), [("auc", [0.9, 0.5, None]), ("log_loss", [0.5, 0.9, None])])
def test_the_best_trial_comes_first_and_one_without_a_value_last(
    tmp_path: Path, metric: str, order: list[float | None]
) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = write_config(tmp_path, train={"early_stop": {"metric": metric}})
    found = sweep.trials(path, [], ["train.seed=1,2,3"])
    for trial, value in zip(found, (None, 0.5, 0.9), strict=True):
        trial.value = value
    assert sweep.metric_of(found[0].config) == metric
    assert [trial.value for trial in sweep.ranked(found)] == order


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["lr"], "expected KEY=VALUE,VALUE"),
        (["a=1,,2"], "expected KEY=VALUE,VALUE"),
        (["a=1,1"], "the value 1 is given twice"),
        (["a=1", "a=2"], "a is specified twice"),
        (["run.name=a,b"], "`run` cannot be searched over"),
    ],
)
def test_wrong_options(options: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        sweep.grid(options)


def test_commas_in_brackets_belong_to_a_value() -> None:
    assert sweep.grid(["a=[1, 2],{b: 1, c: 2},'x,y'"]) == [("a=[1, 2]",), ("a={b: 1, c: 2}",), ("a='x,y'",)]


def test_mistakes_are_found_before_the_first_trial(tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path))
    _, errors = verb("train", path, "--sweep", "train.dense_optimizer.lr=0.1,fast", code=2)
    assert "--set train.dense_optimizer.lr=fast: train.dense_optimizer.lr: found `fast`" in errors
    _, errors = verb("train", path, "--sweep", "train.dense_optimizer.lr=0.1,1e-1", code=2)
    assert "are the same settings" in errors
    _, errors = verb("train", path, "--set", "data.split.fractions=[1, 0, 0]", "--sweep", LR, code=2)
    assert f"with {LR.split(',')[0]} there is no validation set" in errors
    _, errors = verb("train", path, "--sweep", "data.split.fractions=[0.8, 0.1, 0.1],[1, 0, 0]", code=2)
    assert "with data.split.fractions=[1, 0, 0] there is no validation set" in errors
    assert "next:  set data.valid, or a share in data.split.fractions\n" in errors
    by_time = ("--set", "data.split.by=time", "--set", "data.split.column=dense0", "--set", "data.split.test=1.0")
    _, errors = verb("train", path, *by_time, "--sweep", LR, code=2)
    assert "there is no validation set" in errors and "next:  set data.valid, or data.split.valid\n" in errors
    assert not [*tmp_path.glob("runs/*")]
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    _, errors = verb("train", path, "--sweep", LR, code=2)
    assert "PERSIA_NATS_URL is set" in errors and "--local" in errors


def test_the_next_step_after_an_error_is_true_for_a_trial(tmp_path: Path, verb: Verb) -> None:
    """The settings determine the name of a trial's run. Neither ``run.name`` nor a new budget changes the name."""
    write_clicks(tmp_path / "clicks.parquet", 600)
    path = str(write_config(tmp_path, data={"epochs": 4}, budget={"usd": 1e-9, "usd_per_hour": 1.0}))
    words = ("train", path, "--sweep", "train.seed=1")
    verb(*words)
    (folder,) = tmp_path.glob("runs/sweep-*")
    shown = f"runs/{folder.name}"
    assert summaries(tmp_path)[folder.name]["status"] == "stopped"
    out, _ = verb(*words, code=2)
    assert "failed: budget.usd: the run has cost" in out
    assert f"\n  next:  persia train {shown}/persia.yml --resume {shown} --set budget.usd=USD; then repeat" in out
    verb("train", f"{shown}/persia.yml", "--resume", shown, "--set", "budget.usd=9")
    assert "(finished before)" in verb(*words)[0]
    (folder / "summary.json").write_text("{")
    again = f"to train the trial from the beginning: rm -r {shown}; then repeat the sweep"
    assert again in verb(*words, code=4)[1]
    (folder / "persia.yml").unlink()
    out, _ = verb(*words, code=2)
    assert f"has no persia.yml\n  next:  {again}\n" in out and "run.name" not in out


@pytest.mark.row("S1-21")
def test_trials_of_other_rows_are_not_compared(tmp_path: Path, verb: Verb) -> None:
    """If the data has grown, the trials are trained again, each in a new run."""
    write_clicks(tmp_path / "clicks.parquet", 600)
    path = str(write_config(tmp_path))
    verb("train", path, "--sweep", "train.seed=1")
    before = summaries(tmp_path)
    write_clicks(tmp_path / "clicks.parquet", 900)
    out, _ = verb("train", path, "--sweep", "train.seed=1")
    (row,) = table(out)
    found = summaries(tmp_path)
    assert "finished before" not in out and len(found) == 2 and found.items() > before.items()
    assert found[row[-1].rpartition("/")[2]]["rows"]["train"] > next(iter(before.values()))["rows"]["train"]
    assert "(finished before)" in verb("train", path, "--sweep", "train.seed=1")[0]


def test_a_warning_is_shown_once_for_all_trials(tmp_path: Path, verb: Verb) -> None:
    write_clicks(tmp_path / "clicks.parquet", 300)
    path = str(write_config(tmp_path, train={"reproducible": True, "staleness": 4}))
    _, errors = verb("train", path, "--sweep", "train.seed=1,2")
    assert errors.count("training is reproducible, so the staleness is 1") == 1
