"""HTTP connections of uvicorn, with limits on their number, on the size of a header, and on time.

A client that sends its request too slowly, or does not read its response, is disconnected. uvicorn itself limits only
the time between two requests of a connection.
"""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEADER_BYTES = 32 << 10
"""The maximum size of the header of a request, including the first line."""
_LOOK_S = 0.5
_REFUSAL = (
    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    "connection: close\r\ncontent-length: {}\r\n\r\n{}"
)


class Connection(HttpToolsProtocol):
    """An HTTP connection."""

    limit = 1
    """The maximum number of connections."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.since: float | None = None
        """The time at which the connection was opened, an incomplete request began, or the client stopped reading.

        None while the server computes a response, and while it waits for the client's next request.
        """
        self._header = 0

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, unless there are too many."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > self.limit:
            body = f'{{"error": "the maximum number of connections, {self.limit}, is reached; try again later"}}'
            transport.write(_REFUSAL.format(len(body), body).encode())
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        if self.transport.is_closing():
            return
        if self._header >= 0:
            self._header += len(data)
        super().data_received(data)
        if self._header > _HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The header of the request is longer than {_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.since = self.since or self.loop.time()
        self._header = max(self._header, 0)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start to respond."""
        self._header = -1
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Record that the request is complete."""
        self.since = None
        self._header = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Record that the client has stopped reading."""
        self.since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client is reading again."""
        self.since = None
        super().resume_writing()


class HttpServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers, which also disconnects slow clients."""

    def __init__(self, config: uvicorn.Config, timeout_s: float) -> None:
        """Create a server that disconnects clients that are too slow for ``timeout_s`` seconds."""
        super().__init__(config)
        self._timeout_s = timeout_s

    async def _serve(self, sockets: Any = None) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            await super()._serve(sockets)
        finally:
            watch.cancel()

    async def serve(self, sockets: Any = None) -> None:
        """Serve until :attr:`should_exit`."""
        await self._serve(sockets)

    async def _watch(self) -> None:
        """Disconnect clients that are too slow."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            oldest = loop.time() - self._timeout_s
            for connection in [*self.server_state.connections]:
                since = getattr(connection, "since", None)
                if since is not None and since < oldest:
                    connection.transport.abort()
