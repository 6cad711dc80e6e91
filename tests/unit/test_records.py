"""Reading rows from files: each row of a part is read once, the order depends on the seed, a reader can resume."""

import gzip
import json
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from persia.data.records import PARTS, HashSplit, RecordReader, TimeSplit, open_files
from persia.data.records.split import hash_values
from persia.errors import DataError, UsageError
from persia.features import hash_text

ROWS = 1000


def table(start: int = 0, rows: int = ROWS) -> pa.Table:
    numbers = range(start, start + rows)
    return pa.table(
        {
            "row": pa.array(numbers, pa.int64()),
            "user": [f"user{number % 37}" for number in numbers],
            "time": pa.array(
                [datetime(2024, 1, 1 + number * 20 // ROWS // 2) for number in numbers], pa.timestamp("s")
            ),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two Parquet files of 600 and 400 rows, in row groups of 70."""
    for name, start, rows in (("a", 0, 600), ("b", 600, 400)):
        pa.parquet.write_table(table(start, rows), tmp_path / f"{name}.parquet", row_group_size=70)
    return tmp_path


def rows_of(reader: RecordReader) -> list[int]:
    return [row for batch in reader for row in batch["row"].to_pylist()]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("window", [64, 100_000])
def test_an_epoch_has_every_row_once(folder: Path, shuffle: bool, window: int) -> None:
    reader = RecordReader(open_files(str(folder)), 64, shuffle=shuffle, window_rows=window, epochs=2)
    sizes, epochs = [], []
    for batch in reader:
        sizes.append(batch.num_rows)
        epochs += batch["row"].to_pylist()
    assert sizes == ([64] * 15 + [40]) * 2
    first, second = epochs[:ROWS], epochs[ROWS:]
    assert sorted(first) == sorted(second) == [*range(ROWS)]
    assert (first == second == [*range(ROWS)]) is not shuffle
    if shuffle:
        assert first != second
        assert rows_of(RecordReader(open_files(str(folder)), 64, shuffle=True, window_rows=window, epochs=2)) == epochs
        other = RecordReader(open_files(str(folder)), 64, shuffle=True, window_rows=window, epochs=2, seed=1)
        assert rows_of(other) != epochs


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("split", [None, HashSplit((0.5, 0.25, 0.25), group="user")])
def test_a_reader_resumes_after_any_batch(folder: Path, shuffle: bool, split: HashSplit | None) -> None:
    def reader() -> RecordReader:
        files = open_files(str(folder))
        return RecordReader(files, 32, split=split, shuffle=shuffle, window_rows=96, epochs=2, seed=5)

    whole, states = [], []
    first = reader()
    for batch in first:
        whole.append(batch["row"].to_pylist())
        states.append(json.dumps(first.state_dict()))
    for number, state in enumerate(states, 1):
        resumed = reader()
        resumed.load_state_dict(json.loads(state))
        assert [batch["row"].to_pylist() for batch in resumed] == whole[number:], f"after batch {number}"
    states.append(json.dumps(first.state_dict()))
    resumed = reader()
    resumed.load_state_dict(json.loads(states[-1]))
    assert list(resumed) == [], "a reader that was at the end"
    assert rows_of(first) == rows_of(resumed) == [row for batch in whole for row in batch], "they start anew"


def test_a_resumed_reader_refuses_other_data_and_settings(folder: Path) -> None:
    files = open_files(str(folder))
    state = RecordReader(files, 32, shuffle=True).state_dict()
    for other, text in (
        (RecordReader(files, 16, shuffle=True), "batch_size: 32 in the checkpoint, 16 now"),
        (RecordReader(files, 32, shuffle=True, seed=3), "seed: 0 in the checkpoint, 3 now"),
        (RecordReader(open_files(str(folder / "a.parquet")), 32, shuffle=True), "files:"),
    ):
        with pytest.raises(DataError, match=text):
            other.load_state_dict(state)


@pytest.mark.parametrize("count", [3, 40])
def test_shards_divide_the_rows(folder: Path, count: int) -> None:
    """Whole units are divided among shards if there are enough of them; otherwise, single rows are divided."""
    files = open_files(str(folder))
    parts = [
        rows_of(RecordReader(files, 16, shuffle=True, seed=2, shard=(index, count), window_rows=64))
        for index in range(count)
    ]
    assert sorted(row for part in parts for row in part) == [*range(ROWS)]
    assert all(parts)
    one = RecordReader(open_files(str(folder / "a.parquet")), 16, shard=(1, 2))
    assert len(rows_of(one)) == (280 if len(open_files(str(folder / "a.parquet")).units) >= 2 else 300)


@pytest.mark.parametrize("group", [None, "user"])
def test_a_hash_split_divides_and_keeps_groups_together(folder: Path, group: str | None) -> None:
    files = open_files(str(folder))
    split = HashSplit((0.6, 0.2, 0.2), group=group)
    found = {part: list(RecordReader(files, 50, split=split, part=part, shuffle=True)) for part in PARTS}
    rows = {part: [row for batch in batches for row in batch["row"].to_pylist()] for part, batches in found.items()}
    assert sorted(row for part in rows.values() for row in part) == [*range(ROWS)]
    if group is None:
        assert 540 < len(rows["train"]) < 660
    else:
        users = [{user for batch in batches for user in batch["user"].to_pylist()} for batches in found.values()]
        assert sum(map(len, users)) == 37
    again = rows_of(RecordReader(open_files(str(folder / "*.parquet")), 50, split=split, part="valid"))
    assert sorted(again) == sorted(rows["valid"])


def test_files_are_read_in_the_order_given(folder: Path) -> None:
    """The files of a folder or a glob are sorted by their paths."""
    a, b = str(folder / "a.parquet"), str(folder / "b.parquet")
    assert rows_of(RecordReader(open_files([b, a]), 64)) == [*range(600, ROWS), *range(600)]
    (folder / "day").mkdir()
    for name in ("day2", "day10"):
        pa.parquet.write_table(table(), folder / "day" / f"{name}.parquet")
    for given in ([str(folder / "day"), a], [str(folder / "d*" / "*.parquet"), a]):
        assert [Path(path).name for path in open_files(given).paths] == ["day10.parquet", "day2.parquet", "a.parquet"]
    assert len(open_files(str(folder / "**")).paths) == 4, "a glob that matches a folder and its files"
    state = RecordReader(open_files([b, a]), 64).state_dict()
    with pytest.raises(DataError, match="files:"):
        RecordReader(open_files([a, b]), 64).load_state_dict(state)


def test_a_file_is_given_once(folder: Path) -> None:
    a = str(folder / "a.parquet")
    for other in (a, str(folder), str(folder / "*.parquet"), str(folder / "x" / ".." / "a.parquet")):
        (folder / "x").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=r"a\.parquet: the file is given twice, by .* and by ") as caught:
            open_files([a, other])
        assert f"{a} and by {other}" in str(caught.value)
        assert caught.value.hint == "list each file once"


def test_other_files_do_not_move_a_row_to_another_part(tmp_path: Path) -> None:
    """Other files, their order or the parent folder do not change the part of a row. Folders like ``day=2`` do."""
    for name, start in (("day=2/m", 0), ("day=3/m", 1000), ("more/day=1/m", 2000)):
        (tmp_path / name).parent.mkdir(parents=True)
        pa.parquet.write_table(table(start), tmp_path / f"{name}.parquet")
    second, third, first = (str(tmp_path / name) for name in ("day=2/m.parquet", "day=3/m.parquet", "more"))

    def parts(given: str | list[str], split: HashSplit) -> list[set[int]]:
        files = open_files(given, columns=["row", "user"])
        return [{*rows_of(RecordReader(files, 64, split=split, part=part))} for part in PARTS]

    for split in (HashSplit((0.5, 0.25, 0.25)), HashSplit((0.5, 0.25, 0.25), group="user")):
        alone = parts([second, third], split)
        assert parts([third, second], split) == alone
        for given in ([first, third, second], str(tmp_path)):
            assert [{row for row in part if row < 2000} for part in parts(given, split)] == alone
    lower = set(parts(second, HashSplit((0.5, 0.25, 0.25)))[0])
    upper = {row - 1000 for row in parts(third, HashSplit((0.5, 0.25, 0.25)))[0]}
    assert 200 < len(lower & upper) < 300, "the parts of two files are independent"


def test_a_position_of_an_older_split_is_refused_by_name(folder: Path) -> None:
    """Older versions divided rows by the index of their file in the list of files."""
    reader = RecordReader(open_files(str(folder)), 32, split=HashSplit())
    state = json.loads(json.dumps(reader.state_dict()))
    del state["of"]["split"]["row"]
    with pytest.raises(DataError, match="split: .*'row': 'file name and number'.* now"):
        reader.load_state_dict(state)


def test_a_time_split_judges_on_later_rows(folder: Path) -> None:
    split = TimeSplit("time", valid="2024-01-06", test=datetime(2024, 1, 9))
    files = open_files(str(folder))
    times = {
        part: [time for batch in RecordReader(files, 50, split=split, part=part) for time in batch["time"].to_pylist()]
        for part in PARTS
    }
    assert sum(map(len, times.values())) == ROWS
    assert max(times["train"]) < datetime(2024, 1, 6) <= min(times["valid"])
    assert max(times["valid"]) < datetime(2024, 1, 9) <= min(times["test"])
    with pytest.raises(UsageError, match="test .* begins before valid"):
        rows_of(RecordReader(files, 50, split=TimeSplit("time", valid="2024-01-09", test="2024-01-06")))
    with pytest.raises(UsageError, match="valid='spring'"):
        rows_of(RecordReader(files, 50, split=TimeSplit("time", valid="spring", test="2024-01-06")))


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("s", "UTC"), pa.date32()])
@pytest.mark.parametrize(
    ("given", "wanted"), [(20240106, "2024-01-06"), (1704499200, "2024-05-01"), (2024.5, "2024-05-01")]
)
def test_a_number_is_no_time(kind: pa.DataType, given: float, wanted: str) -> None:
    """Read as seconds, 20240106 would be a time in 1970, and all rows would be in the validation part."""
    batch = pa.record_batch({"time": table()["time"].combine_chunks().cast(pa.date32()).cast(kind)})
    with pytest.raises(
        UsageError, match=f"split by 'time': valid={given} is a number, but the column is of type"
    ) as caught:
        TimeSplit("time", valid=given).parts(batch, "a.parquet", 0)
    assert caught.value.hint == f"write a date or a time, such as `valid: {wanted}`"
    numbers = pa.record_batch({"time": pa.array([20240105, 20240106])})
    assert TimeSplit("time", valid=20240106).parts(numbers, "a.parquet", 0).tolist() == [0, 1]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    data = table().drop_columns(["time"])
    pa.csv.write_csv(data, tmp_path / "a.csv")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    pa.csv.write_csv(data, tmp_path / "a.tsv", pa.csv.WriteOptions(delimiter="\t", include_header=False))
    pa.feather.write_feather(data, tmp_path / "a.arrow")
    pa.parquet.write_table(data, tmp_path / "a.parquet")
    types = {"row": pa.int64()}
    for name in ("a.csv", "a.csv.gz", "a.arrow", "a.parquet"):
        files = open_files(str(tmp_path / name), types=types)
        assert pa.Table.from_batches(RecordReader(files, 100)).equals(data), name
    files = open_files(str(tmp_path / "a.tsv"), types=types, header=["row", "user"])
    assert pa.Table.from_batches(RecordReader(files, 100)).equals(data)


def test_text_columns_are_strings_unless_declared(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("code,count\n007,1\n,2\n")
    (batch,) = RecordReader(open_files(str(path), types={"count": pa.float32()}), 10)
    assert batch.to_pydict() == {"code": ["007", None], "count": [1.0, 2.0]}


def test_partitions_of_folders_are_columns(tmp_path: Path) -> None:
    for day in ("1", "2"):
        (tmp_path / f"day={day}").mkdir()
        pa.parquet.write_table(table(rows=10), tmp_path / f"day={day}" / "a.parquet")
    files = open_files(str(tmp_path), columns=["row", "day"])
    assert files.rows == 20
    days = Counter(day for batch in RecordReader(files, 7) for day in batch["day"].to_pylist())
    assert days == {1: 10, 2: 10}


def test_each_text_file_has_its_own_header(tmp_path: Path) -> None:
    """Columns are found by name in every file, not by the order of the first file."""
    (tmp_path / "a.csv").write_text("user,item\nu1,i1\n")
    (tmp_path / "b.csv").write_text("item,more,user\ni2,,u2\n")
    batches = RecordReader(open_files(str(tmp_path), columns=["user", "item"]), 10)
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {"user": "u1", "item": "i1"},
        {"user": "u2", "item": "i2"},
    ]
    (tmp_path / "b.csv").write_text("user,film\nu2,i2\n")
    with pytest.raises(DataError, match="b.csv: no column 'item'; its columns are film, user"):
        rows_of(RecordReader(open_files(str(tmp_path)), 10))


def test_a_text_file_is_not_read_far_ahead(tmp_path: Path) -> None:
    """Even if the consumer is slow, little is read ahead."""
    path = tmp_path / "a.csv"
    path.write_text("row\n" + "1234567890123456789\n" * 5_000_000)  # 100 MB
    files = open_files(str(path))
    before, most = pa.total_allocated_bytes(), 0
    for _ in files.read(files.units[0]):
        time.sleep(0.03)
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 50_000_000


def test_wrong_files_are_named(folder: Path) -> None:
    with pytest.raises(UsageError, match="nothing.parquet: no such file"):
        open_files(str(folder / "nothing.parquet"))
    with pytest.raises(DataError, match=r"no column 'usr' \(did you mean 'user'\?\)"):
        open_files(str(folder), columns=["usr"])
    with pytest.raises(UsageError, match="format 'csv' for .*a.parquet"):
        open_files(str(folder / "a.parquet"), file_format="csv")
    with pytest.raises(UsageError, match="no file that ends in .csv"):
        open_files(str(folder), file_format="csv")
    pa.parquet.write_table(table().rename_columns(["row", "person", "time"]), folder / "c.parquet")
    with pytest.raises(DataError, match="c.parquet: no column 'user'; its columns are"):
        rows_of(RecordReader(open_files(str(folder)), 10))
    whole = (folder / "a.parquet").read_bytes()
    (folder / "c.parquet").unlink()
    (folder / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="b.parquet"):
        rows_of(RecordReader(open_files(str(folder)), 10))
    (folder / "b.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="b.parquet"):
        rows_of(RecordReader(open_files(str(folder)), 10))


def test_a_text_row_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("row\n" + "".join(f"{number}\n" for number in range(500_000)) + "many\n")  # several blocks
    with pytest.raises(DataError, match=r"a.csv: row 500001 \(line 500002\), column 'row': found 'many', but the"):
        rows_of(RecordReader(open_files(str(path), types={"row": pa.int64()}), 1000))


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    """Empty lines are not rows, a value in quotes may have several lines, and a file may have no header."""
    path = tmp_path / "a.csv"
    path.write_text('"text","row"\n\n"one\nline",1\r\n"a ""b""",2\n\n\nc,3\n"d",x\n')
    files = open_files(str(path), types={"row": pa.int64()}, used_by={"row": ["features.row (a.yml:7)"]})
    assert [files.place(str(path), row) for row in range(4)] == [
        "row 1 (line 3)",
        "row 2 (line 5)",
        "row 3 (line 8)",
        "row 4 (line 9)",
    ]
    assert files.place(str(path), 4) == "row 5"
    with pytest.raises(DataError) as caught:
        rows_of(RecordReader(files, 10))
    place = "row 4 (line 9), column 'row', read by features.row (a.yml:7)"
    assert str(caught.value) == f"{path}: {place}: found 'x', but the type of the column is int64"
    (tmp_path / "b.tsv").write_text("\n1\tu1\n\nx\tu2\n")
    with pytest.raises(DataError, match=r"b\.tsv: row 2 \(line 4\), column 'row': found 'x'"):
        rows_of(RecordReader(open_files(str(tmp_path / "b.tsv"), header=["row", "u"], types={"row": pa.int64()}), 10))


def test_values_that_cannot_be_read_are_null_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,x,ok,day,text\n1,0.5,true,2024-02-29,a\n n ,,yes,2024-02-31,1\n 3 ,1e3,false,,\nn,nan,,x,b\n")
    types = {"n": pa.int64(), "x": pa.float32(), "ok": pa.bool_(), "day": pa.date32()}
    files = open_files(str(path), types=types, lenient=True)
    (batch,) = RecordReader(files, 10)
    assert batch.schema.types[:4] == [*types.values()]
    assert batch["n"].to_pylist() == [1, None, 3, None] and batch["text"].to_pylist() == ["a", "1", None, "b"]
    assert batch["ok"].to_pylist() == [True, None, False, None] and batch["day"].null_count == 3
    assert batch["x"].to_pylist()[:3] == [0.5, None, 1000.0]
    assert {name: count for name, count in files.unreadable.items() if count} == {"n": 2, "ok": 1, "day": 2}


def test_a_wrong_value_is_named_in_every_read(tmp_path: Path) -> None:
    """The value may be anywhere in Arrow's blocks of 1 MiB, also at the end of a block, while other files are read."""
    lines = [f"{number},{number * 7 % 1000},user{number % 500}" for number in range(60_000)]
    place = f"{tmp_path}/wrong.csv: row 48001 (line 48002), column 'price'"
    wrong = f"{place}: found 'n/a', but the type of the column is double"
    lines[48_000] = "48000,n/a,user0"
    (tmp_path / "wrong.csv").write_text("row,price,user\n" + "\n".join(lines) + "\n")
    for _ in range(20):
        files = open_files(
            str(tmp_path / "wrong.csv"), types={"row": pa.int64(), "price": pa.float64()}, columns=["price", "row"]
        )
        with pytest.raises(DataError) as caught:
            rows_of(RecordReader(files, 4096, shuffle=True))
        assert str(caught.value) == wrong


def test_a_text_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("row,user\n1,a\n")
    files = open_files(str(path), columns=["user"])
    assert len(files.units) == 1
    path.write_text("row,us\n1,a\n")
    with pytest.raises(DataError, match=r"a\.csv: the file was changed while it was read: now it has no column 'user'"):
        rows_of(RecordReader(files, 10))


def test_wrong_arguments_are_listed_at_once(folder: Path) -> None:
    files = open_files(str(folder), columns=["row"])
    with pytest.raises(UsageError) as caught:
        RecordReader(files, 0, epochs=0, part="all", shard=(2, 2), split=HashSplit(group="user"))
    for text in ("batch_size=0", "epochs=0", "part='all'", "shard=(2, 2)", "'user', which is not read"):
        assert text in str(caught.value)
    with pytest.raises(UsageError, match="their sum is 1.1"):
        HashSplit((0.8, 0.2, 0.1))


def test_splits_are_pinned() -> None:
    """A split is the same as in older versions. Strings have the ids of `persia.features`."""
    assert hash_values(pa.array([1, -1])).tolist() == [1, 2**64 - 1]
    a = 11714444025550555977
    assert hash_values(pa.array(["a", "b", "a"])).tolist() == [a, hash_text("b"), a]
    assert hash_values(pa.array(["a"]).dictionary_encode()).tolist() == [a] == [hash_text("a")]
    assert hash_values(pa.array([1.5])).tolist() == [hash_text("1.5")]
    batch = pa.record_batch({"x": np.arange(12)})
    assert HashSplit((0.5, 0.25, 0.25)).parts(batch, "a.csv", 0).tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0]
    assert HashSplit(seed=1).parts(batch, "day=1/a.csv", 100).tolist() == [0, 0, 0, 2, 2, *[0] * 7]
