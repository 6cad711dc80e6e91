"""Attach an editor to a running rank with debugpy, on loopback only.

``persia debug attach`` writes a request into the folder of the running ranks. The rank starts debugpy's listener,
responds, and accepts an editor for the requested time, while training continues.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from persia.debug import ranks
from persia.debug.gate import RankSession
from persia.debug.ranks import Rank
from persia.runtime.errors import PersiaError, UnreachableError, UsageError
from persia.runtime.files import write_whole
from persia.runtime.logging import get_logger

LOOPBACK = "127.0.0.1"
FIRST_PORT = 5678
"""The port of rank 0, which VS Code proposes; rank R uses this port plus R."""
_POLL_S = 0.2
_LISTENS_S = 30.0
"""Seconds within which debugpy must listen."""
_MISSING = "pip install 'persia[debug]'"
_OTHER_PORT = "if the port is in use, choose another one: --port N"

_logger = get_logger("debug")


class Requests:
    """The requests to attach an editor to this rank. At most one is served at a time.

    Args:
        session: The session of this rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._port = 0
        self._until = 0.0
        self._connected = False
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Serve a request, if there is one. While debugpy waits for an editor, another request extends the wait."""
        path = ranks.own_path(".attach")
        if path is None or not path.exists():
            return
        request = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        self._until = time.monotonic() + request["timeout"]
        if self._thread is not None and self._thread.is_alive():
            if self._port:
                _answer({"port": self._port, "connected": self._connected})
            return
        self._thread = threading.Thread(target=self._serve, args=(request["port"],), name="persia-attach", daemon=True)
        self._thread.start()

    def _serve(self, port: int) -> None:
        try:
            import debugpy
        except ImportError:
            _answer({"error": "debugpy is not installed in the environment of the rank", "next": _MISSING})
            return
        for thread in threading.enumerate():  # an editor that stops the script must not stop heartbeats
            if thread.name.startswith("persia"):
                thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # debugpy reads it
        try:
            self._port = self._port or debugpy.listen((LOOPBACK, port))[1]
        except (RuntimeError, OSError) as error:
            _answer({"error": f"debugpy cannot listen on {LOOPBACK}:{port}: {error}", "next": _OTHER_PORT})
            return
        _answer({"port": self._port, "connected": False})
        while not debugpy.is_client_connected():
            if time.monotonic() > self._until:
                _logger.warning(
                    "no editor was attached within the --timeout of persia debug attach; rank %d continues",
                    self._session.rank,
                )
                return
            time.sleep(_POLL_S)
        self._set_connected(True)
        while debugpy.is_client_connected():
            time.sleep(_POLL_S)
        self._set_connected(False)

    def _set_connected(self, connected: bool) -> None:
        self._connected = connected
        self._session.edited(connected)
        _answer({"port": self._port, "connected": connected})


def _answer(content: dict[str, Any]) -> None:
    write_whole(_answer_of(os.getpid()), json.dumps(content).encode())


def _answer_of(pid: int) -> Path:
    return ranks.folder() / f"{pid}.attached"


def ask(entry: Rank, port: int, timeout_s: float) -> int:
    """Ask a rank to start debugpy's listener, and return the port.

    Raises:
        UnreachableError: The rank does not respond.
        UsageError: debugpy is not installed in the rank's environment, or cannot listen.
    """
    _answer_of(entry.pid).unlink(missing_ok=True)
    request = json.dumps({"port": port, "timeout": timeout_s}).encode()
    write_whole(ranks.folder() / f"{entry.pid}.attach", request)
    silent = UnreachableError(
        f"{entry.title} did not respond within {_LISTENS_S:g} s",
        hint=f"print the stacks of the rank: persia debug stacks --pid {entry.pid}",
    )
    try:
        answer = _wait(entry, lambda _: True, _LISTENS_S, silent)
    except UnreachableError:  # a later breakpoint_ must not open a port for which no editor waits
        (ranks.folder() / f"{entry.pid}.attach").unlink(missing_ok=True)
        raise
    return int(answer["port"])


def wait_for_client(entry: Rank, timeout_s: float) -> None:
    """Wait until an editor is attached.

    Raises:
        UnreachableError: No editor attached within ``timeout_s`` seconds; the rank continues.
    """
    none = UnreachableError(
        f"no editor was attached to {entry.title} within {timeout_s:g} s; the rank continues",
        hint="start the configuration in the editor within that time, or increase the limit: --timeout SECONDS",
    )
    _wait(entry, lambda answer: bool(answer["connected"]), timeout_s, none)


def _wait(
    entry: Rank, complete: Callable[[dict[str, Any]], bool], timeout_s: float, failed: PersiaError
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    path = _answer_of(entry.pid)
    while time.monotonic() < deadline:
        if path.exists():
            answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if "error" in answer:
                raise UsageError(f"{entry.title}: {answer['error']}", hint=str(answer["next"]))
            if complete(answer):
                return answer
        time.sleep(_POLL_S)
    raise failed


def launch_json(entry: Rank, port: int) -> str:
    """Return the configuration with which VS Code attaches: the content of ``.vscode/launch.json``."""
    configuration = {
        "name": f"persia: rank {entry.rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": LOOPBACK, "port": port},
        "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": entry.folder}],
        "justMyCode": True,
    }
    return json.dumps({"version": "0.2.0", "configurations": [configuration]}, indent=2)
