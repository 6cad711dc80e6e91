"""``python -m persia.testing [--torch-only] persia.yml``: check the model of a configuration."""

import sys
from pathlib import Path

from persia.runtime.errors import PersiaError
from persia.runtime.exit_codes import ExitCode
from persia.testing.checks import check, check_alone


def main(arguments: list[str]) -> int:
    """Check the model of a ``persia.yml``, print the report, and return the exit code."""
    alone = "--torch-only" in arguments
    files = [each for each in arguments if each != "--torch-only"]
    if len(files) != 1:
        sys.stderr.write("usage: python -m persia.testing [--torch-only] persia.yml\n")
        return ExitCode.CONFIG
    try:
        report = (check_alone if alone else check)(None, Path(files[0]))
    except PersiaError as error:
        sys.stderr.write(f"error: {error}\n" + (f"next:  {error.hint}\n" if error.hint else ""))
        return error.exit_code
    sys.stdout.write(f"{report}\n")
    if report:
        return ExitCode.OK
    return report.error.exit_code if isinstance(report.error, PersiaError) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
