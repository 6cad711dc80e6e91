"""Parses a request of the Open Inference Protocol's REST form, with or without binary tensors.

The body is a JSON object. With the extension for binary tensors, the bytes of tensors with the parameter
``binary_data_size`` follow the JSON. The header ``Inference-Header-Content-Length`` then has the length of the JSON.
"""

from typing import Any

import msgspec
import numpy as np

from persia.serving import tensors
from persia.serving.batching import Scores
from persia.serving.refusals import InvalidError, UnknownError

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


class InferRequest:
    """A request. The requested outputs are known after :meth:`decode`."""

    def __init__(self, body: bytes, header: bytes | None) -> None:
        """Store a body, and the value of the header ``Inference-Header-Content-Length``."""
        self._body = body
        self._header = header
        self._id: str | None = None
        self._outputs: list[tuple[str, bool]] | None = None
        self._binary = False

    def decode(self, model: Any) -> Any:
        """Return the rows of the request for a model.

        Raises:
            InvalidError: The request is invalid.
        """
        head = len(self._body) if self._header is None else _whole(self._header, len(self._body))
        content = loads(memoryview(self._body)[:head])
        if not isinstance(content, dict) or not isinstance(content.get("inputs"), list):
            raise InvalidError("the request: expected a JSON object with the list 'inputs'")
        self._id = _text(content.get("id"), "id")
        parameters = _parameters(content, "the request")
        self._binary = parameters.get("binary_data_output") is True
        outputs = content.get("outputs") or None
        if outputs is not None:
            self._outputs = [self._output(each) for each in _objects(outputs, "outputs")]
            tensors.check_outputs(name for name, _ in self._outputs)
        rest = memoryview(self._body)[head:]
        found, at = [], 0
        for each in _objects(content["inputs"], "inputs"):
            tensor, size = _input(each, rest[at:])
            found.append(tensor)
            at += size
        if at != len(rest):
            raise InvalidError(
                f"the number of bytes after the JSON is {len(rest)}, expected {at}: the sum of binary_data_size"
            )
        return tensors.to_table(found, model.columns)

    def answer(self, name: str, scores: Scores, outputs: list[str]) -> tuple[bytes, int | None]:
        """Return the body of the response, and the length of its JSON if binary tensors follow it.

        Raises:
            UnknownError: The request names an output that the model does not have.
        """
        wanted = self._outputs if self._outputs is not None else [(each, self._binary) for each in outputs]
        found, raws = [], []
        for output, binary in wanted:
            if output not in outputs:
                raise UnknownError(f"no output {output!r}; the outputs are {', '.join(outputs)}")
            values = np.ascontiguousarray(scores.values[:, outputs.index(output)])
            tensor: dict[str, Any] = {"name": output, "datatype": "FP32", "shape": [len(values)]}
            if binary:
                raws.append(values.astype("<f4", copy=False).tobytes())
                tensor["parameters"] = {"binary_data_size": len(raws[-1])}
            else:
                tensor["data"] = values.tolist()
            found.append(tensor)
        content: dict[str, Any] = {"model_name": name, "model_version": scores.model.identity, "outputs": found}
        if self._id is not None:
            content["id"] = self._id
        if scores.unusual:
            content["parameters"] = {"unusual": dumps(scores.unusual).decode()}
        head = dumps(content)
        return (b"".join([head, *raws]), len(head)) if raws else (head, None)

    def _output(self, output: dict[str, Any]) -> tuple[str, bool]:
        name = _text(output.get("name"), "outputs: name") or ""
        parameters = _parameters(output, f"output {name!r}")
        if parameters.get("classification"):
            raise InvalidError(f"output {name!r}: classification is not supported")
        return name, parameters.get("binary_data", self._binary) is True


def loads(text: bytes | memoryview) -> Any:
    """Parse JSON, and return its value.

    Raises:
        InvalidError: The text is not JSON, or is nested too deeply.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidError(f"the body is not JSON: {error}") from error


def dumps(content: Any) -> bytes:
    """Return a value as JSON; numbers that are not finite become null."""
    return _encoder.encode(content)


def _input(given: dict[str, Any], rest: memoryview) -> tuple[tensors.Tensor, int]:
    """Return a tensor, and the number of bytes after the JSON that belong to it."""
    name, datatype, shape = given.get("name"), given.get("datatype"), given.get("shape")
    if not isinstance(name, str) or not isinstance(datatype, str) or not isinstance(shape, list):
        raise InvalidError("inputs: each input must have the strings 'name' and 'datatype', and the list 'shape'")
    parameters = _parameters(given, name)
    if "shared_memory_region" in parameters:
        raise InvalidError(
            f"{name}: shared memory is not supported: send the list 'data', or bytes with 'binary_data_size'"
        )
    size = parameters.get("binary_data_size")
    if size is None:
        if not isinstance(given.get("data"), list):
            raise InvalidError(f"{name}: expected the list 'data', or the parameter 'binary_data_size'")
        return tensors.from_values(name, datatype, shape, given["data"]), 0
    if not isinstance(size, int) or not 0 <= size <= len(rest):
        raise InvalidError(
            f"{name}: binary_data_size is {size!r}, expected an integer from 0 to {len(rest)}, the number of bytes left"
        )
    return tensors.from_raw(name, datatype, shape, rest[:size]), size


def _objects(given: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise InvalidError(f"{what}: expected a list of objects")
    return given


def _parameters(given: dict[str, Any], what: str) -> dict[str, Any]:
    found = given.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidError(f"parameters of {what}: expected an object")
    return found


def _text(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidError(f"{what}: expected a string")
    return value


def _whole(header: bytes, most: int) -> int:
    if not header.isdigit() or len(header) > 12 or int(header) > most:
        raise InvalidError(
            f"inference-header-content-length {header.decode('latin-1')}: must be an integer of at most {most}, the "
            "size of the body in bytes"
        )
    return int(header)
