"""The limits of ``POST /score`` are checked before its candidates become rows."""

import json
from typing import Any

import pytest
from serving_model import SmallModel

from persia.serving import records, rest
from persia.serving.limits import Limits
from persia.serving.refusals import TooLargeError

LIMITS = Limits(request_rows=100, waiting_bytes=10_000)
ROW: dict[str, Any] = {"user": 1}


def decode(body: Any) -> Any:
    return records.decoder(json.dumps(body).encode(), LIMITS)(SmallModel())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([ROW] * 101, "the request has 101 rows, the limit is 100"),
        ({"records": [ROW] * 101}, "the request has 101 rows, the limit is 100"),
        ({"shared": {"site": "a"}, "candidates": [ROW] * 101}, "the request has 101 rows, the limit is 100"),
        ({"shared": {"site": "a" * 200}, "candidates": [ROW] * 50}, "shared, repeated for 50 candidates, have 10550"),
    ],
    ids=["list", "records", "candidates", "shared"],
)
def test_too_many_rows_are_refused_before_they_are_made(
    body: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    dumps = rest.dumps

    def counted(content: Any) -> bytes:
        written.append(len(content))
        return dumps(content)

    monkeypatch.setattr(rest, "dumps", counted)
    with pytest.raises(TooLargeError, match=message):
        decode(body)
    assert all(size <= 1 for size in written), "rows were made"


def test_as_many_rows_as_the_limit_are_read() -> None:
    for body in ([ROW] * 100, {"records": [ROW] * 100}, {"shared": {"site": "a"}, "candidates": [ROW] * 100}):
        assert len(json.loads(decode(body))) == 100
    nested = [{"user": 1, "unread": [{}, {}]}] * 60  # more braces than rows
    assert len(json.loads(decode(nested))) == 60
