"""Feature transforms in Python: from tables and records to arrays and batches."""

import datetime
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persia.embedding.data import PersiaBatch
from persia.errors import (
    BatchSizeError,
    CheckpointError,
    ConfigError,
    DataError,
    FeatureTypeError,
    ForeignCheckpointError,
    UsageError,
)
from persia.features import (
    Features,
    Fitter,
    Report,
    Samples,
    Transform,
    hash_cross,
    hash_text,
    read_features,
    to_batch,
)
from persia.runtime.errors import MissingLabelError
from persia.trainer import fitting

TEXT = """
features:
  user: {type: id, dim: 8}
  item: {type: id, dim: 8}
  tags: {type: bag, dim: 4, pooling: mean}
  history: {type: sequence, last: 2, table: item, dim: 8}
  age: {type: bucket, quantiles: 2, dim: 2}
  hour: {type: date, column: at, part: hour, dim: 2}
  pair: {type: cross, features: [user, item], dim: 4}
  price: {type: dense, standardise: true}
  age_: {type: dense, column: age, min_max: {min: 0, max: 100}}
labels:
  clicked: {}
  rich: {column: price, greater_than: 1.5, weight: 0.5}
"""
ROWS: list[dict[str, Any]] = [
    {"user": "a", "item": 1, "tags": ["x", "y"], "history": [1, 2, 3], "age": 20.0, "price": 1.0, "clicked": 1},
    {"user": "b", "item": 2, "tags": [], "history": [], "age": 40.0, "price": 2.0, "clicked": 0},
    {"user": None, "item": 3, "tags": None, "history": [4], "age": None, "price": 3.0, "clicked": 0},
]
for _row in ROWS:
    _row["at"] = datetime.datetime(2024, 5, 1, 10, 30)


def table() -> pa.Table:
    return pa.Table.from_pylist(ROWS)


@pytest.fixture(scope="module")
def features() -> Features:
    return Features.parse(TEXT, "persia.yml")


@pytest.fixture(scope="module")
def transform(features: Features) -> Transform:
    return features.fit(table())


def arrays(samples: Samples, slots: list[str]) -> list[Any]:
    parts = [part for slot in slots for part in samples.ids(slot)]
    return [None if part is None else part.tolist() for part in [*parts, samples.dense]]


def test_a_table_becomes_arrays(transform: Transform) -> None:
    samples = transform(table())
    assert len(samples) == 3
    ids, offsets, weights = samples.ids("user")
    assert ids.dtype == np.uint64 and ids.tolist()[:2] == [hash_text("a"), hash_text("b")]
    assert offsets is None and weights is None
    ids, offsets, _ = samples.ids("history")
    assert ids.tolist() == [2, 3, 4]
    assert offsets is not None and offsets.dtype == np.uint32 and offsets.tolist() == [0, 2, 2, 3]
    assert samples.ids("hour")[0].tolist() == [10, 10, 10]
    assert samples.ids("pair")[0][0] == hash_cross([hash_text("a"), 1])
    assert samples.dense.dtype == np.float32
    deviation = float(np.std([1, 2, 3]))
    np.testing.assert_allclose(samples.dense[:, 0], (np.array([1, 2, 3]) - 2) / deviation, rtol=1e-6)
    assert samples.dense[:, 1].tolist() == [np.float32(0.2), np.float32(0.4), 0.0]
    assert samples.label("clicked").tolist() == [1, 0, 0]
    assert samples.label("rich").tolist() == [0, 1, 1]
    expected = {"user": {"null": 1}, "tags": {"null": 1}, "history": {"truncated": 1}}
    assert samples.report.counts == expected | {"age": {"null": 1}, "age_": {"null": 1}}


def test_every_producer_gives_the_same(transform: Transform) -> None:
    expected = arrays(transform(table()), transform.slots)
    whole = table()
    batch = whole.to_batches()[0]
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2)])
    reader = pa.RecordBatchReader.from_batches(whole.schema, chunked.to_batches())
    view = whole.set_column(0, "user", whole["user"].cast(pa.string_view()))
    coded = whole.set_column(0, "user", whole["user"].dictionary_encode())
    for data in (whole, batch, chunked, reader, view, coded):
        assert arrays(transform(data), transform.slots) == expected
    for records in (ROWS, json.dumps(ROWS, default=str), json.dumps(ROWS, default=str).encode()):
        assert arrays(transform(records, labels=False), transform.slots) == expected
    alone = Samples.concat([transform(row) for row in ROWS])
    assert arrays(alone, transform.slots) == expected
    assert alone.report.counts == transform(ROWS).report.counts


def test_numpy_numbers_in_records_are_numbers(transform: Transform) -> None:
    row = {**ROWS[0], "item": np.int64(1), "price": np.float32(1), "tags": ("x", "y"), "at": np.datetime64("now")}
    row["at"] = ROWS[0]["at"]
    assert arrays(transform(row), transform.slots) == arrays(transform(ROWS[0]), transform.slots)


def test_rows_are_taken_and_become_batches(transform: Transform) -> None:
    samples = transform(table())
    backwards = samples.take(np.array([2, 1, 0]))
    assert backwards.label("clicked").tolist() == [0, 0, 1]
    assert arrays(backwards.take(np.array([2, 1, 0])), transform.slots) == arrays(samples, transform.slots)
    assert samples.slice(1, 3).ids("item")[0].tolist() == [2, 3]
    batch = to_batch(samples, meta=b"m")
    assert isinstance(batch, PersiaBatch)
    assert (batch.batch_size, batch.data.slots, batch.data.meta) == (3, transform.slots, b"m")
    for place in (3, -1):
        with pytest.raises(DataError, match=f"row index {place} is out of range: the number of rows is 3"):
            samples.take(np.array([0, place]))
    with pytest.raises(MissingLabelError, match="labels=True"):
        to_batch(transform(table(), labels=False))
    assert not to_batch(transform(table(), labels=False), requires_grad=False).data.requires_grad
    with pytest.raises(BatchSizeError):
        to_batch(samples.slice(0, 0))
    with pytest.raises(DataError, match='no slot "usr"; the slots are: user, item'):
        samples.ids("usr")


def test_slots_and_tables_follow_from_the_features(features: Features) -> None:
    config = features.embedding_config()
    assert config.slots == ["user", "item", "tags", "history", "age", "hour", "pair"]
    assert config.tables == [("user", 8), ("item", 8), ("tags", 4), ("age", 2), ("hour", 2), ("pair", 4)]
    assert features.types[0] == ("user", "id") and features.types[-1] == ("age_", "dense")
    assert features.labels == [("clicked", 1.0, "bce"), ("rich", 0.5, "bce")]
    assert features.needs_rows
    assert "clicked" not in features.columns(labels=False) and "clicked" in features.columns()


def test_a_transform_survives_json_and_pickle(features: Features, transform: Transform) -> None:
    for other in (
        Transform.from_json(transform.to_json()),
        pickle.loads(pickle.dumps(transform)),  # noqa: S301 - our own
        features.load(transform.to_json()),
    ):
        assert other.digest == transform.digest
        assert arrays(other(table()), other.slots) == arrays(transform(table()), transform.slots)
    changed = Features.parse(TEXT.replace("quantiles: 2", "quantiles: 3"), "persia.yml")
    with pytest.raises(ForeignCheckpointError, match="`age` has changed.*Restore the features of the") as of_others:
        changed.load(transform.to_json())
    with pytest.raises(CheckpointError, match="cannot read the transform") as damaged:
        Transform.from_json("{}")
    of_a_newer_version = transform.to_json().replace('"persia_features": 1', '"persia_features": 2')
    with pytest.raises(CheckpointError, match="has version 2, but this build reads version 1; use the") as newer:
        Transform.from_json(of_a_newer_version)
    for refused, kind, hint in (
        (of_others, ForeignCheckpointError, ""),
        (damaged, CheckpointError, "start a new run"),
        (newer, CheckpointError, "start a new run"),
    ):
        assert (type(refused.value), refused.value.hint) == (kind, ""), "its origin determines the next step"
        told = fitting.not_loaded("transform.json", refused.value, "start a new run")
        assert (type(told), told.hint, str(told)) == (kind, hint, f"transform.json: {refused.value}")


def test_a_fit_of_parts_equals_one_of_all(features: Features, transform: Transform) -> None:
    one, other = Fitter(features), Fitter(features)
    one.update(table().slice(2, 1))
    other.update(table().slice(0, 2))
    one.merge(other)
    assert one.rows == 3
    assert one.finish().digest == transform.digest


def test_features_without_a_fit_are_named(features: Features) -> None:
    with pytest.raises(UsageError, match=r"user has no `values`.*age has no quantiles.*price has no mean"):
        features.transform()
    given = Features.parse("features: {u: {type: id, dim: 2, values: string}}\nlabels: {y: {}}", "f")
    assert not given.needs_rows
    assert given.transform()('{"u": "a"}', labels=False).ids("u")[0].tolist() == [hash_text("a")]
    empty = pa.schema([("u", pa.int64()), ("y", pa.int8())]).empty_table()
    bound = Features.parse("features: {u: {type: id, dim: 2}}\nlabels: {y: {}}", "f").fit(empty)
    assert bound([{"u": 7}], labels=False).ids("u")[0].tolist() == [7]


def test_mistakes_of_the_file_have_their_places(tmp_path: Path) -> None:
    path = tmp_path / "persia.yml"
    path.write_text("features:\n  user: {type: id, dim: 8, prefx: a}\n  age: {type: dense, clip: 3}\nlabels: {y: {}}\n")
    with pytest.raises(ConfigError) as caught:
        read_features(path)
    assert [(line, column, key) for line, column, key, _ in caught.value.findings] == [
        (2, 28, "features.user.prefx"),
        (3, 28, "features.age.clip"),
    ]
    assert "did you mean `prefix`?" in str(caught.value)


def test_mistakes_of_the_data_are_reported_together(transform: Transform) -> None:
    wrong = table().rename_columns(["user_", *table().column_names[1:]])
    wrong = wrong.set_column(1, "item", wrong["item"].cast(pa.string()))
    with pytest.raises(DataError) as caught:
        transform(wrong)
    said = str(caught.value)
    assert "2 errors" in said
    assert "user (line 3): there is no column `user`, did you mean `user_`?" in said
    assert "item (line 4): column `item` is Utf8, allowed: integers" in said
    rows = [*ROWS, {**ROWS[0], "price": "dear", "clicked": 3}]
    with pytest.raises(DataError, match=r"price \(line 10\), row 1000003: found the string \"dear\""):
        transform(rows, first_row=1_000_000)
    with pytest.raises(DataError, match=r"clicked \(line 13\), row 3: found the integer 3, allowed: 0 or 1"):
        transform(rows, strict=False)
    served = transform(rows, strict=False, labels=False)
    assert served.report.counts["price"] == {"wrong_type": 1}
    assert np.isfinite(served.dense).all()


def test_what_is_no_table_is_refused_by_type(features: Features, transform: Transform) -> None:
    with pytest.raises(FeatureTypeError, match="found int, allowed: a table"):
        features.fit(3)  # type: ignore[arg-type]
    with pytest.raises(FeatureTypeError, match="record 1: found int, allowed: a dict"):
        transform([{}, 3], strict=False)  # type: ignore[list-item]
    with pytest.raises(FeatureTypeError, match="allowed: a table or a record batch"):
        transform(pa.array([1]))
    with pytest.raises(DataError, match="cannot read the records as JSON objects"):
        transform("[1]")


def test_an_error_of_the_producer_is_passed_on(transform: Transform) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield table().to_batches()[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(DataError, match="the disk is gone"):
        transform(pa.RecordBatchReader.from_batches(table().schema, batches()))


def test_reports_add_up(transform: Transform) -> None:
    report = Report()
    for _ in range(2):
        report.add(transform(table()).report)
    report.add_unseen("user", 5)
    assert report.rows == 6
    assert report.counts["user"] == {"null": 2, "unseen": 5}
