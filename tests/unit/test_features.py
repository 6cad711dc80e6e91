"""Weighted, raw and hash-stacked features in TrainCtx, compared with torch on rows that the test sets."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from conftest import Configure, insert_rows
from torch.utils.dlpack import from_dlpack

from persia.ctx import EmbeddingCtx, TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import DataError, FeatureTypeError
from persia.utils import split_mask
from persia_core.data import Batch

pytestmark = pytest.mark.stack

IDS = 12
LISTS = [[1, 2, 2], [], [3], [4, 4, 1, 5], [9]]
WEIGHTS = [[0.5, -1.0, 2.0], [], [1.5], [0.0, 3.0, -0.25, 1.0], [2.0]]


def arrays(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.array(each, np.uint64) for each in lists]


def floats(lists: list[list[float]]) -> list[np.ndarray]:
    return [np.array(each, np.float32) for each in lists]


class Source(IterableDataset):
    """The same batch several times."""

    def __init__(self, feature: IDTypeFeature, steps: int = 1) -> None:
        super().__init__()
        self.batch = PersiaBatch([feature], labels=[Label(np.zeros(feature.batch_size, np.float32))])
        self.steps = steps

    def __iter__(self) -> Iterator[PersiaBatch]:
        for _ in range(self.steps):  # encoded and decoded, like a batch from data-compose
            yield PersiaBatch.wrap(Batch.from_bytes(self.batch.to_bytes()))


class Vectors(torch.nn.Module):
    """A model that returns the tensor of the only slot."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> torch.Tensor:
        return embeddings[0]


def context() -> TrainCtx:
    torch.manual_seed(3)
    model = Vectors()
    config = EmbeddingConfig((-0.5, 0.5), weight_bound=0)
    return TrainCtx(
        SGD(1.0),
        torch.optim.SGD(model.parameters(), lr=1),
        mixed_precision=False,
        model=model,
        embedding_config=config,
    )


def rows(ctx: EmbeddingCtx) -> torch.Tensor:
    """Return the rows of ids 0 … IDS - 1; missing ones as zeros."""
    batch = PersiaBatch([IDTypeFeatureWithSingleID("a", np.arange(IDS, dtype=np.uint64))], requires_grad=False)
    (looked,) = ctx.get_embedding_from_data(batch).embeddings()
    found = from_dlpack(looked)
    return (found if found.dim() == 2 else found[:, 0]).clone()


def test_weights_equal_per_sample_weights_of_torch(configure: Configure) -> None:
    configure("a: {dim: 4}")
    flat = torch.tensor([i for each in LISTS for i in each])
    offsets = torch.tensor(np.cumsum([0, *[len(each) for each in LISTS]]))
    weights = torch.tensor([w for each in WEIGHTS for w in each])
    with context() as ctx:
        insert_rows(ctx, "a", range(IDS))
        loader = DataLoader(Source(IDTypeFeature("a", arrays(LISTS), floats(WEIGHTS)), 3), reproducible=True)
        for batch in loader:
            bag = torch.nn.EmbeddingBag(IDS, 4, mode="sum", include_last_offset=True)
            bag.weight.data = rows(ctx)
            output, _ = ctx.forward(batch)
            expected = bag(flat, offsets, per_sample_weights=weights)
            torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
            torch.autograd.backward(torch.sin(expected).sum())
            assert bag.weight.grad is not None
            ctx.backward(torch.sin(output).sum())
            ctx.engine.drain()
            torch.testing.assert_close(rows(ctx), bag.weight.data - bag.weight.grad, atol=1e-6, rtol=0)
        assert ctx.step == 1 + 3


def test_weights_of_one_change_no_bit(configure: Configure) -> None:
    configure("a: {dim: 19, sqrt_scaling: true}")
    results = []
    for weights in (None, [np.ones(len(each), np.float32) for each in LISTS]):
        with context() as ctx:
            for batch in DataLoader(Source(IDTypeFeature("a", arrays(LISTS), weights), 5), reproducible=True):
                output, _ = ctx.forward(batch)
                ctx.backward(torch.sin(output).sum())
            results.append(rows(ctx).numpy().tobytes())
    assert results[0] == results[1]


def test_from_offsets_with_weights_is_the_same_feature() -> None:
    lists = IDTypeFeature("a", arrays(LISTS), floats(WEIGHTS))
    assert lists.weights is not None
    flat = IDTypeFeature.from_offsets("a", lists.values, lists.offsets, lists.weights)
    label = [Label(np.zeros(5, np.float32))]
    assert PersiaBatch([flat], labels=label).to_bytes() == PersiaBatch([lists], labels=label).to_bytes()


def test_bad_weights_are_refused_with_their_place() -> None:
    ids = arrays([[1, 2], [3]])
    with pytest.raises(DataError, match="sample 1: expected one weight for each id, found weights: 2, ids: 1"):
        IDTypeFeature("a", ids, floats([[1, 2], [3, 4]]))
    with pytest.raises(DataError, match="expected weights for each sample, found samples with weights: 1, with ids: 2"):
        IDTypeFeature("a", ids, floats([[1, 2]]))
    with pytest.raises(FeatureTypeError, match="weights of sample 0.*float64"):
        IDTypeFeature("a", ids, [np.ones(2), np.ones(1)])  # type: ignore[list-item]
    with pytest.raises(FeatureTypeError, match="weights.*float64"):
        IDTypeFeature.from_offsets("a", ids[0], np.array([0, 2]), np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected one weight for each id, found weights: 1, ids: 2"):
        IDTypeFeature.from_offsets("a", ids[0], np.array([0, 2]), np.ones(1, np.float32))
    with pytest.raises(DataError, match="'?\"?a.*weight NaN at index 1"):
        PersiaBatch([IDTypeFeature("a", ids, floats([[1, np.nan], [3]]))], requires_grad=False)


@pytest.mark.parametrize("keys", ["pooling: mean", "embedding_summation: false"])
def test_weights_where_nothing_is_summed_are_refused(configure: Configure, keys: str) -> None:
    configure(f"a: {{dim: 4, {keys}}}")
    with context() as ctx, pytest.raises(DataError, match=f"per-sample weights.*{keys}"):
        for _ in DataLoader(Source(IDTypeFeature("a", arrays(LISTS), floats(WEIGHTS)))):
            pytest.fail("a batch came")
    del ctx


def test_a_raw_feature_is_its_first_rows_and_a_mask(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    configure("a: {dim: 4, embedding_summation: false, sample_fixed_size: 3}")
    index = torch.tensor([[1, 2, 2], [0, 0, 0], [3, 0, 0], [4, 4, 1], [9, 0, 0]])
    there = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    with context() as ctx, caplog.at_level(logging.WARNING):
        insert_rows(ctx, "a", [1, 2, 3, 4, 9])
        for batch in DataLoader(Source(IDTypeFeature("a", arrays(LISTS)), 3), reproducible=True):
            weight = rows(ctx).requires_grad_()
            output, _ = ctx.forward(batch)
            embedding, mask = split_mask(output)
            assert output.shape == (5, 3, 5)
            assert set(output[..., 4].unique().tolist()) == {0.0, 1.0}
            assert torch.equal(mask, there)
            expected = weight[index] * there.unsqueeze(2)
            assert torch.equal(embedding, expected)
            position = torch.arange(1.0, 4).reshape(1, 3, 1)  # a different weight for each position
            torch.autograd.backward((torch.sin(expected) * position).sum())
            ctx.backward((torch.sin(embedding) * position * mask.unsqueeze(2)).sum())
            ctx.engine.drain()
            assert weight.grad is not None
            torch.testing.assert_close(rows(ctx), weight.detach() - weight.grad, atol=1e-6, rtol=0)
        assert ctx.step == 1 + 3
        assert not rows(ctx)[5].any(), "the id that was cut off has no row"
        assert ctx.engine.stats()["slots"]["a"]["truncated"] == 3
        assert caplog.text.count("sample_fixed_size") == 1
    with context() as ctx, caplog.at_level(logging.WARNING):  # another context warns again
        for batch in DataLoader(Source(IDTypeFeature("a", arrays(LISTS)))):
            ctx.prepare_features(batch)
    assert caplog.text.count("sample_fixed_size") == 2


def test_a_hash_stack_shares_few_rows_among_many_ids(configure: Configure) -> None:
    """Training equals torch on the rows of the buckets. Looking up each id alone identifies its buckets."""
    configure("a: {dim: 4, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 40}}")
    ids = [np.array([i], np.uint64) for i in range(5000)]
    with context() as ctx:
        for batch in DataLoader(Source(IDTypeFeature("a", ids))):
            output, _ = ctx.forward(batch)
            assert len(output.unique(dim=0)) == 1519, "of 1600 pairs of buckets, by the documented hash"
            ctx.backward(output.sum() * 0)
        ctx.engine.drain()
        assert sum(ctx.get_embedding_size()) == 80
    with context() as ctx:
        insert_rows(ctx, "a", range(IDS))
        for batch in DataLoader(Source(IDTypeFeature("a", arrays(LISTS)), 2), reproducible=True):
            alone = rows(ctx)
            output, _ = ctx.forward(batch)
            expected = torch.stack([alone[torch.tensor(each, dtype=torch.long)].sum(0) for each in LISTS])
            torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
            ctx.backward(output.sum())
            ctx.engine.drain()
            # each of an id's two buckets loses the gradients of all its occurrences (no two of these ids share one)
            count = torch.bincount(torch.tensor([i for each in LISTS for i in each]), minlength=IDS)
            touched = count > 0
            torch.testing.assert_close(rows(ctx)[touched], (alone - 2 * count.unsqueeze(1))[touched], atol=1e-5, rtol=0)
