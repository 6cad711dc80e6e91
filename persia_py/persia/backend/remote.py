"""The distributed mode: rows on embedding servers, several trainer ranks, data from data-compose."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as torch_distributed

from persia.backend import rank_checks
from persia.backend.base import Backend, Device, NonFiniteTensor, RowSettings
from persia.backend.begin import begin_when_stored
from persia.discovery import services
from persia.distributed import control_plane, network, private, run
from persia.distributed.options import DistributedBaseOption, default_backend, get_default_distributed_option
from persia.distributed.rendezvous import AFTER_OTHERS_S, Rendezvous
from persia.embedding.config import Configuration
from persia.feed import server as feed_server
from persia.runtime import environment, flight, job, tokens
from persia.runtime.errors import PersiaError, StaleGenerationError, UnreachableError, UsageError
from persia.runtime.files import is_url
from persia.runtime.logging import get_logger, next_step
from persia.runtime.places import Place, Url
from persia.runtime.settings import settings
from persia_core.data import Batch
from persia_core.discovery import advertised_host
from persia_core.engine import Engine
from persia_core.forward import Pipeline, TrainingBatch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_logger = get_logger("remote")


class RemoteBackend(Backend):
    """An engine over embedding servers.

    A training process is one rank of the run: rank 0 begins generations, the other ranks join them. Any other process
    joins the current generation, for evaluation.

    Args:
        trains: Whether this process is a rank.
        device: The model's CUDA device, or None.
        option: How several ranks train the dense part; None means the default of the device.
        gradient_scale: ``mean`` divides embedding gradients by the number of ranks, as DDP does the dense ones;
            ``none`` sums them.
        configuration: As in :class:`Backend`.
        takes_batches: Whether data-compose may send batches to this rank.
        metrics: The address of this process's metrics; empty for none.

    Raises:
        UnreachableError: NATS, a server or another rank did not respond within ``PERSIA_START_TIMEOUT`` seconds; the
            message names it.
        UsageError: The interface does not exist, or the rank is already running.
    """

    def __init__(
        self,
        *,
        trains: bool,
        device: Device | None = None,
        option: DistributedBaseOption | None = None,
        gradient_scale: str = "mean",
        configuration: Configuration | None = None,
        takes_batches: bool = True,
        metrics: str = "",
    ) -> None:
        super().__init__(configuration, device)
        self.configuration.check_trains()
        environment.rename()
        network.check()
        self.rank, self.world_size = (settings.rank, settings.world_size) if trains else (0, 1)
        self._trains = trains
        self._device_id = None if device is None else device.number
        self._option = option or get_default_distributed_option(self._device_id)
        self.gradient_scale = 1.0 / self.world_size if gradient_scale == "mean" else 1.0
        self._takes_batches = takes_batches
        self._announced = {"threads": str(torch.get_num_threads())} | ({"metrics": metrics} if metrics else {})
        if self._device_id is not None:  # shown by persia status --watch
            self._announced["gpu"] = str(torch.cuda.get_device_properties(self._device_id).uuid).removeprefix("GPU-")
        self._job = job.job_name()
        self._url = services.nats_url()
        self._peers: control_plane.Peers | None = None
        self._wrapped: torch.nn.Module | None = None
        self._begun = False
        self._restored = False
        self._announcement: Any = None
        self.feed: feed_server.FeedServer | None = None
        self._discovery = services.connect()
        self._place = Rendezvous(self._discovery, self._url, self.rank, self.world_size)
        try:
            self._connect()
        except BaseException as error:
            self.close(error)
            raise

    def _connect(self) -> None:
        self.engine = Engine.connect(
            self.configuration.embedding,
            self.configuration.general,
            self._discovery,
            rank=self.rank,
            world_size=self.world_size,
            token_file=tokens.token_file(),
            checkpoint_root=settings.checkpoint_root,
            rpc_timeout_s=settings.rpc_timeout,
        )
        if self.device is not None:
            self.device.serve(self.engine)
        services.wait_connected(self._discovery, self._place.left())
        if self._trains:
            self._join_ranks()
        self.engine.wait_ready(self._place.left(min(AFTER_OTHERS_S, settings.start_timeout)))
        _logger.info("embedding slots from %s, rows on the servers of job %s", self.configuration.source, self._job)

    def _join_ranks(self) -> None:
        """Announce this rank, and connect to the other ranks."""
        if self.world_size > 1:
            backend = getattr(self._option, "backend", default_backend(self._device_id))
            private.check(self._host(), rank=self.rank, backend=backend)
        address = ""  # empty without a feed, because data-compose waits for a trainer that has an address
        if self._takes_batches:
            self.feed = feed_server.serve(self._job, host=self._host())
            address = self.feed.address
        self._peers = run.peers()
        if self._peers is not None:  # a second context of this process; the ranks are already connected
            self._peers.limit_s = self._option.limit_s
            self._announcement = self._place.announce(address, {**run.announced(), **self._announced})
            self._peers.note(self._peers.loops)  # counts a loop that the previous context left open
        elif self.world_size == 1:
            self._announcement = self._place.announce(address, self._announced)
        else:
            extra = self._place.open()
            self._announcement = self._place.announce(address, {**extra, **self._announced})
            self._peers, store = self._place.connect()
            self._peers.limit_s = self._option.limit_s
            run.adopt(self._peers, store, extra)
            self._start_torch(store)

    def _host(self) -> str:
        """Return the address of this process, even while NATS restarts and the name of NATS's host has no address."""
        return advertised_host(self._url, timeout_s=settings.start_timeout)

    def _start_torch(self, store: "Store") -> None:
        """Start torch's process group, on the interface of this process's address."""
        name = network.of_address(self._host())
        if name is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
        try:
            with self.collective(), flight.Call(flight.COLLECTIVE, detail="start of the process group"):
                self._option.initialize(store, self.rank, self.world_size, self._device_id)
        except RuntimeError as error:
            if isinstance(error, PersiaError):
                raise
            raise UnreachableError(
                f"torch's process group of {self.world_size} ranks did not start: "
                f"{''.join(str(error).splitlines()[:1]) or type(error).__name__}",
                hint=f"to check the network, run on every rank: RANK=R persia doctor --matrix {self.world_size}",
            ) from error

    def _begin(self, rows: RowSettings, after_generation: int, step: int, seed: int) -> None:
        first, self._begun = not self._begun, True
        if not self._trains:
            self._observe(step)
        elif first:
            self._begin_run(rows, after_generation, step, seed)
        else:
            self.drain_all_ranks()
            if self.rank == 0:
                begin_when_stored(lambda: self._begin_rows(rows, after_generation, step, seed))
                self._restored = True

    def drain_all_ranks(self) -> None:
        """Wait until no rank can push. Rank 0 waits for all ranks; the other ranks return immediately.

        Raises:
            UnreachableError: A rank has not left its training loop within ``PERSIA_RPC_TIMEOUT`` seconds; the message
                names the rank.
            UsageError: This rank is in its loop.
        """
        super().drain_all_ranks()
        if self._peers is not None and self.rank == 0:
            self._peers.wait_for_notes(
                self._peers.loops, "to leave the training loop (PERSIA_RPC_TIMEOUT)", settings.rpc_timeout
            )

    def all_gather(self, what: str, mine: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank; blocks until all have called this."""
        return [mine] if self._peers is None else self._peers.all_gather(what, mine)

    def all_gather_at_exit(self, mine: Any, timeout_s: float) -> list[Any]:
        """Return the values of all ranks before the run ends."""
        return [mine] if self._peers is None else self._peers.all_gather_at_exit(mine, timeout_s)

    def gather(self, mine: Any) -> list[Any] | None:
        """Return the values of all ranks, by rank, on rank 0; None elsewhere. Collective: every rank must call it."""
        if self._peers is None:
            return [mine]
        given: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with self.collective(), flight.Call(flight.COLLECTIVE, detail="gather"):
            torch_distributed.gather_object(mine, given, dst=0)
        return given

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on every rank, with a barrier at its end.

        If the block fails on one rank, every rank raises an error.
        """
        with rank_checks.together(self._peers, what):
            yield

    def _begin_run(self, rows: RowSettings, after_generation: int, step: int, seed: int) -> None:
        """Rank 0 begins the run and drops the rows of an earlier run; the other ranks join."""
        if self._peers is not None:
            rank_checks.check_slots(
                self._peers.all_gather("begin", self.configuration.digest), self.configuration.source
            )
        generation = 0
        if self.rank == 0:
            generation = begin_when_stored(lambda: self._begin_rows(rows, after_generation, step, seed, fresh=True))
        if self._peers is not None:
            generation = self._peers.all_gather("generation", generation)[0]
            if self.rank != 0:
                self.engine.join(generation, step)
        run.trained(step, generation=generation)
        if self.feed is not None:
            self.feed.welcome(generation, self.rank, self.world_size)
        _logger.info("generation %d of job %s, rank %d of %d", generation, self._job, self.rank, self.world_size)

    def _observe(self, step: int) -> None:
        """Join the current generation."""
        generation = self.engine.highest_generation()
        if generation == 0:
            raise UsageError(
                f"cannot evaluate: no training run of job {self._job!r} has begun on its servers, so they have no "
                "rows; start the training script first"
            )
        self.engine.observe(generation, step)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self._peers is None

    def open_loop(self, staleness: int, reproducible: bool, buffer: int, *, hooks: str = "") -> Pipeline:
        """Start a training loop, in a new generation. Every rank calls this, with the same arguments."""
        self.activity += 1
        if self._peers is None:
            begin_when_stored(lambda: self.engine.renew(reproducible))
        else:
            wire_dtype = self.configuration.general.wire_dtype
            own: dict[str, Any] = {"staleness": staleness, "reproducible": reproducible, "wire_dtype": wire_dtype}
            own["list of hooks"] = hooks
            if self._begun and self.engine.generation:
                self.engine.drain()  # all pushes are then acknowledged before the all-gather below
            rate = rank_checks.rate(self.row_settings.optimizer, restored=self._restored)
            rank_checks.check_same(self._peers.all_gather("start of a loop", {**own, **rate}))
            generation = begin_when_stored(lambda: self.engine.renew(reproducible)) if self.rank == 0 else 0
            # The two steps differ if a loop was left early after it had taken a batch without training on it.
            given = [generation, self.engine.step, self.trained_step, self._restored]
            generation, taken, trained, self._restored = self._peers.all_gather("generation", given)[0]
            if self.rank != 0:
                self.engine.join(generation, taken)
                self.trained_step = trained
            self._peers.loops += 1
        if self.rank == 0:
            _logger.info("training loop in generation %d of job %s", self.engine.generation, self._job)
        return self.engine.open(staleness, reproducible, buffer, self.gradient_scale)

    def close_loop(self, pipeline: Pipeline, *, together: bool) -> None:
        """End a training loop, complete or not; rank 0 is informed when this rank's pushes are applied.

        If all ranks end the loop ``together``, each rank returns when the pushes of all ranks are applied. A following
        evaluation or checkpoint therefore does not depend on the speed of ranks.

        Raises:
            PersiaError: On all ranks, if all end the loop ``together`` and the pushes of one rank cannot be applied.
        """
        pipeline.close()
        if self._peers is None:
            return
        if together:
            with self.together("end of a loop"):
                self._note_loop(self._peers)
            return
        try:
            self._note_loop(self._peers)
        except PersiaError as error:  # not raised here, because the next use of the engine raises it
            line = "the training loop has ended, but its last pushes were not applied: %s%s"
            _logger.warning(line, error, next_step(error))

    def _note_loop(self, others: control_plane.Peers) -> None:
        """Inform rank 0 that this rank's pushes are applied."""
        self.engine.drain()
        others.note(others.loops)

    def broadcast(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Broadcast ``state`` if rank 0 has loaded a checkpoint since the last call; return it on the other ranks."""
        restored, self._restored = self._restored, False
        if not restored or self._peers is None:
            return None
        box = [state() if self.rank == 0 else None]
        device = None if self._device_id is None else torch.device("cuda", self._device_id)
        with self.collective(), flight.Call(flight.COLLECTIVE, detail="broadcast of a checkpoint"):
            torch_distributed.broadcast_object_list(box, src=0, device=device)
        return None if self.rank == 0 else box[0]

    def lookup(self, batch: Batch, device_id: int | None = None) -> TrainingBatch:
        """Look up a batch for evaluation, in the current generation."""
        self.activity += 1
        try:
            return self.engine.lookup(batch, device_id)
        except StaleGenerationError:
            generation = self.engine.highest_generation()
            begins = self._trains and self.rank == 0
            if begins or self.engine.iterating or generation == self.engine.generation:
                raise
            self.engine.join(generation, self.trained_step)
            return self.engine.lookup(batch, device_id)

    def first_nonfinite(self, mine: NonFiniteTensor | None) -> NonFiniteTensor | None:
        """Return the first tensor with NaN or infinity on any rank. Collective: every rank must call it."""
        return super().first_nonfinite(mine) if self._peers is None else rank_checks.first_nonfinite(self._peers, mine)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module whose gradients are averaged over all ranks."""
        if self._peers is None:
            return model
        with self.collective(), flight.Call(flight.COLLECTIVE, detail="broadcast of the model"):
            wrapped = self._wrapped = self._option.wrap(model, self._device_id)
        return wrapped

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Enclose a collective of torch. If it fails, the error names the lost rank."""
        with rank_checks.collective(self._peers):
            yield

    def backward(self, loss: torch.Tensor, step: int) -> contextlib.AbstractContextManager[Any]:
        """Enclose the backward pass of ``loss``, at the end of which ranks average their dense gradients."""
        if self._peers is None:
            return super().backward(loss, step)
        return rank_checks.backward(self._peers, self._wrapped, loss, step)

    @property
    def is_rank_0(self) -> bool:
        """Whether this process is rank 0, which writes and loads checkpoints."""
        return settings.rank == 0

    def check_alone(self, what: str) -> None:
        """Refuse to drop rows while another process trains on them.

        Raises:
            UsageError: The job has running trainers, and this process is not one of them.
        """
        if self._trains or run.peers() is not None:
            return
        for peer in services.trainers(self._discovery):
            raise UsageError(
                f"cannot call {what} in a process that only evaluates: job {self._job!r} is being trained by pid "
                f"{peer['pid']} on {peer['host']}, and the call would drop the rows of the job; call it in the "
                "training script, or after training has ended"
            )

    def check_loads(self, what: str) -> None:
        """Check that this process trains: a load would replace the rows that trainers use.

        Raises:
            UsageError: This process only evaluates, for example because its TrainCtx has ended.
        """
        if not self._trains:
            raise UsageError(
                f"cannot call {what} for evaluation: the rows on the servers are those of the training script, which "
                "evaluation reads but does not change. To load only the model, use load_torch_state_dict of the "
                "context, or, without a context, torch.load"
            )

    def checkpoint_dir(self, directory: str | os.PathLike[str]) -> Place:
        """Return the URL of a checkpoint, or its directory, checked to be below ``PERSIA_CKPT_DIR``.

        Raises:
            UsageError: The directory is elsewhere; servers write below ``PERSIA_CKPT_DIR`` only.
        """
        root = settings.checkpoint_root
        where = super().checkpoint_dir(directory)
        if isinstance(where, Url):
            if root is not None and is_url(root) and not f"{where}/".startswith(f"{root.rstrip('/')}/"):
                raise UsageError(f"checkpoint {where}: expected a URL below PERSIA_CKPT_DIR={root}")
            return where
        path = where.absolute()
        if root is not None and is_url(root):
            raise UsageError(f"checkpoint {directory}: expected a URL below PERSIA_CKPT_DIR={root}")
        if root is None:
            raise UsageError(
                f"checkpoint {directory}: PERSIA_CKPT_DIR is not set; set it to the folder that all servers share, or "
                "use an object store: s3://BUCKET/PREFIX"
            )
        if not path.resolve().is_relative_to(Path(root).resolve()):
            raise UsageError(
                f"checkpoint {directory}: expected a folder below PERSIA_CKPT_DIR={root}, which all servers share"
            )
        return path

    def wait_ready(self) -> None:
        """Wait until every server responds."""
        self.engine.wait_ready(settings.start_timeout)

    def close(self, error: BaseException | None) -> None:
        """End the engine's threads, and report the end to the other ranks and to data-compose.

        Raises:
            PersiaError: A push was not acknowledged, so the run is not finished.
        """
        engine: Engine | None = getattr(self, "engine", None)
        if error is None and engine is not None and engine.generation:
            try:
                engine.drain()
            except BaseException as failed:
                self._end(engine, failed)
                raise
        self._end(engine, error)

    def _end(self, engine: Engine | None, error: BaseException | None) -> None:
        if engine is not None:
            engine.close(abandon=error is not None)
        if self._trains:
            run.trained(self.trained_step)
            if error is not None:
                run.fail(run.reason_of(error))
        if self.feed is not None:
            self.feed.close(error)
        if self._announcement is not None:
            self._announcement.close()
        self._place.close()
        self._discovery.close()
