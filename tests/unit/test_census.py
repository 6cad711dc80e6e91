"""The Census-Income example: its data, its iterator, its report, and its script from end to end."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from persia.errors import ConfigError, DataError, StorageError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dlrm"
sys.path.insert(0, str(EXAMPLE))

import census  # noqa: E402
import report  # noqa: E402


def table(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    columns = {name: rng.choice(["a", "b", "?"], rows) for name in census.CATEGORICAL}
    columns |= {name: rng.integers(0, 60, rows).astype(np.float32) for name in census.DENSE}
    columns[census.LABEL] = (columns["age"] > 40).astype(np.uint8)
    return pa.table(columns)


def stored(path: Path, content: pa.Table) -> Path:
    pq.write_table(content, path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return stored(tmp_path / "census.parquet", table(500))


def replaced(name: str, row: int, value: float | None) -> pa.Table:
    content = table(500)
    values = content[name].to_pylist()
    values[row] = value
    return content.set_column(content.column_names.index(name), name, pa.array(values))


def test_values_become_dense_inputs_ids_and_labels(tmp_path: Path) -> None:
    content = table(500)
    samples = census.read(stored(tmp_path / "a.parquet", content))
    assert samples.dense.shape == (500, 7)
    assert samples.ids.shape == (45, 500)
    assert samples.labels.shape == (500, 1)
    np.testing.assert_allclose(np.expm1(samples.dense[:, 0]), content["age"].to_numpy(), rtol=1e-5)
    ages = samples.ids[census.SLOTS.index("age")]
    buckets = samples.ids[census.SLOTS.index("age_bucket")]
    for column, numbers in ((ages, content["age"].to_numpy()), (buckets, content["age"].to_numpy() // 5)):
        assert len(np.unique(column)) == len(np.unique(numbers)) == len(np.unique([column, numbers], axis=1).T)


def test_an_id_depends_on_slot_and_value_alone(tmp_path: Path) -> None:
    content = table(500)
    order = np.random.default_rng(1).permutation(500)[:400]
    one = census.read(stored(tmp_path / "a.parquet", content))
    other = census.read(stored(tmp_path / "b.parquet", content.take(order)))
    np.testing.assert_array_equal(one.ids[:, order], other.ids)
    assert len(np.intersect1d(one.ids[0], one.ids[1])) == 0


def test_the_configuration_has_the_slots_of_the_data() -> None:
    config = yaml.safe_load((EXAMPLE / "config" / "embedding_config.yml").read_text())
    assert tuple(config["slots_config"]) == census.SLOTS
    assert tuple(config["feature_groups"]["census"]) == census.SLOTS


@pytest.mark.parametrize("length", [0, 3, 100, -1])
def test_a_truncated_file_is_named(file: Path, length: int) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    with pytest.raises(DataError, match=r"census\.parquet: .*git restore .*census\.parquet"):
        census.read(file)


def test_a_damaged_page_is_named(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[4:2000] = bytes(1996)
    file.write_bytes(whole)
    with pytest.raises(DataError, match=r"census\.parquet: .*git restore .*census\.parquet"):
        census.read(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.parquet: No such file"):
        census.read(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (table(500).drop_columns(["sex", "age"]), "no column sex, age"),
        (replaced("age", 7, None), "empty cells in column age"),
        (replaced("label", 7, 2), "column label, row index 7: 2.0 is not 0 or 1"),
        (replaced("age", 7, float("nan")), "column age, row index 7: nan is not a number of at least 0"),
        (replaced("age", 7, -1.0), "column age, row index 7: -1.0 is not"),
        (
            table(500).drop_columns(["age"]).append_column("age", pa.array(["old"] * 500)),
            "column age: expected numbers",
        ),
        (table(0), "no rows"),
    ],
)
def test_bad_content_is_named(tmp_path: Path, content: pa.Table, message: str) -> None:
    with pytest.raises(DataError, match=message):
        census.read(stored(tmp_path / "bad.parquet", content))


def drawn(batches: census.Batches) -> list[bytes]:
    return [batch.to_bytes() for batch in batches]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[np.ndarray] = []
    take = census.Samples.take
    samples = census.read(file)

    def noted(self: census.Samples, rows: np.ndarray) -> census.Samples:
        taken.append(rows)
        return take(self, rows)

    monkeypatch.setattr(census.Samples, "take", noted)
    batches = census.Batches(samples, 64, epochs=2, seed=3)
    assert len(list(batches)) == len(batches) == 16
    first, second = np.concatenate(taken[:8]), np.concatenate(taken[8:])
    assert sorted(first) == sorted(second) == list(range(500))
    assert list(first) != list(second)


def test_the_same_seed_gives_the_same_batches(file: Path) -> None:
    samples = census.read(file)
    batches = census.Batches(samples, 64, seed=3)
    first = drawn(batches)
    assert first == drawn(batches) == drawn(census.Batches(samples, 64, seed=3))
    assert first != drawn(census.Batches(samples, 64, seed=4))


@pytest.mark.parametrize("done", [0, 1, 7, 8, 9, 15])
def test_a_resumed_pass_continues_behind_the_last_batch(file: Path, done: int) -> None:
    samples = census.read(file)
    whole = drawn(census.Batches(samples, 64, epochs=2, seed=3))
    stopped = census.Batches(samples, 64, epochs=2, seed=3)
    iterator = iter(stopped)
    for _ in range(done):
        next(iterator)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = census.Batches(samples, 64, epochs=2, seed=3)
    resumed.load_state_dict(state)
    assert drawn(resumed) == whole[done:]
    assert drawn(resumed) == whole


def test_a_position_of_another_run_is_refused(file: Path) -> None:
    samples = census.read(file)
    state = census.Batches(samples, 64, seed=3).state_dict()
    with pytest.raises(DataError, match="batch_size"):
        census.Batches(samples, 32, seed=3).load_state_dict(state)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_a_job_trains_on_the_batches_of_the_embedded_mode(file: Path, ranks: int, replicas: int) -> None:
    samples = census.read(file)
    batches = census.Batches(samples, batch_size=64, epochs=2, seed=3)
    parts = [list(batches.pieces(ranks, replica=replica, replicas=replicas)) for replica in range(replicas)]
    assert sum(map(len, parts)) == ranks * len(batches)
    for number in range(len(batches)):
        epoch, index = divmod(number, len(batches) // 2)
        order = np.random.default_rng([3, epoch]).permutation(len(samples))
        rows = np.array_split(order[index * 64 : (index + 1) * 64], ranks)
        pieces = parts[number % replicas][number // replicas * ranks :][:ranks]
        assert [piece.to_bytes() for piece in pieces] == [samples.take(each).batch().to_bytes() for each in rows]


def test_no_batches_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size=0, epochs=0"):
        census.Batches(census.read(file), 0, epochs=0)


def test_splitting_sets_a_share_apart(file: Path) -> None:
    samples = census.read(file)
    rest, apart = samples.split(0.1)
    assert (len(rest), len(apart)) == (450, 50)
    again = samples.split(0.1)[1]
    np.testing.assert_array_equal(apart.ids, again.ids)
    both = np.concatenate([rest.ids, apart.ids], axis=1)
    np.testing.assert_array_equal(np.sort(both, axis=1), np.sort(samples.ids, axis=1))


def summary(run: report.Run) -> dict[str, object]:
    content: dict[str, object] = json.loads((run.folder / "summary.json").read_text())
    return content


KEYS = ["status", "auc", "log_loss", "samples_per_s", "steps", "seconds", "rows"]


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_run_that_breaks_off_is_not_finished(tmp_path: Path, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), report.Run(tmp_path, "x", steps=2) as run:
        assert summary(run)["status"] == "running"
        run.step(0.5, samples=10)
        raise error
    assert list(summary(run)) == KEYS
    assert (summary(run)["status"], summary(run)["steps"], summary(run)["auc"]) == (status, 1, None)


def test_a_run_that_leaves_early_is_failed(tmp_path: Path) -> None:
    with report.Run(tmp_path, "x", steps=2) as run:
        pass
    assert summary(run)["status"] == "failed"


def test_a_finished_run_has_its_figures_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quality = report.Quality.of(torch.tensor([-1.0, 0.0, 2.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    with report.Run(tmp_path, "x", steps=2) as run:
        for loss in (0.5, 0.25):
            run.step(loss, samples=10)
        run.validated(quality)
        run.finish(quality, rows=7)
    found = summary(run)
    assert list(found) == KEYS
    assert (found["status"], found["auc"], found["steps"], found["rows"]) == ("finished", 0.75, 2, 7)
    assert found["log_loss"] == pytest.approx((np.log1p(np.exp([-1, 0, -2, 1]))).mean())
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == str(run.folder / "summary.json")
