"""pdb for one of several ranks. It notifies the other ranks when it stops, continues and ends."""

import pdb
import sys
from types import FrameType, TracebackType
from typing import Any, Protocol


class Owner(Protocol):
    """The object that receives the events of a debugger."""

    def prompting(self, frame: FrameType | None) -> Any:
        """Return a context manager around a prompt. Inside it, standard input and output are the terminal."""

    def clear(self) -> None:
        """Let the other ranks continue."""

    def continues(self, *, stops_again: bool) -> str:
        """Record that the program continues; return a message to the user, or an empty text."""

    def left(self, frame: FrameType) -> None:
        """Record that a frame was left."""

    def quit(self) -> None:
        """End all ranks."""


class Debugger(pdb.Pdb):
    """pdb that skips the functions of :mod:`persia.debug`.

    Args:
        owner: The session of this rank.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__(skip=["persia.debug", "persia.debug.*"], nosigint=True)
        self._owner = owner

    def interaction(self, frame: FrameType | None, *error: Any) -> None:
        """Prompt on the terminal."""
        with self._owner.prompting(frame):
            self.stdout = sys.stdout
            super().interaction(frame, *error)

    def examine(self, trace: TracebackType) -> None:
        """Prompt in the frame in which an error was raised."""
        self.reset()
        self.interaction(None, trace)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Notify the owner that a frame is left."""
        trace = super().dispatch_return(frame, arg)
        self._owner.left(frame)
        return trace

    def do_continue(self, arg: str) -> bool | None:
        """c(ont(inue)): continue until the next breakpoint."""
        told = self._owner.continues(stops_again=bool(self.get_all_breaks()))
        if told:
            self.message(told)
        return super().do_continue(arg)

    do_c = do_cont = do_continue

    def do_clear_(self, arg: str) -> None:
        """clear_(): let the other ranks continue; this one stays at the prompt."""
        del arg
        self._owner.clear()

    def do_quit(self, arg: str) -> bool | None:
        """q(uit): end all ranks of the run."""
        del arg
        self._owner.quit()
        return True

    do_q = do_exit = do_quit

    def do_run(self, arg: str) -> None:
        """run, restart: refused, because a rank cannot restart without the others."""
        del arg
        self.error("a rank cannot restart without the others; end all ranks (q), and restart them")

    do_restart = do_run

    def do_EOF(self, arg: str) -> bool | None:  # noqa: N802  # pdb's name
        """Ctrl-D, or a closed terminal: end all ranks of the run."""
        self.message("")
        return self.do_quit(arg)
