"""What runs in the process of a data-compose script: ``python -m persia.launch.data FILE ARGUMENTS...``."""

import sys

from persia.launch.script import guarded, run_script


def main() -> int:
    """Run the script in ``sys.argv[1]``; 75 says that a new epoch of the run began and it has to run again."""
    return guarded(lambda: run_script(sys.argv[1], sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
