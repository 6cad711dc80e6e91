"""Memory while training: samples, a planted leak that is found with its line, and clean runs without an alarm."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS
from trainer_files import config_of, fit

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD
from persia.errors import UsageError
from persia.profile.growth import MB, MemoryWatch, Sample, slope, steady_growth

KEPT: list[object] = []
"""What the planted leaks keep."""
LEAK = 1_000_000


class Clean(TinyModel):
    """Leaks nothing."""


class LeaksBytes(TinyModel):
    """Leaks 1 MB of Python memory in each step."""

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        KEPT.append(bytes(LEAK))  # the planted line
        return super().forward(non_id_tensors, embedding_tensors)


class LeaksTensors(TinyModel):
    """Leaks 1 MB of tensors in each step, which Python's allocator does not track."""

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        KEPT.append(torch.ones(LEAK // 4, dtype=torch.float32))
        return super().forward(non_id_tensors, embedding_tensors)


def watched(folder: Path, model: TinyModel, steps: int = 200) -> MemoryWatch:
    """Train with a sample every 20 steps."""
    dense = torch.optim.SGD(model.parameters(), 0.1)
    with (
        TrainCtx(SGD(0.1), dense, mixed_precision=False, model=model) as ctx,
        MemoryWatch(folder, ctx, every=20, leaks=True) as watch,
    ):
        for batch in DataLoader(Batches(steps, ids=100_000)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
    KEPT.clear()
    return watch


@pytest.mark.row("S4-31")
@pytest.mark.parametrize("model", [LeaksBytes, LeaksTensors])
def test_a_leak_of_1_mb_a_step_is_found_within_200_steps_with_its_line(
    configure: Configure, tmp_path: Path, model: type[TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    watch = watched(tmp_path / "memory", model())
    assert watch.found is not None and watch.found.last <= 200
    assert watch.found.mb_per_1000 >= 500  # the rest of the process may grow or shrink
    text = (tmp_path / "memory" / "leak-rank-0.txt").read_text()
    assert text.splitlines()[0] in caplog.text
    line = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the planted line" in line)
    if model is LeaksBytes:
        assert re.search(rf"test_growth\.py:{line}: \+\d+\.\d\d MB in \+\d+ blocks", text.splitlines()[1]), text
    else:
        assert re.search(r"tensors float32 250000 cpu: \+\d+\.\d\d MB", text), text


@pytest.mark.row("S4-31")
def test_a_clean_run_is_silent_though_its_rows_grow(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    watch = watched(tmp_path / "memory", Clean(), 400)
    samples = [Sample(**json.loads(line)) for line in (tmp_path / "memory" / "rank-0.jsonl").read_text().splitlines()]
    assert watch.found is None and "grows by" not in caplog.text
    assert not (tmp_path / "memory" / "leak-rank-0.txt").exists()
    assert [each.step for each in samples] == [*range(20, 401, 20)]
    assert samples[-1].row_count > samples[0].row_count > 0 and samples[-1].rows > samples[0].rows
    assert all(each.peak >= each.rss > MB and each.python_peak >= each.python > 0 for each in samples)


def grown(rates: list[float], noise: float = 0.0, rows: float = 0.0) -> list[Sample]:
    """Return samples of every 100 steps, each with the given growth in MB."""
    rng, found, size = random.Random(1), [], 500 * MB
    for number, rate in enumerate(rates, 1):
        size += rate * MB
        place = int(number * rows * MB)
        found.append(Sample(100 * number, int(size + place + rng.uniform(-noise, noise) * MB), 0, rows=place))
    return found


@pytest.mark.row("S4-31")
@pytest.mark.parametrize(
    ("samples", "mb"),
    [
        (grown([20.0] * 10), 200),
        (grown([20.0] * 10, noise=20), 200),
        (grown([0.0] * 10, noise=50), None),  # a busy allocator
        (grown([0, 0, 0, 500, 0, 0, 0, 0, 0, 0]), None),  # one large buffer that is kept
        (grown([400 / 2**n for n in range(10)]), None),  # a cache fills up
        (grown([0.0] * 10, rows=30), None),  # new ids
        (grown([2.0] * 10), None),  # below the limit
        (grown([20.0] * 5), None),  # too few samples
    ],
)
def test_steady_growth_only_is_a_leak(samples: list[Sample], mb: float | None) -> None:
    found = steady_growth(samples, 100.0)
    assert (found is None) == (mb is None), found
    if found is not None and mb is not None:
        assert found.mb_per_1000 == pytest.approx(mb, rel=0.2)


def test_a_slope_is_that_of_most_pairs() -> None:
    assert slope([(0, 0), (10, 50), (20, 100)]) == 5
    assert slope([(0, 0), (10, 50), (20, 100), (30, 10_000), (40, 200), (50, 250)]) == 5


def test_a_resumed_run_appends_to_its_record_and_mends_a_line_that_was_cut(tmp_path: Path) -> None:
    MemoryWatch(tmp_path, every=1).stepped(1)
    lines = tmp_path / "rank-0.jsonl"
    lines.write_text(lines.read_text() + '{"step": 2, "rs')
    MemoryWatch(tmp_path, every=1).stepped(2)
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [1, 2]


def test_a_record_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank-0.jsonl").mkdir()  # an error for any user, like a full disk
    watch = MemoryWatch(tmp_path, every=1)
    for step in range(3):
        watch.stepped(step)
    problem = "rank-0.jsonl: Is a directory; training continues, and the record of memory is incomplete"
    assert caplog.text.count(problem) == 1


def test_the_peak_is_that_between_samples_too(tmp_path: Path) -> None:
    watch = MemoryWatch(tmp_path, every=1)
    before = watch._sample(1).rss
    block = torch.ones(int(100 * MB))
    del block
    assert watch._sample(2).peak >= before + 300 * MB


@pytest.mark.row("S4-11")
def test_the_memory_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    trainer, _ = fit(config_of(tmp_path, memory={"every": 3}))
    assert trainer.folder is not None
    lines = (trainer.folder.path / "memory" / "rank-0.jsonl").read_text().splitlines()
    samples = [Sample(**json.loads(line)) for line in lines]
    assert [each.step for each in samples] == [3, 6, 9, 12]
    assert samples[-1].row_count > 0 and samples[-1].python == 0  # Python memory is recorded only with leaks: true
    logged = [
        json.loads(line)["event"] for line in (trainer.folder.path / "logs" / "train.log").read_text().splitlines()
    ]
    found = [re.match(r"memory at step (\d+): resident [\d,]+ MB; peak [\d,]+ MB; \d+ rows", event) for event in logged]
    assert [int(each[1]) for each in found if each] == [3, 6, 9, 12], logged


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every=0"):
        MemoryWatch(tmp_path, every=0)
    with pytest.raises(UsageError, match="limit_mb=0"):
        MemoryWatch(tmp_path, limit_mb=0)
