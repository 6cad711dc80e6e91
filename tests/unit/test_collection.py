"""EmbeddingCollection: bit-identical to TrainCtx, equal to torch to 1e-5, and safe in user loops."""

import copy
import gc
import importlib
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS, everything, loss_fn, make, train
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is exported, if not explicitly

from persia.backend.local import LocalBackend
from persia.ctx import eval_ctx
from persia.data import DataLoader
from persia.distributed import run
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.embedding.schedule import LRSchedule
from persia.errors import (
    BatchSizeError,
    CheckpointError,
    ConfigError,
    DataError,
    FeatureTypeError,
    NonFiniteError,
    RunLostError,
    UsageError,
)
from persia.nn import EmbeddingCollection, TableConfig

IDS = 200
TABLES = [TableConfig("a", 4, ["a"]), TableConfig("b", 4, ["b"])]
Arrays = tuple[dict[str, Any], torch.Tensor, torch.Tensor]


def arrays(number: int) -> Arrays:
    """Return the features, dense inputs and labels of ``Batches(...).batch(number)``."""
    rng = np.random.default_rng([0, number])
    single = rng.integers(0, IDS, 32, dtype=np.uint64)
    lists = [rng.integers(0, IDS, rng.integers(0, 4), dtype=np.uint64) for _ in range(32)]
    dense = rng.standard_normal((32, 3), dtype=np.float32)
    label = ((single % 3 == 0) | (dense[:, 0] > 1)).astype(np.float32)[:, None]
    offsets = np.cumsum([0, *[len(each) for each in lists]])
    features = {"a": torch.from_numpy(single.astype(np.int64)), "b": (np.concatenate(lists), torch.from_numpy(offsets))}
    return features, torch.from_numpy(dense), torch.from_numpy(label)


def collection(optimizer: Optimizer | None = None, **kwargs: Any) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, optimizer or SGD(0.1), EmbeddingConfig((-0.1, 0.1)), **kwargs)


def step(model: TinyModel, tables: Any, dense_optimizer: torch.optim.Optimizer, number: int) -> float:
    """Run one step of a user loop."""
    features, dense, label = arrays(number)
    loss = loss_fn(model([dense], list(tables(features).values())), label)
    loss.backward()
    dense_optimizer.step()
    dense_optimizer.zero_grad()
    return float(loss.detach())


def rows(tables: EmbeddingCollection, count: int = IDS) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found: dict[str, torch.Tensor] = tables({name: torch.arange(count) for name in ("a", "b")})
    return {name: tensor.clone() for name, tensor in found.items()}


def bits(tables: EmbeddingCollection, model: TinyModel) -> bytes:
    tensors = [*rows(tables).values(), *(parameter.detach() for parameter in model.parameters())]
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def fresh(seed: int = 1) -> tuple[TinyModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = TinyModel()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


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
    """The same tables in plain torch: ``a`` and ``c`` share one, ``b`` is a mean, ``d`` is weighted."""

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
    """100 steps of SGD to 1e-5: shared tables, mean, per-sample weights, features that the loss sometimes ignores."""
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
    """As in a model with two towers over the same tables."""
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


def test_more_forwards_than_the_staleness_are_refused() -> None:
    tables = collection(staleness=2)
    features = arrays(0)[0]
    first, second = tables(features), tables(features)
    with pytest.raises(UsageError, match="2 forwards wait for their backward.*staleness=2"):
        tables(features)
    with torch.no_grad():
        tables(features)
    del second
    gc.collect()
    third = tables(features)  # a dropped forward needs no backward
    (first["a"].sum() + third["a"].sum()).backward()
    tables(features)


def test_a_second_backward_through_one_forward_is_refused() -> None:
    tables = collection()
    loss = tables(arrays(0)[0])["a"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="no gradients can be pushed"):
        loss.backward()


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
    with pytest.raises(NonFiniteError, match="25 steps in a row"):
        for _ in range(25):
            (tables(features)["b"].sum() * float("nan")).backward()


def test_ids_are_what_they_are_in_any_dtype() -> None:
    tables = collection(SGD(1.0))
    for ids in (
        torch.tensor([1, 2]),
        torch.tensor([1, 2], dtype=torch.int32),
        np.array([1, 2], np.uint64),
        np.array([1, 2], np.uint16),
        [1, 2],
        [[1], [2]],
        [np.array([1]), torch.tensor([2])],
        ([1, 2], [0, 1, 2]),
    ):
        tables({"a": ids, "b": ids})["a"].sum().backward()
    assert tables.stats()["rows"]["a"] == 2
    hashes = torch.tensor([-1, 1]).view(torch.uint64)
    tables({"a": hashes, "b": hashes})["a"].sum().backward()
    with torch.no_grad():
        same = np.array([2**64 - 1, 1], np.uint64)
        assert tables({"a": same, "b": same})["a"].any(1).all()
        empty = tables({"a": [[], [1]], "b": ([], [0, 0, 0])})
        assert not empty["a"][0].any() and not empty["b"].any()


def test_mistakes_are_named() -> None:
    tables = collection()
    ids = torch.arange(2)
    for features, error, text in [
        ({"a": ids}, DataError, "missing: b; its tables have a, b"),
        ({"a": ids, "b": ids, "x": ids}, DataError, "unknown: x"),
        (
            {"a": ids.float(), "b": ids},
            FeatureTypeError,
            "'a', ids: want a 1-d array or list of whole numbers.*got a 1-d float32 Tensor",
        ),
        ({"a": ids.reshape(1, 2), "b": ids}, FeatureTypeError, "got a 2-d int64 Tensor"),
        ({"a": [1.0, 2.0], "b": ids}, FeatureTypeError, "'a'.*got float"),
        ({"a": torch.tensor([4, -1]), "b": ids}, DataError, "'a', ids, row 1: -1 is negative"),
        ({"a": [[4], [5, -1]], "b": ids}, DataError, "'a', sample 1: -1 is negative"),
        ({"a": (ids, torch.tensor([0, 1])), "b": ids}, DataError, "include_last_offset=True"),
        ({"a": (ids, torch.tensor([0.0, 2.0])), "b": ids}, FeatureTypeError, "'a', offsets"),
        ({"a": (ids, torch.tensor([0, 2]), torch.ones(2)), "b": ids}, BatchSizeError, "a: 1, b: 2"),
        ({"a": (ids, torch.tensor([0, 1, 2]), torch.ones(1)), "b": ids}, DataError, "1 weights for 2 ids"),
        ({"a": (ids, torch.tensor([0, 1, 2]), torch.ones(2).double()), "b": ids}, FeatureTypeError, "weights.*float32"),
        ({"a": (ids, torch.tensor([0, 1, 2]), torch.ones(2, requires_grad=True)), "b": ids}, UsageError, "detach"),
        (
            {"a": (ids, torch.tensor([0, 1, 2]), torch.ones(2, dtype=torch.bfloat16)), "b": ids},
            FeatureTypeError,
            "'a', weights: want 1-d float32, got 1-d bfloat16",
        ),
    ]:
        with pytest.raises(error, match=text):
            tables(features)
    tables({"a": ids, "b": ids})["a"].sum().backward()  # the collection still works


def test_wrong_tables_are_refused_at_once() -> None:
    wrong = [
        TableConfig("t", 4, ["a"], pooling="max"),
        TableConfig("t", 4, ["a"]),
        TableConfig("u", 4, []),
    ]
    with pytest.raises(ConfigError) as caught:
        EmbeddingCollection(wrong, SGD(0.1))
    for text in (
        "pooling='max'",
        "two tables have the name 't'",
        "'a' is in the tables 't' and 't'",
        "feature_names=[]",
    ):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match=r"(?s)the tables of EmbeddingCollection.*dim: found `0`"):
        EmbeddingCollection([TableConfig("t", 0, ["a"])], SGD(0.1))
    with pytest.raises(ConfigError, match="no table"):
        EmbeddingCollection([], SGD(0.1))
    with pytest.raises(UsageError, match="persia.embedding.optim"):
        EmbeddingCollection(TABLES, torch.optim.SGD([torch.zeros(1)], 0.1))  # type: ignore[arg-type]
    weighted = EmbeddingCollection([TableConfig("t", 4, ["a"], pooling="mean")], SGD(0.1))
    with pytest.raises(DataError, match="pooling='sum'"):
        weighted({"a": (torch.arange(2), torch.tensor([0, 2]), torch.ones(2))})


def test_it_is_made_outside_of_contexts_and_not_copied(configure: Configure) -> None:
    configure(SLOTS)
    with eval_ctx(), pytest.raises(UsageError, match="make it outside"):
        collection()
    tables = collection()
    for spoil in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"save\(\) them instead"):
            spoil(tables)
    tables.close()
    tables.close()
    with pytest.raises(UsageError, match="closed"):
        tables(arrays(0)[0])


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
    with pytest.raises(UsageError, match="1 forwards wait"):
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
    with pytest.raises(CheckpointError, match="collection.state.*made with lr=0"):
        other.load(tmp_path / "ckpt")
    assert all(torch.equal(after, before[name]) for name, after in rows(other).items())
    assert other.step == 1


def test_a_batch_that_is_refused_ends_no_generation() -> None:
    """The engine detects more ids than a look-up may have, before the look-up."""
    tables = collection(SGD(1.0), staleness=2)
    ids = torch.arange(6)
    tables({"a": ids, "b": ids})["a"].sum().backward()
    before, generation = rows(tables, 6), tables._session.engine.generation
    waiting = tables({"a": ids, "b": ids})
    many = torch.arange(1_100_000)
    with pytest.raises(DataError, match="unique ids of the batch"):
        tables({"a": many, "b": many})
    waiting["a"].sum().backward()
    torch.testing.assert_close(rows(tables, 6)["a"], before["a"] - 1)
    assert tables.step == 2
    left = tables({"a": ids, "b": ids})
    for _ in range(2):
        with pytest.raises(DataError, match="unique ids of the batch"):
            tables({"a": many, "b": many})
    tables({"a": ids, "b": ids})["a"].sum().backward()
    with pytest.raises(UsageError, match="no gradients can be pushed"):
        left["a"].sum().backward()
    torch.testing.assert_close(rows(tables, 6)["a"], before["a"] - 2)
    assert (tables.step, tables._session.engine.generation) == (4, generation)


def test_the_failure_that_ends_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it cannot begin, and when it is closed in a run that has failed."""
    ends: list[BaseException | None] = []
    made: weakref.WeakSet[LocalBackend] = weakref.WeakSet()  # those of other tests may be closed in the meantime
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


class Whole(torch.nn.Module):
    """A model with its tables inside."""

    def __init__(self, model: TinyModel, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.model, self.tables = model, tables

    def forward(self, features: dict[str, Any], dense: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model([dense], list(self.tables(features).values()))
        return result


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


def test_it_is_found_under_its_old_path() -> None:
    embedding = importlib.import_module("persia.embedding")
    assert embedding.EmbeddingCollection is EmbeddingCollection
    assert embedding.TableConfig is TableConfig
    with pytest.raises(AttributeError, match="no attribute 'Session'"):
        embedding.Session  # noqa: B018
