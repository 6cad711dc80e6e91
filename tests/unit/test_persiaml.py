"""Interfaces that PersiaML's scripts use: names, defaults, attributes, and calls that must have an effect."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Batches, Configure, TinyModel

from persia.ctx import BaseCtx, EmbeddingCtx, PreprocessMode, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.distributed import DDPOption
from persia.embedding import data, optim
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import UsageError
from persia.logger import get_default_logger, get_logger, setLogger
from persia.nn import EmbeddingCollection, TableConfig
from persia.prelude import check_pyarray_dtype_valid
from persia.service import get_embedding_worker_services
from persia.utils import find_free_port

SLOTS = "a: {dim: 4}\nb: {dim: 4}"


class Few(IterableDataset):
    """The same batch several times."""

    def __init__(self, batch: PersiaBatch, count: int) -> None:
        super().__init__()
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from [self.batch] * self.count


def test_modules_are_there_after_import_persia_alone() -> None:
    script = """
import persia
persia.ctx.TrainCtx, persia.data.DataLoader, persia.embedding.get_default_embedding_config, persia.utils.setup_seed
persia.embedding.optim.Adagrad, persia.embedding.data.PersiaBatch, persia.logger.get_logger, persia.prelude
persia.service.get_embedding_worker_services, persia.distributed.DDPOption, persia.env.get_rank
from persia.launcher import cli
try:
    persia.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "module 'persia' has no attribute 'nothing'\n"), done.stderr


def test_the_default_logger_takes_a_name_and_options(log: list[str], tmp_path: Path) -> None:
    get_default_logger("nn_worker").warning("started")
    assert log == ["WARNING started"]
    path = tmp_path / "train.log"
    logger = get_default_logger("persiaml_file", log_filename=path, enable_file_logger=True)
    try:
        logger.info("first")
        assert get_logger("persiaml_file") is logger
        assert path.read_text().count("first") == 1
    finally:
        close(logger)


def close(logger: logging.Logger) -> None:
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def test_loggers_write_the_files_that_they_are_asked_for(tmp_path: Path) -> None:
    everything, errors = tmp_path / "all.log", tmp_path / "errors.log"
    for _ in range(2):  # the second call attaches nothing
        logger = setLogger("persiaml_test", logging.DEBUG, str(everything), True, str(errors), True, logging.INFO)
    try:
        logger.debug("small")
        logger.info("usual")
        logger.error("bad")
    finally:
        close(logger)
    assert [line.split()[-1] for line in everything.read_text().splitlines()] == ["small", "usual", "bad"]
    assert [line.split()[-1] for line in errors.read_text().splitlines()] == ["bad"]


def test_reproducible_training_uses_staleness_1_and_says_so(
    configure: Configure, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Batches(1), reproducible=True, embedding_staleness=10)
    assert loader.staleness == 1
    assert DataLoader(Batches(1), reproducible=True).staleness == 1
    assert len(log) == 1 and "embedding_staleness=10" in log[0] and "the staleness is 1" in log[0]
    monkeypatch.setenv("REPRODUCIBLE", "1")
    EmbeddingCollection([TableConfig("a", 4, ["a"])], optim.SGD(0.1), staleness=8)
    assert any("EmbeddingCollection(staleness=8)" in message for message in log)


def test_features_keep_what_they_were_given() -> None:
    ids = [np.array([1, 2], np.uint64), np.array([], np.uint64), np.array([3], np.uint64)]
    assert [each.tolist() for each in IDTypeFeature("a", ids).data] == [[1, 2], [], [3]]
    assert IDTypeFeature("a", []).data == []
    assert IDTypeFeatureWithSingleID("a", np.array([4, 5], np.uint64)).data.tolist() == [4, 5]
    label = Label(np.zeros((3, 1), np.float32))
    assert (len(label), label.batch_size, label.data.shape, label.name) == (3, 3, (3, 1), "label_anonymous")
    assert NonIDTypeFeature(np.zeros(2), name="age").name == "age"
    assert isinstance(label, data.NdarrayDataBase)
    for dtype in data._ND_ARRAY_SUPPORT_TYPE:
        check_pyarray_dtype_valid(data.NdarrayDataBase(np.zeros(1, dtype)).data, np.dtype(dtype))
    with pytest.raises(TypeError, match="float16"):
        check_pyarray_dtype_valid(np.zeros(1, np.float16), np.dtype(np.float16))
    with pytest.raises(TypeError, match="found float64"):
        check_pyarray_dtype_valid(np.zeros(1), np.dtype(np.float32))


def test_optimizers_keep_their_arguments() -> None:
    sgd, adam = optim.SGD(0.1, momentum=0.5, weight_decay=0.25), optim.Adam(betas=(0.5, 0.75), eps=0.5)
    adagrad = optim.Adagrad(initial_accumulator_value=0.5, g_square_momentum=0.25, vectorwise_shared=True)
    assert (sgd.lr, sgd.momentum, sgd.weight_decay) == (0.1, 0.5, 0.25)
    assert (adam.lr, adam.betas, adam.weight_decay, adam.eps) == (1e-3, (0.5, 0.75), 0, 0.5)
    assert (adagrad.lr, adagrad.initial_accumulator_value, adagrad.weight_decay) == (1e-2, 0.5, 0)
    assert (adagrad.g_square_momentum, adagrad.eps, adagrad.vectorwise_shared) == (0.25, 1e-10, True)


def test_ddp_accepts_unused_parameters_as_in_persiaml(log: list[str]) -> None:
    assert DDPOption(backend="gloo").options == {"find_unused_parameters": True}
    assert DDPOption(backend="gloo", find_unused_parameters=False).options == {"find_unused_parameters": False}
    assert not log
    assert DDPOption("file", "gloo", sync_file="/tmp/sync").options == {"find_unused_parameters": True}  # noqa: S108
    assert log[0].endswith("no effect, because rank 0 is found through discovery: sync_file")


def a_batch(*, labels: bool = True) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeature("b", [np.array([1, 2], np.uint64), np.array([3], np.uint64)])],
        labels=[Label(np.ones((2, 1), np.float32))] if labels else None,
        requires_grad=labels,
    )


class Sum(torch.nn.Module):
    """One layer over all embeddings of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        assert [tensor.shape for tensor in embedding_tensors] == [(2, 4)]
        result: torch.Tensor = self.layer(embedding_tensors[0])
        return result


def test_a_batch_may_have_some_of_the_slots(configure: Configure) -> None:
    configure(SLOTS)
    model = Sum()
    with TrainCtx(optim.SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model) as ctx:
        for batch in DataLoader(Few(a_batch(), 3)):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
        assert ctx.get_embedding_size() == [3]


def test_there_are_no_labels_where_a_batch_has_none(configure: Configure) -> None:
    configure(SLOTS)
    for mode, labels in ((PreprocessMode.EVAL, False), (PreprocessMode.INFERENCE, True)):
        with EmbeddingCtx(mode, model=Sum()) as ctx:
            output, found = ctx.forward(a_batch(labels=labels))
            assert output.shape == (2, 1) and found is None
    with eval_ctx(model=Sum()) as ctx:
        assert len(ctx.forward(a_batch())[1]) == 1


def test_a_state_dict_is_not_written_to_a_folder_called_like_a_url(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    monkeypatch.chdir(tmp_path)
    with eval_ctx(model=TinyModel()) as ctx:
        with pytest.raises(UsageError, match="hdfs://host/a: expected a local path"):
            ctx.dump_torch_state_dict(TinyModel(), "hdfs://host/a", "dense.pt")
        with pytest.raises(UsageError, match="load_torch_state_dict: hdfs://host/a/dense.pt"):
            ctx.load_torch_state_dict(TinyModel(), "hdfs://host/a/dense.pt")
    assert not (tmp_path / "hdfs:").exists()


def test_a_negative_device_is_the_cpu() -> None:
    assert BaseCtx(device_id=-1).device_id is None


def test_the_middlewares_of_a_script_outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_embedding_worker_services() == ["embedding_worker:8887"]
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "here:1")
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://127.0.0.1:1")
    assert get_embedding_worker_services() == ["here:1"]
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", " here:1, there:2,")
    assert get_embedding_worker_services() == ["here:1", "there:2"]


def test_a_free_port_may_be_asked_for_with_an_interval() -> None:
    assert find_free_port(10000, 2) > 0 and find_free_port(interval=3) > 0


def test_keys_without_effect_are_one_warning(configure: Configure, log: list[str], tmp_path: Path) -> None:
    """Other versions of PersiaML have these keys. PersiaML itself ignores every unknown key."""
    configure(SLOTS)
    (tmp_path / "global_config.yml").write_text(
        "common_config:\n  metrics_config: {enable_metrics: false, push_interval_seconds: 10}\n  job_type: Train\n"
        "embedding_parameter_server_config: {capacity: 1000, full_amount_manager_buffer_size: 1000, capcity: 5}\n"
        "mine: {a: 1}\n"
    )
    with eval_ctx(model=TinyModel()) as ctx:
        assert ctx.get_embedding_size() == [0]
    warnings = [message for message in log if message.startswith("WARNING")]
    assert len(warnings) == 1, warnings
    for key in (
        "push_interval_seconds",
        "job_type",
        "full_amount_manager_buffer_size",
        "mine",
        "did you mean `capacity`",
    ):
        assert key in warnings[0]
    assert "enable_metrics" not in warnings[0]
