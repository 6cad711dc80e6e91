"""Batches: valid ones are accepted, all others are refused with the place of the error."""

from typing import Any

import numpy as np
import pytest
import torch

from persia.embedding.data import (
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import BatchSizeError, DataError, FeatureTypeError, MissingLabelError, PersiaError

pytestmark = pytest.mark.stack


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


FLOAT: Any = 2.5
ANY: dict[str, Any] = {"one array": ids(1, 2), "number": 7}
LABEL = [Label(np.zeros((2, 1), np.float32))]


def test_a_batch_keeps_its_size_and_survives_its_wire_format() -> None:
    from persia_core.data import Batch

    batch = PersiaBatch(
        [IDTypeFeature("a", [ids(1, 2, 1), ids()]), IDTypeFeatureWithSingleID("b", ids(2**64 - 1, 0))],
        [NonIDTypeFeature(np.ones((2, 3), np.float32)), NonIDTypeFeature(np.ones(2, np.bool_))],
        LABEL,
        meta=b"note",
    )
    assert batch.batch_size == 2
    again = Batch.from_bytes(batch.to_bytes())
    assert again.batch_size == 2
    assert again.slots == ["a", "b"]
    assert again.meta == b"note"
    assert again.to_bytes() == batch.to_bytes()


@pytest.mark.parametrize("position", [0, 7, 40, -1])
def test_damaged_bytes_are_refused(position: int) -> None:
    from persia_core.data import Batch

    data = bytearray(PersiaBatch([IDTypeFeature("a", [ids(1, 2), ids(3)])], labels=LABEL).to_bytes())
    data[position] ^= 1
    with pytest.raises(DataError):
        Batch.from_bytes(bytes(data))
    with pytest.raises(DataError):
        Batch.from_bytes(bytes(data[:-3]))


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64"])
def test_every_dense_dtype_is_accepted(dtype: str) -> None:
    PersiaBatch([IDTypeFeatureWithSingleID("a", ids(1, 2))], [NonIDTypeFeature(np.ones((2, 2), dtype))], LABEL)


def test_ids_are_what_they_are_in_any_dtype() -> None:
    """EmbeddingCollection has the same rule: see test_collection_mistakes."""
    plain = [[1, 2, 1], [], [2**31, 2**63]]
    expected = PersiaBatch([IDTypeFeature("a", [ids(*each) for each in plain])], requires_grad=False).to_bytes()
    bags: list[Any] = [
        plain,
        [np.array([1, 2, 1], np.int8), np.array([]), ids(2**31, 2**63)],
        [torch.tensor([1, 2, 1], dtype=torch.int32), [], [np.int64(2**31), 2**63]],
        [(1, 2, 1), torch.tensor([]), [2**31, 2**63]],
    ]
    for samples in bags:
        assert PersiaBatch([IDTypeFeature("a", samples)], requires_grad=False).to_bytes() == expected
    flat = IDTypeFeature.from_offsets("a", [*plain[0], *plain[2]], np.array([0, 3, 3, 5], np.int32))
    assert PersiaBatch([flat], requires_grad=False).to_bytes() == expected
    for dtype in ("int64", "int32", "uint32", "uint8", ">i8"):
        single = IDTypeFeatureWithSingleID("a", np.array([5, 0, 7], dtype)).values
        assert (single.dtype, single.tolist()) == (np.dtype(np.uint64), [5, 0, 7])
    hashes = np.array([-1, -(2**63)])
    assert IDTypeFeatureWithSingleID("a", hashes.view(np.uint64)).values.tolist() == [2**64 - 1, 2**63]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: IDTypeFeatureWithSingleID("a", np.array([1.0, 2.0])), FeatureTypeError, "'a'.*float64"),
        (lambda: IDTypeFeatureWithSingleID("a", np.array(["x"], object)), FeatureTypeError, "'a'.*1-d object"),
        (lambda: IDTypeFeatureWithSingleID("a", [True, False]), FeatureTypeError, "'a'.*1-d bool list"),
        (lambda: IDTypeFeatureWithSingleID("a", [1, FLOAT]), FeatureTypeError, "'a'.*1-d float64 list"),
        (lambda: IDTypeFeatureWithSingleID("a", np.array([3, 1, -1])), DataError, "'a', ids, row 2: -1 is negative"),
        (lambda: IDTypeFeatureWithSingleID("a", [1, 2**64]), DataError, r"'a'.*2\^64 - 1, found 18446744073709551616$"),
        (lambda: IDTypeFeatureWithSingleID("a", [-1, 2**63]), DataError, r"'a'.*2\^64 - 1, found -1$"),
        (lambda: IDTypeFeature("a", [ids(2**63), [1], np.array([4, -7])]), DataError, "'a', sample 2: -7 is negative"),
        (lambda: IDTypeFeature("a", ANY["one array"]), FeatureTypeError, "'a', sample 0.*found uint64"),
        (lambda: IDTypeFeature("a", ANY["number"]), FeatureTypeError, "'a'.*ids of each sample, found int"),
        (lambda: IDTypeFeature.from_offsets("a", [-2, 1], [0, 2]), DataError, "'a', ids, row 0: -2 is negative"),
        (lambda: IDTypeFeature("a", [ids(1), np.array([1.0])]), FeatureTypeError, "sample 1"),
        (lambda: IDTypeFeature.from_offsets("a", ids(1, 2), np.array([0, 3])), DataError, "ascend"),
        (lambda: IDTypeFeatureWithSingleID("", ids(1)), DataError, "ASCII"),
        (lambda: NonIDTypeFeature(np.ones((2, 2), np.float16)), FeatureTypeError, "float16"),
        (lambda: NonIDTypeFeature(np.ones((2, 2), ">f4")), FeatureTypeError, "byte order"),
        (lambda: Label(np.array([[0.0], [2.0]]), binary=True), DataError, "row 1: 2.0"),
        (lambda: Label(np.array([[0.0], [np.nan]]), binary=True), DataError, "row 1: nan"),
    ],
)
def test_a_bad_feature_is_refused_with_its_place(make: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        make()  # type: ignore[operator]
    assert isinstance(caught.value, PersiaError)


def test_a_bad_batch_is_refused_with_its_place() -> None:
    a = IDTypeFeatureWithSingleID("a", ids(1, 2))
    with pytest.raises(MissingLabelError) as missing:
        PersiaBatch([a])
    assert isinstance(missing.value, RuntimeError)
    with pytest.raises(BatchSizeError, match=r"a: 2.*b: 1.*label: 2") as unequal:
        PersiaBatch([a, IDTypeFeatureWithSingleID("b", ids(1))], labels=LABEL)
    assert isinstance(unequal.value, AssertionError)
    with pytest.raises(BatchSizeError, match="empty"):
        PersiaBatch([], labels=LABEL)
    with pytest.raises(BatchSizeError):
        PersiaBatch([IDTypeFeatureWithSingleID("a", ids())], labels=[Label(np.zeros((0, 1), np.float32))])
    with pytest.raises(TypeError, match=r"id_type_features\[0\]"):
        PersiaBatch([ids(1, 2)], labels=LABEL)  # type: ignore[list-item]
    with pytest.raises(FeatureTypeError, match="expected a list of"):
        PersiaBatch(a, labels=LABEL)  # type: ignore[arg-type]
    with pytest.raises(FeatureTypeError, match=r"labels=.*expected a list of Label, found Label"):
        PersiaBatch([a], labels=LABEL[0])  # type: ignore[arg-type]
    with pytest.raises(FeatureTypeError, match=r"non_id_type_features=.*found ndarray"):
        PersiaBatch([a], np.zeros(2), LABEL)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="more than once.*a"):
        PersiaBatch([a, a], labels=LABEL)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_in_dense_input_is_refused_with_row_and_column(value: float, dtype: type) -> None:
    data: np.ndarray = np.zeros((4, 3), dtype)
    data[2, 1] = value
    with pytest.raises(DataError, match=r"price.*row 2.*column 1"):
        PersiaBatch(
            [IDTypeFeatureWithSingleID("a", ids(1, 2, 3, 4))],
            [NonIDTypeFeature(data, name="price")],
            [Label(np.zeros(4, np.float32))],
        )


def test_more_samples_and_more_ids_than_a_u16_counts() -> None:
    """PersiaML wrapped positions beyond 65,535 (ARCHITECTURE section 11, defect 11)."""
    size = MAX_BATCH_SIZE + 5
    offsets = np.zeros(size + 1, np.int64)
    offsets[1:] = size  # the first sample has them all
    batch = PersiaBatch(
        [IDTypeFeature.from_offsets("a", np.arange(size, dtype=np.uint64), offsets)],
        labels=[Label(np.zeros(size, np.float32))],
    )
    assert batch.batch_size == size
