"""Embedded mode: runs the data script in a thread of the training process."""

import shlex
import sys
import threading
from pathlib import Path
from typing import Any

from persia.feed.inbox import Inbox, SenderCallbacks
from persia.feed.protocol import Stopped
from persia.feed.replay import Record, ReplayCheck
from persia.runtime.errors import ConfigError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings
from persia_core.data import Batch

_logger = get_logger("feed")

_NAMES = ("data_loader.py", "data_compose.py")
_SELF = "this process"
_LEAVE_S = 5.0
"""Seconds within which the script must end after training."""

_running: "ScriptFeed | None" = None


class ScriptFeed:
    """Runs the data script, and receives the batches that its ``DataCtx`` sends.

    Attributes:
        inbox: The waiting batches.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self._path, self._arguments = find_script()
        self._thread = threading.Thread(target=self._run, name="persia-data-script", daemon=True)
        self._connected = False
        self._reported: BaseException | None = None

    def start(self) -> None:
        """Start the script.

        Raises:
            UsageError: A data script is already running.
        """
        global _running
        if _running is not None:
            raise UsageError(
                "a data script is already running in this process: leave the context whose StreamingDataset started it"
            )
        _running = self
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Refuse more batches, and wait a few seconds for the script to end. ``error`` has no effect."""
        global _running
        del error
        self.inbox.stop("training is over")
        if _running is self:
            self._thread.join(_LEAVE_S)
            if self._thread.is_alive():
                _logger.warning(
                    "%s is still running %g s after training ended; its thread is abandoned", self._path, _LEAVE_S
                )
            _running = None

    def _run(self) -> None:
        """Execute the script, and pass its error to the training loop.

        The method does not use runpy, because runpy replaces ``__main__``, and the training script could then not
        pickle its classes.
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
            reported = not error.code or self._reported is not None
            text = f"the data script {self._path} ended with sys.exit({error.code!r})"
            self._finish(None if reported else UsageError(text))
        except Stopped:
            pass
        except BaseException as error:
            self._finish(error)
        finally:
            sys.argv = before

    def _finish(self, error: BaseException | None) -> None:
        if not self._connected:
            error = error or UsageError(
                f"{self._path} ended without a `with DataCtx()`, so it sent no data",
                hint="send the batches inside the block: with DataCtx() as ctx: ctx.send_data(batch)",
            )
            self.connect()
            self.report_end(0, error)
        elif error is not None and error is not self._reported:
            line = "%s failed after its DataCtx had ended: %s: %s"
            _logger.error(line, self._path, type(error).__name__, error)

    def connect(self) -> ReplayCheck:
        """Connect the script's ``DataCtx`` when the training loop requests batches.

        Returns:
            The check of the batches that the script must skip.

        Raises:
            Stopped: Training has ended.
        """
        self._connected = True
        ignored = SenderCallbacks(taken=lambda _: None, stopped=lambda _: None, replaced=lambda: None)
        position = self.inbox.connect(0, 1, _SELF, ignored)
        return ReplayCheck(0, 0, position.received, position.record) if position else ReplayCheck(0, 0, 0, Record())

    def send(self, number: int, batch: Batch, position: str) -> None:
        """Add batch ``number`` to the inbox; wait while it is full.

        Raises:
            Stopped: Training has ended.
        """
        self.inbox.wait_for_room(0)
        self.inbox.put(0, _SELF, number, number, batch, batch.to_bytes(), position)

    def report_end(self, batches: int, error: BaseException | None = None) -> None:
        """Report that all batches are sent, or that the script failed."""
        self._reported = error
        self.inbox.end(0, _SELF, batches, error)


class ScriptSender:
    """The sender of a ``DataCtx`` in embedded mode, with the methods of :class:`persia.feed.sender.Sender`.

    Attributes:
        world_size: The number of ranks, which is 1.
        generation: The generation of the run, which is always 1.
    """

    world_size = 1
    generation = 1

    def __init__(self, feed: ScriptFeed) -> None:
        self._feed = feed
        self._replay = feed.connect()
        self._sent = 0

    @property
    def transform(self) -> str:
        """The transform that makes the batches, as JSON; empty if the script makes its own batches."""
        return self._feed.inbox.transform

    def resume(self) -> str:
        """Return the position at which to begin; empty means the first batch."""
        if self._sent == 0 and self._replay.batches > 1 and self._replay.position_before:
            self._sent = self._replay.batches - 1
            self._replay.begin_at_last()
            return self._replay.position_before
        return ""

    def send(self, batch: Batch, position: str = "") -> None:
        """Add a batch to the inbox; wait while it is full.

        Raises:
            Stopped: Training has ended.
        """
        if self._sent < self._replay.batches:
            self._replay.skip(self._sent, batch)
        else:
            self._feed.send(self._sent, batch, position)
        self._sent += 1

    def end(self) -> None:
        """Report that all batches are sent."""
        self._feed.report_end(self._sent)

    def fail(self, error: BaseException) -> None:
        """Report an error of the script to the training loop."""
        self._feed.report_end(self._sent, error)

    def close(self) -> None:
        """Return immediately, because there is no connection."""


def running() -> ScriptFeed:
    """Return the feed whose data script is running in this process.

    Raises:
        UsageError: No data script is running.
    """
    if _running is None:
        raise UsageError(
            "DataCtx: PERSIA_NATS_URL is not set, and no training script has started this data script",
            hint="run the training script, whose StreamingDataset starts the data script; or, in a job, set "
            "PERSIA_NATS_URL",
        )
    return _running


def find_script() -> tuple[Path, list[str]]:
    """Return the data script and its arguments: ``PERSIA_DATALOADER_ENTRY``, or a file next to the main script.

    Raises:
        ConfigError: The file does not exist, or the variable has an unclosed quote.
    """
    entry = settings.data_script
    if entry is not None:
        try:
            name, *arguments = [entry] if Path(entry).is_file() else shlex.split(entry)
        except ValueError as error:  # an unclosed quote, or only spaces
            raise ConfigError(
                f"PERSIA_DATALOADER_ENTRY={entry}: cannot be split into a script path and arguments: a quote is not "
                "closed, or the value has only spaces",
                hint="close the quote, or set PERSIA_DATALOADER_ENTRY to the path of the data script",
            ) from error
        if not Path(name).is_file():
            place = f"working directory: {Path.cwd()}"
            raise ConfigError(
                f"PERSIA_DATALOADER_ENTRY={entry}: {name}: no such file ({place})",
                hint="set PERSIA_DATALOADER_ENTRY to the path of the data script",
            )
        return Path(name).resolve(), arguments
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name, []
    raise ConfigError(
        f"StreamingDataset: no data script: PERSIA_DATALOADER_ENTRY is not set, and {folder} has no "
        f"{' or '.join(_NAMES)}",
        hint="set PERSIA_DATALOADER_ENTRY to the path of the data script",
    )
