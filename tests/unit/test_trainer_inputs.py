"""Invalid input of the trainer: one clear message, if possible before any file is created."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from trainer_files import config_of, write_clicks

from persia.config import Config
from persia.errors import DataError, PersiaError, StorageError, UsageError
from persia.runtime.logging import get_logger
from persia.trainer import Trainer, prediction

Change = Callable[[pa.Table], pa.Table]


def replaced(name: str, values: Any) -> Change:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values(table)))


def one_wrong(name: str, row: int, value: Any) -> Change:
    def values(table: pa.Table) -> list[Any]:
        found: list[Any] = table[name].to_pylist()
        found[row] = value
        return found

    return replaced(name, values)


def renamed(name: str, new: str) -> Change:
    return lambda table: table.rename_columns([new if each == name else each for each in table.column_names])


BAD: dict[str, tuple[Change, str]] = {
    "a missing column": (
        lambda table: table.drop_columns(["id1"]),
        r"clicks.parquet: no column 'id1' .*, read by features\.id1 \(\S*persia\.yml:\d+\)",
    ),
    "a renamed column": (renamed("dense0", "dens0"), r"no column 'dense0' \(did you mean 'dens0' or 'dense1'\?\)"),
    "strings for numbers": (
        replaced("dense0", lambda table: ["x"] * len(table)),
        r"clicks.parquet: .*dense0 \(\S*persia\.yml:\d+\): column `dense0` is Utf8, allowed",
    ),
    "a label of three values": (
        one_wrong("label", 1234, 2),
        r"clicks.parquet: .*label \(\S*persia\.yml:\d+\), row 1235: found the integer 2, allowed: 0 or 1",
    ),
    "a label that is null": (one_wrong("label", 77, None), r"clicks.parquet: .*row 78"),
    "a number of a wrong type in a row": (
        replaced("id0", lambda table: [float(value) for value in table["id0"].to_pylist()]),
        r"column `id0` is Float64, allowed",
    ),
    "a feature without any value": (
        replaced("dense0", lambda table: pa.nulls(len(table), pa.float32())),
        r"dense0",
    ),
    "no rows": (lambda table: table.slice(0, 0), "the train set has no rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_training_data_is_named(tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    pa.parquet.write_table(change(table), tmp_path / "clicks.parquet", row_group_size=500)
    with Trainer(config_of(tmp_path)) as trainer, pytest.raises(PersiaError, match=f"(?s){message}") as caught:
        for _ in trainer.fit():
            pass
    assert caught.value.exit_code == 2
    folder = tmp_path / "runs" / "one"
    if folder.exists():
        found = trainer.folder.read_json("summary.json") if trainer.folder else {}
        assert found["status"] == "failed" and "row" in found["error"]


def test_a_feature_that_is_always_null_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    nothing = table.set_column(table.column_names.index("id1"), "id1", pa.nulls(len(table), pa.string()))
    pa.parquet.write_table(nothing, tmp_path / "clicks.parquet")
    with caplog.at_level("WARNING", "persia.trainer"), Trainer(config_of(tmp_path)) as trainer:
        get_logger("trainer").addHandler(caplog.handler)
        for _ in trainer.fit():
            pass
    get_logger("trainer").removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if record.name == "persia.trainer"]
    assert "feature 'id1' is null in all rows that were trained on: correct its column, or remove the feature" in said
    assert not [each for each in said if "id0" in each]


def test_a_row_of_a_text_file_is_named(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet", 1000))
    pa.csv.write_csv(table, tmp_path / "clicks.csv")
    lines = (tmp_path / "clicks.csv").read_text().splitlines()
    lines[701] = lines[701].replace(",", ",dear", 3).replace("dear", "", 2)
    (tmp_path / "clicks.csv").write_text("\n".join(lines) + "\n")
    kinds = {"id0": "int64", "dense0": "float64", "dense1": "float64", "label": "int64"}
    config = config_of(tmp_path, data={"train": "clicks.csv", "columns": kinds})
    with Trainer(config) as trainer, pytest.raises(DataError, match=r"(?s)clicks.csv: .*(7\d\d|dear)"):
        trainer.fit()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    path = write_clicks(tmp_path / "clicks.parquet")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a table"):
        path.write_bytes(content)
        with Trainer(config_of(tmp_path)) as trainer, pytest.raises(DataError, match=r"clicks\.parquet"):
            trainer.fit()
    with Trainer(config_of(tmp_path, data={"valid": "absent.parquet"})) as trainer, pytest.raises(PersiaError):
        path.write_bytes(whole)
        trainer.fit()
    assert not (tmp_path / "runs" / "one").exists()


def test_weights_that_are_none_are_refused(tmp_path: Path) -> None:
    table = pa.parquet.read_table(write_clicks(tmp_path / "clicks.parquet"))
    for value, shown in ((-1.0, "-1.0"), (float("nan"), "nan"), (None, "null")):
        weights: list[float | None] = [1.0] * len(table)
        weights[1111] = value
        pa.parquet.write_table(table.append_column("w", pa.array(weights)), tmp_path / "clicks.parquet")
        config = config_of(tmp_path, train={"weight": "w"}, run={"name": f"w{shown.strip('-.')}"})
        with (
            Trainer(config) as trainer,
            pytest.raises(DataError, match=rf"(?s)clicks\.parquet: train\.weight: column 'w', row 1112: found {shown}"),
        ):
            for _ in trainer.fit():
                pass


@pytest.fixture
def trained(tmp_path: Path) -> Config:
    config = config_of(tmp_path)
    with Trainer(config) as trainer:
        for _ in trainer.fit():
            pass
    return config


def test_rows_that_cannot_be_read_are_no_failure_to_write(
    trained: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield from ()
        raise StorageError("cannot read the rows", hint="mount the disk")

    with Trainer(trained) as trainer:
        trainer.resume()
        monkeypatch.setattr(trainer, "predict", unreadable)
        with pytest.raises(StorageError, match="^cannot read the rows$") as raised:
            prediction.write(trainer, str(tmp_path / "clicks.parquet"), tmp_path / "out.parquet")
    assert raised.value.hint == "mount the disk" and not [*tmp_path.glob("*out.parquet*")]


def test_bad_rows_of_a_prediction_write_nothing(trained: Config, tmp_path: Path) -> None:
    table = pa.parquet.read_table(tmp_path / "clicks.parquet")
    out = tmp_path / "out.parquet"
    wrong = replaced("dense0", lambda table: ["x"] * len(table))(table)
    pa.parquet.write_table(wrong, tmp_path / "wrong.parquet")
    pa.parquet.write_table(table.drop_columns(["id1"]), tmp_path / "lacking.parquet")
    pa.parquet.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    with Trainer(trained) as trainer:
        trainer.resume()
        for name, message in (
            ("wrong", "wrong.parquet: .*dense0"),
            ("lacking", "no column `id1`"),
            ("empty", "no row"),
        ):
            with pytest.raises(PersiaError, match=f"(?s){message}"):
                prediction.write(trainer, str(tmp_path / f"{name}.parquet"), out)
        written = prediction.write(trainer, str(tmp_path / "wrong.parquet"), out, strict=False)
        assert written.unusual.rows == len(table) and written.unusual.counts["dense0"] == {"wrong_type": len(table)}
        with pytest.raises(UsageError, match="already exists"):
            prediction.write(trainer, str(tmp_path / "clicks.parquet"), out)
        prediction.write(trainer, str(tmp_path / "clicks.parquet"), out, force=True)
        with pytest.raises(UsageError, match="already have a column 'score'"):
            prediction.write(trainer, str(out), tmp_path / "again.parquet")
        with pytest.raises(UsageError, match=r"ends in \.parquet"):
            prediction.write(trainer, str(out), tmp_path / "out.csv")
        with pytest.raises(UsageError, match=r"out\.parquet: there is no folder .*no folder"):
            prediction.write(trainer, str(tmp_path / "clicks.parquet"), tmp_path / "no folder" / "out.parquet")
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(("out", "again", ".out", ".again"))}
    assert left == {"out.parquet"}


def test_scores_of_values_that_training_never_saw(trained: Config, tmp_path: Path) -> None:
    table = pa.parquet.read_table(tmp_path / "clicks.parquet").slice(0, 10)
    new = replaced("id1", lambda table: [f"new{row}" for row in range(len(table))])(table)
    pa.parquet.write_table(new, tmp_path / "new.parquet")
    with Trainer(trained) as trainer:
        report = trainer.resume().evaluate(str(tmp_path / "new.parquet"))
        assert report.slots_without_row["id1"] == 1.0
        scores = [each for _, found in trainer.predict(str(tmp_path / "new.parquet")) for each in found["label"]]
    assert len(scores) == 10 and np.isfinite(scores).all()
