"""B4's limit: plain sockets that send as many bytes over the same two hops, client - relay - server, and back."""

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

PIECE = 1 << 17


def _receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill ``buffer``. Return False if the peer has closed the connection."""
    filled = 0
    while filled < len(buffer):
        got = connection.recv_into(buffer[filled:])
        if got == 0:
            return False
        filled += got
    return True


def _send(connection: socket.socket, data: memoryview) -> bool:
    connection.sendall(data)
    return True


def _accept(pipe: Connection) -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _serve(pipe: Connection, up: int, down: int) -> None:
    """Receive ``up`` bytes and send ``down`` bytes until the client disconnects. Then report the CPU seconds."""
    with _accept(pipe) as client:
        taken, given = memoryview(bytearray(PIECE)), memoryview(bytes(PIECE))
        start = time.process_time()
        while _move(up, lambda size: _receive(client, taken[:size])):
            _move(down, lambda size: _send(client, given[:size]))
    pipe.send(time.process_time() - start)


def _relay(pipe: Connection, port: int, up: int, down: int) -> None:
    """Forward ``up`` bytes and return ``down`` bytes, piece by piece."""
    with _accept(pipe) as client, socket.create_connection(("127.0.0.1", port)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(PIECE))

        def forward(source: socket.socket, target: socket.socket) -> Callable[[int], bool]:
            return lambda size: _receive(source, buffer[:size]) and _send(target, buffer[:size])

        start = time.process_time()
        while _move(up, forward(client, server)):
            _move(down, forward(server, client))
    pipe.send(time.process_time() - start)


def _move(total: int, piece: Callable[[int], bool]) -> bool:
    """Call ``piece(size)`` for ``total`` bytes. Return False as soon as a call returns False."""
    left = total
    while left > 0:
        if not piece(min(left, PIECE)):
            return False
        left -= PIECE
    return True


def cpu_seconds(up: int, down: int, rounds: int) -> float:
    """Return the CPU seconds of all three processes for one round trip: ``up`` bytes sent, ``down`` bytes returned."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there, up, down), daemon=True)
    server.start()
    port = here.recv()
    relay_here, relay_there = context.Pipe()
    relay = context.Process(target=_relay, args=(relay_there, port, up, down), daemon=True)
    relay.start()
    given, taken = memoryview(bytes(PIECE)), memoryview(bytearray(PIECE))
    with socket.create_connection(("127.0.0.1", relay_here.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.process_time()
        for _ in range(rounds):
            _move(up, lambda size: _send(connection, given[:size]))
            _move(down, lambda size: _receive(connection, taken[:size]))
        own = time.process_time() - start
    total = own + float(relay_here.recv()) + float(here.recv())
    relay.join()
    server.join()
    return total / rounds


if __name__ == "__main__":
    print(cpu_seconds(832 * 1024, 6_815_744, 50) * 1e3, "ms of CPU time per round trip")
