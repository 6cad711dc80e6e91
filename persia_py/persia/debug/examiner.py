"""A post-mortem: the rank that fails first stops at its error before the other ranks are notified of the failure."""

import sys
import traceback

from persia.debug import terminal
from persia.debug.breakpoint import Session
from persia.debug.debugger import Debugger
from persia.runtime.errors import RunLostError
from persia.runtime.logging import get_logger

_logger = get_logger("debug")


class Examiner:
    """Prompts in the failing frame of the rank that fails first.

    Args:
        session: The session of this rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: BaseException | None = None

    def __call__(self, error: BaseException) -> None:
        """Prompt, unless the error was examined before, or was caused by the failure of another rank."""
        session = self._session
        if error is self._seen or error.__traceback__ is None:
            return
        self._seen = error
        first = session.gate.get("failed")
        if isinstance(error, RunLostError) or (first is not None and first["rank"] != session.rank):
            return
        session.gate.put("failed", {"rank": session.rank})
        descriptor = terminal.find()
        if descriptor is None:
            _logger.warning(
                "no post-mortem of rank %d: it has no terminal; run persia debug run --pm in a terminal", session.rank
            )
            return
        last = traceback.extract_tb(error.__traceback__)[-1]
        session.stopped_at(f"{last.filename.rpartition('/')[2]}:{last.lineno} ({type(error).__name__})")
        session.use_terminal(descriptor)
        with session.prompting(None):
            sys.stdout.write("".join(traceback.format_exception(error)))
            sys.stdout.write(
                f"rank {session.rank} of {session.world_size} failed; the other ranks wait when they need this rank. "
                "c ends this rank with its error, q ends all ranks\n"
            )
        Debugger(session).examine(error.__traceback__)
