"""EmbeddingCollection: inputs of any dtype, and mistakes."""

import copy
import gc
import importlib
import pickle

import numpy as np
import pytest
import torch
from conftest import Configure
from small_collection import TABLES, arrays, collection, rows
from test_training import SLOTS

from persia.ctx import eval_ctx
from persia.embedding.optim import SGD
from persia.errors import (
    BatchSizeError,
    ConfigError,
    DataError,
    FeatureTypeError,
    UsageError,
)
from persia.nn import EmbeddingCollection, TableConfig


def test_more_forwards_than_the_staleness_are_refused() -> None:
    tables = collection(staleness=2)
    features = arrays(0)[0]
    first, second = tables(features), tables(features)
    with pytest.raises(UsageError, match="forward passes without a backward pass: 2, and staleness=2 allows"):
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
    with pytest.raises(UsageError, match="cannot push the gradients of step"):
        loss.backward()


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
        ({"a": ids}, DataError, "missing: b; its tables have the features a, b"),
        ({"a": ids, "b": ids, "x": ids}, DataError, "unknown: x"),
        (
            {"a": ids.float(), "b": ids},
            FeatureTypeError,
            "'a', ids: expected a 1-d array or list of integers.*found a 1-d float32 Tensor",
        ),
        ({"a": ids.reshape(1, 2), "b": ids}, FeatureTypeError, "found a 2-d int64 Tensor"),
        ({"a": [1.0, 2.0], "b": ids}, FeatureTypeError, "'a'.*found float"),
        ({"a": torch.tensor([4, -1]), "b": ids}, DataError, "'a', ids, row 1: -1 is negative"),
        ({"a": [[4], [5, -1]], "b": ids}, DataError, "'a', sample 1: -1 is negative"),
        ({"a": (ids, torch.tensor([0, 1])), "b": ids}, DataError, "include_last_offset=True"),
        ({"a": (ids, torch.tensor([0.0, 2.0])), "b": ids}, FeatureTypeError, "'a', offsets"),
        ({"a": (ids, torch.tensor([0, 2]), torch.ones(2)), "b": ids}, BatchSizeError, "a: 1, b: 2"),
        ({"a": (ids, torch.tensor([0, 1, 2]), torch.ones(1)), "b": ids}, DataError, "weights: 1, ids: 2"),
        ({"a": (ids, torch.tensor([0, 1, 2]), torch.ones(2).double()), "b": ids}, FeatureTypeError, "weights.*float32"),
        ({"a": (ids, torch.tensor([0, 1, 2]), torch.ones(2, requires_grad=True)), "b": ids}, UsageError, "detach"),
        (
            {"a": (ids, torch.tensor([0, 1, 2]), torch.ones(2, dtype=torch.bfloat16)), "b": ids},
            FeatureTypeError,
            "'a', weights: expected 1-d float32, found 1-d bfloat16",
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
    with eval_ctx(), pytest.raises(UsageError, match="create it outside"):
        collection()
    tables = collection()
    for spoil in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"because it does not contain its rows; use save\(\)"):
            spoil(tables)
    tables.close()
    tables.close()
    with pytest.raises(UsageError, match="closed"):
        tables(arrays(0)[0])


def test_a_batch_that_is_refused_ends_no_generation() -> None:
    """The engine refuses a batch with too many ids before its look-up."""
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
    with pytest.raises(UsageError, match="cannot push the gradients of step"):
        left["a"].sum().backward()
    torch.testing.assert_close(rows(tables, 6)["a"], before["a"] - 2)
    assert (tables.step, tables._session.engine.generation) == (4, generation)


def test_it_is_found_under_its_old_path() -> None:
    embedding = importlib.import_module("persia.embedding")
    assert embedding.EmbeddingCollection is EmbeddingCollection
    assert embedding.TableConfig is TableConfig
    with pytest.raises(AttributeError, match="no attribute 'Session'"):
        embedding.Session  # noqa: B018
