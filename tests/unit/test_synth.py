"""Synthetic rows: equal for equal seeds, with ids from a power law and labels from the teacher."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from persia.cli.main import app
from persia.data import synth
from persia.data.records import HashSplit
from persia.errors import StorageError, UsageError

TEACHER = synth.Teacher(ids=(100, 5_000), dense=2)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = labels == 1
    count = positive.sum()
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (~positive).sum()))


def test_the_printed_quality_is_that_of_the_teacher(tmp_path: Path) -> None:
    made = synth.write(tmp_path / "a.parquet", 300_000, TEACHER)
    labels = np.asarray(pa.parquet.read_table(tmp_path / "a.parquet")["label"])
    probabilities = np.concatenate([each for _, each in TEACHER.batches(300_000)])
    assert made.rows == len(labels) == 300_000
    assert made.positive == labels.mean() == pytest.approx(0.2, abs=0.003)
    assert auc(probabilities, labels) == pytest.approx(made.best_auc, abs=0.003)
    loss = -np.mean(np.where(labels == 1, np.log(probabilities), np.log(1 - probabilities)))
    assert loss == pytest.approx(made.best_log_loss, abs=0.003)
    assert made.auc == pytest.approx(auc(probabilities, labels), abs=1e-5) != made.best_auc
    assert made.log_loss == pytest.approx(loss, abs=1e-9) != made.best_log_loss
    assert 0.7 < made.best_auc < 0.95
    worse = np.random.default_rng(0).normal(probabilities, 0.1)
    assert auc(worse, labels) < made.best_auc - 0.01


def test_ids_follow_the_power_law() -> None:
    ((batch, _),) = TEACHER.batches(100_000)
    counts = np.sort(np.unique(np.asarray(batch["id0"]), return_counts=True)[1])[::-1]
    assert len(counts) <= 100
    assert counts[0] / counts[9] == pytest.approx(10**1.05, rel=0.4)
    assert batch.schema.field("id1").type == pa.string()
    uniform = synth.Teacher(ids=(10,), exponent=0)
    ((batch, _),) = uniform.batches(100_000)
    counts = np.unique(np.asarray(batch["id0"]), return_counts=True)[1]
    assert len(counts) == 10 and counts.min() > 9_000


def test_rows_depend_on_the_seed_alone_and_more_begin_with_the_same(tmp_path: Path) -> None:
    synth.write(tmp_path / "a.parquet", 1_000, TEACHER)
    synth.write(tmp_path / "b.csv", 140_000, TEACHER)
    few, many = pa.parquet.read_table(tmp_path / "a.parquet"), pa.csv.read_csv(tmp_path / "b.csv")
    assert many.num_rows == 140_000
    assert many.slice(0, 1_000)["id0"].to_pylist() == few["id0"].to_pylist()
    assert many.slice(0, 1_000)["label"].to_pylist() == few["label"].to_pylist()
    synth.write(tmp_path / "c.parquet", 1_000, synth.Teacher(ids=(100, 5_000), dense=2, seed=1))
    assert pa.parquet.read_table(tmp_path / "c.parquet")["id0"] != few["id0"]
    assert {each.name for each in tmp_path.iterdir()} == {"a.parquet", "b.csv", "c.parquet"}


def test_rows_can_begin_where_a_file_ends(tmp_path: Path) -> None:
    """New rows of the same teacher begin at the end of a chunk or in its middle, or span two chunks."""
    (whole,) = pa.Table.from_batches([batch for batch, _ in TEACHER.batches(300_000)]).combine_chunks().to_batches()
    chances = np.concatenate([each for _, each in TEACHER.batches(300_000)])
    for skip, rows in ((0, 10), (1 << 17, 5), (100_000, 100_000), (131_071, 2)):
        found = [*TEACHER.batches(rows, skip)]
        assert pa.Table.from_batches([batch for batch, _ in found]).equals(pa.table(whole.slice(skip, rows)))
        assert np.array_equal(np.concatenate([each for _, each in found]), chances[skip : skip + rows])
    path = tmp_path / "more.parquet"
    options = ["--rows", "100", "--skip", "131000", "--ids", "100,5000", "--dense", "2"]
    app(["data", "synth", str(path), *options], standalone_mode=False)
    assert pa.parquet.read_table(path).equals(pa.table(whole.slice(131_000, 100)))
    with pytest.raises(UsageError, match="skip -1"):
        synth.write(path, 10, TEACHER, skip=-1)


@pytest.mark.parametrize("group", [None, "id0"])
def test_labels_do_not_depend_on_the_split_whatever_its_seed(group: str | None) -> None:
    """The teacher's random numbers and the hash of a split use the same function."""
    teacher = synth.Teacher(ids=(20_000,), exponent=0, dense=0)
    rows, labels = [], []
    for batch, _ in teacher.batches(40_000):
        rows.append(batch)
        labels.append(np.asarray(batch["label"]))
    (batch,) = pa.Table.from_batches(rows).combine_chunks().to_batches()
    label = np.concatenate(labels)
    for seed in (0, 1, 2, 7919, 7920):  # 1: the seed of labels; 7919 and 7920: those of the weights of id0
        parts = HashSplit((0.5, 0.25, 0.25), group, seed).parts(batch, "a.parquet", 0)
        shares = [label[parts == part].mean() for part in range(3)]
        assert shares == pytest.approx([0.2] * 3, abs=0.02), f"seed {seed}"


def test_wrong_numbers_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        synth.Teacher(ids=(0,), dense=-1, exponent=9, positive=1)
    for text in ("ids 0", "dense -1", "exponent 9", "positive 1"):
        assert text in str(caught.value)
    with pytest.raises(UsageError, match="a.txt"):
        synth.write(tmp_path / "a.txt", 10, TEACHER)
    with pytest.raises(StorageError, match="nowhere"):
        synth.write(tmp_path / "nowhere" / "a.parquet", 10, TEACHER)


def test_the_command_prints_the_best_quality(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.parquet"
    app(["data", "synth", str(path), "--rows", "5000", "--ids", "50,1e3", "--dense", "1"], standalone_mode=False)
    assert pa.parquet.read_table(path).column_names == ["id0", "id1", "dense0", "label"]
    printed = capfd.readouterr().out
    assert "5,000 rows" in printed and "best AUC 0." in printed
    made = synth.write(tmp_path / "b.parquet", 5000, synth.Teacher((50, 1000), 1))
    assert f"on these labels the teacher has AUC {made.auc:.4f}, log loss {made.log_loss:.4f}" in printed
    with pytest.raises(UsageError, match="--ids many: expected comma-separated numbers"):
        app(["data", "synth", str(path), "--ids", "many"], standalone_mode=False)
