"""A loop that never trains is reported: gradients are not pushed, or forward passes have no backward pass."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Batches, Configure
from small_collection import arrays, collection
from test_training import SLOTS, loss_fn, make, train

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.errors import DataError, UsageError


def of(log: list[str], text: str) -> list[str]:
    return [message for message in log if text in message]


Step = Callable[[TrainCtx, torch.Tensor], object]


def own_backward(ctx: TrainCtx, loss: torch.Tensor) -> None:
    """Run the calls of a plain torch loop."""
    loss.backward()  # type: ignore[no-untyped-call]
    ctx.dense_optimizer.step()
    ctx.dense_optimizer.zero_grad()


def no_backward(ctx: TrainCtx, loss: torch.Tensor) -> None:
    """Drop the loss."""


def run(ctx: TrainCtx, step: Step, count: int = 10) -> None:
    for batch in DataLoader(Batches(count)):
        output, labels = ctx.forward(batch)
        step(ctx, loss_fn(output, labels[0]))


@pytest.mark.parametrize("leave", [False, True])
def test_a_backward_of_torch_in_place_of_ours_is_named(configure: Configure, log: list[str], leave: bool) -> None:
    configure(SLOTS)

    def step(ctx: TrainCtx, loss: torch.Tensor) -> None:
        own_backward(ctx, loss)
        seen.append(len(of(log, "WARNING")))

    seen: list[int] = []
    text = r"on none of \d+ batches.*ctx.backward\(loss\).*instead of loss.backward"
    with pytest.raises(UsageError, match=text), make() as ctx:
        for batch in DataLoader(Batches(10)):
            output, labels = ctx.forward(batch)
            step(ctx, loss_fn(output, labels[0]))
            if leave:
                break
    if leave:
        return
    assert seen[:2] == [0, 1], "at the second forward"
    early, late = of(log, "WARNING")
    assert "step 1: the gradients of its embeddings were computed, but not pushed" in early
    assert "0 of 10 batches were trained on" in late


def test_forwards_without_a_backward_are_named(configure: Configure, log: list[str]) -> None:
    configure(SLOTS)
    with make() as ctx:
        run(ctx, no_backward)
    early, late = of(log, "WARNING")
    assert "step 3: the last 3 forward passes were not followed by ctx.backward(loss)" in early
    assert "0 of 10 batches were trained on" in late


def test_an_error_that_leaves_the_context_is_not_replaced(configure: Configure) -> None:
    configure(SLOTS)

    def fail(ctx: TrainCtx, loss: torch.Tensor) -> None:
        own_backward(ctx, loss)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), make() as ctx:
        run(ctx, fail)


def test_how_many_batches_were_trained_on_is_logged(configure: Configure, log: list[str]) -> None:
    """An occasional batch without a backward pass, an evaluation, and an early end of a loop are not mistakes."""
    configure(SLOTS)

    def most(ctx: TrainCtx, loss: torch.Tensor) -> None:
        numbers.append(len(numbers))
        if numbers[-1] % 3:
            ctx.backward(loss * float("nan") if numbers[-1] == 4 else loss)

    numbers: list[int] = []
    with make() as ctx:
        train(ctx, DataLoader(Batches(10)))
        with eval_ctx(model=ctx.model) as evaluation:
            for batch in DataLoader(Batches(5)):
                evaluation.forward(batch)
        train(ctx, DataLoader(Batches(10)), 4)
        assert of(log, "were trained on") == [
            "INFO the training loop has ended: 10 of 10 batches were trained on",
            "INFO the training loop has ended: 4 of 4 batches were trained on",
        ]
        with torch.no_grad():
            run(ctx, no_backward)
        assert not of(log, "WARNING")
        run(ctx, most)
    text = "WARNING the training loop has ended: 5 of 10 batches were trained on; 4 had no ctx.backward(loss), 1 was"
    assert of(log, "WARNING the training")[0].startswith(text)
    assert len(of(log, "WARNING")) == 2, "the skipped step and the end"


def test_forwards_of_a_collection_that_are_dropped_are_named(log: list[str]) -> None:
    """An evaluation that leaves the model in training mode drops forward passes."""
    tables = collection()
    for number in range(10):
        tables(arrays(number)[0])["a"].detach().sum()
    (early,) = of(log, "WARNING")
    assert "the last 3 forward passes in training mode were not followed by backward()" in early
    tables.close()
    assert of(log, "closed") == [
        "WARNING EmbeddingCollection is closed: no row was updated (forward passes: 10, none with a backward pass)"
    ]


def test_forwards_that_wait_for_a_backward_that_never_comes_are_named() -> None:
    tables = collection(staleness=3)
    losses = [tables(arrays(number)[0])["a"].sum() for number in range(3)]
    none = r"staleness=3 allows no more \(no forward pass has had a backward pass\).*loss\.item\(\)"
    with pytest.raises(UsageError, match=none):
        tables(arrays(3)[0])
    losses.pop().backward()
    losses.append(tables(arrays(3)[0])["a"].sum())
    with pytest.raises(UsageError, match="staleness=3 allows no more; call backward"):
        tables(arrays(3)[0])


def test_backwards_of_a_collection_are_counted(log: list[str]) -> None:
    tables = collection()
    for number in range(12):
        loss = tables(arrays(number)[0])["a"].sum()
        if number % 3:
            loss.backward()
        with torch.no_grad():
            tables(arrays(number)[0])
    tables.close()
    assert not [message for message in of(log, "WARNING") if "evaluation: " not in message]
    assert of(log, "closed") == ["INFO EmbeddingCollection is closed: 8 of 12 forward passes had a backward pass"]
    log.clear()
    unused = collection()
    unused.close()
    forgotten = collection()
    forgotten(arrays(0)[0])["a"].sum().backward()
    del forgotten
    gc.collect()
    assert of(log, "closed") == ["INFO EmbeddingCollection is closed: 1 of 1 forward passes had a backward pass"]


def test_batches_that_a_collection_refuses_are_no_forwards(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.nn.session.Session._is_sound", lambda _: True)
    tables = collection()
    with monkeypatch.context() as patch:
        patch.setattr(type(tables._session), "_loop", lambda _: Refusing())
        for number in range(10):
            with pytest.raises(DataError, match="too many ids"):
                tables(arrays(number)[0])
    tables.close()
    assert not of(log, "WARNING") and not of(log, "closed")


class Refusing:
    """A pipeline that refuses every batch."""

    def feed(self, batch: object) -> bool:
        return True

    def next(self, timeout_s: float) -> None:
        raise DataError("too many ids")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_before_ours_is_the_named_cause(configure: Configure, retain: bool) -> None:
    configure(SLOTS)
    with make() as ctx:
        for batch in DataLoader(Batches(3)):
            output, labels = ctx.forward(batch)
            loss = loss_fn(output, labels[0])
            loss.backward(retain_graph=retain)
            if retain:  # a loss of two parts may be intended
                ctx.backward(loss)
                continue
            with pytest.raises(UsageError, match=r"loss.backward\(\) was called on this loss before.*remove loss"):
                ctx.backward(loss)
            break


@pytest.mark.parametrize("dump", ["dump_checkpoint", "dump_embedding"])
def test_a_checkpoint_of_a_loop_without_a_backward_is_a_warning(
    configure: Configure, tmp_path: Path, log: list[str], dump: str
) -> None:
    configure(SLOTS)
    with make() as ctx:
        getattr(ctx, dump)(tmp_path / "before")
        run(ctx, no_backward, 2)
        getattr(ctx, dump)(tmp_path / "nothing")
        assert len(of(log, "WARNING the model was not trained before this checkpoint: none of the 2 batches")) == 1
        train(ctx, DataLoader(Batches(2)))
        getattr(ctx, dump)(tmp_path / "something")
    assert len(of(log, "the model was not trained before this checkpoint")) == 1


def test_a_checkpoint_of_a_collection_without_a_backward_is_a_warning(tmp_path: Path, log: list[str]) -> None:
    tables = collection()
    tables.save(tmp_path / "before")
    tables(arrays(0)[0])
    tables.save(tmp_path / "nothing")
    found = of(log, "WARNING the model was not trained before this checkpoint (forward passes: 1, none with a backward")
    assert len(found) == 1
    tables(arrays(1)[0])["a"].sum().backward()
    tables.save(tmp_path / "something")
    assert len(of(log, "the model was not trained before this checkpoint")) == 1
    tables.close()
