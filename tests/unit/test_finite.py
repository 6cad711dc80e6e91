"""NaN and infinity: the message names tensor, sample, ids and step, and nothing of the step is applied."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Batches, Configure
from test_training import everything, loss_fn, make, poison

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.encoded import sample_ids
from persia.errors import NonFiniteError, UsageError

SLOTS = "a: {dim: 4}\nb: {dim: 4}"
Spoil = Callable[[TrainCtx, torch.Tensor, torch.Tensor], torch.Tensor]


def test_the_ids_of_a_sample_are_read_from_an_encoded_batch() -> None:
    lists = [np.array(each, np.uint64) for each in ([7, 2**64 - 1, 7], [], [5])]
    weights = [np.ones(len(each), np.float32) for each in lists]
    batch = PersiaBatch(
        [
            IDTypeFeature("weighted", lists, weights),
            IDTypeFeature("lists", lists),
            IDTypeFeatureWithSingleID("single", np.array([9, 4, 9], np.uint64)),
        ],
        [NonIDTypeFeature(np.ones((3, 2), np.float32), "x")],
        [Label(np.ones(3, np.float32))],
        meta=b"meta",
    ).to_bytes()
    assert [sample_ids(batch, slot, 0) for slot in ("weighted", "lists", "single", "none")] == [
        *([[7, 2**64 - 1, 7]] * 2),
        [9],
        [],
    ]
    assert [sample_ids(batch, "lists", sample) for sample in (1, 2)] == [[], [5]]
    assert sample_ids(batch, "single", 1) == [4]


def spoil_gradient(ctx: TrainCtx, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    del output
    return loss + poison(ctx._embeddings[0])


def spoil_below(ctx: TrainCtx, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    del output
    return loss + poison(ctx._embeddings[0], float("-inf"))


def spoil_output(ctx: TrainCtx, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    del ctx, loss
    with torch.no_grad():
        output[5] = float("nan")  # the output of the model, not a value that the script computes from it
    return output.sum()


def spoil_weight(ctx: TrainCtx, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    del output
    assert ctx.model is not None
    next(ctx.model.parameters()).data[0, 0] = float("inf")
    return loss * float("nan")


def spoil_dense(ctx: TrainCtx, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    del output
    assert ctx.model is not None
    weight = next(ctx.model.parameters())
    weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), float("nan")))  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.row("S3-24")
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda ctx, output, loss: loss * float("nan"), "the loss is nan"),
        (spoil_output, "the model's output, sample 5, is nan"),
        (spoil_gradient, r"the gradient of slot 'a', sample 3 \(id \d+\), is inf"),
        (spoil_below, r"the gradient of slot 'a', sample 3 \(id \d+\), is -inf"),
        (spoil_dense, r"the gradient of the weight '[\w.]+' of the model, shape \(.*\), is not finite"),
        (spoil_weight, r"the weight '[\w.]+' of the model, shape \(.*\), is not finite"),
    ],
)
def test_a_step_that_is_not_finite_ends_training_before_anything_is_applied(
    configure: Configure, spoil: Spoil, named: str
) -> None:
    configure(SLOTS)
    with make(nonfinite="raise") as ctx:
        iterator = iter(DataLoader(Batches(5), reproducible=True))
        for number, batch in enumerate(iterator):
            output, labels = ctx.forward(batch)
            loss = loss_fn(output, labels[0])
            if number < 2:
                ctx.backward(loss)
                continue
            before = everything(ctx)
            loss = spoil(ctx, output, loss)
            with pytest.raises(NonFiniteError, match=rf"^step 3: {named}; model and rows are unchanged") as caught:
                ctx.backward(loss)
            assert caught.value.step == 3 and "train.nonfinite=skip" in caught.value.hint
            if spoil is not spoil_weight:
                assert everything(ctx) == before
            assert (ctx.step, ctx.skipped_steps) == (2, 0)
            break
        ids = sample_ids(Batches(5).batch(2).to_bytes(), "a", 3)
        assert spoil is not spoil_gradient or ", ".join(map(str, ids)) in str(caught.value)


@pytest.mark.row("S3-24")
def test_a_row_that_is_not_finite_is_the_first_cause(configure: Configure) -> None:
    """The row makes the loss and all gradients NaN."""
    configure(SLOTS)
    with make(nonfinite="raise") as ctx:
        for batch in DataLoader(Batches(1)):
            dense, embeddings, labels = ctx.prepare_features(batch)
            with torch.no_grad():
                embeddings[0][4, 1] = float("nan")
            assert ctx.model is not None
            (number,) = sample_ids(Batches(1).batch(0).to_bytes(), "a", 4)
            loss = loss_fn(ctx.model(dense, embeddings), labels[0])
            with pytest.raises(
                NonFiniteError, match=rf"the looked-up row of slot 'a', sample 4 \(id {number}\), is nan"
            ):
                ctx.backward(loss)


def test_anomaly_detection_names_the_operation(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx, torch.autograd.set_detect_anomaly(True):
        for batch in DataLoader(Batches(1)):
            output, _ = ctx.forward(batch)
            loss = torch.sqrt(output * 0.0).sum() * 0.0
            with (
                pytest.raises(NonFiniteError, match=r"step 1: Function 'SqrtBackward0' returned nan"),
                pytest.warns(UserWarning, match="forward call"),
            ):
                ctx.backward(loss)


@pytest.mark.row("S3-23")
def test_the_norm_is_torchs_and_is_the_one_that_clips(configure: Configure) -> None:
    configure(SLOTS)

    def steps(clip: float | None) -> tuple[list[float], list[float], list[torch.Tensor]]:
        found: list[float] = []
        expected: list[float] = []
        with make(clip_norm=clip) as ctx:
            assert ctx.model is not None
            assert ctx.grad_norm is None
            parameters = list(ctx.model.parameters())
            ctx.dense_optimizer.register_step_pre_hook(
                lambda *_: applied.extend(p.grad.clone() for p in parameters if p.grad is not None)
            )
            for batch in DataLoader(Batches(4), reproducible=True):
                output, labels = ctx.forward(batch)
                loss = loss_fn(output, labels[0])
                gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
                expected.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
                ctx.backward(loss)
                found.append(ctx.grad_norm or 0.0)
        return found, expected, applied

    applied: list[torch.Tensor] = []
    found, expected, _ = steps(None)
    assert found == pytest.approx(expected, rel=1e-5)
    applied = []
    limit = found[0] / 4
    found, expected, applied = steps(limit)
    assert found == pytest.approx(expected, rel=1e-5)  # the norm before clipping
    count = len(applied) // 4
    for step in range(4):
        norm = float(torch.cat([each.flatten() for each in applied[step * count : (step + 1) * count]]).norm())
        assert norm == pytest.approx(min(limit, found[step]), rel=1e-4)


def test_policies_are_checked() -> None:
    wrong: dict[str, Any] = {"nonfinite": "ignore", "clip_norm": 0.0, "precision": "fp8"}
    for name, value in wrong.items():
        with pytest.raises(UsageError, match=f"TrainCtx\\({name}="):
            make(**{name: value})


@pytest.mark.row("S3-23")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_norm_that_is_not_finite_clips_nothing(configure: Configure, precision: str) -> None:
    """Each gradient is finite, but its square is not. Clipping by an infinite norm would make all gradients 0."""
    configure(SLOTS)
    with make(nonfinite="raise", clip_norm=1.0, precision=precision) as ctx:
        assert ctx.model is not None
        weight = next(ctx.model.parameters())
        weight.register_hook(lambda gradient: torch.full_like(gradient, 1e30))  # type: ignore[no-untyped-call]
        (batch,) = DataLoader(Batches(1), reproducible=True)
        before = everything(ctx)
        output, labels = ctx.forward(batch)
        loss = loss_fn(output, labels[0])
        if precision == "fp16":  # treated as an overflow, because a smaller scale may help
            ctx.backward(loss)
            assert ctx.skipped_steps == 1
        else:
            text = "step 1: the norm of the gradients of the model's weights is inf, so they cannot be clipped"
            with pytest.raises(NonFiniteError, match=text):
                ctx.backward(loss)
        assert everything(ctx) == before


def test_a_step_that_is_refused_does_not_unscale_the_next_one(configure: Configure) -> None:
    configure(SLOTS)
    with make(nonfinite="raise", precision="fp16") as ctx:
        for batch in DataLoader(Batches(3), reproducible=True):
            output, labels = ctx.forward(batch)
            loss = loss_fn(output, labels[0])
            if batch.step == 2:
                with pytest.raises(NonFiniteError, match="the loss is nan"):
                    ctx.backward(loss * float("nan"))
                continue
            ctx.backward(loss)
            assert ctx.grad_norm is not None and 0 < ctx.grad_norm < 10
        assert ctx.step == 3


def test_the_sample_is_that_of_the_batch_and_not_of_its_part(configure: Configure) -> None:
    configure(SLOTS)
    with make(nonfinite="raise") as ctx:
        for batch in DataLoader(Batches(1)):
            with pytest.raises(NonFiniteError, match="the model's output, sample 21, is nan"):
                for part in ctx.micro_batches(batch, 8):
                    output, labels = ctx.forward(part)
                    if part.rows.start == 16:
                        with torch.no_grad():
                            output[5] = float("nan")
                    ctx.backward(loss_fn(output, labels[0]) * part.share)
