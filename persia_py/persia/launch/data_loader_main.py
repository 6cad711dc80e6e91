"""The process of a data script: ``python -m persia.launch.data_loader_main FILE ARGUMENTS...``.

Without arguments, the process sends the rows of ``PERSIA_CONFIG``.
"""

import sys
from pathlib import Path

from persia.feed.protocol import RunRestarted
from persia.launch.user_script import guarded, run_script
from persia.runtime.config_files import persia_config
from persia.runtime.errors import UsageError
from persia.runtime.exit_codes import AGAIN
from persia.runtime.settings import settings


def main() -> int:
    """Run the script in ``sys.argv[1]``, or the built-in one."""
    return guarded(_send_data)


def _send_data() -> int:
    script, *arguments = sys.argv[1:] or [""]
    try:
        code = run_script(script, arguments) if script else _send_rows()
    except RunRestarted as restarted:
        sys.stderr.write(f"{restarted}: restarting the script\n")
        return AGAIN
    if code == 0 and (note := settings.served) and not Path(note).read_bytes():
        raise UsageError(
            f"{script} ended without a `with DataCtx()`, so it sent no data; the trainers wait for data",
            hint="send the batches inside the block: with DataCtx() as ctx: ctx.send_data(batch)",
        )
    return code


def _send_rows() -> int:
    from persia.trainer import data_compose

    if (path := persia_config()) is None:
        raise UsageError(
            "no script is given, and PERSIA_CONFIG is not set",
            hint="specify the path of a script, or set PERSIA_CONFIG to the path of a persia.yml",
        )
    data_compose.send(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
