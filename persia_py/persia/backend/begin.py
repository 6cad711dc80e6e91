"""Starts a generation, and retries while a server cannot write to its disk."""

import time
from collections.abc import Callable

from persia.runtime import preemption
from persia.runtime.errors import RunLostError, StorageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("remote")

_HINT = (
    "on the host of the server, check the owner of the path that the message names, and the free space and the state "
    "of its disk"
)
_FIRST_S, _LONGEST_S = 0.2, 5.0
"""Seconds before the first retry; each delay is twice the previous one, up to the longest."""


def begin_when_stored(begin: Callable[[], int]) -> int:
    """Return the generation that ``begin`` starts; retry while a server cannot write its number to disk.

    Raises:
        RunLostError: ``PERSIA_RPC_TIMEOUT`` seconds have passed.
    """
    started, wait, logged = time.monotonic(), _FIRST_S, False
    while True:
        try:
            return begin()
        except StorageError as error:
            waited = time.monotonic() - started
            if waited + wait > settings.rpc_timeout:
                raise RunLostError(
                    f"cannot begin a generation; tried for {waited:.0f} s (PERSIA_RPC_TIMEOUT): {error}",
                    hint=f"{_HINT}, then restart the trainers",
                ) from error
            if not logged:
                line = "cannot begin a generation; retrying for %g s: %s; next: %s"
                _logger.warning(line, settings.rpc_timeout, error, _HINT)
                logged = True
        preemption.exit_if_requested()
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_S)
