"""What runs in the process of a data-compose script: ``python -m persia.launch.data FILE ARGUMENTS...``."""

import sys

from persia.feed import RunRestarted
from persia.launch.script import guarded, run_script

AGAIN = 75
"""Exit code: a new epoch of the run began, the script has to run again."""


def main() -> int:
    """Run the script in ``sys.argv[1]``."""
    return guarded(_compose)


def _compose() -> int:
    try:
        return run_script(sys.argv[1], sys.argv[2:])
    except RunRestarted as restarted:
        sys.stderr.write(f"{restarted}: running the script again\n")
        return AGAIN


if __name__ == "__main__":
    sys.exit(main())
