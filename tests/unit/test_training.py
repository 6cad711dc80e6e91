"""Training in the embedded mode: equal to torch, reproducible, and safe to interrupt."""

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Batches, Configure, TinyModel, insert_rows
from torch.utils.dlpack import from_dlpack
from waiting import wait_until

from persia.ctx import EmbeddingCtx, TrainCtx, cnt_ctx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    PersiaBatch,
)
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.errors import NonFiniteError

SLOTS = "a: {dim: 4}\nb: {dim: 4}"
loss_fn = torch.nn.BCEWithLogitsLoss()


def train(ctx: TrainCtx, loader: DataLoader, steps: int | None = None) -> list[float]:
    losses = []
    for batch in loader:
        output, labels = ctx.forward(batch)
        losses.append(float(ctx.backward(loss_fn(output, labels[0]))))
        if steps is not None and len(losses) == steps:
            break
    return losses


def leave_loops(ctx: TrainCtx, loader: DataLoader) -> list[int]:
    """Leave three loops at their fourth batch, without training on it. Return the labels of the trained batches."""
    trained = []
    for _ in range(3):
        for taken, batch in enumerate(loader):
            if taken == 3:
                break
            output, labels = ctx.forward(batch)
            ctx.backward(output.sum())
            trained.append(int(labels[0][0]))
    return trained


def make(seed: int = 1, optimizer: Optimizer | None = None, **kwargs: object) -> TrainCtx:
    torch.manual_seed(seed)
    model = TinyModel()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainCtx(
        optimizer or SGD(0.1),
        dense,
        mixed_precision=False,
        model=model,
        embedding_config=EmbeddingConfig((-0.1, 0.1)),
        **kwargs,  # type: ignore[arg-type]
    )


def rows(ctx: EmbeddingCtx, count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ids 0 … count - 1 of both slots; missing ones as zeros."""
    ids = np.arange(count, dtype=np.uint64)
    batch = PersiaBatch([IDTypeFeatureWithSingleID("a", ids), IDTypeFeatureWithSingleID("b", ids)], requires_grad=False)
    a, b = ctx.get_embedding_from_data(batch).embeddings()
    return from_dlpack(a), from_dlpack(b)


def everything(ctx: TrainCtx) -> bytes:
    assert ctx.model is not None
    tensors = [*rows(ctx), *(p.detach() for p in ctx.model.parameters())]
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def store_threads() -> int:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has ended meanwhile
            names.append(path.read_text())
    return sum(name.startswith("persia-store-") for name in names)


def test_threads_that_divide_requests_change_no_bit(configure: Configure, tmp_path: Path) -> None:
    """Each request has more ids than one thread processes alone, and rows are evicted."""
    found = []
    for threads in (1, 3):
        configure(SLOTS)
        section = f"{{capacity: 30_000, request_threads: {threads}}}"
        (tmp_path / "global_config.yml").write_text(f"embedding_parameter_server_config: {section}\n")
        with make(optimizer=Adam(0.1)) as ctx:
            expected = threads if threads > 1 else 0  # a thread sets its name after its start
            wait_until(f"{expected} threads of the store", lambda: store_threads() == expected, 10)  # noqa: B023
            train(ctx, DataLoader(Batches(3, batch_size=12_000, ids=40_000), reproducible=True))
            found.append([tensor.numpy().tobytes() for tensor in rows(ctx, 40_000)])
    assert found[0] == found[1]


@pytest.mark.stack
@pytest.mark.parametrize(("pooling", "mode"), [("sum", "sum"), ("mean", "mean")])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_equals_torch_embedding_bag(configure: Configure, pooling: str, mode: str, momentum: float) -> None:
    """With SGD, K = 1 and equal initial rows, 200 steps agree to 1e-5, including ids that repeat in a batch."""
    configure(f"a: {{dim: 4}}\nb: {{dim: 4, pooling: {pooling}}}")
    data = Batches(200, ids=200)
    with make(optimizer=SGD(0.1, momentum=momentum)) as ctx:
        insert_rows(ctx, "ab", range(200))
        start = rows(ctx)
        loader = DataLoader(data, reproducible=True)
        iterator = iter(loader)
        reference = TinyModel()
        reference.load_state_dict(ctx.model.state_dict())  # type: ignore[union-attr]
        bags = [torch.nn.EmbeddingBag(200, 4, mode="sum"), torch.nn.EmbeddingBag(200, 4, mode=mode)]
        dense_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        known = torch.zeros(2, 200, dtype=torch.bool)
        velocity = [torch.zeros(200, 4), torch.zeros(200, 4)]
        for number in range(200):
            batch = next(iterator)
            generator = np.random.default_rng([0, number])
            single = generator.integers(0, 200, 32, dtype=np.uint64)
            lists = [generator.integers(0, 200, generator.integers(0, 4), dtype=np.uint64) for _ in range(32)]
            dense = torch.from_numpy(generator.standard_normal((32, 3), dtype=np.float32))
            flat = [
                torch.from_numpy(single.astype(np.int64)),
                torch.from_numpy(np.concatenate(lists).astype(np.int64)),
            ]
            offsets = torch.tensor(np.cumsum([0, *[len(x) for x in lists][:-1]]))
            for slot in range(2):  # new rows start with the initial weights of Persia
                fresh = torch.zeros(200, dtype=torch.bool)
                fresh[flat[slot]] = True
                fresh &= ~known[slot]
                known[slot] |= fresh
                bags[slot].weight.data[fresh] = start[slot][fresh]
            output, labels = ctx.forward(batch)
            loss = ctx.backward(loss_fn(output, labels[0]))
            embedded = [bags[0](flat[0], torch.arange(32)), bags[1](flat[1], offsets)]
            expected = loss_fn(reference([dense], embedded), labels[0])
            expected.backward()
            dense_optimizer.step()
            dense_optimizer.zero_grad()
            for slot in range(2):
                weight = bags[slot].weight
                assert weight.grad is not None
                touched = torch.zeros(200, dtype=torch.bool)
                touched[flat[slot]] = True
                velocity[slot][touched] = momentum * velocity[slot][touched] + weight.grad[touched]
                weight.data -= 0.1 * torch.where(touched[:, None], velocity[slot], 0)
                weight.grad = None
            assert abs(float(loss) - expected.item()) < 1e-5, number
        iterator.close()  # type: ignore[attr-defined]
        for ours, bag, first, trained in zip(rows(ctx), bags, start, known, strict=True):
            torch.testing.assert_close(ours[trained], bag.weight.data[trained], atol=1e-5, rtol=0)
            assert torch.equal(ours[~trained], first[~trained])


@pytest.mark.stack
def test_pushed_gradients_equal_finite_differences(configure: Configure) -> None:
    """The test sets the rows. With SGD and lr 1, a step subtracts the derivative of the loss from each row."""
    configure("a: {dim: 3}\nb: {dim: 3, sqrt_scaling: true}", groups="shared: [a, b]")
    a = [np.array(x, np.uint64) for x in ([1, 2], [3], [], [2, 2])]
    b = [np.array(x, np.uint64) for x in ([2], [], [4, 4, 1], [3])]
    batch = PersiaBatch([IDTypeFeature("a", a), IDTypeFeature("b", b)], labels=[Label(np.zeros(4, np.float32))])
    target = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 7

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(embeddings, 1)

    class One(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            yield batch

    def loss_of(weights: torch.Tensor) -> torch.Tensor:
        def pool(lists: list[np.ndarray], sqrt: bool) -> torch.Tensor:
            out = []
            for ids in lists:
                total = weights[torch.from_numpy(ids.astype(np.int64))].sum(0)
                out.append(total / max(len(ids), 1) ** 0.5 if sqrt else total)
            return torch.stack(out)

        return torch.sin(torch.cat([pool(a, False), pool(b, True)], 1) * target).sum()

    model = Model()
    with TrainCtx(
        SGD(1.0),
        torch.optim.SGD(model.parameters(), lr=1),
        model=model,
        mixed_precision=False,
        embedding_config=EmbeddingConfig((-0.5, 0.5), weight_bound=0),
    ) as ctx:
        insert_rows(ctx, "ab", range(1, 5))
        for looked in DataLoader(One(), reproducible=True):
            before = torch.zeros(5, 3, dtype=torch.float64)
            before[1:] = shared_rows(ctx)
            output, _ = ctx.forward(looked)
            ctx.backward(torch.sin(output.double() * target).sum())
        after = torch.zeros(5, 3, dtype=torch.float64)
        after[1:] = shared_rows(ctx)
    step = 1e-6
    for row in range(1, 5):
        for column in range(3):
            nudge = torch.zeros(5, 3, dtype=torch.float64)
            nudge[row, column] = step
            slope = (loss_of(before + nudge) - loss_of(before - nudge)) / (2 * step)
            assert abs(float(before[row, column] - after[row, column]) - float(slope)) < 2e-6


def shared_rows(ctx: EmbeddingCtx) -> torch.Tensor:
    ids = np.arange(1, 5, dtype=np.uint64)
    batch = PersiaBatch([IDTypeFeatureWithSingleID("a", ids), IDTypeFeatureWithSingleID("b", ids)], requires_grad=False)
    a, b = (from_dlpack(tensor).double() for tensor in ctx.get_embedding_from_data(batch).embeddings())
    assert torch.equal(a, b), "slots of one group share rows"
    return a


@pytest.mark.stack
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, momentum=0.9), Adagrad(0.1), Adagrad(0.1, vectorwise_shared=True), Adam()]
)
def test_reproducible_runs_are_equal_bit_for_bit(configure: Configure, optimizer: Optimizer) -> None:
    configure(SLOTS)
    results = []
    for _ in range(2):
        with make(optimizer=optimizer) as ctx:
            train(ctx, DataLoader(Batches(60), reproducible=True))
            results.append(everything(ctx))
    assert results[0] == results[1]


def test_the_first_step_of_a_process_is_logged_once(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(SLOTS)
    said: list[str] = []
    monkeypatch.setattr("persia.loop.training._first_done", False)
    monkeypatch.setattr("persia.loop.training._logger.info", lambda text, *values: said.append(text % values))
    for _ in range(2):
        with make() as ctx:
            train(ctx, DataLoader(Batches(3)))
    assert said == ["first step done: step 1"]


def test_another_seed_gives_other_rows(configure: Configure) -> None:
    configure(SLOTS)
    results = []
    for seed in (1, 2):
        with make(seed) as ctx:
            insert_rows(ctx, "ab", range(200))
            results.append(rows(ctx)[0])
    assert results[0].any(1).all() and results[1].any(1).all()
    assert not torch.equal(results[0], results[1])


class Skipping(IterableDataset):
    """Like ``Batches``, but without a state dict, so a resumed run must read and skip batches."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        source = Batches(40)
        for number in range(40):
            yield source.batch(number)


@pytest.mark.stack
@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adagrad(0.1), Adam()])
@pytest.mark.parametrize("capacity", [1_000_000, 256])
def test_resuming_equals_never_stopping(
    configure: Configure, tmp_path: Path, stateful: bool, optimizer: Optimizer, capacity: int
) -> None:
    """The results are bit-identical, even with evictions: a capacity of 256 is one row per shard."""
    configure(SLOTS, capacity=capacity)

    def data() -> IterableDataset:
        return Batches(40) if stateful else Skipping()

    with make(optimizer=optimizer) as ctx:
        for number, batch in enumerate(DataLoader(data(), reproducible=True), 1):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            if number == 15:
                ctx.dump_checkpoint(tmp_path / "ckpt")
        expected = everything(ctx)
        assert ctx.step == 40
    with make(seed=99, optimizer=optimizer) as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        assert ctx.step == 15
        losses = train(ctx, DataLoader(data(), reproducible=True))
        assert len(losses) == 25
        assert everything(ctx) == expected


@pytest.mark.stack
def test_training_learns_with_overlap(configure: Configure) -> None:
    configure(SLOTS)
    with make(optimizer=Adagrad(0.1)) as ctx:
        losses = train(ctx, DataLoader(Batches(300), embedding_staleness=8))
        assert len(losses) == 300
        assert np.mean(losses[-30:]) < 0.9 * np.mean(losses[:30])
        stats = ctx.engine.stats()
        assert stats["max_staleness"] <= 7
        pushes = stats["pushes"]
        assert pushes["rows_pushed"] == pushes["rows_applied"] > 0


def test_evaluation_changes_nothing_and_reads_missing_rows_as_zeros(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(5), reproducible=True))
        before, size = everything(ctx), ctx.get_embedding_size()
        model = ctx.model
        assert model is not None
        modes = [model.training]
        with eval_ctx(model=model) as inner:
            assert cnt_ctx() is inner
            modes.append(model.training)
            for batch in DataLoader(Batches(3, seed=9, ids=100_000)):
                output, _ = inner.forward(batch)
                assert not output.requires_grad
            unknown = PersiaBatch(
                [
                    IDTypeFeatureWithSingleID("a", np.array([10**15], np.uint64)),
                    IDTypeFeature("b", [np.empty(0, np.uint64)]),
                ],
                requires_grad=False,
            )
            _, embeddings, _ = inner.prepare_features(unknown)
            assert all(not tensor.any() for tensor in embeddings)
            again = inner.get_embedding_from_bytes(unknown.to_bytes())
            assert all(not from_dlpack(tensor).any() for tensor in again.embeddings())
        assert [*modes, model.training] == [True, False, True]
        assert (everything(ctx), ctx.get_embedding_size()) == (before, size)
        ctx.clear_embeddings()
        assert ctx.get_embedding_size() == [0]


def test_a_checkpoint_before_backward_is_of_the_step_before(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    optimizer = Adam()
    with make(optimizer=optimizer) as ctx:
        for batch in DataLoader(Batches(20), reproducible=True):
            if batch.step == 11:
                ctx.dump_checkpoint(tmp_path / "ckpt")
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
        expected = everything(ctx)
    with make(seed=5, optimizer=optimizer) as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        assert ctx.step == 10
        train(ctx, DataLoader(Batches(20), reproducible=True))
        assert ctx.step == 20
        assert everything(ctx) == expected


def test_loading_waits_for_pushes_in_flight(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(5)))
        ctx.dump_embedding(tmp_path / "rows")
        expected = [tensor.clone() for tensor in rows(ctx)]
        for _ in range(5):
            train(ctx, DataLoader(Batches(30, batch_size=512), embedding_staleness=16))
            ctx.load_embedding(tmp_path / "rows")
            assert all(torch.equal(x, y) for x, y in zip(expected, rows(ctx), strict=True))


@pytest.mark.stack
def test_a_nonfinite_step_changes_nothing_and_names_the_slot(
    configure: Configure, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PersiaML's finite check ran once, then never (ARCHITECTURE section 11, defect 6)."""
    configure(SLOTS)
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    with make() as ctx:
        for number, batch in enumerate(DataLoader(Batches(30), reproducible=True)):
            output, labels = ctx.forward(batch)
            loss = loss_fn(output, labels[0])
            before = everything(ctx)
            if number == 21:
                ctx.backward(loss + poison(ctx._embeddings[1]))
                assert everything(ctx) == before
            else:
                ctx.backward(loss)
                assert everything(ctx) != before
    assert "step 22 skipped" in caplog.text
    assert "slot 'b'" in caplog.text


def test_rows_whose_sum_of_gradients_overflows_stay_and_are_told(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(SLOTS)
    with make() as ctx:
        for number, batch in enumerate(DataLoader(Batches(6))):
            output, labels = ctx.forward(batch)
            huge = poison(ctx._embeddings[1], 3e38) if number else 0  # finite, and many samples have an id in common
            ctx.backward(loss_fn(output, labels[0]) + huge)
    found = [line for line in capfd.readouterr().err.splitlines() if "rows were not updated" in line]
    assert [line.split("steps_so_far=")[1] for line in found] == ["1", "2", "4"], found
    assert "step=2 " in found[0] and 'table="b"' in found[0] and "id=" in found[0]


def poison(tensor: torch.Tensor, value: float = float("inf")) -> torch.Tensor:
    """Return 0 with a given gradient, which may be infinite in sample 3."""

    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(())

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(tensor)
            out[3 if math.isinf(value) else ...] = value
            return out

    result: torch.Tensor = Infinite.apply(tensor)
    return result


def test_training_stops_when_no_step_is_finite(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx, pytest.raises(NonFiniteError, match="25 steps in a row.*loss is nan"):
        for batch in DataLoader(Batches(100)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]) * float("nan"))


def test_a_learning_rate_of_zero_freezes_the_rows(configure: Configure) -> None:
    configure(SLOTS)
    optimizer = SGD(0.5)
    with make(optimizer=optimizer) as ctx:
        train(ctx, DataLoader(Batches(3), reproducible=True))
        before = [tensor.clone() for tensor in rows(ctx)]
        optimizer.update_lr(0.0)
        train(ctx, DataLoader(Batches(3), reproducible=True))
        assert all(torch.equal(x, y) for x, y in zip(before, rows(ctx), strict=True))
        optimizer.update_lr(0.1)
        train(ctx, DataLoader(Batches(3), reproducible=True))
        assert not torch.equal(before[0], rows(ctx)[0])
