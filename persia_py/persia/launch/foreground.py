"""Runs a program on the terminal of this process: a shell in a container, or a step of ``persia doctor --ladder``."""

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
    """Run a program until it ends, and return its exit code.

    Ctrl-C is left to the program, which has the same terminal. After SIGTERM or SIGHUP, the program gets SIGTERM. When
    the program has ended, this process ends too, after the blocks around this call have cleaned up. Call this only in
    the main thread.

    Args:
        words: The program and its arguments.
        env: The whole environment.
        output: The file for its output and errors; None means those of this process.
        started: Called when the program is running.
        ends_at_interrupt: Whether Ctrl-C ends the program with SIGTERM, because it would otherwise prompt at the
            terminal.

    Returns:
        The exit code; minus the number of the signal that killed it.

    Raises:
        SystemExit: A signal has ended the call.
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
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # an ignored signal, as under nohup, stays ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        process = subprocess.Popen(words, env=env, stdout=output, stderr=None if output is None else subprocess.STDOUT)
        if received:  # the signal arrived before the process existed
            process.terminate()
        if started is not None:
            started(process)
        code = process.wait()
    finally:
        for number, handler in before.items():
            # None means that the handler was not set from Python, so it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        raise SystemExit(AGAIN)
    return code
