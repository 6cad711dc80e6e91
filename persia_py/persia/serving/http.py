"""HTTP: ``POST /score``, the Open Inference Protocol's REST form, health and metrics, as an ASGI application."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from persia import __version__
from persia.serving import access, records, rest
from persia.serving.metrics import CONTENT_TYPE
from persia.serving.refusals import (
    EncodingError,
    FailedError,
    MethodError,
    RefusedError,
    TooLargeError,
    UnauthorizedError,
    UnknownError,
)
from persia.serving.service import Service, inputs, output_names, outputs

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Answer = tuple[int, list[tuple[bytes, bytes]], bytes]

_JSON = (b"content-type", b"application/json")
BUNDLE = b"persia-bundle"
"""The response header that names the bundle."""


class _GoneError(Exception):
    """The client has disconnected, or did not send its request in time."""


class HttpApp:
    """The ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        path, api = scope["path"], "score"
        try:
            if path == "/score":
                status, headers, body = await self._score(scope, receive)
            elif path.startswith("/v2/models/") and path.endswith("/infer"):
                api = "rest"
                status, headers, body = await self._infer(scope, receive)
            else:
                api = ""
                status, headers, body = self._other(scope)
            outcome = "ok"
        except _GoneError:
            self._service.answered(api, "gone", began)
            return
        except RefusedError as error:
            status, headers, body = _refusal(error)
            outcome = error.outcome
        except Exception:
            if api:
                self._service.answered(api, FailedError.outcome, began)
            raise
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
        if api:
            self._service.answered(api, outcome, began)

    async def _score(self, scope: MutableMapping[str, Any], receive: Receive) -> _Answer:
        body = await self._body(scope, receive)
        scores = await self._service.score(records.decoder(body, self._service.limits), len(body))
        model = scores.model
        names = output_names(model)
        values = scores.values
        columns = [values[:, index].tolist() for index in range(len(names))]
        named = columns[0] if len(names) == 1 else dict(zip(model.labels, columns, strict=True))
        content: dict[str, Any] = {"bundle": model.identity, "scores": named}
        if scores.unusual:
            content["unusual"] = scores.unusual
        return 200, [_JSON, (BUNDLE, model.identity.encode())], rest.dumps(content)

    async def _infer(self, scope: MutableMapping[str, Any], receive: Receive) -> _Answer:
        parts = [unquote(part) for part in scope["raw_path"].decode("ascii").split("/")[3:-1]]
        name, version = _name_and_version(parts)
        header = _header(scope, b"inference-header-content-length")
        body = await self._body(scope, receive, lambda: self._service.check_model(name, version))
        request = rest.InferRequest(body, header)
        scores = await self._service.score(self._service.for_version(version, request.decode), len(body))
        model = scores.model
        content, head = request.answer(self._service.name, scores, output_names(model))
        headers = [(BUNDLE, model.identity.encode())]
        if head is None:
            return 200, [_JSON, *headers], content
        headers.append((b"inference-header-content-length", str(head).encode()))
        return 200, [(b"content-type", b"application/octet-stream"), *headers], content

    async def _body(
        self, scope: MutableMapping[str, Any], receive: Receive, check: Callable[[], None] = lambda: None
    ) -> bytes:
        """Return the body of a request, after reserving its size in the batcher."""
        if scope["method"] != "POST":
            raise MethodError(f"{scope['method']} {scope['path']}: expected POST")
        length, limit = 0, self._service.limits.body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value) if value.isdigit() else 0
            elif name == b"content-encoding" and value.lower() != b"identity":
                given = value.decode("latin-1")
                raise EncodingError(f"content-encoding {given} is not supported: send the body uncompressed")
        self._authorize(scope)
        check()
        if length > limit:
            raise TooLargeError(f"the request has {length} bytes, the limit is {limit}")
        batcher = self._service.batcher
        batcher.reserve(length)
        size = length
        try:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            body: bytes = message["body"]
            parts = [body]
            read = len(body)
            while True:
                if read > limit:
                    raise TooLargeError(f"the request has at least {read} bytes, the limit is {limit}")
                if read > size:  # the header content-length is missing
                    batcher.grow(read - size)
                    size = read
                if not message["more_body"]:
                    return body if len(parts) == 1 else b"".join(parts)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                parts.append(message["body"])
                read += len(parts[-1])
        except BaseException:
            batcher.release(size)
            raise

    def _authorize(self, scope: MutableMapping[str, Any]) -> None:
        expected = self._service.expected
        if expected is not None and not access.allowed(expected, _header(scope, b"authorization")):
            raise UnauthorizedError(
                "no valid token: send the header Authorization: Bearer TOKEN; on the server, persia serve --show-token "
                "prints the token"
            )

    def _other(self, scope: MutableMapping[str, Any]) -> _Answer:
        """Respond to requests for health, metrics and metadata."""
        path, method = scope["path"].rstrip("/") or "/", scope["method"]
        service = self._service
        ready = service.ready
        health = ("/v2/health/live", "/v2/health/ready")
        if path not in ("/metrics", "/v2", *health) and not path.startswith("/v2/models/"):
            known = ", ".join(("/score", "/metrics", "/v2", *health))
            raise UnknownError(f"no path {path}; the paths are {known} and /v2/models/NAME")
        if method not in ("GET", "HEAD"):
            raise MethodError(f"{method} {path}: expected GET")
        if path == "/v2/health/live":
            return _json({"live": True})
        if path == "/v2/health/ready":
            return _json({"ready": ready}, 200 if ready else 503)
        if path == "/metrics":
            return 200, [(b"content-type", CONTENT_TYPE)], service.metrics.text()
        self._authorize(scope)
        if path == "/v2":
            return _json({"name": "persia", "version": __version__, "extensions": ["binary_tensor_data"]})
        parts = [unquote(part) for part in scope["raw_path"].decode("ascii").rstrip("/").split("/")[3:]]
        asks_ready = parts[-1] == "ready" and len(parts) in (2, 4)
        name, version = _name_and_version(parts[:-1] if asks_ready else parts)
        service.check_model(name, version)
        if asks_ready:
            return _json({"name": name, "ready": ready}, 200 if ready else 503)
        model = service.model
        return _json(
            {
                "name": name,
                "versions": [model.identity],
                "platform": "persia_bundle",
                "inputs": [vars(tensor) for tensor in inputs(model)],
                "outputs": [vars(tensor) for tensor in outputs(model)],
            }
        )


def _name_and_version(parts: list[str]) -> tuple[str, str | None]:
    """Return name and version from ``NAME`` or ``NAME/versions/VERSION``."""
    if len(parts) == 1:
        return parts[0], None
    if len(parts) == 3 and parts[1] == "versions":
        return parts[0], parts[2]
    found = "/".join(parts)
    raise UnknownError(f"expected /v2/models/NAME or /v2/models/NAME/versions/VERSION, found /v2/models/{found}")


def _header(scope: MutableMapping[str, Any], wanted: bytes) -> bytes | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return None


def _json(content: Any, status: int = 200) -> _Answer:
    return status, [_JSON], rest.dumps(content)


def _refusal(error: RefusedError) -> _Answer:
    headers = [_JSON]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, UnauthorizedError):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, TooLargeError):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return error.status, headers, rest.dumps({"error": str(error)})
