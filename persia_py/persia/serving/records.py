"""The body of ``POST /score``: records as JSON, or one shared part and its candidates."""

from typing import Any

from persia.serving import rest
from persia.serving.batching import Decode
from persia.serving.refusals import InvalidError

_FORMS = (
    'want a list of records, {"records": [...]}, or {"shared": {...}, "candidates": [{...}, ...]}; '
    "a record is an object of columns"
)


def decoder(body: bytes) -> Decode:
    """Return the function that reads the rows of a body.

    A list of records is read by the transform itself. An object is ``{"records": [...]}``, or ``{"shared": record,
    "candidates": [record, ...]}``, where each candidate is a row with the columns of ``shared`` and its own.
    """
    if body[:64].lstrip()[:1] == b"[":
        return lambda model: _records(body, model)
    return lambda model: _object(body, model)


def _records(body: bytes, model: Any) -> bytes:
    """Return the body, if it is certain to have a column of the model."""
    if not any(name in body for name in model.quoted):
        _check(rest.loads(body), model)
    return body


def _object(body: bytes, model: Any) -> bytes:
    content = rest.loads(body)
    if not isinstance(content, dict):
        raise InvalidError(_FORMS)
    if content.keys() == {"records"}:
        rows = content["records"]
    elif content.keys() == {"shared", "candidates"}:
        shared, rows = content["shared"], content["candidates"]
        if not isinstance(shared, dict) or not isinstance(rows, list):
            raise InvalidError(_FORMS)
        if both := sorted({*shared} & {key for row in rows if isinstance(row, dict) for key in row}):
            raise InvalidError(f"columns of both shared and a candidate: {', '.join(both)}")
        rows = [{**shared, **row} if isinstance(row, dict) else row for row in rows]
    else:
        raise InvalidError(f"keys {', '.join(content) or 'none'}: {_FORMS}")
    _check(rows, model)
    return rest.dumps(rows)


def _check(rows: Any, model: Any) -> None:
    """Refuse what is not a list of records, and records of which none has a column of the model."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidError(_FORMS)
    if rows and not any(name in row for row in rows for name in model.columns):
        raise InvalidError(f"no record has a column of the model: {', '.join(model.columns)}")
