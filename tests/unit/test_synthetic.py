"""Tests whether data limits a run: random batches without reading, and the speed of reading by batch size."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from test_profile import verb  # noqa: F401 - a fixture
from trainer_files import config_of, fit, write_clicks, write_config

from persia.data.records import RecordReader
from persia.errors import ConfigError, DataError
from persia.trainer import StepReport, data_bench
from persia.trainer.synthetic import POOL


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let each batch of a reader take 200 ms, and return the list of batch sizes."""
    read: list[int] = []
    plain = RecordReader.__iter__

    def slowly(self: RecordReader) -> Iterator[pa.RecordBatch]:
        for rows in plain(self):
            time.sleep(0.2)
            read.append(rows.num_rows)
            yield rows

    monkeypatch.setattr(RecordReader, "__iter__", slowly)
    return read


@pytest.mark.row("S3-13")
def test_random_batches_isolate_slow_data(tmp_path: Path, slow: list[int]) -> None:
    plan = {"split": {"fractions": [1.0, 0.0, 0.0]}}
    shares = {}
    for synthetic in (False, True):
        slow.clear()
        trainer, reports = fit(config_of(tmp_path, data={**plan, "synthetic": synthetic}, run={"log_every": 1}))
        steps = [each for each in reports if isinstance(each, StepReport)]
        assert steps[-1].step == steps[-1].total_steps == 16
        shares[synthetic] = sum(each.shares["data"] for each in steps[2:]) / len(steps[2:])
        assert trainer.folder is not None
        assert trainer.folder.path == tmp_path / "runs" / ("synthetic/one" if synthetic else "one")
    assert shares[False] > 0.4 > 0.1 > shares[True], shares
    assert (tmp_path / "runs" / "LATEST").read_text() == "one\n"
    assert (tmp_path / "runs" / "synthetic" / "one" / "checkpoints").is_dir()
    assert POOL < 16


def test_a_real_run_is_not_resumed_with_random_rows(
    tmp_path: Path,
    verb: Callable[..., str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_clicks(tmp_path / "clicks.parquet", 500)
    config = str(write_config(tmp_path, checkpoint={"dir": str(tmp_path / "saves")}))
    verb("train", config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "saves" / "one").rglob("*")}
    out = verb("train", config, "--resume", "--set", "data.synthetic=true", code=2)
    assert "data.synthetic: False in the run, True now" in out
    verb("train", config, "--set", "data.synthetic=true")
    assert (tmp_path / "saves" / "synthetic" / "one").is_dir()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "saves" / "one").rglob("*")} == before
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "job"))
    with pytest.raises(ConfigError, match="data.synthetic: found true, allowed: false in a job"):
        fit(config_of(tmp_path, data={"synthetic": True}))


@pytest.mark.row("S3-17")
def test_the_speed_of_each_batch_size_is_shown(
    tmp_path: Path,
    verb: Callable[..., str],  # noqa: F811
    slow: list[int],
) -> None:
    write_clicks(tmp_path / "clicks.parquet", 3000)
    config = str(write_config(tmp_path))
    out = verb("data", "bench", config, "--sweep", "--seconds", "0.1")
    lines = [line.split()[1::2] for line in out.splitlines() if line.startswith("│")]
    sizes = [int(line[0].replace(",", "")) for line in lines]
    assert sizes == sorted({128, *data_bench.SIZES})
    assert "data.batch_size 128 reads" in out and ": set " in out  # each batch takes 80 ms
    alone = verb("data", "bench", config, "--seconds", "0.1", "--set", "data.batch_size=64")
    assert alone.count("│") == 5 * 1 and "give" not in alone


def test_a_value_that_cannot_be_used_has_its_file_and_row(
    tmp_path: Path,
    verb: Callable[..., str],  # noqa: F811
) -> None:
    path = write_clicks(tmp_path / "clicks.parquet", 500)
    table = pyarrow.parquet.read_table(path)
    labels = table["label"].to_pylist()
    labels[321] = 2
    index = table.column_names.index("label")
    pyarrow.parquet.write_table(table.set_column(index, "label", pa.array(labels)), path)
    with pytest.raises(DataError, match=r"(?s)clicks\.parquet.*row 322.*0 or 1"):
        fit(config_of(tmp_path, data={"synthetic": True, "split": {"fractions": [1.0, 0.0, 0.0]}}))
    out = verb("data", "bench", str(tmp_path / "persia.yml"), "--seconds", "0.1", code=2)
    assert "clicks.parquet" in out and "row 322" in out


def test_the_advice_keeps_a_size_that_is_fast_enough() -> None:
    speeds = [data_bench.Speed(size, rows, 1.0, 10) for size, rows in ((64, 50), (128, 95), (256, 100), (512, 99))]
    assert data_bench.advice(speeds, 128) == "data.batch_size 128 reads 95% as fast as 256, the fastest: keep it"
    assert "set 128" in data_bench.advice(speeds, 64)
    assert json.dumps([round(each.ms_a_batch) for each in speeds]) == "[100, 100, 100, 100]"
