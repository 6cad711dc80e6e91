"""The numbers of a run: reactions to NaN, gradient norm, learning-rate schedule, precision, saves."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_memory import results, small
from trainer_files import fit

import persia
from persia.errors import NonFiniteError
from persia.trainer import StepReport, Trainer, models, optimizers


class Spoilt(torch.nn.Module):
    """A model whose output is NaN in one forward of training."""

    def __init__(self, model: torch.nn.Module, at: int) -> None:
        super().__init__()
        self.model, self.at, self.seen = model, at, 0

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return the output of the model, or NaN in its third row."""
        output: torch.Tensor = self.model(dense, embeddings)
        self.seen += self.training
        if self.training and self.seen == self.at:
            output = output.index_fill(0, torch.tensor([2]), float("nan"))
        return output


@pytest.mark.row("S3-24")
def test_nan_ends_the_run_or_skips_the_step(tmp_path: Path) -> None:
    config = small(tmp_path, checkpoint={"every": 1})
    with pytest.raises(NonFiniteError, match=r"^step 3: the model's output, sample 2, is nan") as caught:
        fit(config, model=Spoilt(models.build(config), 3))
    assert "--set train.nonfinite=skip" in caught.value.hint
    path = tmp_path / "runs" / str(config.run.name)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["step"] == 2 and summary["skipped_steps"] == 0
    # The run continues after its newest save, with the policy that the message names.
    resumed = small(tmp_path, train={"nonfinite": "skip"}, checkpoint={"every": 1}, run={"name": config.run.name})
    with Trainer(resumed, Spoilt(models.build(config), 1)).resume() as trainer:
        steps = [each.step for each in trainer.fit() if isinstance(each, StepReport)]
    assert steps == [3, 4, 5]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["skipped_steps"] == 1
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines if "loss" in line] == [False, False, True, False, False]


@pytest.mark.row("S3-24")
def test_a_label_that_is_neither_0_nor_1_has_its_file_and_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    config = small(tmp_path)
    table = pa.parquet.read_table(tmp_path / "clicks.parquet")
    labels = table["label"].to_pylist()
    labels[321] = 2
    column = table.column_names.index("label")
    pa.parquet.write_table(table.set_column(column, "label", pa.array(labels)), tmp_path / "clicks.parquet")
    with pytest.raises(persia.errors.DataError, match=r"(?s)clicks\.parquet.*row 322.*0 or 1"):
        fit(config)


@pytest.mark.row("S3-24")
def test_anomaly_detection_is_on_where_it_is_asked_for(tmp_path: Path) -> None:
    found = []

    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            found.append(torch.is_anomaly_enabled())
            output: torch.Tensor = self.layer(embeddings[0])
            return output

    fit(small(tmp_path), model=Asks())
    assert not any(found)
    found.clear()
    fit(small(tmp_path, train={"detect_anomaly": True}), model=Asks())
    assert found == [True] * 5 and not torch.is_anomaly_enabled()


@pytest.mark.row("S3-23")
def test_every_report_and_every_line_has_the_norm(tmp_path: Path) -> None:
    config = small(tmp_path)
    steps, _, _ = results(config)
    assert all(each.grad_norm is not None and each.grad_norm > 0 for each in steps)
    assert "grad norm" in str(steps[0])
    limit = (steps[0].grad_norm or 0.0) / 8
    clipped, _, _ = results(small(tmp_path, train={"clip_norm": limit, "dense_optimizer": {"name": "sgd", "lr": 1.0}}))
    free, _, _ = results(small(tmp_path, train={"dense_optimizer": {"name": "sgd", "lr": 1.0}}))
    assert clipped[0].grad_norm == free[0].grad_norm == steps[0].grad_norm
    assert clipped[-1].loss != free[-1].loss
    path = tmp_path / "runs" / str(config.run.name) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["grad_norm"] for line in lines if "loss" in line] == [each.grad_norm for each in steps]


@pytest.mark.row("S3-25")
@pytest.mark.parametrize("course", ["constant", "linear", "cosine"])
def test_the_rate_of_each_line_is_that_of_the_formula(tmp_path: Path, course: str) -> None:
    train = {"lr_schedule": course, "warmup": 2, "dense_optimizer": {"name": "sgd", "lr": 0.5}}
    config = small(tmp_path, data={"epochs": 2}, train=train)
    steps, _, _ = results(config)
    assert [each.step for each in steps] == [*range(1, 11)]

    def factor(step: int) -> float:
        if step <= 2:
            return step / 2
        done = (step - 2) / 8
        return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[course]

    expected = pytest.approx([0.5 * factor(each.step) for each in steps])
    assert [each.learning_rate for each in steps] == expected
    path = tmp_path / "runs" / str(config.run.name) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["learning_rate"] for line in lines if "learning_rate" in line] == expected
    rows = optimizers.of_rows(config.train, 10)
    assert [0.5 * rows.lr_factor(each.step) for each in steps] == expected


@pytest.mark.row("S3-22")
def test_the_rate_of_the_command_line_is_used(tmp_path: Path) -> None:
    small(tmp_path)
    overrides = ["train.dense_optimizer.lr=0.25", "run.name=fast"]
    config = persia.load_config(tmp_path / "persia.yml", overrides)
    steps, _, _ = results(config)
    assert {each.learning_rate for each in steps} == {0.25}


@pytest.mark.row("S3-35")
def test_saves_are_made_at_the_interval(tmp_path: Path) -> None:
    config = small(tmp_path, data={"batch_size": 50}, checkpoint={"every": 3, "keep": 9})
    trainer, _ = fit(config)
    assert trainer.folder is not None
    saves = {path.name for path in Path(trainer.folder.saves(config)).glob("step-*")}
    assert saves == {"step-3", "step-6", "step-9", "step-10"}  # the last one is written at the end


# --- precision


@pytest.mark.row("S3-06")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_the_bytes(tmp_path: Path, precision: str) -> None:
    seen: list[torch.dtype] = []

    class Notes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            output: torch.Tensor = self.layer(embeddings[0])
            seen.append(output.dtype)
            return output

    full, weights, _ = results(small(tmp_path), Notes())
    assert {*seen} == {torch.float32}
    seen.clear()
    half, other, _ = results(small(tmp_path, precision=precision), Notes())
    assert {*seen} == {getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])}
    assert [each.loss for each in half] == pytest.approx([each.loss for each in full], rel=0.02)
    assert [each.loss for each in half] != [each.loss for each in full]
    assert all(value.dtype == torch.float32 for value in other.values())
    assert any(not torch.equal(weights[name], value) for name, value in other.items())


@pytest.mark.row("S3-06", "S3-32")
def test_an_overflow_of_fp16_skips_the_step_of_model_and_rows_and_halves_the_scale(tmp_path: Path) -> None:
    class Steep(torch.nn.Module):
        """A model whose gradient exceeds float16 at the first loss scale and half of it, but not at a quarter."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(4, 1)
            torch.nn.init.zeros_(self.layer.weight)  # gives the gradients of all rows the same size
            torch.nn.init.zeros_(self.layer.bias)

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            output: torch.Tensor = self.layer(embeddings[0])
            return Amplified.apply(output)  # type: ignore[no-any-return]

    class Amplified(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: torch.Tensor) -> torch.Tensor:
            given = gradient[0]
            limit.append(65504 / float(given[0].abs()))
            steep = torch.zeros_like(given)
            steep[0] = (given[0].float() * (factor[0] if factor else 1.0)).to(given.dtype)
            return steep

    limit: list[float] = []
    factor: list[float] = []
    config = small(tmp_path, precision="fp16", checkpoint={"every": 1, "keep": 9})
    fit(config, model=Steep())
    factor.append(3 * limit[0])  # at a quarter of the scale it is below the limit
    config = small(tmp_path, precision="fp16", checkpoint={"every": 1, "keep": 9})
    trainer, _ = fit(config, model=Steep())
    assert trainer.folder is not None
    assert trainer.folder.read_json("summary.json")["skipped_steps"] == 2
    saves = trainer.folder.saves(config)
    values = [torch.load(saves / f"step-{step}" / "loss_scale.pt", weights_only=True)["value"] for step in range(1, 6)]
    assert values == [2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14]
    states = [torch.load(saves / f"step-{step}" / "dense.pt", weights_only=True) for step in range(1, 6)]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in itertools.pairwise(states)]
    assert same == [True, False, False, False]
    sizes = [sum(len(path.read_bytes()) for path in Path(saves, f"step-{step}").glob("*.arrow")) for step in (1, 2, 3)]
    assert sizes[0] == sizes[1] < sizes[2]  # a push inserts the rows of new ids
