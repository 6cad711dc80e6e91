"""Proposals of `persia data inspect`: each test is for a rule or a common mistake."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import yaml

from persia.cli.main import app
from persia.config import load_config
from persia.data.inspect import Inspection, inspect
from persia.data.inspect.settings import Setting
from persia.errors import DataError, UsageError

ROWS = 2000
RANDOM = np.random.default_rng(0)
LABEL = (RANDOM.random(ROWS) < 0.3).astype(np.int8)
Inspect = Callable[..., Inspection]
SETTING = Setting({}, "")


@pytest.fixture
def inspected(tmp_path: Path) -> Inspect:
    """Inspects columns of a Parquet file. A column ``label`` is added if none is given."""

    def run(columns: dict[str, Any] | None = None, /, suffix: str = ".parquet", **options: Any) -> Inspection:
        path = tmp_path / f"train{suffix}"
        columns = columns or {"item": RANDOM.integers(0, 50, ROWS)}
        rows = len(next(iter(columns.values())))
        table = pa.table(columns if "label" in columns or "label" in options else {**columns, "label": LABEL[:rows]})
        if suffix == ".csv":
            pa.csv.write_csv(table, path)
        else:
            pa.parquet.write_table(table, path, row_group_size=500)
        return inspect(str(path), folder=tmp_path, **options)

    return run


def features(found: Inspection) -> dict[str, dict[str, Any]]:
    return {feature.name: feature.keys for feature in found.proposal.features}


def left_out(found: Inspection, column: str) -> str:
    return next(each.reason for each in found.proposal.left_out if each.column == column)


def loaded(found: Inspection, folder: Path) -> Any:
    (folder / "persia.yml").write_text(found.yaml)
    return load_config(folder / "persia.yml")


# Features.


def test_strings_and_few_integers_are_ids(inspected: Inspect) -> None:
    found = features(
        inspected({"site": [f"s{number % 90}" for number in range(ROWS)], "code": RANDOM.integers(0, 50, ROWS)})
    )
    assert found["site"] == found["code"] == {"type": "id", "dim": 16}


def test_few_integers_that_may_be_amounts_keep_their_order(inspected: Inspect) -> None:
    found = features(inspected({"order": RANDOM.integers(1, 60, ROWS), "hour": RANDOM.integers(1, 5, ROWS)}))
    assert [*found] == ["order", "order_dense", "hour"]
    assert found["order_dense"] == {"type": "dense", "column": "order", "standardise": True}


@pytest.mark.parametrize(
    ("name", "high", "kind"),
    [("user_id", 900, "id"), ("userId", 900, "id"), ("zip", 900, "id"), ("price", 900, "bucket"), ("h", 2**60, "id")],
)
def test_many_integers_are_ids_by_their_name_or_range(inspected: Inspect, name: str, high: int, kind: str) -> None:
    values = RANDOM.integers(0, high, 700)[RANDOM.integers(0, 700, ROWS)]
    assert features(inspected({name: values}))[name]["type"] == kind


def test_a_number_is_an_interval_and_a_float(inspected: Inspect) -> None:
    found = features(inspected({"x": RANDOM.normal(size=ROWS), "y": np.exp(3 * RANDOM.normal(size=ROWS))}))
    assert found["x"] == {"type": "bucket", "quantiles": 64, "dim": 16}
    assert found["x_dense"] == {"type": "dense", "column": "x", "standardise": True}
    assert found["y_dense"] == {"type": "dense", "column": "y", "log1p": True, "standardise": True}


def test_a_number_that_is_mostly_zero_gets_intervals_of_the_others(inspected: Inspect) -> None:
    values = np.where(RANDOM.random(ROWS) < 0.9, 0.0, RANDOM.integers(1, 5000, ROWS))
    bounds = features(inspected({"gain": values}))["gain"]["boundaries"]
    intervals = np.searchsorted(bounds, values)
    zero, counts = intervals[values == 0], np.bincount(intervals[values > 0])
    assert len(set(zero)) == 1 and counts[zero[0]] == 0
    assert len(bounds) > 30 and counts.max() < 20


def test_a_number_of_few_values_has_an_interval_for_each(inspected: Inspect) -> None:
    values = RANDOM.integers(0, 5, ROWS) / 4
    bounds = features(inspected({"share": values}))["share"]["boundaries"]
    assert bounds == [0, 0.25, 0.5, 0.75]
    assert np.array_equal(np.searchsorted(bounds, values), values * 4)


def test_separated_strings_and_lists_are_bags(inspected: Inspect) -> None:
    genres = ["|".join(RANDOM.choice(["a", "b", "c d", "e", "f"], 3, replace=False)) for _ in range(ROWS)]
    items = [[f"i{number}" for number in RANDOM.integers(0, 40, row % 5)] for row in range(ROWS)]
    found = features(inspected({"genres": genres, "seen": items, "item": [f"i{row % 40}" for row in range(ROWS)]}))
    assert found["genres"] == {"type": "bag", "separator": "|", "pooling": "mean", "dim": 16}
    assert found["seen"] == {"type": "bag", "pooling": "mean", "dim": 16, "table": "item"}


def test_text_with_spaces_is_no_bag(inspected: Inspect) -> None:
    titles = [f"the long title of number {number % 400} here" for number in range(ROWS)]
    assert features(inspected({"title": titles, "item": titles}))["title"]["type"] == "id"


def test_times_become_parts_that_come_again(inspected: Inspect) -> None:
    start = datetime(2024, 1, 1)
    times = [start + timedelta(hours=number) for number in range(ROWS)]
    found = features(inspected({"clicked_at": times, "ts": [int(time.timestamp()) for time in times]}))
    assert {name: keys["part"] for name, keys in found.items()} == {
        "clicked_at_hour": "hour",
        "clicked_at_weekday": "weekday",
        "ts_hour": "hour",
        "ts_weekday": "weekday",
    }
    assert found["ts_hour"]["unit"] == "s"


def test_useless_columns_are_left_out_with_a_reason(inspected: Inspect) -> None:
    found = inspected(
        {
            "item": RANDOM.integers(0, 50, ROWS),
            "constant": ["x"] * ROWS,
            "nothing": pa.nulls(ROWS, pa.string()),
            "uuid": [f"{number:032x}" for number in range(ROWS)],
            "index": np.arange(ROWS),
            "event_id": RANDOM.permutation(ROWS) * 7,
            "struct": [{"a": number} for number in range(ROWS)],
            "text": [f"this is a sentence with the number {number}" for number in range(ROWS)],
        }
    )
    assert [*features(found)] == ["item"]
    assert left_out(found, "constant") == "every row is x"
    assert left_out(found, "nothing") == "no row has a value"
    assert "a different value (2,000 of 2,000)" in left_out(found, "uuid")
    assert "counts the rows" in left_out(found, "index")
    assert "a different value" in left_out(found, "event_id")
    assert "cannot be a feature" in left_out(found, "struct")
    assert "free text" in left_out(found, "text")
    assert "# index: {type: bucket, quantiles: 64, dim: 16}" in found.yaml


def test_an_instance_weight_is_no_feature(inspected: Inspect) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "instance_weight": RANDOM.random(ROWS) * 1000})
    assert [*features(found)] == ["item"]
    assert "weight of a row" in left_out(found, "instance_weight")
    assert "# weight: instance_weight" in found.yaml


def test_a_column_that_knows_the_label_is_left_out_with_a_warning(inspected: Inspect) -> None:
    leak = np.where(RANDOM.random(ROWS) < 0.98, LABEL * 2.0, 1.0) + 0.1 * RANDOM.random(ROWS)
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "refund": leak})
    assert [*features(found)] == ["item"]
    assert "known only after the label" in left_out(found, "refund")
    assert any("refund" in warning for warning in found.proposal.warnings)
    assert 0.4 < found.proposal.alone["item"] < 0.6


def test_many_ids_wait_for_a_second_row(inspected: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.data.inspect.features.MANY", 500)
    found = features(inspected({"user_id": RANDOM.integers(0, 900, ROWS)}))
    assert found["user_id"]["admission"] == {"min_count": 2}


def test_names_that_features_may_not_have_are_changed(inspected: Inspect, tmp_path: Path) -> None:
    codes = RANDOM.integers(0, 50, ROWS)
    found = inspected({"größe": codes, " a ": codes, "b: {c}": codes, "no": codes})
    assert features(found)["gr__e"] == {"type": "id", "column": "größe", "dim": 16} or "gr_" in str(features(found))
    assert loaded(found, tmp_path).compiled.columns()[:4] == ["größe", " a ", "b: {c}", "no"]


def test_wide_tables_get_a_cross_network_of_low_rank(inspected: Inspect) -> None:
    codes = RANDOM.integers(0, 5, ROWS)
    assert "low_rank" not in inspected({f"c{number}": codes for number in range(64)}).proposal.model.value
    assert inspected({f"c{number}": codes for number in range(65)}).proposal.model.value["low_rank"] == 64


# Labels.


@pytest.mark.parametrize("name", ["label", "click", "isClick", "target"])
def test_the_label_is_known_by_its_name(inspected: Inspect, name: str) -> None:
    flag = RANDOM.integers(0, 2, ROWS)
    found = inspected({"flag": flag, name: LABEL}, label=None)
    assert found.proposal.label.column == name
    assert [*features(found)] == ["flag"]


def test_the_only_column_of_two_numbers_is_the_label(inspected: Inspect) -> None:
    found = inspected({"item": RANDOM.integers(0, 9, ROWS), "outcome_7": LABEL}, label=None)
    assert found.proposal.label.column == "outcome_7"


YES = ["yes" if one else "no" for one in LABEL]
STARS = np.tile([1, 2, 3, 4, 5], ROWS // 5)


@pytest.mark.parametrize(
    ("columns", "chosen", "said"),
    [
        ({"click": LABEL, "is_member": LABEL}, "click", None),
        ({"click": LABEL, "rating": STARS}, "click", "may also be 'rating'"),
        ({"click": LABEL, "y": STARS}, "click", "may also be 'y'"),
        ({"y": STARS, "is_member": LABEL}, "y", "may also be 'is_member'"),
        ({"rating": STARS, "bought_it": LABEL, "renewed": YES}, "rating", "may also be 'bought_it', 'renewed'"),
        ({"is_member": LABEL, "renewed": YES}, "is_member", "may also be 'renewed'"),
        ({"label": YES}, "label", None),
        ({"label": LABEL * 2 - 1}, "label", None),
        ({"label": LABEL + 1}, "label", "2 counts as 1, which was guessed; to count 1 as 1: --label label=1"),
    ],
)
def test_a_doubtful_guess_is_a_warning(
    inspected: Inspect, columns: dict[str, Any], chosen: str, said: str | None
) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), **columns}, label=None)
    assert found.proposal.label.column == chosen and "the only column" not in found.proposal.label.reason
    doubts = [warning for warning in found.proposal.warnings if "guessed" in warning]
    assert (said is None) == (not doubts) and (said is None or said in doubts[0]), doubts
    assert all(f"# warning: {doubt}" in found.yaml for doubt in doubts)


def test_which_of_two_strings_is_1_may_be_a_guess(inspected: Inspect) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "label": ["b" if one else "a" for one in LABEL]})
    assert "label label: b counts as 1, which was guessed; to count a as 1: --label label=a" in found.proposal.warnings


@pytest.mark.parametrize(
    ("columns", "message", "hint"),
    [
        ({"a": LABEL, "b": LABEL}, "candidates: 'a', 'b'", "--label b"),
        ({"click": LABEL, "target": LABEL}, "candidates: 'click', 'target'", "--label target"),
        ({"x": np.arange(ROWS)}, "no column looks like a label; the columns are x", "--label COL"),
    ],
)
def test_an_unclear_label_is_asked_for(inspected: Inspect, columns: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        inspected(columns, label=None)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("values", "given", "keys"),
    [
        (["yes" if one else "no" for one in LABEL], "y", {"equals": "yes"}),
        (["b" if one else "a" for one in LABEL], "y", {"equals": "b"}),
        (LABEL.astype(bool), "y", {}),
        (LABEL.astype(bool), "y=1", {"equals": True}),
        (LABEL.astype(bool), "y=False", {"equals": False}),
        (LABEL * 2 - 1, "y", {"equals": 1}),
        (np.tile([1, 2, 3, 4, 5], ROWS // 5), "y", {"greater_than": 2}),
        (np.tile([1, 2, 3, 4, 5], ROWS // 5), "y>3", {"greater_than": 3}),
        (np.tile([1, 2, 3, 4, 5], ROWS // 5), "y=5", {"equals": 5}),
        (["won", "lost", "drawn", "won"] * (ROWS // 4), "y=won", {"equals": "won"}),
    ],
)
def test_a_label_of_other_values_gets_a_rule(
    inspected: Inspect, tmp_path: Path, values: Any, given: str, keys: dict[str, Any]
) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "y": values}, label=given)
    assert found.proposal.label.keys == keys
    compiled = loaded(found, tmp_path).compiled
    made = compiled.fit(found.table.sample)(found.table.sample).label("y")
    assert np.array_equal(made == 1, found.proposal.label.positive)


@pytest.mark.parametrize(
    ("values", "given", "message"),
    [
        (np.ones(ROWS), "y", "the rows read have only the value 1"),
        (pa.nulls(ROWS, pa.int64()), "y", "the rows read have only the value null"),
        (np.full(ROWS, np.nan), "y", "the rows read have only the value nan"),
        (["won", "lost", "drawn", "won"] * (ROWS // 4), "y", "3 different strings"),
        (np.tile([1, 2, 3, 4], ROWS // 4), "y>9", "no rows of the sample have the label 1"),
        (["a", "b"] * (ROWS // 2), "y=c", "no rows of the sample have the label 1; frequent values are"),
        ([[1, 2]] * ROWS, "y", "a column of list<.+> cannot be a label"),
        (["a", "b"] * (ROWS // 2), "y>1", "the column is string, expected numbers"),
        (np.arange(ROWS), "y>x", "'x' is not a finite number"),
        (np.arange(ROWS), "y>inf", "'inf' is not a finite number"),
        (np.arange(ROWS), "y=nan", "the column is int64, expected a finite number"),
        (LABEL.astype(bool), "y=yes", "the column is bool, expected true, false, 1 or 0"),
        (LABEL, "Y", r"did you mean 'y'\?"),
    ],
)
def test_a_column_that_is_no_label_is_refused(inspected: Inspect, values: Any, given: str, message: str) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        inspected({"item": RANDOM.integers(0, 50, ROWS), "y": values}, label=given)


def test_rows_without_a_label_are_warned_of(inspected: Inspect) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "label": pa.array([None, *LABEL[1:].tolist()])})
    assert any("rows without a value: 1; `persia train`" in warning for warning in found.proposal.warnings)


# Rows and files.


def test_a_time_column_makes_a_time_split(inspected: Inspect, tmp_path: Path) -> None:
    times = [datetime(2024, 1, 1) + timedelta(hours=3 * number) for number in range(ROWS)]
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "time": times})
    assert found.proposal.data["split"].value == {
        "by": "time",
        "column": "time",
        "valid": "2024-07-18",
        "test": "2024-08-12",
    }
    assert loaded(found, tmp_path).data.split.column == "time"


def test_a_session_is_not_divided_and_no_feature(inspected: Inspect) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "session_id": np.arange(ROWS) // 8})
    assert found.proposal.data["split"].value["group"] == "session_id"
    assert "its values do not recur" in left_out(found, "session_id")


def test_a_user_stays_a_feature(inspected: Inspect) -> None:
    found = inspected({"item": RANDOM.integers(0, 50, ROWS), "user_id": np.arange(ROWS) // 8})
    assert features(found)["user_id"]["type"] == "id"
    assert "# gauc_group: user_id" in found.yaml


def test_repeated_rows_are_warned_of(inspected: Inspect, tmp_path: Path) -> None:
    item = RANDOM.permutation(ROWS * 10)[:ROWS]
    test = tmp_path / "test.parquet"
    pa.parquet.write_table(pa.table({"item": item[:100], "label": LABEL[:100]}), test)
    found = inspected({"item": item}, test=str(test))
    assert found.table.repeats.across == 1
    assert any("100.0% of the test rows occur in training" in warning for warning in found.proposal.warnings)
    assert found.table.repeats.within == 0
    item[1000:] = item[:1000]
    found = inspected({"item": item, "label": np.tile(LABEL[:1000], 2)})
    assert any("100.0% of the rows occur more than once" in warning for warning in found.proposal.warnings)


def test_a_test_file_lacks_a_column(inspected: Inspect, tmp_path: Path) -> None:
    test = tmp_path / "test.parquet"
    pa.parquet.write_table(pa.table({"label": LABEL}), test)
    with pytest.raises(DataError, match="no column 'item'"):
        inspected(test=str(test))


@pytest.mark.parametrize(("rows", "message"), [(0, "no rows"), (1, "only one row was read")])
def test_empty_files_are_refused(inspected: Inspect, rows: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        inspected({"item": np.arange(rows), "label": LABEL[:rows]})


def test_a_table_without_a_feature_is_refused(inspected: Inspect) -> None:
    with pytest.raises(DataError, match="no column can be a feature: constant: every row is 1"):
        inspected({"constant": np.ones(ROWS, int)})
    with pytest.raises(DataError, match="the label is the only column"):
        inspected({"label": LABEL})


def test_few_rows_are_warned_of(inspected: Inspect) -> None:
    found = inspected({"item": [1, 2, 3], "label": [0, 1, 0]})
    assert any("3 rows are too few" in warning for warning in found.proposal.warnings)


# Text files.


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (["2024-02-29", "2024-02-31"], "'2024-02-31', which is not a valid date"),
        (["2024-02-29 10:00", "2024-02-29 25:00"], "'2024-02-29 25:00', which is not a valid timestamp"),
    ],
)
def test_a_date_that_does_not_exist_is_named(
    inspected: Inspect, tmp_path: Path, values: list[str], wrong: str, suffix: str
) -> None:
    days = [values[number == 1234] for number in range(ROWS)]
    found = inspected({"day": days, "price": RANDOM.random(ROWS)}, suffix=suffix)
    (warning,) = found.proposal.warnings
    place = "row 1235 (line 1236)" if suffix == ".csv" else "row 1235"
    assert warning.startswith(f"column day: {place} is {wrong}") and "strings" in warning
    assert "day" not in found.proposal.data.get("columns", SETTING).value
    assert features(found)["day"]["type"] == "id"
    assert loaded(found, tmp_path).data.columns.get("day") is None


def test_times_with_nanoseconds_are_times(inspected: Inspect) -> None:
    """`data.columns` has no type for nanoseconds, so the column is read as text and the features parse it."""
    found = inspected(
        {"at": [f"2024-05-{1 + row % 20:02d} 1{row % 9}:00:00.123456789" for row in range(ROWS)]}, suffix=".csv"
    )
    assert found.proposal.data["columns"].value == {"label": "int64"} and not found.proposal.warnings
    assert features(found)["at_hour"]["type"] == "date"


def test_types_of_text_columns_are_declared_where_all_values_agree(inspected: Inspect, tmp_path: Path) -> None:
    found = inspected(
        {
            "zip": [f"{number % 70:05d}" for number in range(ROWS)],
            "count": RANDOM.integers(0, 50, ROWS),
            "price": RANDOM.random(ROWS),
            "day": [f"2024-01-{1 + number * 20 // ROWS:02d}" for number in range(ROWS)],
            "mixed": ["n/a" if number == 77 else str(number) for number in range(ROWS)],
        },
        suffix=".csv",
    )
    assert found.proposal.data["columns"].value == {
        "count": "int64",
        "price": "float64",
        "day": "date",
        "label": "int64",
    }
    assert features(found)["zip"] == {"type": "id", "dim": 16}
    assert any(
        "mixed: 100.0% of the values are numbers, but row 78 (line 79) is 'n/a'" in warning
        for warning in found.proposal.warnings
    )
    assert loaded(found, tmp_path).data.columns["day"] == "date"


def test_a_file_without_separators_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;label\n1;0\n2;1\n3;0\n")
    with pytest.raises(UsageError, match="no column looks like a label; the columns are a;label"):
        inspect(str(tmp_path / "a.csv"))


# The command.


def test_the_command_writes_a_proposal_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pa.parquet.write_table(pa.table({"item": RANDOM.integers(0, 50, ROWS), "label": LABEL}), "clicks.parquet")
    arguments = ["data", "inspect", "clicks.parquet"]
    app([*arguments, "-o", "persia.yml"], standalone_mode=False)
    assert "next: persia train persia.yml" in capsys.readouterr().out
    assert [*load_config("persia.yml").features] == ["item"]
    with pytest.raises(UsageError, match=r"persia\.yml already exists"):
        app([*arguments, "-o", "persia.yml"], standalone_mode=False)
    app(arguments, standalone_mode=False)
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown[shown.index("# Proposed") : shown.index("next:")])["labels"] == {
        "label": {"column": "label"}
    }
    (tmp_path / "jobs").mkdir()
    app([*arguments, "-o", "jobs/a.yml"], standalone_mode=False)
    assert load_config("jobs/a.yml").data.train == "../clicks.parquet"
    capsys.readouterr()
    app([*arguments, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["columns"]["item"]["distinct"] == 50 and found["rows_read"] == ROWS
