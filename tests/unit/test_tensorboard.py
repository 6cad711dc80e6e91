"""The event files of TensorBoard have every number of ``metrics.jsonl``, under its name and step."""

import errno
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_files import config_of, fit, write_clicks

from persia.errors import ConfigError, StorageError
from persia.trainer import Trainer, record

Curves = dict[str, list[tuple[int, float]]]


class Writer:
    """A substitute for torch's writer, which needs a package that the tests lack. It has the flushed numbers."""

    def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step, self.closed = Path(log_dir), purge_step, False
        self.flushed: Curves = defaultdict(list)
        self._waiting: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._waiting.append((tag, value, step))

    def flush(self) -> None:
        for tag, value, step in self._waiting:
            self.flushed[tag].append((step, value))
        self._waiting.clear()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """Return the list of created writers."""
    made: list[Writer] = []

    def make(*arguments: Any, **named: Any) -> Writer:
        made.append(Writer(*arguments, **named))
        return made[-1]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    monkeypatch.setattr(record, "find_spec", lambda _: True)
    return made


BOARD = {"run": {"tensorboard": True}}


def numbers(folder: Path) -> Curves:
    """Return the curves of metrics.jsonl."""
    found: Curves = defaultdict(list)

    def walk(place: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                walk(f"{place}{name}/", value, step)
            elif isinstance(value, int | float) and place + name not in ("step", "best"):
                found[place + name].append((step, value))

    for line in (folder / "metrics.jsonl").read_text().splitlines():
        walk("", content := json.loads(line), content["step"])
    return found


def test_every_number_is_flushed_as_soon_as_it_is_reported(tmp_path: Path, writers: list[Writer]) -> None:
    write_clicks(tmp_path / "clicks.parquet", 1000)
    with Trainer(config_of(tmp_path, **BOARD)) as trainer:
        for _ in trainer.fit():
            assert trainer.folder is not None
            assert writers[0].flushed == numbers(trainer.folder.path)
    (writer,) = writers
    run = tmp_path / "runs" / "one"
    assert writer.folder == run / "tensorboard" and writer.purge_step is None and writer.closed
    assert {"loss", "learning_rate", "samples_per_s", "valid/label/auc", "test/label/auc"} <= {*writer.flushed}


def test_a_resumed_run_drops_later_steps(tmp_path: Path, writers: list[Writer]) -> None:
    write_clicks(tmp_path / "clicks.parquet", 1000)
    fit(config_of(tmp_path, **BOARD))
    with Trainer(config_of(tmp_path, **BOARD, data={"epochs": 2})).resume() as trainer:
        [*trainer.fit()]
    first, second = writers
    last = max(step for step, _ in first.flushed["loss"])
    assert second.purge_step == last + 1 and min(step for step, _ in second.flushed["loss"]) > last


def test_a_full_disk_is_named(tmp_path: Path, writers: list[Writer], monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(_: Writer) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writer, "flush", flush)
    write_clicks(tmp_path / "clicks.parquet", 1000)
    with pytest.raises(StorageError, match="one/tensorboard: No space left on device"):
        fit(config_of(tmp_path, **BOARD))


def test_without_the_package_the_error_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="the package tensorboard is not installed") as caught:
        fit(config_of(tmp_path, **BOARD))
    assert "pip install tensorboard" in caught.value.hint and not (tmp_path / "runs").exists()
