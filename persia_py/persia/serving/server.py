"""The serving process: loads a bundle, serves until a signal, and ends without dropping a request."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from persia.runtime.errors import UnreachableError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.interruptible import interruptible
from persia.runtime.logging import get_logger
from persia.serving import access
from persia.serving.batching import Batcher
from persia.serving.connections import Connection, HttpServer
from persia.serving.http import HttpApp
from persia.serving.limits import Limits
from persia.serving.location import Found, find
from persia.serving.metrics import Metrics
from persia.serving.reload import Reloader
from persia.serving.rpc import RpcServer
from persia.serving.service import Service

_logger = get_logger("serving")

_BACKLOG = 1_024
_OTHER_PORT = "choose an address of this host, and a free port above 1023: {} HOST:PORT"


@dataclass(frozen=True)
class Options:
    """The options of serving.

    Attributes:
        http: The address for HTTP, ``HOST:PORT``; port 0 selects a free port.
        grpc: The address for gRPC; None disables gRPC.
        name: The name of the model in the Open Inference Protocol; None means the name of the folder.
        limits: The limits.
    """

    http: str
    grpc: str | None
    name: str | None = None
    limits: Limits = field(default_factory=Limits)


def serve(path: Path, options: Options, load: Callable[[Path], Any]) -> ExitCode:
    """Serve a bundle until SIGTERM or Ctrl-C, and return the exit code.

    Args:
        path: A bundle, a link to one, or a folder of versions.
        options: The options.
        load: Loads and checks a bundle.

    Raises:
        CheckpointError: The path has no bundle, or an incomplete one.
        UsageError: An address is invalid.
        AuthError: The token file cannot be read, or there is none and an address is not loopback.
        ConfigError: A certificate cannot be read.
        UnreachableError: A port cannot be opened.
    """
    addresses = access.address(options.http, "--http")
    rpc = access.address(options.grpc, "--grpc") if options.grpc is not None else None
    expected, certificate = access.bearer(), access.certificate()
    found = find(path)
    model = _first(load, found.path)
    listening = _listen(addresses)
    process = _Process(path, options, load, expected, certificate)
    with listening:
        return uvloop.run(process.run(found, model, listening, rpc))


class _Process:
    """A serving process, from its start to its end."""

    def __init__(
        self,
        path: Path,
        options: Options,
        load: Callable[[Path], Any],
        expected: bytes | None,
        certificate: tuple[str, str] | None,
    ) -> None:
        self._path = path
        self._options = options
        self._load = load
        self._expected = expected
        self._certificate = certificate
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._code = ExitCode.OK

    async def run(self, found: Found, model: Any, listening: socket.socket, rpc: tuple[str, int] | None) -> ExitCode:
        """Serve until a signal."""
        limits, metrics = self._options.limits, Metrics()
        batcher = Batcher(model, limits, metrics)
        metrics.waiting.set_function(lambda: batcher.waiting)
        metrics.waiting_bytes.set_function(lambda: batcher.waiting_bytes)
        reloader = Reloader(self._path, (found, model), self._load, batcher, metrics)
        name = self._options.name or self._path.absolute().name
        service = Service(name, limits, metrics, batcher, reloader, self._expected)
        metrics.is_ready(lambda: service.ready)
        server = self._http(service)
        remote = None
        try:
            if rpc is not None:
                remote = RpcServer(service, *rpc)
                await remote.start()
            self._on_signals(reloader, limits.drain_s)
            answering = asyncio.create_task(server.serve([listening]))
            watching = asyncio.create_task(reloader.run())
            self._say(service, listening, remote, rpc)
            stopping = asyncio.create_task(self._stop.wait())
            broken = asyncio.create_task(batcher.broken.wait())
            await asyncio.wait({answering, watching, stopping, broken}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and limits.drain_s > 0:
                service.draining = True
                if remote is not None:
                    await remote.leave()
                again = asyncio.create_task(self._stop_now.wait())
                await asyncio.wait(
                    {answering, watching, again, broken},
                    timeout=limits.drain_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                again.cancel()
            service.stopping = True
            if batcher.broken.is_set():
                self._code = ExitCode.FAILED
            watching.cancel()
            if remote is not None:
                await remote.leave()
            server.should_exit = True
            await asyncio.gather(answering, *([remote.stop(limits.timeout_s)] if remote is not None else []))
            if watching.done() and not watching.cancelled():
                watching.result()
        except RuntimeError as error:
            if remote is None and rpc is not None:
                text = f"--grpc: cannot listen on {self._options.grpc}: {error}"
                raise UnreachableError(text, hint=_OTHER_PORT.format("--grpc")) from error
            raise
        finally:
            await asyncio.get_running_loop().run_in_executor(None, batcher.close)
        _logger.info("all connections are closed; ending")
        return self._code

    def _http(self, service: Service) -> HttpServer:
        limits = service.limits
        protocol = type("Connection", (Connection,), {"limit": limits.connections})
        files = self._certificate
        config = uvicorn.Config(
            HttpApp(service),
            http=protocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(limits.timeout_s) + 1,
            ssl_certfile=None if files is None else files[0],
            ssl_keyfile=None if files is None else files[1],
        )
        return HttpServer(config, limits.timeout_s)

    def _on_signals(self, reloader: Reloader, drain_s: float) -> None:
        loop = asyncio.get_running_loop()

        def stop(code: ExitCode) -> None:
            if self._stop.is_set() or drain_s == 0:
                _logger.info("stopping: completing the requests that have arrived")
                self._stop_now.set()
            else:
                _logger.info("no longer ready; stopping in %g s, or immediately after another signal", drain_s)
            self._code = code
            self._stop.set()

        loop.add_signal_handler(signal.SIGTERM, stop, ExitCode.OK)
        loop.add_signal_handler(signal.SIGINT, stop, ExitCode.INTERRUPTED)
        with contextlib.suppress(AttributeError):
            loop.add_signal_handler(signal.SIGHUP, reloader.ask)

    def _say(
        self, service: Service, listening: socket.socket, remote: RpcServer | None, rpc: tuple[str, int] | None
    ) -> None:
        scheme = "http" if self._certificate is None else "https"
        host, port = listening.getsockname()[:2]
        where = [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"]
        if remote is not None and rpc is not None:
            where.append(f"gRPC at {f'[{rpc[0]}]' if ':' in rpc[0] else rpc[0]}:{remote.port}")
        _logger.info("serving %s, bundle %s: %s", service.name, service.model.identity, ", ".join(where))


def _first(load: Callable[[Path], Any], path: Path) -> Any:
    """Load the first bundle. A signal ends the process, because nothing is served yet."""
    with interruptible(), ThreadPoolExecutor(1) as pool:
        return pool.submit(load, path).result()


def _listen(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket.

    Raises:
        UnreachableError: The port cannot be opened.
    """
    try:
        host, port = address
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as opened:
            listening = opened.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            opened.pop_all()
    except OSError as error:
        text = f"--http: cannot listen on {address[0]}:{address[1]}: {error.strerror}"
        raise UnreachableError(text, hint=_OTHER_PORT.format("--http")) from error
    return listening
