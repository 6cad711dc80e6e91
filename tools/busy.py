"""Run a command while every processor is busy, and return its exit code. Usage: tools/busy.py COMMAND ARGUMENTS..."""

import os
import subprocess
import sys

BUSY = "import os, sys\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""The code of a process that keeps one processor busy, and ends with the process that started it."""


def main(command: list[str]) -> int:
    """Keep the processors busy until the command ends."""
    others = [subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
