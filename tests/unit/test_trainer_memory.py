"""Runs with less memory: micro-batches, accumulation, and halved micro-batches when memory runs out."""

import gc
import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from test_micro_batch import CPU_TEXT, Scarce
from trainer_files import config_of, fit, write_clicks

from persia.config import Config
from persia.errors import ConfigError, OutOfMemoryError
from persia.trainer import StepReport, Trainer, models
from persia.trainer.step import Steps, rows_at_a_time

_numbers = itertools.count()
SMALL: dict[str, Any] = {"data": {"batch_size": 100}, "run": {"log_every": 1}}
"""5 steps of 100 rows."""


def small(folder: Path, **blocks: Any) -> Config:
    """Return a configuration like ``config_of``, with 500 rows, all for training, and a report of every step."""
    if not (folder / "clicks.parquet").exists():
        write_clicks(folder / "clicks.parquet", 500)
    merged = {**SMALL, **blocks}
    for name in SMALL:
        merged[name] = {**SMALL[name], **merged[name]}
    merged["data"] = {"split": {"fractions": [1, 0, 0]}, **merged["data"]}
    merged["run"] = {"name": f"run{next(_numbers)}", **merged["run"]}
    return config_of(folder, **merged)


def results(config: Config, model: torch.nn.Module | None = None) -> tuple[list[StepReport], dict[str, Any], bytes]:
    """Train, and return the reports, the weights and the rows."""
    trainer, reports = fit(config, model=model)
    assert trainer.folder is not None
    steps = [each for each in reports if isinstance(each, StepReport)]
    newest = trainer.folder.saves(config) / f"step-{steps[-1].step}"
    weights = torch.load(newest / "dense.pt", weights_only=True)
    rows = [column for path in sorted(Path(newest).glob("*.arrow")) for column in _columns(path)]
    return steps, weights, np.concatenate(rows).tobytes()


def _columns(path: Path) -> list[np.ndarray[Any, Any]]:
    """Return the numbers of a shard's file: ids, weights, states."""
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all().combine_chunks()
    lists = [chunk for name in ("weights", "state") for chunk in table[name].chunks]
    return [np.asarray(each, np.float64) for each in (*table["id"].chunks, *(chunk.flatten() for chunk in lists))]


def assert_close(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Check that losses, norms, weights and rows of two runs agree to 1e-6."""
    (first, weights, rows), (second, other_weights, other_rows) = one, other
    assert [each.step for each in first] == [each.step for each in second]
    for name in ("loss", "grad_norm"):
        values = [[getattr(each, name) for each in steps] for steps in (first, second)]
        assert values[0] == pytest.approx(values[1], abs=1e-6), name
    assert weights.keys() == other_weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, other_weights[name], atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(np.frombuffer(rows), np.frombuffer(other_rows), atol=2e-6, rtol=1e-4)


SGD: dict[str, Any] = {
    "embedding_optimizer": {"name": "sgd", "lr": 0.1},
    "dense_optimizer": {"name": "sgd", "lr": 0.1},
}
"""Optimizers that do not divide by a root of squared gradients, which amplifies rounding errors of tiny gradients."""


@pytest.mark.row("S3-02", "S3-03")
def test_n_batches_of_a_step_equal_one_batch_of_as_many_rows(tmp_path: Path) -> None:
    whole = small(tmp_path, data={"batch_size": 120}, train=SGD)
    parts = small(tmp_path, data={"batch_size": 40}, train={**SGD, "accumulate": 3})
    assert (whole.step_rows, parts.step_rows, rows_at_a_time(parts)) == (120, 120, 40)
    one, other = results(whole), results(parts)
    assert_close(one, other)  # the fifth step has 20 rows
    assert [each.total_steps for each in other[0]] == [5] * 5
    alone = results(small(tmp_path, data={"batch_size": 40}, train=SGD))
    assert alone[0][-1].total_steps == 13  # without accumulation, there are more steps


@pytest.mark.row("S3-03")
def test_weights_of_rows_have_their_part_in_each_micro_batch(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet", 500))
    weights = np.arange(500) % 4 / 2  # some micro-batches weigh more than others
    weights[:50] = 0
    pa.parquet.write_table(table.append_column("w", pa.array(weights)), tmp_path / "clicks.parquet")
    train = {**SGD, "weight": "w"}
    order = {"shuffle": False}
    whole = results(small(tmp_path, data=order, train=train))
    assert_close(whole, results(small(tmp_path, data=order, train={**train, "micro_batch": 30})))


def test_the_default_of_the_accumulator_is_that_of_the_step(tmp_path: Path) -> None:
    one = small(tmp_path, data={"batch_size": 120})
    other = small(tmp_path, data={"batch_size": 40}, train={"accumulate": 3})
    values = [each.train.embedding_optimizer.arguments["initial_accumulator_value"] for each in (one, other)]
    assert values[0] == values[1]


def scarce(config: Config, failures: int, where: str = "backward") -> Scarce:
    torch.manual_seed(config.train.seed)
    return Scarce(models.build(config), [RuntimeError(CPU_TEXT) for _ in range(failures)], where)


@pytest.mark.row("S4-13")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_without_memory_is_made_in_halves(tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    config = small(tmp_path, train=SGD)
    expected = results(config, scarce(config, 0))
    caplog.clear()
    config = small(tmp_path, train=SGD)
    model = scarce(config, 2, where)
    sizes: list[int] = []
    model.register_forward_hook(lambda module, given, output: sizes.append(len(output)))
    with Trainer(config, model) as trainer:
        reports = [each for each in trainer.fit() if isinstance(each, StepReport)]
        assert trainer.folder is not None
    assert not model.errors
    # The first step fails with 100 and with 50 rows. All other steps begin with 25.
    assert sizes[-20:] == [25] * 20
    told = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert [text.partition(";")[0] for text in told] == [
        "step 1: memory ran out with 100 rows in the model at a time",
        "step 1: memory ran out with 50 rows in the model at a time",
    ]
    assert "using 25 from now on" in told[-1] and "DefaultCPUAllocator" in told[-1]
    assert "5 of 5 batches were trained on" in caplog.text
    newest = trainer.folder.saves(config) / "step-5"
    kept = torch.load(newest / "state.pt", weights_only=True)["trainer"]["micro_batch"]
    assert kept == [None, 25]
    found = (reports, torch.load(newest / "dense.pt", weights_only=True), b"")
    assert_close((expected[0], expected[1], b""), found)


@pytest.mark.row("S4-13")
def test_a_resumed_run_begins_with_the_rows_that_fit(tmp_path: Path) -> None:
    config = small(tmp_path, train=SGD, run={"name": "again"})
    with Trainer(config, scarce(config, 1)) as trainer:
        reports = trainer.fit()
        next(reports)
        trainer.save()
    for given, size in ((None, 50), (40, 40)):  # a number in the configuration overrides that of the checkpoint
        config = small(tmp_path, data={"epochs": 2}, train={**SGD, "micro_batch": given}, run={"name": "again"})
        model = scarce(config, 0)
        sizes: list[int] = []
        model.register_forward_hook(lambda module, inputs, output, sizes=sizes: sizes.append(len(output)))
        with Trainer(config, model).resume() as trainer:
            next(iter(trainer.fit()))
        assert sizes[0] == size


@pytest.mark.row("S3-01")
def test_the_report_has_the_keys_to_change(tmp_path: Path) -> None:
    config = small(tmp_path, data={"batch_size": 2})
    with pytest.raises(OutOfMemoryError, match=r"step 1, 1 row at a time.*CPUAllocator") as caught:
        fit(config, model=scarce(config, 9))
    assert caught.value.hint.startswith("to use less memory: --set precision=bf16") and "`model`" in caught.value.hint
    assert "the largest tensors:" in str(caught.value)


def test_a_model_that_normalises_over_a_batch_is_never_divided(tmp_path: Path) -> None:
    class Normalising(torch.nn.Module):
        def __init__(self, errors: list[Exception]) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.layer = torch.nn.Linear(4, 1)
            self.errors = errors

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            if self.errors:
                raise self.errors.pop()
            output: torch.Tensor = self.layer(self.norm(embeddings[0]))
            return output

    for key in ("accumulate", "micro_batch"):
        with pytest.raises(ConfigError, match=rf"train\.{key}: the model normalizes .* \(BatchNorm1d 'norm'\)"):
            fit(small(tmp_path, train={key: 2}), model=Normalising([]))
    with pytest.raises(OutOfMemoryError) as caught:
        fit(small(tmp_path), model=Normalising([RuntimeError(CPU_TEXT)]))
    assert "micro_batch" not in caught.value.hint
    assert caught.value.hint.endswith("because BatchNorm1d 'norm' normalizes over the samples of a batch")


@pytest.mark.row("S3-07")
def test_a_second_run_of_a_process_finds_the_memory_of_the_first(tmp_path: Path) -> None:
    config = small(tmp_path)
    torch.manual_seed(config.train.seed)
    model = models.build(config)
    alive = weakref.ref(model)
    first = results(config, model)
    del model
    gc.collect()
    assert alive() is None
    second = small(tmp_path)
    torch.manual_seed(second.train.seed)
    again = results(second, models.build(second))
    assert [each.loss for each in first[0]] == [each.loss for each in again[0]]


def test_a_step_is_repeated_only_if_all_ranks_that_failed_can() -> None:
    part = SimpleNamespace(batch_size=4)
    failures = [None, [True, 4, "first"], [False, 4, "second"]]
    steps = object.__new__(Steps)
    steps._ctx = SimpleNamespace(  # type: ignore[assignment]
        micro_batches=lambda batch, rows: [part, part],
        gather_weights=lambda batch: None,
        common_context=SimpleNamespace(all_gather=lambda topic, mine: failures),
    )
    steps._divided = lambda batch, parts: torch.tensor(0.0)  # type: ignore[method-assign]
    for repeats in (False, True):
        failures[2] = [repeats, 4, "second"]
        with pytest.raises(OutOfMemoryError, match="rank 1: first") as caught:
            steps._in_agreement(part, 4)  # type: ignore[arg-type]
        assert caught.value.can_repeat is repeats
