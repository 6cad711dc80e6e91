"""Admits gRPC calls that have the token, up to a limit, and health calls from any client.

A call begins before its message arrives, and a client may never send the message. A call therefore counts towards the
limit only after its token is checked, and health calls have a separate limit. gRPC's own limit counts all calls alike.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from persia.serving import access
from persia.serving.limits import Limits
from persia.serving.refusals import BusyError

HEALTH_CALLS = 64
"""The maximum number of health calls that wait for their messages. A further call replaces the oldest one."""

_HEALTH = (
    "/grpc.health.v1.Health/Check",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
"""The calls that require no token."""


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc,name-defined,unused-ignore]
    """Refuses calls without the token, and calls beyond the limit.

    A refused call ends immediately, and does not wait for its message.

    Args:
        expected: The required value of ``authorization``; None admits every call.
        limits: The limits; ``waiting`` bounds the number of calls with the token, from their start to their end.
    """

    def __init__(self, expected: bytes | None, limits: Limits) -> None:
        self._expected, self._limits = expected, limits
        self._open = 0
        self._silent: dict[asyncio.Future[None], None] = {}  # health calls whose message has not arrived, oldest first
        self._without_token: Any = grpc.stream_stream_rpc_method_handler(_refuse)
        self._beyond: Any = grpc.stream_stream_rpc_method_handler(self._say_busy)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler_call_details.method in _HEALTH:
            return self._about_health(handler)
        if not self._has_token(handler_call_details):
            return self._without_token
        if self._open >= self._limits.waiting:
            return self._beyond
        self._open += 1
        call = cast("asyncio.Task[Any]", asyncio.current_task())  # the task ends together with the call
        call.add_done_callback(self._ended)
        return handler

    def _has_token(self, call: grpc.HandlerCallDetails) -> bool:
        if self._expected is None:
            return True
        for name, value in call.invocation_metadata or ():
            if name == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
                if access.allowed(self._expected, given):
                    return True
        return False

    def _ended(self, _call: "asyncio.Task[Any]") -> None:
        self._open -= 1

    def _about_health(self, handler: Any) -> Any:
        """Return a handler that waits for the message of a health call, unless newer calls replace the call."""

        async def answer(_requests: Any, context: Any) -> None:
            message = await self._message(context)
            await context.write(await handler.unary_unary(message, context))

        return grpc.stream_stream_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)

    async def _message(self, context: Any) -> Any:
        """Return the message of a health call. Abort the call if no message arrives."""
        if len(self._silent) >= HEALTH_CALLS:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.set_result(None)
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._silent[left] = None
        reading = asyncio.ensure_future(context.read())
        # The task is not canceled, because gRPC still writes to its buffer. The task ends with the call.
        reading.add_done_callback(_note)
        try:
            await asyncio.wait({reading, left}, timeout=self._limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._silent.pop(left, None)
        if not reading.done():  # abort() raises an error, which ends the call
            if left.done():
                text = f"more than {HEALTH_CALLS} health calls wait for their messages, and this one has waited longest"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            text = f"no message arrived within {self._limits.timeout_s:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        message = reading.result()
        if message is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        return message

    async def _say_busy(self, _requests: Any, context: Any) -> None:
        context.set_trailing_metadata((("retry-after", str(BusyError.retry_after_s)),))
        text = f"{self._open} calls are open, the limit is {self._limits.waiting}; try again later"
        await context.abort(BusyError.code, text)


async def _refuse(_requests: Any, context: Any) -> None:
    text = (
        "no valid token: send the metadata authorization: Bearer TOKEN; on the server, persia serve --show-token "
        "prints the token"
    )
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)


def _note(reading: "asyncio.Future[Any]") -> None:
    """Retrieve the error of a call that ended before its message arrived."""
    if not reading.cancelled():
        reading.exception()
