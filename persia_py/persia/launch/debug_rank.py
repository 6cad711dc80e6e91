"""The process of one rank of ``persia debug run``: ``python -m persia.launch.debug_rank FILE|-m MODULE ARGUMENTS...``.

This module differs from :mod:`persia.launch.rank_main` in three points:

* Torch waits for other ranks for up to a day.
* A thread watches the other ranks from the start.
* With ``PERSIA_DEBUG_POST_MORTEM=1``, a failing rank prompts at its error.
"""

import runpy
import sys
from collections.abc import Sequence

from persia.debug import process_groups, ranks, watcher
from persia.debug.breakpoint import session
from persia.debug.examiner import Examiner
from persia.debug.gate import POST_MORTEM
from persia.launch.rank_main import finished, handle_sigterm
from persia.launch.user_script import exit_code, guarded, run_script
from persia.runtime import post_mortem
from persia.runtime.settings import flag, settings


def main() -> int:
    """Run the script in ``sys.argv[1:]`` as one rank."""
    words = sys.argv[1:]
    handle_sigterm()
    ranks.register(settings.rank, settings.world_size)
    return guarded(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    own = session()
    process_groups.extend_new()
    watcher.start(own)
    if flag(POST_MORTEM):
        post_mortem.install(Examiner(own))
    if settings.nats_url is not None:
        return finished(lambda: _script(words))
    try:
        return _script(words)
    except Exception as error:
        post_mortem.examine(error)
        raise


def _script(words: Sequence[str]) -> int:
    if words[0] != "-m":
        return run_script(words[0], words[1:])
    sys.argv = ["-m", *words[2:]]
    sys.path[0] = ""
    try:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        return exit_code(exit_)
    return 0


if __name__ == "__main__":
    sys.exit(main())
