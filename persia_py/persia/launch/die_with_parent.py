"""Runs a program that the kernel kills when its parent dies: ``die_with_parent.py PARENT_PID PROGRAM ARGUMENTS...``.

With this program, no child process outlives a killed launcher. It is run by its path and without site-packages, so its
start takes only a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel to send SIGKILL when the parent dies, then replace this process with the program."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"error: cannot run {command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
