"""The embedded mode's data-compose: the data script, in a thread of the training process."""

import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

from persia.feed.inbox import Events, Inbox
from persia.feed.protocol import Stopped
from persia.feed.replay import Replay
from persia.runtime.errors import ConfigError, UsageError
from persia.runtime.logging import get_logger
from persia_core.data import Batch

_logger = get_logger("feed")

_NAMES = ("data_loader.py", "data_compose.py")
_SELF = "this process"
_LEAVE_S = 5.0
"""Seconds a script has to end when training is over."""

_running: "ScriptFeed | None" = None


class ScriptFeed:
    """Runs the data script, and takes what its ``DataCtx`` sends.

    Attributes:
        inbox: Where the batches wait.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self._path, self._arguments = find_script()
        self._thread = threading.Thread(target=self._run, name="persia-data-script", daemon=True)
        self._connected = False
        self._told: BaseException | None = None

    def start(self) -> None:
        """Start the script.

        Raises:
            UsageError: Another one is running.
        """
        global _running
        if _running is not None:
            raise UsageError("a data script is already running in this process")
        _running = self
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Stop the script, as far as it sends batches; ``error`` is what training was left with."""
        global _running
        del error
        self.inbox.stop("training is over")
        if _running is self:
            self._thread.join(_LEAVE_S)
            if self._thread.is_alive():
                _logger.warning("%s is still busy %g s after training ended; left behind", self._path, _LEAVE_S)
            _running = None

    def _run(self) -> None:
        """Execute the script; what it raises belongs to the training loop.

        runpy is no help here: it would replace ``__main__`` under the training script, which then could pickle
        none of its classes.
        """
        folder, before = str(self._path.parent), sys.argv
        if folder not in sys.path:
            sys.path.insert(0, folder)
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(self._path), "__builtins__": __builtins__}
        try:
            sys.argv = [str(self._path), *self._arguments]
            exec(compile(self._path.read_bytes(), self._path, "exec"), names)  # noqa: S102  # the user's own script
            self._finish(None)
        except SystemExit as error:
            told = not error.code or self._told is not None
            self._finish(None if told else UsageError(f"{self._path} exited: {error.code}"))
        except Stopped:
            pass
        except BaseException as error:
            self._finish(error)
        finally:
            sys.argv = before

    def _finish(self, error: BaseException | None) -> None:
        if not self._connected:
            error = error or UsageError(f"{self._path} ended without a `with DataCtx()`: it sent no data")
            self.connect()
            self.tell(0, error)
        elif error is not None and error is not self._told:
            _logger.error("%s failed behind its DataCtx: %r", self._path, error)

    def connect(self) -> Replay:
        """Let the script's ``DataCtx`` in, once the training loop asks for batches; return what it has had already.

        Raises:
            Stopped: No batch is wanted any more.
        """
        self._connected = True
        ignored = Events(taken=lambda _: None, stopped=lambda _: None, replaced=lambda: None)
        place = self.inbox.connect(0, 1, _SELF, ignored)
        return Replay(0, 0, place.received, place.digest) if place else Replay(0, 0, 0, None)

    def send(self, number: int, batch: Batch) -> None:
        """Hand batch ``number`` over; wait until there is room.

        Raises:
            Stopped: No batch is wanted any more.
        """
        self.inbox.wait_for_room(0)
        self.inbox.put(0, _SELF, number, number, batch, batch.to_bytes())

    def tell(self, batches: int, error: BaseException | None = None) -> None:
        """Say that everything is sent, or what the script failed with."""
        self._told = error
        self.inbox.end(0, _SELF, batches, error)


class ScriptSender:
    """What a ``DataCtx`` sends through in the embedded mode; the same calls as :class:`persia.feed.sender.Sender`.

    Attributes:
        world_size: One rank.
        generation: Of a run that has no other.
    """

    world_size = 1
    generation = 1

    def __init__(self, feed: ScriptFeed) -> None:
        self._feed = feed
        self._replay = feed.connect()
        self._sent = 0

    def send(self, batch: Batch) -> None:
        """Hand a batch over; wait until there is room.

        Raises:
            Stopped: No batch is wanted any more.
        """
        if self._sent < self._replay.batches:
            self._replay.leave_out(batch)
        else:
            self._feed.send(self._sent, batch)
        self._sent += 1

    def end(self) -> None:
        """Say that everything is sent."""
        self._feed.tell(self._sent)

    def fail(self, error: BaseException) -> None:
        """Pass an error of the script on to the training loop."""
        self._feed.tell(self._sent, error)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def running() -> ScriptFeed:
    """Return the feed whose script is running in this process.

    Raises:
        UsageError: There is none.
    """
    if _running is None:
        raise UsageError(
            "DataCtx: PERSIA_NATS_URL is not set, and no training script runs this one; run the training script, "
            "whose StreamingDataset starts it"
        )
    return _running


def find_script() -> tuple[Path, list[str]]:
    """Return the data script and its arguments: ``PERSIA_DATALOADER_ENTRY``, else a file beside the main script.

    Raises:
        ConfigError: There is none.
    """
    entry = os.environ.get("PERSIA_DATALOADER_ENTRY", "").strip()
    if entry:
        name, *arguments = [entry] if Path(entry).is_file() else shlex.split(entry)
        if not Path(name).is_file():
            raise ConfigError(f"PERSIA_DATALOADER_ENTRY={entry}: no file {name} (seen from {Path.cwd()})")
        return Path(name).resolve(), arguments
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name, []
    raise ConfigError(
        f"StreamingDataset: no data script; set PERSIA_DATALOADER_ENTRY to it, or put {' or '.join(_NAMES)} into "
        f"{folder}"
    )
