"""Data-compose's context: sends batches to the trainers."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from persia.discovery import services
from persia.embedding.data import PersiaBatch
from persia.feed.protocol import RunRestarted, Stopped
from persia.runtime.contexts import ends_well
from persia.runtime.errors import FeatureTypeError, UnreachableError, UsageError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

if TYPE_CHECKING:
    from persia.feed.embedded import ScriptSender
    from persia.feed.sender import Sender
    from persia_core.discovery import Announcement, Discovery

_logger = get_logger("feed")


class DataCtx:
    """Sends the batches of one data-compose replica to the trainers that are announced.

    Its ``n``-th batch (from 0) goes to rank ``n mod world_size``. The end of the block ends the replica's data, also by
    ``sys.exit(0)`` or when a generator around it is closed. An exception that leaves the block is reported to the
    trainers, which stop. When the trainers accept no more batches, the block ends early without an error. If
    ``PERSIA_NATS_URL`` is not set, the training script runs this one in a thread, and batches stay in the process.

    A restarted script has to send the same batches: the replica skips those that the trainers have received, and warns
    if they differ.

    Args:
        *args: PersiaML's; accepted, without effect.
        **kwargs: PersiaML's; accepted, without effect.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._sender: Sender | ScriptSender | None = None
        self._discovery: Discovery | None = None
        self._announcement: Announcement | None = None

    def __enter__(self) -> Self:
        """Connect to every trainer rank; wait until they run and request data.

        Raises:
            AuthError: A trainer refuses the token.
            IncompatibleError: A trainer of another job or version, or another number of replicas.
            UsageError: Another process is this replica already, or the embedded mode runs no training script.
        """
        if self._sender is not None:
            raise UsageError("this DataCtx is already entered")
        if settings.nats_url is not None:
            self._sender = self._connect()
        else:
            from persia.feed import embedded

            self._sender = embedded.ScriptSender(embedded.running())
        return self

    def _connect(self) -> "Sender":
        from persia.feed.sender import Sender
        from persia.runtime.job import job_name

        job, index, size = job_name(), settings.place.replica_index, settings.place.replica_size
        discovery = self._discovery = services.connect()

        def find() -> list[dict[str, str]]:
            try:
                return services.trainers(discovery)
            except UnreachableError:  # NATS is unreachable, which discovery logs; trainers may appear later
                return []

        sender = None
        try:
            self._announcement = discovery.announce("persia-data", index, size, "", {})
            sender = Sender(job, index, size, find=find, start_timeout=settings.start_timeout)
            if note := settings.served:
                Path(note).write_text(sender.rank_0, encoding="utf-8")
            return sender
        except BaseException:
            if sender is not None:
                sender.close()
            self._release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report how the data ended; at the end of the data, wait until every rank has received it.

        Returns:
            True if the block was left because the trainers accept no more batches; False if the script ended it.
        """
        sender = self._sender
        if sender is None:
            return False
        stopped = value if isinstance(value, Stopped) else None
        try:
            if value is None or ends_well(value):
                sender.end()
            elif isinstance(value, SystemExit):
                sender.fail(UsageError(f"it exited: {value.code}"))
            elif not isinstance(value, Stopped | RunRestarted | KeyboardInterrupt):
                sender.fail(value)
        except Stopped as error:
            stopped = error
        finally:
            sender.close()
            self._release()
        if stopped is not None:
            _logger.info("the trainers accept no more batches: %s", stopped)
        return isinstance(value, Stopped)

    def _release(self) -> None:
        if self._announcement is not None:
            self._announcement.close()
        if self._discovery is not None:
            self._discovery.close()
        self._sender = self._announcement = self._discovery = None

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send a batch; wait while the buffer of its rank is full.

        Raises:
            FeatureTypeError: It is not a :class:`~persia.embedding.data.PersiaBatch`.
            DataError: The batch is too large to be sent.
            UsageError: Outside the ``with`` block.
        """
        if not isinstance(persia_batch, PersiaBatch):
            raise FeatureTypeError(f"send_data: want a PersiaBatch, got {type(persia_batch).__name__}")
        self._entered().send(persia_batch.data)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self._entered().world_size

    @property
    def generation(self) -> int:
        """The generation of the run that the batches are for."""
        return self._entered().generation

    @property
    def transform(self) -> str:
        """The ``transform`` of the ranks' ``StreamingDataset`` as JSON; empty if there is none.

        Raises:
            IncompatibleError: The ranks have different ones.
        """
        return self._entered().transform

    def _entered(self) -> "Sender | ScriptSender":
        if self._sender is None:
            raise UsageError("DataCtx is used outside its `with` block")
        return self._sender
