"""The HTTP server for metrics."""

import socket
import socketserver
import sys
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry

from persia.runtime.logging import get_logger

_logger = get_logger("monitor")

REQUEST_S = 5.0
"""Seconds within which a client must send its request, and receive each part of the response."""
CONNECTIONS = 32
"""The maximum number of connections that are served at the same time; further connections are closed."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Suppress the log of requests."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A server with one thread for each of at most :data:`CONNECTIONS` connections."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        self.address_family = family
        self._free = threading.Semaphore(CONNECTIONS)
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread that serves the connection. Close the connection if too many are served."""
        if not self._free.acquire(blocking=False):
            _logger.debug("metrics: closed a connection from %s: at most %d are served", client_address, CONNECTIONS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that has disconnected, or has not sent its request in time.

        Errors of a scrape are answered with 500.
        """
        del request
        _logger.debug("metrics: the connection from %s failed: %r", client_address, sys.exc_info()[1])


def serve(host: str, port: int, registry: CollectorRegistry) -> int:
    """Serve metrics from a thread until the process ends, and return the port.

    Args:
        host: The address.
        port: The port; 0 chooses a free one.
        registry: The metrics.

    Raises:
        OSError: The address cannot be used.
    """
    server = _Server(host, port)
    server.set_app(prometheus_client.make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="persia-metrics", daemon=True).start()
    return int(server.server_port)
