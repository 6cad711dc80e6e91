"""Data-compose with a persia.yml sends the trainer's batches, divided among ranks. Processes share a fit."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from waiting import wait_until

from persia.config import Config, load_config
from persia.data.records import RecordReader
from persia.data.records.files import open_files
from persia.embedding.data import PersiaBatch
from persia.errors import DataError, StorageError
from persia.feed.replay import MAX_POSITION_BYTES
from persia.trainer import data_compose, fitting
from persia.trainer.data_compose import pieces
from persia.trainer.fit_once import fit_once
from persia.trainer.parts import Parts

TEXT = """\
data: {train: rows.parquet, split: {fractions: [1, 0, 0]}}
features:
  user: {type: id, dim: 4}
  price: {type: dense, standardise: true}
labels: {clicked: {}}
"""


def write(folder: Path, price: float) -> Config:
    columns = {"user": [*range(10)], "price": [price + row for row in range(10)], "clicked": [0, 1] * 5}
    pa.parquet.write_table(pa.table(columns), folder / "rows.parquet")
    (folder / "persia.yml").write_text(TEXT)
    return load_config(folder / "persia.yml")


@pytest.mark.parametrize(("rows", "ranks"), [(10, 3), (3, 3), (4096, 1), (7, 2)])
def test_a_batch_is_divided_among_the_ranks(rows: int, ranks: int) -> None:
    found = pieces(rows, ranks)
    assert [row for start, stop in found for row in range(start, stop)] == [*range(rows)]
    sizes = [stop - start for start, stop in found]
    assert len(sizes) == ranks and max(sizes) - min(sizes) <= 1


def test_fewer_rows_than_ranks_are_no_step() -> None:
    assert pieces(2, 3) == []


class Sent:
    """The ``DataCtx`` of a job whose trainers do not exist."""

    def __init__(self, transform: str, ranks: int, position: str) -> None:
        self.transform, self.world_size, self.position = transform, ranks, position
        self.batches: list[tuple[bytes, str]] = []

    def __enter__(self) -> "Sent":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def resume(self) -> str:
        return self.position

    def send_data(self, batch: PersiaBatch, position: str) -> None:
        self.batches.append((batch.data.to_bytes(), position))


@pytest.mark.parametrize(
    ("ranks", "epochs", "data"),
    [(1, 2, "shuffle: true, window_rows: 8"), (3, 2, "shuffle: false"), (2, 1, "shuffle: true, workers: 3")],
)
def test_every_position_gives_the_batches_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, epochs: int, data: str
) -> None:
    numbers = [float(row) for row in range(41)]
    columns = {"user": [*range(41)], "price": numbers, "w": numbers, "clicked": ([0, 1] * 21)[:41]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=7)
    path = tmp_path / "persia.yml"
    path.write_text(TEXT.replace("data: {", f"data: {{batch_size: 6, epochs: {epochs}, {data}, "))
    config = load_config(path)
    transform = fitting.fit(config, Parts(config)).transform.to_json()

    def sent(position: str) -> list[tuple[bytes, str]]:
        ctx = Sent(transform, ranks, position)
        monkeypatch.setattr(data_compose, "DataCtx", lambda: ctx)
        data_compose.send(path)
        return ctx.batches

    whole = sent("")
    assert len(whole) == len({position for _, position in whole}) == 7 * epochs * ranks
    for after, (_, position) in enumerate(whole, 1):
        assert sent(position) == whole[after:]
    path.write_text(f"{path.read_text()}train: {{weight: w}}\n")
    with pytest.raises(DataError, match="other columns are read"):
        sent(whole[0][1])
    path.write_text(path.read_text().replace("train: {weight: w}", "").replace("batch_size: 6", "batch_size: 5"))
    with pytest.raises(DataError, match=r"batch_size: 6 in the checkpoint, 5 now") as other:
        sent(whole[0][1])
    assert other.value.hint == "use the files and settings of the checkpoint, or start a new run"
    for foreign in ("row 7", "7", '{"row": 7}', "{}"):
        with pytest.raises(DataError, match="the ranks have received batches of a data script"):
            sent(foreign)


def test_a_position_stays_short_however_many_columns_are_read(tmp_path: Path) -> None:
    """A position that is longer than MAX_POSITION_BYTES would end the job."""
    names = [f"a_column_with_a_long_name_{number}" for number in range(5000)]
    assert len("".join(names)) > MAX_POSITION_BYTES
    rows = pa.table({name: [1, 2] for name in names})
    pa.parquet.write_table(rows, tmp_path / "wide.parquet")
    reader = RecordReader(open_files(str(tmp_path / "wide.parquet")), 1)
    short = data_compose._short(reader.state_dict()["of"])
    assert len(json.dumps(short)) < 1000


def test_one_process_fits_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path, 1.0)
    fits: list[None] = []
    entered, go = threading.Event(), threading.Event()
    fit = fitting.fit

    def slow(*arguments: object) -> fitting.Fitted:
        fits.append(None)
        entered.set()
        go.wait(20)
        return fit(config, Parts(config))

    monkeypatch.setattr(fitting, "fit", slow)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(fit_once, config, Parts(config), tmp_path / "fits") for _ in range(2)]
        wait_until("a fit", entered.is_set, 10)
        go.set()
        first, second = (each.result(20) for each in found)
    assert len(fits) == 1
    assert first.transform.digest == second.transform.digest and first.rows == second.rows == 10


def test_other_rows_are_fitted_again(tmp_path: Path) -> None:
    first = fit_once(write(tmp_path, 1.0), Parts(write(tmp_path, 1.0)), tmp_path / "fits")
    config = write(tmp_path, 5.0)  # a file of the same name and size
    second = fit_once(config, Parts(config), tmp_path / "fits")
    assert first.transform.digest != second.transform.digest
    assert second.transform.digest == fitting.fit(config, Parts(config)).transform.digest
    assert len([*(tmp_path / "fits").glob("*.json")]) == 1


def test_a_damaged_fit_is_named(tmp_path: Path) -> None:
    config = write(tmp_path, 1.0)
    fit_once(config, Parts(config), tmp_path / "fits")
    (path,) = (tmp_path / "fits").glob("*.json")
    for damaged in ("{", '{"transform": "{}", "rows": 10}'):
        path.write_text(damaged)
        with pytest.raises(StorageError, match=path.name) as error:
            fit_once(config, Parts(config), tmp_path / "fits")
        assert error.value.hint == f"remove the file to fit again: rm {path}"
