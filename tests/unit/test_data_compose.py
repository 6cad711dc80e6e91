"""Data-compose of a persia.yml: the batches of the trainer, divided among ranks; a fit that processes share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from waiting import wait_until

from persia.config import Config, load_config
from persia.errors import StorageError
from persia.trainer import fitting
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
