"""Become another program that the kernel kills when its parent dies: ``tied.py PARENT_PID PROGRAM ARGUMENTS...``.

Run by path and without site-packages, so that it costs a few milliseconds. Nothing outlives a launcher that was killed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then run the program in it."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
