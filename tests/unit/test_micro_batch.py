"""Micro-batches have the gradients of the whole batch, and are halved when memory runs out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Batches, Configure, TinyModel
from test_training import SLOTS, loss_fn, make, rows, train

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.errors import OutOfMemoryError, UsageError
from persia.loop import backward, out_of_memory

CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


def state(ctx: TrainCtx) -> list[torch.Tensor]:
    assert ctx.model is not None
    return [*(each.clone() for each in rows(ctx)), *(p.detach().clone() for p in ctx.model.parameters())]


def in_parts(ctx: TrainCtx, size: int, steps: int = 6) -> list[float]:
    losses = []
    for batch in DataLoader(Batches(steps), reproducible=True):
        total = 0.0
        for part in ctx.micro_batches(batch, size):
            output, labels = ctx.forward(part)
            assert len(output) == part.batch_size == len(labels[0])
            total += float(ctx.backward(loss_fn(output, labels[0]) * part.share))
        losses.append(total)
    return losses


@pytest.mark.row("S4-13")
@pytest.mark.parametrize("slots", [SLOTS, "a: {dim: 4}\nb: {dim: 1, embedding_summation: false, sample_fixed_size: 2}"])
@pytest.mark.parametrize("size", [1, 10, 32, 100])
def test_parts_give_the_loss_and_the_gradients_of_the_batch(configure: Configure, slots: str, size: int) -> None:
    configure(slots)
    results = []
    for parts in (None, size):
        with make() as ctx:
            ctx.model = Flat()  # a raw slot also has 4 columns: 2 positions with a weight and a mask each
            torch.manual_seed(3)
            for weight in ctx.model.parameters():
                torch.nn.init.normal_(weight, std=0.3)
            ctx.dense_optimizer = ctx._backward._dense_optimizer = torch.optim.SGD(ctx.model.parameters(), lr=0.1)
            losses = train(ctx, DataLoader(Batches(6), reproducible=True)) if parts is None else in_parts(ctx, parts)
            ctx.engine.drain()
            pushes = ctx.engine.stats()["pushes"]["rows_pushed"]
            results.append((losses, state(ctx) if slots == SLOTS else [], pushes))
    (losses, whole, pushed), (in_pieces, pieces, pushed_in_pieces) = results
    assert in_pieces == pytest.approx(losses, abs=1e-6)
    assert pushed_in_pieces == pushed > 0  # once for each step
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


class Flat(TinyModel):
    """A model for slots of any shape."""

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return ``[batch, 1]`` logits."""
        return super().forward(non_id_tensors, [tensor.flatten(1) for tensor in embedding_tensors])


def test_a_step_that_was_left_in_its_middle_is_forgotten(configure: Configure) -> None:
    configure(SLOTS)
    results = []
    for leaves in (False, True):
        with make() as ctx:
            for batch in DataLoader(Batches(3), reproducible=True):
                if leaves:
                    part = next(iter(ctx.micro_batches(batch, 8)))
                    output, labels = ctx.forward(part)
                    ctx.backward(loss_fn(output, labels[0]))
                if batch.step == 2:
                    output, labels = ctx.forward(batch)
                    ctx.backward(loss_fn(output, labels[0]))
                    continue
                for part in ctx.micro_batches(batch, 8):
                    output, labels = ctx.forward(part)
                    ctx.backward(loss_fn(output, labels[0]) * part.share)
            results.append(state(ctx))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_forward_of_a_whole_batch_without_a_backward_is_dropped(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, DDP would wait for the backward pass of the dropped forward pass."""
    configure(SLOTS)
    dropped: list[object] = []
    monkeypatch.setattr("persia.ctx.step.drop_step", dropped.append)
    with make() as ctx:
        for batch in DataLoader(Batches(2), reproducible=True):
            if batch.step == 1:
                ctx.forward(batch)
            for part in ctx.micro_batches(batch, 8):
                output, labels = ctx.forward(part)
                ctx.backward(loss_fn(output, labels[0]) * part.share)
            assert dropped == [ctx.model]


def test_what_would_differ_is_refused(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        assert ctx.model is not None
        ctx.model.norm = torch.nn.BatchNorm1d(3)
        for batch in DataLoader(Batches(1)):
            with pytest.raises(UsageError, match="BatchNorm1d 'norm'"):
                next(iter(ctx.micro_batches(batch, 8)))
            assert next(iter(ctx.micro_batches(batch, 32))).is_last
            with pytest.raises(UsageError, match="rows=0"):
                next(iter(ctx.micro_batches(batch, 0)))


# --- memory


def test_one_of_several_ranks_does_not_repeat_the_backward_that_averages(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    with make() as ctx:
        assert ctx.model is not None
        ctx.model = Scarce(ctx.model, [RuntimeError(CPU_TEXT), RuntimeError(CPU_TEXT)], "backward")
        (batch,) = DataLoader(Batches(1))
        for alone in (True, False):
            output, labels = ctx.forward(batch)
            monkeypatch.setattr(type(ctx._backend), "is_alone", alone)
            with pytest.raises(OutOfMemoryError) as caught:
                ctx.backward(loss_fn(output, labels[0]))
            assert caught.value.can_repeat == alone


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_step_that_is_repeated_is_unscaled_once(
    configure: Configure, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out between the division of gradients by the scale and their use."""
    configure(SLOTS)
    total_norm, errors = backward._total_norm, [RuntimeError(CPU_TEXT)]

    def scarce(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        if errors and ctx.step == 1:
            raise errors.pop()
        return total_norm(parameters)

    monkeypatch.setattr(backward, "_total_norm", scarce)
    with make(precision=precision) as ctx:
        norms = []
        for batch in DataLoader(Batches(3), reproducible=True):
            output, labels = ctx.forward(batch)
            try:
                ctx.backward(loss_fn(output, labels[0]))
            except OutOfMemoryError:
                for part in ctx.micro_batches(batch, 16):
                    output, labels = ctx.forward(part)
                    ctx.backward(loss_fn(output, labels[0]) * part.share)
            norms.append(ctx.grad_norm)
        assert not errors and ctx.step == 3 and not ctx.skipped_steps
        assert all(norm is not None and 0 < norm < 10 for norm in norms)


class Fails(torch.autograd.Function):
    """Returns its input. The backward or the forward pass raises an error once for each entry of a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, errors: list[Exception], where: str) -> torch.Tensor:
        ctx.errors, ctx.where = errors, where
        if where == "forward" and errors:
            raise errors.pop()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.where == "backward" and ctx.errors:
            raise ctx.errors.pop()
        return gradient[0], None, None


class Scarce(torch.nn.Module):
    """A model whose forward or backward pass runs out of memory a given number of times."""

    def __init__(self, model: torch.nn.Module, errors: list[Exception], where: str) -> None:
        super().__init__()
        self.model, self.errors, self.where = model, errors, where
        self.large = torch.nn.Parameter(torch.zeros(1 << 18))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return the output of the model."""
        output: torch.Tensor = Fails.apply(self.model(dense, embeddings), self.errors, self.where)
        return output


def real_error() -> Exception:
    """Return the error of a real allocation that is larger than any address space."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return RuntimeError(str(caught.value))


ERRORS: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError(CPU_TEXT),
    real_error,
]


@pytest.mark.row("S3-01")
def test_tensors_that_something_keeps_of_each_step_share_a_line() -> None:
    kept = [torch.ones(256, 1024) for _ in range(40)]
    alone = torch.ones(3, 1024, 1024)
    text = str(out_of_memory.report(RuntimeError("no memory"), 3, 32, [("weight", alone)]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    many = "cpu not named, 40 of them: does a list of the model or the script grow with the steps?"
    assert f"40.0 MiB float32 256x1024 {many}" in lines
    assert "12.0 MiB float32 3x1024x1024 cpu weight" in lines
    assert len(kept) == 40


@pytest.mark.row("S3-01")
@pytest.mark.parametrize("make_error", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_report_names_step_rows_and_the_largest_tensors(
    configure: Configure, make_error: Callable[[], Exception], where: str
) -> None:
    configure(SLOTS)
    error = make_error()
    assert out_of_memory.is_out_of_memory(error)
    with make() as ctx:
        assert ctx.model is not None
        errors: list[Exception] = []
        ctx.model = Scarce(ctx.model, errors, where)
        for batch in DataLoader(Batches(3), reproducible=True):
            output, labels = ctx.forward(batch) if batch.step < 3 or where == "backward" else (None, [])
            if batch.step < 3:
                ctx.backward(loss_fn(output, labels[0]))
                continue
            before = state(ctx)
            errors.append(error)
            with pytest.raises(OutOfMemoryError) as caught:
                if where == "forward":
                    ctx.forward(batch)
                else:
                    ctx.backward(loss_fn(output, labels[0]))
            text = str(caught.value)
            assert text.startswith(f"step 3, 32 rows at a time: {str(error).splitlines()[0]}\nthe largest tensors:\n")
            assert len(text.splitlines()) <= 2 + out_of_memory.LARGEST
            named = "1.0 MiB float32 262144 cpu weight large"
            assert named in [" ".join(line.split()) for line in text.splitlines()]
            assert "micro_batches" in caught.value.hint and "precision='bf16'" in caught.value.hint
            assert all(torch.equal(one, other) for one, other in zip(before, state(ctx), strict=True))
            for part in ctx.micro_batches(batch, 16):  # the step can be repeated
                output, labels = ctx.forward(part)
                ctx.backward(loss_fn(output, labels[0]) * part.share)
        assert ctx.step == 3


def test_other_errors_are_those_of_the_model(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx, pytest.raises(RuntimeError, match="^no idea$"):
        assert ctx.model is not None
        ctx.model = Scarce(ctx.model, [RuntimeError("no idea")], "backward")
        train(ctx, DataLoader(Batches(1)))


def test_a_step_whose_update_fails_cannot_be_repeated(configure: Configure) -> None:
    """When the update fails, the gradients of the step have already been pushed."""
    configure(SLOTS)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with make() as ctx:
        ctx.dense_optimizer.register_step_pre_hook(fail)
        with pytest.raises(OutOfMemoryError) as caught:
            train(ctx, DataLoader(Batches(1)))
        assert not caught.value.can_repeat
