"""A command of a shell, such as ``persia``, that runs as a fork of the fork server of the tests: see ``forking.py``.

This process represents the fork as the child of the shell: it forwards signals to the fork, and ends with the exit code
of the fork. If this process is killed, the fork is killed too. Each command starts this script, so it imports little.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn


def main(address: str, command: list[str]) -> NoReturn:
    """Run a command of this interpreter with the arguments of this process.

    Args:
        address: The socket of ``forking.Commands``.
        command: The words before the arguments: a console script, or nothing.
    """
    argv = [*command, *sys.argv[1:]]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(address)
        request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()})  # noqa: PTH109
        socket.send_fds(control, [request.encode()], [0, 1, 2])
        pid = int(control.recv(64))
        if not pid:
            os.execv(sys.executable, [sys.executable, *argv])  # noqa: S606

        def pass_on(number: int, _: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):  # the fork has ended, and its exit code arrives
                os.kill(pid, number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, pass_on)
        code = int(control.recv(64) or -signal.SIGKILL)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
