"""Named file formats."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from persia.cli.main import app
from persia.config import load_config
from persia.data.records import HashSplit, RecordReader, open_files, presets
from persia.errors import DataError, UsageError

ROWS = 3000


def write_criteo(path: Path, rows: int = ROWS) -> None:
    """Write rows in Criteo's format: a label, 13 integers and 26 categories of 8 digits. Fields may be empty."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for row in range(rows):
            numbers = ["" if random.random() < 0.3 else str(int(random.exponential(5000)) - 1) for _ in range(13)]
            codes = ["" if random.random() < 0.1 else f"{int(random.integers(0, 90)) * 7919:08x}" for _ in range(26)]
            file.write("\t".join([str(row % 4 // 3), *numbers, *codes]) + "\n")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    write_criteo(tmp_path / "train.txt")
    return tmp_path / "train.txt"


def test_criteo_has_names_and_types(train: Path) -> None:
    files = open_files(str(train), **presets.options("criteo"))
    assert files.schema.names == ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    rows = pa.Table.from_batches([*RecordReader(files, ROWS, split=HashSplit((1, 0, 0)))])
    assert rows.num_rows == ROWS and rows.schema.types == [pa.int64()] * 14 + [pa.string()] * 26
    first = train.read_text().split("\n")[0].split("\t")
    assert [*rows.slice(0, 1).to_pylist()[0].values()] == [
        None if text == "" else int(text) if place < 14 else text for place, text in enumerate(first)
    ]
    assert rows["I1"].null_count > ROWS / 5


def test_criteo_is_inspected(train: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(train.parent)
    app(["data", "inspect", "train.txt", "--preset", "criteo", "-o", "persia.yml"], standalone_mode=False)
    assert "3,000 rows, 40 columns" in capsys.readouterr().out
    config = load_config("persia.yml")
    assert config.data.preset == "criteo" and not config.data.columns
    kinds = dict(config.compiled.types)
    assert kinds["C1"] == "id" and kinds["I1_dense"] == "dense" and len(kinds) == 26 + 2 * 13
    assert config.compiled.columns() == [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)), "label"]


def test_mistakes_are_named(train: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="preset 'criteos': expected one of criteo"):
        presets.options("criteos")
    lines = train.read_text().split("\n")
    (tmp_path / "short.txt").write_text("\n".join([*lines[:5], "1\t2\t3"]))
    with pytest.raises(DataError, match=r"short\.txt: .*[Ee]xpected 40 columns, (got|found) 3"):
        [*RecordReader(open_files(str(tmp_path / "short.txt"), **presets.options("criteo")), 10)]
    (tmp_path / "wrong.txt").write_text(lines[0].replace(lines[0].split("\t")[0] + "\t", "x\t", 1))
    with pytest.raises(
        DataError, match=r"wrong\.txt: row 1 \(line 1\), column 'label': found 'x', but the type of the column is int64"
    ):
        [*RecordReader(open_files(str(tmp_path / "wrong.txt"), **presets.options("criteo")), 10)]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(UsageError, match=r"format 'tsv' for .*a\.parquet: expected a name that ends in \.tsv"):
        open_files(str(tmp_path / "a.parquet"), **presets.options("criteo"))
