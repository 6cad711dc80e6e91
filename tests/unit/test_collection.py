"""EmbeddingCollection: bit-identical to TrainCtx, equal to torch to 1e-5, and safe in user loops."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Batches, Configure
from small_collection import IDS, Whole, arrays, bits, collection, fresh, rows, step
from test_training import SLOTS, everything, loss_fn, make, train
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, but not explicitly

from persia.backend.local import LocalBackend
from persia.data import DataLoader
from persia.distributed import run
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.embedding.schedule import LRSchedule
from persia.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    RunLostError,
    UsageError,
)
from persia.nn import EmbeddingCollection, TableConfig


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), Adam(0.01).scheduled(LRSchedule(warmup_steps=9))])
def test_it_equals_train_ctx_bit_for_bit(configure: Configure, optimizer: Optimizer) -> None:
    configure(SLOTS)
    with make(optimizer=optimizer) as ctx:
        losses = train(ctx, DataLoader(Batches(40), reproducible=True))
        expected = everything(ctx)
    model, dense_optimizer = fresh()
    tables = collection(optimizer)
    assert [step(model, tables, dense_optimizer, number) for number in range(40)] == losses
    assert bits(tables, model) == expected
    assert tables.step == 40


class Bags(torch.nn.Module):
    """The same tables in plain torch: ``a`` and ``c`` share a table, ``b`` is a mean, ``d`` is weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Embedding(IDS, 4, sparse=False)
        self.mean = torch.nn.Embedding(IDS, 6)
        self.weighted = torch.nn.Embedding(IDS, 3)

    def forward(self, f: dict[str, Any]) -> dict[str, torch.Tensor]:
        def bag(weight: torch.Tensor, feature: Any, mode: str = "sum") -> torch.Tensor:
            ids, offsets, *weights = feature
            return torch.nn.functional.embedding_bag(
                ids,
                weight,
                offsets,
                mode=mode,
                include_last_offset=True,
                per_sample_weights=weights[0] if weights else None,
            )

        return {
            "a": self.shared(f["a"]),
            "c": bag(self.shared.weight, f["c"]),
            "b": bag(self.mean.weight, f["b"], "mean"),
            "d": bag(self.weighted.weight, f["d"]),
        }


@pytest.mark.stack
def test_it_equals_torch_embedding_bag() -> None:
    """The results of 100 SGD steps agree to 1e-5: shared tables, means, weights, features that the loss ignores."""
    torch.manual_seed(5)
    tables = EmbeddingCollection(
        [
            TableConfig("shared", 4, ["a", "c"]),
            TableConfig("mean", 6, ["b"], pooling="mean"),
            TableConfig("weighted", 3, ["d"]),
        ],
        SGD(0.1),
        EmbeddingConfig((-0.3, 0.3), weight_bound=0),
    )
    bags, generator = Bags(), torch.Generator().manual_seed(1)
    every = torch.arange(IDS)
    lists = (every, torch.arange(IDS + 1))
    made = tables({"a": every, "c": lists, "b": lists, "d": lists})
    torch.autograd.backward(sum(vectors.sum() for vectors in made.values()) * 0)  # inserts every row
    with torch.no_grad():
        start = tables({"a": every, "c": lists, "b": lists, "d": lists})
        assert torch.equal(start["a"], start["c"])
        for name, table in (("a", bags.shared), ("b", bags.mean), ("d", bags.weighted)):
            table.weight.copy_(start[name])
    assert start["a"].any() and start["d"].any()
    reference = torch.optim.SGD(bags.parameters(), lr=0.1)

    def random_lists() -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(0, 5, (16,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        return torch.randint(0, 20, (int(offsets[-1]),), generator=generator), offsets

    for number in range(100):
        weighted = random_lists()
        weights = torch.randn(len(weighted[0]), generator=generator)
        features: dict[str, Any] = {
            "a": torch.randint(0, 20, (16,), generator=generator),
            "c": random_lists(),
            "b": random_lists(),
            "d": (*weighted, weights),
        }
        losses = []
        for module in (tables, bags):
            vectors = module(features)
            used = [vectors[name] for name in ("a", "c", "b", "d") if not (name == "b" and number % 5 == 0)]
            loss = torch.sin(torch.cat(used, 1) * 3).square().mean(1).sum()
            torch.autograd.backward(loss)
            losses.append(loss.item())
        reference.step()
        reference.zero_grad()
        assert losses[0] == pytest.approx(losses[1], abs=1e-5), number
    with torch.no_grad():
        end = tables({"a": every, "c": lists, "b": lists, "d": lists})
    for name, table in (("a", bags.shared), ("b", bags.mean), ("d", bags.weighted)):
        torch.testing.assert_close(end[name], table.weight.detach(), atol=1e-5, rtol=0)


def test_two_forwards_and_one_backward() -> None:
    """A model with two towers over the same tables does this."""
    tables = collection(SGD(1.0))
    ids = torch.arange(6)
    features = {"a": ids, "b": ids}
    tables(features)["a"].sum().backward()
    before = rows(tables, 6)
    one, other = tables(features), tables(features)
    (one["a"].sum() + 2 * other["a"].sum()).backward()
    torch.testing.assert_close(rows(tables, 6)["a"], before["a"] - 3)
    assert torch.equal(rows(tables, 6)["b"], before["b"]), "no gradient, no update"
    assert tables.step == 3


def test_accumulating_gradients_updates_rows_in_each_backward() -> None:
    model, dense_optimizer = fresh()
    tables = collection()
    for part in range(4):
        features, dense, label = arrays(part)
        before = rows(tables)["a"]
        (loss_fn(model([dense], list(tables(features).values())), label) / 4).backward()
        assert not torch.equal(rows(tables)["a"], before)
    dense_optimizer.step()
    assert tables.step == 4


def test_evaluation_changes_nothing() -> None:
    tables = collection()
    model, dense_optimizer = fresh()
    step(model, tables, dense_optimizer, 0)
    before, held = rows(tables), tables.stats()["rows"]
    features = {"a": torch.arange(10_000, 10_032), "b": torch.arange(32)}
    tables.eval()
    vectors = tables(features)
    assert not vectors["a"].requires_grad
    assert not vectors["a"].any()
    tables.train()
    with torch.no_grad():
        assert not tables(features)["b"].requires_grad
    assert tables.stats()["rows"] == held
    assert all(torch.equal(after, before[name]) for name, after in rows(tables).items())


def test_a_step_with_nan_changes_no_row(caplog: pytest.LogCaptureFixture) -> None:
    tables = collection()
    features = arrays(0)[0]
    tables(features)["a"].sum().backward()
    before = rows(tables)
    (tables(features)["b"].sum() * float("nan")).backward()
    assert all(torch.equal(after, before[name]) for name, after in rows(tables).items())
    assert any("feature 'b', sample" in record.message for record in caplog.records)
    assert tables.skipped == 1
    tables(features)["a"].sum().backward()
    assert tables.skipped == 0
    with pytest.raises(NonFiniteError, match="25 steps in a row") as caught:
        for _ in range(25):
            (tables(features)["b"].sum() * float("nan")).backward()
    assert caught.value.hint == "lower the learning rate, or inspect the loss and the batch of this step"


@pytest.mark.stack
@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adam(0.01)])
def test_saving_and_loading_goes_on_bit_for_bit(tmp_path: Path, optimizer: Optimizer) -> None:
    optimizer.update_lr(0.05)
    model, dense_optimizer = fresh()
    tables = collection(optimizer)
    for number in range(10):
        step(model, tables, dense_optimizer, number)
    tables.save(tmp_path / "ckpt", model=model.state_dict())
    for number in range(10, 20):
        step(model, tables, dense_optimizer, number)
    expected = bits(tables, model)
    tables.close()
    model, dense_optimizer = fresh(seed=7)
    optimizer.update_lr(0.5)
    tables = collection(optimizer)
    step(model, tables, dense_optimizer, 99)
    loaded = tables.load(tmp_path / "ckpt")
    model.load_state_dict(loaded.state("model.pt"))
    assert (tables.step, optimizer.lr) == (10, 0.05)
    for number in range(10, 20):
        step(model, tables, dense_optimizer, number)
    assert bits(tables, model) == expected
    waiting = tables(arrays(0)[0])
    with pytest.raises(UsageError, match="cannot load .* forward passes without a backward pass: 1; call"):
        tables.load(tmp_path / "ckpt")
    del waiting
    with pytest.raises(CheckpointError):
        tables.load(tmp_path / "none")


def test_states_of_any_name_are_saved(tmp_path: Path) -> None:
    tables = collection()
    states = {name: {"x": torch.ones(1)} for name in ("embedding", "collection", "model")}
    tables.save(tmp_path / "ckpt", **states)
    loaded = tables.load(tmp_path / "ckpt")
    assert all(loaded.state(f"{name}.pt") == states[name] for name in states)


def test_a_learning_rate_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    tables = collection(SGD(0.1))
    tables(arrays(0)[0])["a"].sum().backward()
    tables.save(tmp_path / "ckpt")
    other = collection(SGD(0.0))
    other(arrays(1)[0])["a"].sum().backward()
    before = rows(other)
    with pytest.raises(CheckpointError, match="collection.state.*created with lr=0"):
        other.load(tmp_path / "ckpt")
    assert all(torch.equal(after, before[name]) for name, after in rows(other).items())
    assert other.step == 1


def test_the_failure_that_ends_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is closed with the error, if a collection cannot begin or is collected after a failed run."""
    ends: list[BaseException | None] = []
    made: weakref.WeakSet[LocalBackend] = weakref.WeakSet()  # backends of other tests may be closed in the meantime
    make, close = LocalBackend.__init__, LocalBackend.close

    def counted(self: LocalBackend, *arguments: Any, **options: Any) -> None:
        made.add(self)
        make(self, *arguments, **options)

    def closed(self: LocalBackend, error: BaseException | None = None) -> None:
        if self in made:
            ends.append(error)
        close(self, error)

    def fails(self: LocalBackend, settings: object) -> None:
        raise ConfigError("as planned")

    monkeypatch.setattr(run._process, "failed", "")  # an earlier test may have failed a run
    monkeypatch.setattr(LocalBackend, "__init__", counted)
    monkeypatch.setattr(LocalBackend, "close", closed)
    tables = collection()
    tables.close()
    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "apply", fails)
        with pytest.raises(ConfigError):
            collection()
    forgotten = collection()
    monkeypatch.setattr(run._process, "failed", "ValueError: as planned")
    del forgotten
    gc.collect()
    assert ends[0] is None
    assert isinstance(ends[1], ConfigError)
    assert isinstance(ends[2], RunLostError) and "ValueError: as planned" in str(ends[2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch._dynamo calls it
@pytest.mark.parametrize("how", ["ddp", "compile"])
def test_it_works_inside_ddp_and_a_compiled_model(how: str, tmp_path: Path) -> None:
    results = []
    for wrapped in (False, True):
        model, dense_optimizer = fresh()
        tables = collection()
        whole: Any = Whole(model, tables)
        assert len(list(whole.parameters())) == len(list(model.parameters()))
        if wrapped and how == "ddp":
            store = FileStore(str(tmp_path / "store"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            whole = torch.nn.parallel.DistributedDataParallel(whole)
        elif wrapped:
            whole = torch.compile(whole, backend="aot_eager")
        try:
            for number in range(10):
                features, dense, label = arrays(number)
                loss_fn(whole(features, dense), label).backward()
                dense_optimizer.step()
                dense_optimizer.zero_grad()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        results.append([*rows(tables).values(), *(parameter.detach().clone() for parameter in model.parameters())])
        assert tables.step == 10
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, atol=1e-6, rtol=0)
