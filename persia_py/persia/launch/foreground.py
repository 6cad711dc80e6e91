"""A program that has the terminal of this process: a shell in a container, a step of the ladder."""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

from persia.runtime.exit_codes import AGAIN


def run(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    output: IO[bytes] | None = None,
    started: "Callable[[subprocess.Popen[bytes]], None] | None" = None,
    ends_at_interrupt: bool = False,
) -> int:
    """Run a program to its end, and return its exit code.

    Ctrl-C is for the program, which has the same terminal. SIGTERM and SIGHUP are passed on to it; once it has ended,
    this process ends too, and what encloses this call is cleaned up. Only in the main thread.

    Args:
        words: Program and arguments.
        env: The whole environment.
        output: The file of its output and errors; None is that of this process.
        started: Called when it runs.
        ends_at_interrupt: Ctrl-C ends the program by SIGTERM, because it would ask at the terminal.

    Returns:
        The exit code; minus the number of the signal that killed it.

    Raises:
        SystemExit: A signal has ended it.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGINT:
            received.append(number)
        if process is not None and (number != signal.SIGINT or ends_at_interrupt):
            process.terminate()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        process = subprocess.Popen(words, env=env, stdout=output, stderr=None if output is None else subprocess.STDOUT)
        if received:  # it arrived before there was a process
            process.terminate()
        if started is not None:
            started(process)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
    if received:
        raise SystemExit(AGAIN)
    return code
