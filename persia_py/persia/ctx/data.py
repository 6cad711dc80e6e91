"""Data-compose's context: sends batches to the trainers."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from persia.discovery import services
from persia.embedding.data import PersiaBatch
from persia.feed.protocol import RunRestarted, Stopped
from persia.feed.replay import MAX_POSITION_BYTES
from persia.monitor import feeding
from persia.runtime.contexts import ends_well
from persia.runtime.errors import DataError, FeatureTypeError, UnreachableError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from persia.feed.embedded import ScriptSender
    from persia.feed.sender import Sender
    from persia.monitor.exporter import Exporter
    from persia.monitor.feeding import FeedMetrics
    from persia_core.discovery import Announcement, Discovery

_logger = get_logger("feed")


class DataCtx:
    """Sends the batches of one data-compose replica to the announced trainers.

    Batch ``n`` of the replica (from 0) goes to rank ``n mod world_size``. The end of the block ends the replica's data,
    as do ``sys.exit(0)`` inside the block and closing a generator around the block. An exception that leaves the block
    is reported to the trainers, which stop. When the trainers stop accepting batches, the block ends early without an
    error. If ``PERSIA_NATS_URL`` is not set, the training script runs the data script in a thread of its process.

    A restarted script must send the same batches. The replica skips batches that the trainers have already received,
    and logs a warning if they differ. A script that can begin at any batch passes its position to :meth:`send_data`,
    and begins at the position that :meth:`resume` returns.

    Args:
        *args: Accepted for compatibility with PersiaML, without effect.
        **kwargs: Accepted for compatibility with PersiaML, without effect.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._sender: Sender | ScriptSender | None = None
        self._discovery: Discovery | None = None
        self._announcement: Announcement | None = None
        self._exported: tuple[FeedMetrics, Exporter] | None = None
        self._begun = False  # whether the script has sent a batch, or has asked for its position

    def __enter__(self) -> Self:
        """Connect to every trainer rank. Wait until they run and request data.

        Raises:
            AuthError: A trainer refuses the token.
            IncompatibleError: A trainer belongs to another job, has another version, or expects another number of
                replicas.
            UsageError: Another process already runs as this replica, or, in the embedded mode, no training script runs
                this data script.
        """
        if self._sender is not None:
            raise UsageError("this DataCtx is already entered; enter it once, in one `with` block")
        if settings.nats_url is not None:
            self._sender = self._connect()
        else:
            from persia.feed import embedded

            self._sender = embedded.ScriptSender(embedded.running())
        self._begun = False
        return self

    def _connect(self) -> "Sender":
        from persia.feed.sender import Sender
        from persia.runtime.job import job_name

        job, index, size = job_name(), settings.place.replica_index, settings.place.replica_size
        discovery = self._discovery = services.connect()

        def find() -> list[dict[str, str]]:
            try:
                return services.trainers(discovery)
            except UnreachableError:  # NATS is unreachable; discovery logs this, and trainers may still appear
                return []

        sender = None
        try:
            self._exported = exported = feeding.start()
            metrics = {} if exported is None or not exported[1].address else {"metrics": exported[1].address}
            self._announcement = discovery.announce("persia-data", index, size, "", metrics)
            sender = Sender(job, index, size, find=find, start_timeout=settings.start_timeout)
            if note := settings.served:
                Path(note).write_text(sender.rank_0, encoding="utf-8")
            if exported is not None:
                exported[0].begin(sender.generation)
            return sender
        except BaseException:
            if sender is not None:
                sender.close()
            self._release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report how the data ended. After the last batch, wait until every rank has received it.

        Returns:
            True if the block was left because the trainers stopped accepting batches; False if the script ended it.
        """
        sender = self._sender
        if sender is None:
            return False
        stopped = value if isinstance(value, Stopped) else None
        try:
            if value is None or ends_well(value):
                sender.end()
            elif isinstance(value, SystemExit):
                sender.fail(UsageError(f"the data script ended with sys.exit({value.code!r})"))
            elif not isinstance(value, Stopped | RunRestarted | KeyboardInterrupt):
                sender.fail(value)
        except Stopped as error:
            stopped = error
        finally:
            sender.close()
            self._release()
        if stopped is not None:
            _logger.info("the trainers stopped accepting batches: %s", stopped)
        return isinstance(value, Stopped)

    def _release(self) -> None:
        exported, self._exported = self._exported, None
        try:
            if exported is not None:
                exported[1].push()
        finally:
            if self._announcement is not None:
                self._announcement.close()
            if self._discovery is not None:
                self._discovery.close()
            self._sender = self._announcement = self._discovery = None

    def resume(self) -> str:
        """Return the position at which this script must begin, because the run is resumed or the script restarted.

        The first batch that the script sends afterwards must be the one that followed ``send_data(batch, position)``
        with this position. At most a few batches before the point of interruption are made again. The trainers skip
        these batches, and a warning is logged if they differ.

        Returns:
            The position; empty if the script must begin at its first batch: in a new run, when the script had sent
            fewer than two batches to a rank, when it passed no positions, or when another version of Persia wrote the
            checkpoint.

        Raises:
            UsageError: After :meth:`send_data`, at a second call, or outside the ``with`` block.
        """
        sender = self._entered()
        if self._begun:
            raise UsageError("DataCtx.resume: call it once, before the first send_data")
        self._begun = True
        return sender.resume()

    def send_data(self, persia_batch: PersiaBatch, position: str = "") -> None:
        """Send a batch. Block while the buffer of its rank is full.

        Args:
            persia_batch: The batch.
            position: A text, at most 64 KiB in UTF-8, from which the script can make the batches that follow, such as
                the state of its reader as JSON. :meth:`resume` of a restarted script returns it.

        Raises:
            FeatureTypeError: The argument is not a :class:`~persia.embedding.data.PersiaBatch`.
            DataError: The batch is too large to be sent, or the position is too long.
            UsageError: Outside the ``with`` block.
        """
        if not isinstance(persia_batch, PersiaBatch):
            raise FeatureTypeError(f"send_data: expected a PersiaBatch, found {type(persia_batch).__name__}")
        if not isinstance(position, str):
            raise FeatureTypeError(f"send_data: position: expected a str, found {type(position).__name__}")
        if len(position.encode()) > MAX_POSITION_BYTES:
            raise DataError(
                f"send_data: the position has {len(position.encode())} bytes, allowed: at most {MAX_POSITION_BYTES}",
                hint="send only what is needed to find the next batch, such as a file and a row",
            )
        began = time.monotonic()
        self._begun = True
        self._entered().send(persia_batch.data, position)
        if self._exported is not None:
            self._exported[0].sent(persia_batch.data.batch_size, began)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self._entered().world_size

    @property
    def generation(self) -> int:
        """The generation of the run for which the batches are sent."""
        return self._entered().generation

    @property
    def transform(self) -> str:
        """The ``transform`` of the ranks' ``StreamingDataset`` as JSON; empty if there is none.

        Raises:
            IncompatibleError: The ranks have different transforms.
        """
        return self._entered().transform

    def _entered(self) -> "Sender | ScriptSender":
        if self._sender is None:
            raise UsageError("DataCtx is used outside its `with` block")
        return self._sender
