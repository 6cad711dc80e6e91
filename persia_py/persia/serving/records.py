"""Parses the body of ``POST /score``: records as JSON, or a shared part with candidates."""

from typing import Any

from persia.embedding.listed import listed
from persia.serving import rest
from persia.serving.batching import Decode
from persia.serving.limits import Limits
from persia.serving.refusals import InvalidError, TooLargeError

_FORMS = (
    'expected a list of records, {"records": [...]}, or {"shared": {...}, "candidates": [{...}, ...]}; '
    "a record is an object of columns"
)


def decoder(body: bytes, limits: Limits) -> Decode:
    """Return the function that reads the rows of a body.

    A list of records is read by the transform itself. An object is ``{"records": [...]}``, or ``{"shared": record,
    "candidates": [record, ...]}``, where each candidate is a row with its own columns and those of ``shared``. The
    limits are checked before candidates become rows, and before the transform.
    """
    if body[:64].lstrip()[:1] == b"[":
        return lambda model: _records(body, model, limits)
    return lambda model: _object(body, model, limits)


def _records(body: bytes, model: Any, limits: Limits) -> bytes:
    """Return the body unchanged, if it certainly has a column of the model."""
    if body.count(b"{") > limits.request_rows or not any(name in body for name in model.quoted):
        rows = rest.loads(body)
        _check(rows, model)
        _check_count(rows, limits)
    return body


def _object(body: bytes, model: Any, limits: Limits) -> bytes:
    content = rest.loads(body)
    if not isinstance(content, dict):
        raise InvalidError(_FORMS)
    if content.keys() == {"records"}:
        rows = content["records"]
        _check_count(rows, limits)
    elif content.keys() == {"shared", "candidates"}:
        shared, rows = content["shared"], content["candidates"]
        if not isinstance(shared, dict) or not isinstance(rows, list):
            raise InvalidError(_FORMS)
        _check_count(rows, limits)
        if (size := len(rest.dumps(shared)) * len(rows)) > limits.waiting_bytes:
            raise TooLargeError(
                f"the columns in shared, repeated for {len(rows)} candidates, have {size} bytes, the limit is "
                f"{limits.waiting_bytes}"
            )
        if both := sorted({*shared} & {key for row in rows if isinstance(row, dict) for key in row}):
            raise InvalidError(f"columns in both shared and a candidate: {listed(both)}")
        rows = [{**shared, **row} if isinstance(row, dict) else row for row in rows]
    else:
        raise InvalidError(f"found the keys {listed(content)}: {_FORMS}")
    _check(rows, model)
    return rest.dumps(rows)


def _check_count(rows: Any, limits: Limits) -> None:
    if isinstance(rows, list) and len(rows) > limits.request_rows:
        raise TooLargeError(f"the request has {len(rows)} rows, the limit is {limits.request_rows}")


def _check(rows: Any, model: Any) -> None:
    """Check that the body is a list of records, and that a record has a column of the model."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidError(_FORMS)
    if rows and not any(name in row for row in rows for name in model.columns):
        raise InvalidError(f"no record has a column of the model, which takes {listed(model.columns)}")
