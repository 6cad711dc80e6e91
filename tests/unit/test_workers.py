"""The keys of reading ahead: ``data.workers``, ``prefetch``, ``persistent`` and ``pin``."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Verb
from trainer_files import config_of, fit, summary, write_clicks, write_config
from waiting import wait_until

from persia.data import StreamingDataset
from persia.errors import DataError
from persia.features import Transform
from persia.trainer import Trainer, batches, data_compose
from persia.trainer.batches import TrainingBatches, Unusual
from persia.trainer.in_order import in_order
from persia.trainer.parts import Parts
from persia.trainer.training import Training

WAIT_S = 60.0


def test_results_are_in_order_while_several_threads_work() -> None:
    """The first item finishes last, because it waits for the third one."""
    third = threading.Event()
    names = set()

    def work(item: int) -> int:
        names.add(threading.current_thread().name)
        if item == 2:
            third.set()
        assert third.wait(WAIT_S)
        return 10 * item

    assert [*in_order(range(20), work, 3)] == [10 * item for item in range(20)]
    assert len(names) > 1 and threading.current_thread().name not in names


def test_one_worker_is_the_thread_that_iterates() -> None:
    names = {*in_order(range(5), lambda item: threading.current_thread().name, 1)}
    assert names == {threading.current_thread().name}


def test_work_is_a_few_items_ahead() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            read.append(item)
            yield item

    results = in_order(items(), lambda item: item, 3)
    assert next(results) == 0 and read == [0, 1, 2, 3]
    assert next(results) == 1 and len(read) == 5
    results.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("persia-worker")]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", ["items", "work"])
def test_an_error_follows_all_results_before_it(workers: int, place: str) -> None:
    def items() -> Iterator[int]:
        for item in range(10):
            if place == "items" and item == 7:
                raise DataError("seven")
            yield item

    def work(item: int) -> int:
        if place == "work" and item == 7:
            raise DataError("seven")
        return item

    found: list[int] = []
    with pytest.raises(DataError, match="seven"):
        found.extend(in_order(items(), work, workers))
    assert found == [*range(7)]


def test_a_section_is_complete_before_the_next_begins() -> None:
    """``persistent: false`` uses sections. Without sections, work on item 4 begins while item 3 waits."""
    for ends in (True, False):
        begun: list[int] = []
        release = threading.Event()

        def work(item: int, begun: list[int] = begun, release: threading.Event = release) -> int:
            begun.append(item)
            if item == 3:
                assert release.wait(WAIT_S)
            return item

        results = in_order(range(8), work, 4, section=(lambda item: item // 4) if ends else None)
        taken: list[int] = []
        thread = threading.Thread(target=taken.extend, args=(results,))
        thread.start()
        first = {0, 1, 2, 3} if ends else {*range(7)}
        wait_until("the work", partial(first.issubset, begun), WAIT_S)
        assert (4 in begun) != ends
        release.set()
        thread.join(WAIT_S)
        assert taken == [*range(8)]


def drawn(dataset: TrainingBatches) -> list[bytes]:
    return [batch.to_bytes() for batch in dataset]


def dataset_of(folder: Path, **data: Any) -> TrainingBatches:
    config = config_of(folder, data={"batch_size": 96, "epochs": 2, **data})
    parts = Parts(config)
    transform: Transform = config.compiled.fit(next(iter(parts.train.reader(2000))))
    return TrainingBatches.of_config(config, parts.train, transform)


@pytest.mark.row("S4-34")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("workers", [2, 5])
def test_batches_do_not_depend_on_the_workers(tmp_path: Path, workers: int, persistent: bool) -> None:
    expected = drawn(dataset_of(tmp_path))
    several = dataset_of(tmp_path, workers=workers, persistent=persistent)
    assert drawn(several) == expected and len(expected) > 10
    assert drawn(several) == expected, "a second pass is the first one again"


@pytest.mark.row("S4-34")
@pytest.mark.parametrize("done", [0, 1, 9, 25])
def test_a_resumed_reader_with_workers_continues_after_the_last_batch(tmp_path: Path, done: int) -> None:
    """The position counts the batches that were yielded, not the batches that workers have prepared."""
    expected = drawn(dataset_of(tmp_path))
    stopped = dataset_of(tmp_path, workers=4)
    iterator = iter(stopped)
    for _ in range(done):
        next(iterator)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = dataset_of(tmp_path, workers=3)
    resumed.load_state_dict(state)
    assert drawn(resumed) == expected[done:]


@pytest.mark.row("S4-34")
def test_a_run_has_equal_bits_with_other_keys_of_reading(tmp_path: Path) -> None:
    results = []
    for number, keys in enumerate(({}, {"workers": 3, "prefetch": 1, "persistent": False, "pin": True})):
        config = config_of(tmp_path, data={"epochs": 2, **keys}, run={"name": f"run-{number}"})
        trainer, _ = fit(config)
        found = summary(trainer)
        found["test"].pop("seconds")
        assert trainer.folder is not None
        newest = max(Path(trainer.folder.saves(config)).glob("step-*"), key=lambda path: int(path.name[5:]))
        results.append((found["test"], (newest / "dense.pt").read_bytes(), found["unusual"]))
    assert results[0] == results[1]
    data = {"epochs": 3, "workers": 2, "prefetch": 8}
    with Trainer(config_of(tmp_path, data=data, run={"name": "run-1"})) as trainer:
        reports = [*trainer.resume(tmp_path / "runs" / "run-1").fit()]
    assert reports and summary(trainer)["status"] == "finished"


@pytest.mark.row("S4-34")
def test_batches_that_are_ready_ahead_are_those_of_the_key(tmp_path: Path) -> None:
    assert dataset_of(tmp_path).buffer_size == 4
    assert dataset_of(tmp_path, prefetch=9).buffer_size == 9


@pytest.mark.row("S4-34")
@pytest.mark.parametrize(("prefetch", "expected"), [(None, 10), (3, 3)])
def test_in_a_job_it_is_the_buffer_of_each_data_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int | None, expected: int
) -> None:
    config = config_of(tmp_path, data={} if prefetch is None else {"prefetch": prefetch})
    with Trainer(config) as trainer:
        trainer.fit()
        training = trainer._training
        assert isinstance(training, Training)
        monkeypatch.setattr(training, "_in_job", True)
        made = training._dataset()
        monkeypatch.setattr(training, "_in_job", False)
    assert isinstance(made, StreamingDataset) and made.buffer_size == expected


@pytest.mark.row("S4-34")
def test_a_data_compose_sends_equal_batches_with_workers(tmp_path: Path) -> None:
    sent = []
    for workers in (1, 4):
        data = {"workers": workers, "batch_size": 100, "epochs": 2, "persistent": workers == 1}
        config = config_of(tmp_path, data=data)
        parts = Parts(config)
        transform = config.compiled.fit(next(iter(parts.train.reader(2000))))
        reader = parts.train.reader(100, shuffle=True, epochs=2)
        unusual = Unusual()
        batches = data_compose._batches(config, parts, reader, transform, 2, unusual)
        sent.append(([(batch.to_bytes(), position) for batch, position in batches], unusual.rows))
    assert sent[0] == sent[1] and len(sent[0][0]) > 20


@pytest.mark.row("S4-34")
@pytest.mark.parametrize(("workers", "persistent"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("module", [batches, data_compose])
def test_the_keys_reach_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, workers: int, persistent: bool
) -> None:
    """The keys take effect in a trainer that reads the file, and in a data-compose."""
    used: list[tuple[int, list[int]]] = []

    def noted(items: Any, work: Any, workers: int, *, section: Any = None) -> Any:
        read = [*items]
        used.append((workers, [] if section is None else sorted({section(item) for item in read})))
        return in_order(iter(read), work, workers, section=section)

    monkeypatch.setattr(module, "in_order", noted)
    data = {"workers": workers, "persistent": persistent, "batch_size": 96, "epochs": 2}
    if module is batches:
        drawn(dataset_of(tmp_path, **data))
    else:
        config = config_of(tmp_path, data=data)
        parts = Parts(config)
        transform = config.compiled.fit(next(iter(parts.train.reader(2000))))
        reader = parts.train.reader(96, shuffle=True, epochs=2)
        assert [*data_compose._batches(config, parts, reader, transform, 1, Unusual())]
    assert used == [(workers, [] if persistent else [0, 1])], "one section for each epoch"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wrong_row_is_named_after_the_batches_before_it(tmp_path: Path, workers: int) -> None:
    table = pq.read_table(write_clicks(tmp_path / "clicks.parquet"))
    labels = table["label"].to_pylist()
    labels[1500] = 7
    table = table.set_column(table.column_names.index("label"), "label", pa.array(labels))
    pq.write_table(table, tmp_path / "clicks.parquet")
    data = {"shuffle": False, "workers": workers, "split": {"fractions": [1, 0, 0]}, "batch_size": 100}
    config = config_of(tmp_path, data=data)
    parts = Parts(config)
    transform = config.compiled.fit(table.slice(0, 1000).combine_chunks().to_batches()[0])
    batches = TrainingBatches.of_config(config, parts.train, transform)
    found: list[int] = []
    with pytest.raises(DataError, match=r"clicks\.parquet: [^$]*, row 1501"):
        found.extend(batch.batch_size for batch in batches)
    assert found == [100] * 15


@pytest.mark.row("S4-34")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"workers": 0}, "data.workers: found `0`, allowed: a whole number from 1 to 256"),
        ({"workers": 257}, "data.workers: found `257`"),
        ({"workers": "all"}, "data.workers: found `all`"),
        ({"prefetch": 0}, "data.prefetch: found `0`, allowed: a whole number from 1 to 1024"),
        ({"persistent": "maybe"}, "data.persistent: found `maybe`, allowed: true, false"),
        ({"pin": False}, "data.pin: found `false`, allowed: true: a batch always goes to a GPU through page-locked"),
        ({"pin": 1}, "data.pin: found `1`, allowed: true, false"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, verb: Verb, keys: dict[str, Any], message: str) -> None:
    errors = verb("config", "check", str(write_config(tmp_path, data=keys)), code=2)[1]
    assert message in errors, errors


@pytest.mark.row("S4-34")
@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        ({"persistent": False}, "data.persistent: has no effect with `workers: 1`"),
        ({"synthetic": True, "workers": 2}, "data.workers: has no effect with `synthetic: true`"),
        ({"workers": 2, "persistent": False, "prefetch": 2, "pin": True}, ""),
    ],
)
def test_keys_without_an_effect_are_a_warning(tmp_path: Path, verb: Verb, keys: dict[str, Any], warning: str) -> None:
    write_clicks(tmp_path / "clicks.parquet", 100)
    errors = verb("config", "check", str(write_config(tmp_path, data=keys)))[1]
    assert warning in errors and ("warning" in errors) == bool(warning), errors


def test_the_measurement_of_reading_uses_the_workers(
    tmp_path: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    from persia.trainer import data_bench

    used: list[int] = []

    def noted(items: Any, work: Any, workers: int) -> Any:
        used.append(workers)
        return in_order(items, work, workers)

    monkeypatch.setattr(data_bench, "in_order", noted)
    write_clicks(tmp_path / "clicks.parquet", 500)
    out, _ = verb("data", "bench", str(write_config(tmp_path)), "--seconds", "0.01", "--set", "data.workers=3")
    assert used == [3] and "128" in out
