"""A CUDA device gives the same results as the CPU: vectors, gradients, rows, skipped steps, checkpoints."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Batches, Configure, TinyModel
from torch.utils.dlpack import from_dlpack

from persia.ctx import EmbeddingCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD, Adagrad
from persia.nn import EmbeddingCollection, TableConfig

SLOTS = """
    single: {dim: 8}
    summed: {dim: 12}
    mean: {dim: 5, pooling: mean}
    root: {dim: 16, sqrt_scaling: true}
    raw: {dim: 7, embedding_summation: false, sample_fixed_size: 3}
    stack: {dim: 32, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 50}}
    left: {dim: 4}
    right: {dim: 4, pooling: mean}
    half: {dim: 8, dtype: f16}
"""
GROUPS = "both: [left, right]"
NAMES = ["single", "summed", "mean", "root", "raw", "stack", "left", "right", "half"]
loss_fn = torch.nn.BCEWithLogitsLoss()


class Everything(IterableDataset):
    """Batches with every kind of feature, with empty samples, weights, and one frequent id."""

    def __init__(self, count: int, batch_size: int = 64) -> None:
        super().__init__(buffer_size=4)
        self.count, self.batch_size = count, batch_size

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        """Return batch ``number``."""
        rng = np.random.default_rng(number)
        features: list[Any] = [IDTypeFeatureWithSingleID("single", rng.integers(0, 99, self.batch_size, np.uint64))]
        for name in NAMES[1:]:
            lists = [rng.integers(0, 99, rng.integers(0, 6), np.uint64) for _ in range(self.batch_size)]
            lists[3] = np.full(900, 7, np.uint64)  # so many ids that several threads add their gradients
            weights = None
            if name == "summed":
                weights = [rng.standard_normal(len(ids), np.float32) for ids in lists]
            features.append(IDTypeFeature(name, lists, weights))
        dense = rng.standard_normal((self.batch_size, 3), np.float32)
        label = (dense[:, :1] > 0).astype(np.float32)
        return PersiaBatch(features, [NonIDTypeFeature(dense)], [Label(label)], requires_grad=requires_grad)

    def __iter__(self) -> Any:
        for number in range(self.count):
            yield self.batch(number)


class Wide(torch.nn.Module):
    """One layer over all inputs, in float64, so the order of its own sums has no visible effect."""

    def __init__(self) -> None:
        super().__init__()
        width = 3 + 8 + 12 + 5 + 16 + 3 * 8 + 32 + 4 + 4 + 8
        self.layer = torch.nn.Linear(width, 1).double()

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return logits."""
        flat = [tensor.flatten(1).double() for tensor in (*dense, *embeddings)]
        result: torch.Tensor = self.layer(torch.cat(flat, 1))
        return result


def make(device: int | None, model: torch.nn.Module, **options: Any) -> TrainCtx:
    model = model if device is None else model.cuda(device)
    return TrainCtx(
        options.pop("optimizer", Adagrad(0.1)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=options.pop("mixed_precision", False),
        model=model,
        device_id=device,
        embedding_config=EmbeddingConfig((-0.1, 0.1)),
        **options,
    )


def train(ctx: TrainCtx, steps: int) -> list[float]:
    losses = []
    for batch in DataLoader(Everything(steps), reproducible=True):
        output, labels = ctx.forward(batch)
        losses.append(float(ctx.backward(loss_fn(output, labels[0].double()))))
    return losses


def vectors(ctx: EmbeddingCtx) -> list[torch.Tensor]:
    _, embeddings, _ = ctx.prepare_features(Everything(1).batch(0, requires_grad=False))
    return [tensor.cpu() for tensor in embeddings]


def results(device: int | None, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(3)
    with make(device, Wide(), **options) as ctx:
        return train(ctx, 8), vectors(ctx)


def test_the_first_vectors_have_the_bits_of_the_cpu(configure: Configure) -> None:
    configure(SLOTS, groups=GROUPS)
    seen = []
    for device in (None, 0):
        torch.manual_seed(3)
        with make(device, Wide()) as ctx:
            for batch in DataLoader(Everything(1), reproducible=True):
                dense, embeddings, labels = ctx.prepare_features(batch)
                seen.append([tensor.detach().cpu() for tensor in (*dense, *embeddings, *labels)])
                where = {tensor.device.type for tensor in (*dense, *embeddings, *labels)}
                assert where == {"cpu" if device is None else "cuda"}
                batch.discard()
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_training_gives_the_rows_of_the_cpu(configure: Configure) -> None:
    configure(SLOTS, groups=GROUPS)
    (losses, rows), (device_losses, device_rows) = results(None), results(0)
    np.testing.assert_allclose(device_losses, losses, rtol=1e-5)
    for name, one, other in zip(NAMES, rows, device_rows, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3 if name == "half" else 1e-4, atol=1e-5, msg=name)


@pytest.mark.row("S3-06/G")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vectors_of_sixteen_bits_are_those_of_the_cpu_rounded(configure: Configure, dtype: torch.dtype) -> None:
    configure(SLOTS, groups=GROUPS)
    _, rows = results(None)
    _, halves = results(0, embedding_dtype=dtype)
    assert all(tensor.dtype == dtype for tensor in halves)
    # Adagrad's first steps amplify a rounded gradient near zero, so single numbers may differ more than the vectors.
    wanted = {torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    for name, one, other in zip(NAMES, rows, halves, strict=True):
        assert (other.float() - one).norm() <= wanted * one.norm(), name


@pytest.mark.row("S3-06/G", "S3-32/G")
def test_mixed_precision_scales_dense_and_embedding_gradients_together(configure: Configure) -> None:
    configure(SLOTS, groups=GROUPS)
    losses, rows = results(0)
    scaled, scaled_rows = results(0, mixed_precision=True, grad_scalar_update_factor=1000)
    np.testing.assert_allclose(np.array(scaled) / 2.0**16, losses, rtol=1e-5)
    for one, other in zip(rows, scaled_rows, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.row("S3-32/G")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "embedding", "dense"])
def test_a_step_that_is_not_finite_changes_nothing(
    configure: Configure, caplog: pytest.LogCaptureFixture, where: str, bad: float
) -> None:
    configure("a: {dim: 4}\nb: {dim: 4}")
    torch.manual_seed(3)
    with make(0, TinyModel(), optimizer=SGD(0.1)) as ctx, caplog.at_level(logging.WARNING):
        assert ctx.model is not None
        probe = Batches(1).batch(0, requires_grad=False)
        for number, batch in enumerate(DataLoader(Batches(4), reproducible=True)):
            output, labels = ctx.forward(batch)
            before = [tensor.clone() for tensor in ctx.model.state_dict().values()]
            rows = [from_dlpack(tensor).cpu() for tensor in ctx.get_embedding_from_data(probe).embeddings()]
            loss = loss_fn(output, labels[0])
            hook = None
            if number == 2:
                target = {"loss": loss, "embedding": ctx._embeddings[1], "dense": next(ctx.model.parameters())}[where]
                if where == "loss":
                    loss = loss * bad
                else:
                    hook = target.register_hook(lambda gradient: gradient * bad)
            ctx.backward(loss)
            if hook is not None:
                hook.remove()
            if number == 2:
                after = list(ctx.model.state_dict().values())
                found = [from_dlpack(tensor).cpu() for tensor in ctx.get_embedding_from_data(probe).embeddings()]
                assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
                assert all(torch.equal(one, other) for one, other in zip(rows, found, strict=True))
    assert caplog.text.count("skipped") == 1


@pytest.mark.parametrize("name", ["summed", "raw"])
def test_a_gradient_that_no_id_gets_is_looked_at_as_on_the_cpu(
    configure: Configure, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    configure(SLOTS, groups=GROUPS)
    for device in (None, 0):
        caplog.clear()
        with make(device, Wide()) as ctx, caplog.at_level(logging.WARNING):
            for batch in DataLoader(Everything(1), reproducible=True):
                output, labels = ctx.forward(batch)
                rows = ctx._embeddings[NAMES.index(name)]
                empty = (rows.detach() == 0).all(-1, keepdim=True)
                assert empty.any()
                rows.register_hook(lambda gradient, empty=empty: gradient.masked_fill(empty, float("nan")))  # type: ignore[no-untyped-call]
                ctx.backward(loss_fn(output, labels[0].double()))
        assert f"the gradient of slot {name!r}" in caplog.text, device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")
def test_a_device_that_is_not_the_first_trains_as_the_first(configure: Configure) -> None:
    configure(SLOTS, groups=GROUPS)
    (losses, rows), (other_losses, other_rows) = results(0), results(1)
    torch.cuda.set_device(0)
    assert losses == other_losses
    assert all(torch.equal(one, other) for one, other in zip(rows, other_rows, strict=True))


def test_a_feature_without_a_gradient_keeps_its_rows(configure: Configure) -> None:
    configure("a: {dim: 4}\nb: {dim: 4}", groups="both: [a, b]")
    found = []
    for device in (None, 0):
        torch.manual_seed(3)
        with make(device, TinyModel(embeddings=4), optimizer=SGD(0.1, weight_decay=0.1)) as ctx:
            assert ctx.model is not None
            for batch in DataLoader(Batches(3), reproducible=True):
                dense, embeddings, labels = ctx.prepare_features(batch)
                ctx.backward(loss_fn(ctx.model(dense, embeddings[:1]), labels[0]))
            probe = Batches(1).batch(0, requires_grad=False)
            found.append([from_dlpack(tensor).cpu() for tensor in ctx.get_embedding_from_data(probe).embeddings()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_evaluation_and_other_streams_see_what_was_trained(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS, groups=GROUPS)
    torch.manual_seed(3)
    with make(0, Wide()) as ctx:
        train(ctx, 4)
        expected = vectors(ctx)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), eval_ctx(model=ctx.model) as inner:
            again = vectors(inner)
        ctx.dump_checkpoint(tmp_path / "saved")
    with make(None, Wide()) as ctx:
        ctx.load_checkpoint(tmp_path / "saved")
        on_cpu = vectors(ctx)
        on_device = ctx.get_embedding_from_data(Everything(1).batch(0, requires_grad=False), device_id=0)
        assert on_device.device_id == 0
    assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(expected, on_cpu, strict=True))


def test_a_collection_trains_on_a_device_as_on_the_cpu() -> None:
    tables = [TableConfig("user", 16, ["user"]), TableConfig("item", 8, ["seen", "bought"], pooling="mean")]
    found = []
    for device in (None, "cuda:0"):
        torch.manual_seed(5)
        collection = EmbeddingCollection(tables, Adagrad(0.1), device=device, staleness=1)
        generator = torch.Generator().manual_seed(7)
        features: dict[str, Any] = {}
        for _ in range(5):
            features = {"user": torch.randint(0, 50, (32,), generator=generator)}
            for name in ("seen", "bought"):
                lengths = torch.randint(0, 5, (32,), generator=generator)
                offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                features[name] = (torch.randint(0, 50, (int(offsets[-1]),), generator=generator), offsets)
            output = collection(features)
            torch.cat(list(output.values()), 1).double().square().sum().backward()  # type: ignore[no-untyped-call]
        collection.eval()
        found.append([tensor.cpu() for tensor in collection(features).values()])
        collection.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
