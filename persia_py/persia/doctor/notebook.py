"""A notebook server in the trainer's image, on a copy of a folder."""

import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

from persia.doctor import compose, context, ports
from persia.launch import foreground
from persia.runtime.errors import UnreachableError, UsageError

READY_S = 60.0
"""Seconds within which a notebook must respond."""
_PERIOD_S = 0.2
"""Seconds between two requests."""


def run(folder: Path, port: int, token: str, *, mount: bool, ready: Callable[[], None]) -> int:
    """Run a notebook server in the trainer's image, until it ends or Ctrl-C.

    Args:
        folder: The context.
        port: The port on this host; the container publishes it on loopback only.
        token: The token that a browser must send.
        mount: Whether to work on the folder itself.
        ready: Called when the server responds to an HTTP request that has the token.

    Raises:
        UsageError: As in :func:`persia.doctor.context.read`, the port is in use, or the image has no notebook server.
        UnreachableError: Nothing can run in containers here.
    """
    if (used := ports.free("port", port, "--port", "127.0.0.1")).status == "fail":
        raise UsageError(f"--port {port}: {used.found}", hint="choose another port: --port N")
    options = ["--publish", f"127.0.0.1:{port}:8888", "--env", "JUPYTER_TOKEN", "--env", "HOME=/tmp"]
    server = ["python", "-m", "jupyterlab", "--ip=0.0.0.0", "--port=8888", "--no-browser"]
    with context.prepared(folder, mount=mount) as workspace:
        context.check_stack()
        _check_jupyter(workspace)
        context.say(workspace, mount=mount)

        def started(process: "subprocess.Popen[bytes]") -> None:
            threading.Thread(target=_wait, args=(process, port, token, ready), daemon=True).start()

        return foreground.run(
            context.words_of(server, options=options),
            env=context.variables(workspace) | {"JUPYTER_TOKEN": token},  # a command line is visible to other users
            started=started,
            ends_at_interrupt=True,
        )


def _check_jupyter(workspace: Path) -> None:
    """Check that the image has a notebook server.

    Raises:
        UsageError: The image has no notebook server.
        UnreachableError: The check cannot run in the image.
    """
    words = context.words_of(["python", "-c", "import jupyterlab"])
    environment = context.variables(workspace)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 and "No module named 'jupyterlab'" not in done.stderr:
        raise UnreachableError(
            f"cannot import jupyterlab in the image {compose.image()}: {compose.last_line(done)}",
            hint="check the image: persia doctor --image",
        )
    if done.returncode != 0:
        raise UsageError(
            f"the image {compose.image()} has no notebook server",
            hint="add it to the image: FROM IMAGE, then RUN pip install jupyterlab; or use: persia debug shell",
        )


def _wait(process: "subprocess.Popen[bytes]", port: int, token: str, ready: Callable[[], None]) -> None:
    """Call ``ready`` when the server responds; after a time limit, report why it does not."""
    pause, why = threading.Event(), ""
    for _ in range(int(READY_S / _PERIOD_S)):
        if process.poll() is not None:
            return
        if not (why := _no_answer(port, token)):
            ready()
            return
        pause.wait(_PERIOD_S)
    sys.stderr.write(
        f"warning: the notebook does not respond at 127.0.0.1:{port} after {READY_S:.0f} s: {why}\n"
        "next: see its log above; Ctrl-C ends it\n"
    )


def _no_answer(port: int, token: str) -> str:
    """Return why the server does not respond to a request with the token; empty if it responds.

    A connection proves nothing: Docker's proxy accepts it before the server in the container listens.
    """
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/status", headers={"Authorization": f"token {token}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=1.0) as answer:
            return "" if answer.status == 200 else f"HTTP status {answer.status}"
    except (OSError, http.client.HTTPException) as error:  # exceptions of urllib are OSErrors
        return str(error) or type(error).__name__
