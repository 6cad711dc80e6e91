"""Tensors of the Open Inference Protocol: numbers are never changed, and each Arrow type has a datatype."""

from typing import Any

import pytest

from persia.serving.manifest import Input
from persia.serving.refusals import InvalidError
from persia.serving.tensors import from_values


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("UINT64", [1, 2**64 - 1]),
        ("UINT64", [2**63, 2**63 - 1, 0]),
        ("INT64", [2**63 - 1, -(2**63)]),
        ("UINT32", [0, 2**32 - 1]),
    ],
)
def test_integers_keep_their_value(datatype: str, values: list[int]) -> None:
    assert from_values("user", datatype, [len(values)], values).values.tolist() == values


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("UINT64", [-1, 2**63]),
        ("UINT64", [2**64]),
        ("UINT64", [1.0, 2**63]),
        ("UINT64", [True, 2**63]),
        ("INT64", [1, 2**63]),
        ("INT64", [0.5]),
        ("INT8", [128]),
        ("BOOL", [1]),
    ],
)
def test_a_number_that_the_datatype_cannot_hold_is_refused(datatype: str, values: list[Any]) -> None:
    with pytest.raises(InvalidError, match=f"user: data is not {datatype}"):
        from_values("user", datatype, [len(values)], values)


@pytest.mark.parametrize(
    ("arrow", "datatype", "is_list"),
    [
        ("int64", "INT64", False),
        ("decimal128(10, 2)", "FP64", False),
        ("timestamp[us]", "BYTES", False),
        ("list<item: int32 not null>", "INT32", True),
        ("large_list<element: float>", "FP32", True),
        ("fixed_size_list<item: double>[3]", "FP64", True),
        ("list<item: decimal256(40, 0)>", "FP64", True),
    ],
)
def test_the_metadata_of_a_column_follows_its_arrow_type(arrow: str, datatype: str, is_list: bool) -> None:
    column = Input("user", arrow, ())
    assert (column.datatype, column.is_list) == (datatype, is_list)
