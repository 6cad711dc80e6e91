"""``persia.helper``: a whole job for the duration of a ``with`` block."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Batches, TinyModel
from stack import missing
from waiting import is_running

from persia.ctx import DataCtx, TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.optim import SGD
from persia.errors import ConfigError, PersiaError
from persia.helper import PersiaServiceCtx, ensure_persia_service
from persia.service import get_embedding_worker_services

SLOTS = {"slots_config": {"a": {"dim": 4}, "b": {"dim": 4}}}


@pytest.fixture(autouse=True)
def binaries(no_job: None) -> Iterator[None]:
    if reason := missing():
        pytest.skip(reason)
    before = psutil.Process().children()
    yield
    assert not [child for child in psutil.Process().children() if child not in before and is_running(child.pid)]


def send(count: int = 4) -> None:
    with DataCtx() as ctx:
        for number in range(count):
            ctx.send_data(Batches(count).batch(number))


def train() -> list[int]:
    model = TinyModel()
    with TrainCtx(SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), mixed_precision=False, model=model) as ctx:
        for batch in DataLoader(StreamingDataset()):
            output, labels = ctx.forward(batch)
            ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        return ctx.get_embedding_size()


def test_train_here_with_data_from_another_process() -> None:
    assert "PERSIA_NATS_URL" not in os.environ
    with ensure_persia_service(
        data_loader_func=send,
        embedding_config=SLOTS,
        embedding_parameter_replica_num=2,
        embedding_worker_replica_num=2,
    ):
        assert len(get_embedding_worker_services()) == 2
        rows = train()
    assert len(rows) == 2 and all(rows)
    assert not [name for name in os.environ if name.startswith("PERSIA_")]


def test_functions_in_processes_of_their_own(tmp_path: Path) -> None:
    def trainer() -> None:  # a closure, as in usual tests
        (tmp_path / os.environ["RANK"]).write_text(str(sum(train())))

    with PersiaServiceCtx(data_loader_func=send, nn_worker_func=trainer, embedding_config=SLOTS, nproc_per_node=2):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_trainer_that_fails() -> None:
    def trainer() -> None:
        raise ValueError("mine")

    with (
        pytest.raises(PersiaError, match="trainer ended with exit code 1"),
        PersiaServiceCtx(nn_worker_func=trainer, embedding_config=SLOTS),
    ):
        pass


def test_both_or_neither_configuration() -> None:
    with pytest.raises(ConfigError, match="either"):
        PersiaServiceCtx()
    with pytest.raises(ConfigError, match="either"):
        PersiaServiceCtx(embedding_config=SLOTS, embedding_config_path="slots.yml")
