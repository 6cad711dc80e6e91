"""One pass over a table: counts, estimates, and the rows that are sampled from a large table."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from persia.data.inspect.document import flow
from persia.data.inspect.scan import scan
from persia.data.inspect.signal import alone, auc
from persia.data.inspect.sketches import Distinct, Repeats, RowSample, hashes_of
from persia.data.records import open_files
from persia.data.records.split import mix
from persia.errors import DataError

RANDOM = np.random.default_rng(1)


def write(path: Path, columns: dict[str, object], **options: int) -> str:
    pa.parquet.write_table(pa.table(columns), path, **options)
    return str(path)


def test_values_are_counted_exactly_and_then_estimated() -> None:
    distinct = Distinct(1000)
    distinct.add(mix(np.arange(999, dtype=np.uint64), 0))
    distinct.add(mix(np.arange(500, dtype=np.uint64), 0))
    assert (distinct.exact, distinct.count) == (True, 999)
    for start in range(0, 100_000, 10_000):
        distinct.add(mix(np.arange(start, start + 10_000, dtype=np.uint64), 0))
    assert not distinct.exact and distinct.count == pytest.approx(100_000, rel=0.1)


def test_the_sample_is_uniform_and_bounded() -> None:
    sample = RowSample(1000)
    for start in range(0, 50_000, 5000):
        sample.add(pa.record_batch({"row": np.arange(start, start + 5000)}), start)
    rows = sample.table["row"].to_numpy()
    assert len(rows) == len(np.unique(rows)) == 1000 and (np.diff(rows) > 0).all()
    assert rows.mean() == pytest.approx(25_000, rel=0.06)


def test_repeated_rows_are_estimated() -> None:
    rows = np.concatenate([np.arange(40_000), np.arange(10_000)]).astype(np.uint64)
    repeats = Repeats(2000)
    for part in np.array_split(mix(rows, 0), 7):
        repeats.add(part)
    assert repeats.within == pytest.approx(20_000 / 50_000, abs=0.05)
    repeats.add(mix(np.arange(39_000, 41_000, dtype=np.uint64), 0), test=True)
    assert repeats.across == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 2, None, 1]),
        pa.array(["a", "b", None, "a"]),
        pa.array(["a", "b", None, "a"], pa.large_string()),
        pa.array([1.5, 2.5, None, 1.5], pa.float32()),
        pa.array([[1, 2], [2, 1], None, [1, 2]]),
        pa.array([["a", None], ["a"], None, ["a", None]]),
        pa.array([True, False, None, True]),
        pa.array([1, 2, None, 1], pa.timestamp("ns", "UTC")),
        pa.array([1, 2, None, 1], pa.date32()),
        pa.array([1, 2, None, 1], pa.duration("s")),
        pa.array([1, 2, None, 1], pa.time32("s")),
        pa.array([{"a": 1}, {"a": 2}, None, {"a": 1}]),
        pa.array([b"a", b"b", None, b"a"]),
        pa.array([1, 2, None, 1]).cast(pa.decimal128(25, 2)),
    ],
    ids=lambda values: str(values.type),
)
def test_equal_values_of_every_type_have_equal_hashes(values: pa.Array) -> None:
    first, second, third = hashes_of(values)
    assert first == third != second


def test_a_column_is_described(tmp_path: Path) -> None:
    numbers = np.where(RANDOM.random(5000) < 0.5, 0.0, np.exp(RANDOM.normal(size=5000)))
    path = write(
        tmp_path / "a.parquet",
        {
            "x": pa.array(
                [None if row % 10 == 0 else np.nan if row % 10 == 1 else numbers[row] for row in range(5000)]
            ),
            "s": pa.array(["", "a", "a", None, "b"] * 1000).dictionary_encode(),
            "l": [[], ["a"], ["a", "b", "c"], None, ["b"]] * 1000,
        },
        row_group_size=700,
    )
    columns = scan(open_files(path)).columns
    x, s, items = columns["x"], columns["s"], columns["l"]
    assert (x.nulls, x.not_finite, x.kind) == (500, 500, "number")
    assert x.missing == 0.2 and x.numbers is not None
    known = numbers[np.arange(5000) % 10 > 1]
    assert (x.numbers.low, x.numbers.high, x.numbers.zeros) == (known.min(), known.max(), (known == 0).sum())
    assert x.quantiles[3] == np.quantile(known, 0.5, method="inverted_cdf") and x.skew > 1
    assert (s.nulls, s.empty, s.distinct, s.top[0]) == (1000, 1000, 3, ("a", 0.5))
    assert (items.nulls, items.empty, items.distinct) == (1000, 1000, 3)
    assert items.lengths == (5 / 4, 3)


def test_a_large_table_is_read_in_part_and_says_so(tmp_path: Path) -> None:
    rows = np.arange(10_000)
    path = write(tmp_path / "a.parquet", {"row": rows, "label": rows % 2}, row_group_size=100)
    table = scan(open_files(path), 640)
    assert (table.rows, table.total, table.whole) == (640, 10_000, False)
    seen = table.sample["row"].to_numpy()
    assert seen.max() > 9_800 and seen.min() < 100
    assert scan(open_files(path)).whole
    (tmp_path / "a.csv").write_text("row\n" + "\n".join(map(str, range(1000))))
    table = scan(open_files(str(tmp_path / "a.csv")), 100)
    assert (table.rows, table.total, table.whole) == (100, None, False)
    table = scan(open_files(str(tmp_path / "a.csv")), 1000)
    assert (table.rows, table.total, table.whole) == (1000, 1000, True)


@pytest.mark.parametrize("values", [1000, 3])
def test_a_column_alone_is_scored_on_rows_that_it_did_not_see(tmp_path: Path, values: int) -> None:
    label = RANDOM.random(20_000) < 0.2
    ids = RANDOM.integers(0, 20_000, 20_000)
    path = write(tmp_path / "a.parquet", {"noise": ids, "known": label * values + RANDOM.integers(0, values, 20_000)})
    columns = scan(open_files(path)).columns
    noise, known = (alone(columns[name], label) for name in ("noise", "known"))
    assert noise == pytest.approx(0.5, abs=0.03) and known == pytest.approx(1, abs=0.01)


def test_the_area_under_the_curve() -> None:
    labels = np.array([False, True, False, True])
    assert auc(np.array([1.0, 2.0, 3.0, 4.0]), labels) == 0.75
    assert auc(np.array([1.0, 1.0, 1.0, 1.0]), labels) == 0.5
    assert auc(np.array([1.0, 2.0]), np.array([True, True])) == 0.5


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("a,a\n1,2\n")
    for name, message in (("a.parquet", "duplicate field names"), ("a.csv", "several columns have the name a")):
        with pytest.raises(DataError, match=f"{name}: .*{message}"):
            open_files(str(tmp_path / name))


@pytest.mark.parametrize(
    "value",
    ["a", "yes", "1e-6", "1", "a: b", "{", "#", "", 'x"y\\', "null", "~", "2024-01-01", "é\n", 1e-6, 1.0, 3, True],
)
def test_values_are_written_as_yaml(value: object) -> None:
    import yaml

    assert yaml.safe_load(f"{{k: {flow(value)}}}") == {"k": value}
