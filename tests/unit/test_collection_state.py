"""A state dict of a model with a collection refers to rows, and is refused if they differ."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Configure, TinyModel
from small_collection import TABLES, Whole, arrays, collection, rows
from test_training import SLOTS, loss_fn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, but not explicitly

from persia.backend.local import LocalBackend
from persia.ctx import eval_ctx
from persia.embedding.optim import SGD
from persia.errors import CheckpointError
from persia.nn import EmbeddingCollection
from persia.nn.reference import RowsVersion
from persia.nn.session import Session

KEY = "tables._extra_state"


def make() -> Whole:
    torch.manual_seed(1)
    return Whole(TinyModel(), collection(SGD(1.0)))


def train(whole: Any, count: int = 3) -> None:
    dense_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for number in range(count):
        features, dense, label = arrays(number)
        loss_fn(whole(features, dense), label).backward()
        dense_optimizer.step()
        dense_optimizer.zero_grad()


def predict(whole: Any) -> torch.Tensor:
    features, dense, _ = arrays(99)
    with torch.no_grad():
        output: torch.Tensor = whole(features, dense)
    return output.clone()


def test_a_state_dict_alone_is_refused_by_another_collection(tmp_path: Path) -> None:
    whole = make()
    train(whole)
    torch.save(whole.state_dict(), tmp_path / "model.pt")
    other = make()
    for options in ({}, {"strict": False}):
        with pytest.raises(
            CheckpointError, match=r"after step 3; .* has rows after step 0.*save\(DIR, model=.*collection.load"
        ):
            other.load_state_dict(torch.load(tmp_path / "model.pt"), **options)


@pytest.mark.parametrize("how", ["in the checkpoint", "beside it", "after it"])
def test_a_state_dict_is_taken_with_the_rows_of_its_checkpoint(tmp_path: Path, how: str) -> None:
    whole = make()
    train(whole)
    if how == "beside it":
        torch.save(whole.state_dict(), tmp_path / "model.pt")
    whole.tables.save(tmp_path / "checkpoint", **({"model": whole.state_dict()} if how == "in the checkpoint" else {}))
    if how == "after it":
        torch.save(whole.state_dict(), tmp_path / "model.pt")
    expected = predict(whole)
    train(whole)
    other = make()
    train(other, 1)
    loaded = other.tables.load(tmp_path / "checkpoint")
    state = loaded.state("model.pt") if how == "in the checkpoint" else torch.load(tmp_path / "model.pt")
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(predict(other), expected)
    train(other, 1)
    with pytest.raises(CheckpointError, match="does not belong to the rows"):
        other.load_state_dict(state)


def test_the_best_state_dict_of_a_training_is_refused_later(tmp_path: Path) -> None:
    """Early stopping restores the dense weights, but not the rows."""
    whole = make()
    train(whole)
    best = copy.deepcopy(whole.state_dict())
    best_on_cpu = {key: value.detach().cpu().clone() for key, value in whole.state_dict().items()}
    expected = predict(whole)
    whole.load_state_dict(best)  # nothing was trained since
    whole.tables.save(tmp_path / "best")
    train(whole, 2)
    for state in (best, best_on_cpu):
        with pytest.raises(CheckpointError, match="rows after step 3; .* has rows after step 5"):
            whole.load_state_dict(state)
    whole.tables.load(tmp_path / "best")
    whole.load_state_dict(best_on_cpu)
    assert torch.equal(predict(whole), expected)


def test_trainings_that_share_a_beginning_are_told_apart(tmp_path: Path) -> None:
    whole = make()
    train(whole)
    whole.tables.save(tmp_path / "checkpoint")
    whole.tables.load(tmp_path / "checkpoint")
    train(whole, 2)
    one = whole.state_dict()
    whole.tables.load(tmp_path / "checkpoint")
    train(whole, 2)
    with pytest.raises(CheckpointError, match="does not belong to the rows"):
        whole.load_state_dict(one)


def test_models_that_were_not_trained_may_share_a_state_dict() -> None:
    one, other = make(), make()
    assert str(other.load_state_dict(one.state_dict())) == "<All keys matched successfully>"


def test_a_state_dict_of_an_older_version_loads_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    whole = make()
    train(whole)
    old = {key: value for key, value in whole.state_dict().items() if key != KEY}
    make().load_state_dict(old)
    (message,) = (record.message for record in caplog.records if "no reference" in record.message)
    assert KEY in message


def test_a_context_loads_a_state_dict_of_an_older_version(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    whole = make()
    with eval_ctx() as ctx:
        ctx.dump_torch_state_dict(whole, tmp_path, "new.pt")
        ctx.load_torch_state_dict(whole, tmp_path / "new.pt")
        torch.save({key: value for key, value in whole.state_dict().items() if key != KEY}, tmp_path / "old.pt")
        ctx.load_torch_state_dict(whole, tmp_path / "old.pt")


def test_a_reference_that_is_something_else_is_refused() -> None:
    whole = make()
    for wrong in (torch.zeros(3), torch.zeros(25), {"rows": 1}, None):
        with pytest.raises(CheckpointError, match="no reference to rows"):
            whole.load_state_dict({**whole.state_dict(), KEY: wrong})


def test_ranks_may_name_the_same_rows_differently() -> None:
    """Each rank takes a state dict before rank 0 writes a checkpoint."""
    ranks = [RowsVersion(), RowsVersion()]
    references = []
    for rank in ranks:
        rank.changed()
        references.append(rank.reference(7))
    names = [name for rank in ranks for name in rank.names()]
    loaded = RowsVersion()
    loaded.set(names)
    for reference in references:
        loaded.check(reference, 7)
        loaded.check(reference.half(), 7)
    with pytest.raises(CheckpointError, match="does not belong to the rows"):
        ranks[1].check(references[0], 7)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch._dynamo calls it
@pytest.mark.parametrize("how", ["ddp", "compile"])
def test_a_wrapped_model_is_checked_too(how: str, tmp_path: Path) -> None:
    if how == "ddp":
        store = FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole = make()
        wrapped: Any = (
            torch.nn.parallel.DistributedDataParallel(whole)
            if how == "ddp"
            else torch.compile(whole, backend="aot_eager")
        )
        train(wrapped)
        best = copy.deepcopy(wrapped.state_dict())
        wrapped.load_state_dict(best)
        train(wrapped, 1)
        with pytest.raises(CheckpointError, match="does not belong to the rows"):
            wrapped.load_state_dict(best)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert len(rows(whole.tables)) == 2


@pytest.mark.parametrize("others", [True, False])
def test_a_skipped_step_leaves_the_rows_only_where_no_other_rank_pushes(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    whole = make()
    train(whole)
    state = whole.state_dict()
    features, dense, label = arrays(7)
    loss = loss_fn(whole(features, dense), label) * float("nan")
    with monkeypatch.context() as patch:
        if others:
            patch.setattr("persia.nn.session.run.peers", object)
        loss.backward()
    assert whole.tables.skipped == 1
    if others:  # other ranks may have pushed in this step
        with pytest.raises(CheckpointError, match="does not belong to the rows"):
            whole.load_state_dict(state)
    else:
        whole.load_state_dict(state)


def test_whether_rows_on_servers_are_those_of_a_state_dict_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process only evaluates rows that another process trains."""
    whole = make()
    train(whole)
    state = whole.state_dict()
    here = Session._open_backend
    monkeypatch.setattr(Session, "_open_backend", lambda _, configuration, device: LocalBackend(configuration, device))
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://nowhere:4222")
    evaluates = Whole(TinyModel(), EmbeddingCollection(TABLES, None))
    trains = Whole(TinyModel(), collection(SGD(1.0)))
    monkeypatch.delenv("PERSIA_NATS_URL")
    monkeypatch.setattr(Session, "_open_backend", here)
    evaluates.load_state_dict(state)
    (message,) = (record.message for record in caplog.records if "cannot determine whether" in record.message)
    assert "saved after step 3" in message
    with pytest.raises(CheckpointError, match="does not belong to the rows"):
        trains.load_state_dict(state)
    trains.tables.close()
    evaluates.tables.close()
