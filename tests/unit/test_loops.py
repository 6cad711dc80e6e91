"""Loops over data loaders, and contexts: left early, nested, misused."""

import contextlib
import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Batches, Configure
from test_training import SLOTS, everything, leave_loops, loss_fn, make, train
from waiting import wait_until

from persia.backend.local import LocalBackend
from persia.ctx import Checkpoints, EmbeddingCtx, PreprocessMode, cnt_ctx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDFeature,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD, Adam
from persia.errors import DataError, DeviceError, FeatureTypeError, UnreachableError, UsageError
from persia_core.forward import Pipeline


def test_leaving_the_loop_early_and_looping_again(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        for steps in (3, 1, 7):
            assert len(train(ctx, DataLoader(Batches(50), embedding_staleness=2), steps)) == steps
        for _ in DataLoader(Batches(20), embedding_staleness=2):
            pass  # batches that are never trained on leave the staleness window
        assert len(train(ctx, DataLoader(Batches(20), embedding_staleness=1))) == 20
    wait_until("threads to end", lambda: not persia_threads(), 30.0, evidence=lambda: str(persia_threads()))


def test_waiting_for_batches_to_evaluate_is_told(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configure(SLOTS)
    monkeypatch.setattr("persia.data.loader.REMIND_S", 0.1)
    monkeypatch.setattr("persia.data.loader.SLICE_S", 0.05)
    logging.getLogger("persia").addHandler(caplog.handler)

    class Slow(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            wait_until("a word about it", lambda: "waiting for a batch of the data set after" in caplog.text, 20)
            yield from Batches(2)

    with make(), eval_ctx(embedding_config=EmbeddingConfig()):
        assert len(list(DataLoader(Slow()))) == 2
    logging.getLogger("persia").removeHandler(caplog.handler)


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Record the threads that other tests in this process have left running."""
    _before[:] = []
    _before[:] = persia_threads()


_before: list[str] = []


def persia_threads() -> list[str]:
    """Return the names of the threads that Persia, including Rust, has started in this process since the test began."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since then
            names.append(path.read_text().strip())
    python = [thread.name for thread in threading.enumerate()]
    running = Counter(name for name in (*names, *python) if name.startswith("persia"))
    return sorted((running - Counter(_before)).elements())


class Numbered(Batches):
    """Batches whose ids are the batch number."""

    def batch(self, number: int, *, requires_grad: bool = True) -> PersiaBatch:
        ids = np.array([number], np.uint64)
        features: list[IDFeature] = [IDTypeFeatureWithSingleID("a", ids), IDTypeFeature("b", [ids])]
        return PersiaBatch(
            features, [NonIDTypeFeature(np.zeros((1, 3), np.float32))], [Label(np.full(1, number, np.float32))],
            requires_grad=requires_grad,
        )  # fmt: skip


@pytest.mark.parametrize("reproducible", [True, False])
def test_no_batch_is_lost_when_a_loop_is_left_early(configure: Configure, reproducible: bool) -> None:
    """Batches that were read ahead and not trained on are yielded again."""
    configure(SLOTS)
    with make() as ctx:
        assert leave_loops(ctx, DataLoader(Numbered(9), reproducible=reproducible)) == list(range(9))


def test_a_batch_that_is_skipped_does_not_hold_up_the_next(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        taken = list(DataLoader(Batches(5), reproducible=True))
        assert [batch.step for batch in taken] == [1, 2, 3, 4, 5]
        with pytest.raises(UsageError, match="cannot push the gradients of step 2"):
            ctx.forward(taken[1])
            ctx.backward(sum(tensor.sum() for tensor in ctx._embeddings))  # type: ignore[arg-type]


def test_a_loop_kept_beyond_its_context_ends(configure: Configure) -> None:
    """The threads of an abandoned loop free their gradients under the GIL. Joining them while holding it would hang."""
    configure(SLOTS)
    with make() as ctx:
        iterator = iter(DataLoader(Batches(60, batch_size=512), embedding_staleness=60))
        batches = [next(iterator) for _ in range(30)]
        for batch in batches:
            batch.push([torch.ones(512, 4), torch.ones(512, 4)], 1.0)
        del batches, batch
        assert ctx.engine.iterating
    with pytest.raises(UsageError, match="loop has ended"):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    wait_until("threads to end", lambda: not persia_threads(), 30.0, evidence=lambda: str(persia_threads()))


def test_nested_contexts_leave_the_outer_ones_settings(configure: Configure) -> None:
    configure(SLOTS)
    outer_optimizer = SGD(0.0)
    with make(optimizer=outer_optimizer) as ctx:
        train(ctx, DataLoader(Batches(3), reproducible=True))
        before = everything(ctx)[: 200 * 4 * 4 * 2]
        with make(optimizer=SGD(5.0)) as inner:
            train(inner, DataLoader(Batches(3), reproducible=True))
        changed = everything(ctx)[: len(before)]
        assert changed != before
        train(ctx, DataLoader(Batches(3), reproducible=True))
        assert everything(ctx)[: len(before)] == changed
        with pytest.raises(UsageError, match="optimizer state"), make(optimizer=Adam()):
            pass
        train(ctx, DataLoader(Batches(3), reproducible=True))
        assert everything(ctx)[: len(before)] == changed
        assert cnt_ctx() is ctx


def test_a_loop_is_not_disturbed_from_inside(configure: Configure, tmp_path: Path) -> None:
    """A second loop, other settings and a load are refused inside a loop, and the loop continues."""
    configure(SLOTS)
    with make() as ctx:
        train(ctx, DataLoader(Batches(2)))
        ctx.dump_embedding(tmp_path / "rows")
        steps = 0
        for batch in DataLoader(Batches(4), reproducible=True):
            with pytest.raises(UsageError, match="leave its loop first"):
                next(iter(DataLoader(Batches(1))))
            with pytest.raises(UsageError, match="leave its loop first"), eval_ctx(embedding_config=EmbeddingConfig()):
                pass
            with pytest.raises(UsageError, match="leave its loop first"):
                ctx.configure_embedding_parameter_servers(EmbeddingConfig())
            with pytest.raises(UsageError, match="leave its loop first"):
                ctx.load_embedding(tmp_path / "rows")
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            steps += 1
        assert steps == 4


def test_a_generator_around_a_context_may_be_closed(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the generator is not a failure: pushes are awaited, and ranks and data scripts get no error."""
    configure(SLOTS)
    ends: list[BaseException | None] = []
    close = LocalBackend.close

    def closed(self: LocalBackend, error: BaseException | None = None) -> None:
        ends.append(error)
        close(self, error)

    monkeypatch.setattr(LocalBackend, "close", closed)

    def steps() -> Iterator[int]:
        with make() as ctx:
            for batch in DataLoader(Batches(9)):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_fn(output, labels[0]))
                yield batch.step

    generator = steps()
    assert next(generator) == 1
    generator.close()  # type: ignore[attr-defined]
    assert ends == [None]
    assert cnt_ctx() is None


def test_a_loop_whose_end_fails_reads_no_further(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(SLOTS)
    close = LocalBackend.close_loop

    def fail(self: LocalBackend, pipeline: Pipeline, *, together: bool) -> None:
        close(self, pipeline, together=together)
        raise UnreachableError("a push is not applied")

    monkeypatch.setattr(LocalBackend, "close_loop", fail)
    data = Batches(9)
    with make() as ctx:
        loop = iter(DataLoader(data))
        for _ in range(2):
            output, labels = ctx.forward(next(loop))
            ctx.backward(loss_fn(output, labels[0]))
        with pytest.raises(UnreachableError):
            loop.close()  # type: ignore[attr-defined]
    assert data.next == 2  # the position of the loop, not that of the thread that reads ahead
    wait_until("threads to end", lambda: not persia_threads(), 30.0, evidence=lambda: str(persia_threads()))


def test_contexts_can_be_made_again_and_start_empty(configure: Configure) -> None:
    """PersiaML's context was a singleton of the process (ARCHITECTURE section 11, defect 12)."""
    configure(SLOTS)
    for _ in range(3):
        with make() as ctx:
            assert ctx.get_embedding_size() == [0]
            train(ctx, DataLoader(Batches(2)))
            assert ctx.get_embedding_size()[0] > 0
    assert cnt_ctx() is None


@pytest.mark.parametrize("saves", [False, True])
def test_an_error_of_the_data_set_reaches_the_loop_in_its_place(
    configure: Configure, tmp_path: Path, saves: bool
) -> None:
    configure(SLOTS)

    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            yield Batches(1).batch(0)
            yield Batches(1).batch(1)
            raise ZeroDivisionError("row 17 of part-3")

    with make(checkpoints=Checkpoints(tmp_path / "run") if saves else None) as ctx:
        seen = 0
        with pytest.raises(ZeroDivisionError, match="row 17 of part-3"):
            for batch in DataLoader(Broken()):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_fn(output, labels[0]))
                seen += 1
        assert seen == 2


def test_a_feature_without_a_slot_is_named(configure: Configure) -> None:
    configure(SLOTS)

    class Wrong(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            features = [IDTypeFeatureWithSingleID(name, np.array([1], np.uint64)) for name in ("a", "extra")]
            yield PersiaBatch(features, labels=[Label(np.zeros(1, np.float32))])

    with make(), pytest.raises(DataError, match=r"without a slot: extra; the slots are a, b \(not in the batch: b\)"):
        next(iter(DataLoader(Wrong())))


@pytest.mark.row("S0-22")
def test_wrong_use_is_named(configure: Configure) -> None:
    configure(SLOTS)
    with make() as ctx:
        with pytest.raises(UsageError, match="forward"):
            ctx.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(UsageError, match="expected an IterableDataset, found list"):
            DataLoader([{}])  # type: ignore[arg-type]
        with pytest.raises(FeatureTypeError, match="batch 1.*found dict"):
            next(iter(DataLoader(Dicts())))
        with pytest.raises(UsageError, match="already entered"):
            ctx.__enter__()
        for _ in DataLoader(Batches(3)):
            with pytest.raises(UsageError, match="inside a loop"):
                ctx.load_checkpoint("anywhere")
            break
    with pytest.raises(UsageError, match="outside"):
        ctx.get_embedding_size()
    with pytest.raises(UsageError, match="inside TrainCtx or eval_ctx"):
        iter(DataLoader(Batches(1)))
    with pytest.raises(DeviceError, match="device 1000"):
        EmbeddingCtx(PreprocessMode.EVAL, device_id=1000)


class Dicts(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        yield {}  # type: ignore[misc]


@pytest.mark.parametrize("host", ["127.0.0.1:9", "persia_nats_service.invalid:4222"])
def test_a_job_whose_broker_is_not_there_is_named(
    host: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(SLOTS)
    monkeypatch.setenv("PERSIA_NATS_URL", f"nats://{host}")
    monkeypatch.setenv("PERSIA_START_TIMEOUT", "1")
    with pytest.raises(UnreachableError, match=rf"nats://{host} cannot be reached") as caught, make():
        pass
    assert caught.value.exit_code == 3
    for step in ("set PERSIA_NATS_URL", "PERSIA_NATS_URL= persia-launcher nn-worker"):
        assert step in caught.value.hint
    assert cnt_ctx() is None


def test_a_loader_iterates_the_data_set_it_was_given_last(configure: Configure) -> None:
    configure(SLOTS)
    loader = DataLoader(Batches(3))
    with make() as ctx:
        assert len(train(ctx, loader)) == 3
        loader.dataset = Batches(7)
        assert len(train(ctx, loader)) == 7


def test_a_model_is_freed_with_its_context(configure: Configure, tmp_path: Path) -> None:
    configure(SLOTS)
    gc.disable()
    try:
        with make(checkpoints=Checkpoints(tmp_path, every=2)) as ctx:
            train(ctx, DataLoader(Batches(3)))
            assert ctx.model is not None
            model = weakref.ref(ctx.model)
        del ctx
        assert model() is None
    finally:
        gc.enable()


def test_a_step_that_another_context_pushes_counts(configure: Configure) -> None:
    configure(SLOTS)
    with make() as outer, make() as inner:
        for batch in DataLoader(Batches(2)):
            output, labels = outer.forward(batch)
            outer.backward(loss_fn(output, labels[0]))
            assert inner.step == outer.step == batch.step


def test_ranks_share_a_position_only_after_a_load(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(SLOTS)
    shared = []
    monkeypatch.setattr(LocalBackend, "broadcast", lambda self, state: shared.append(state()["cursor"]))
    with make() as ctx:
        loader = DataLoader(Batches(5))
        train(ctx, loader, 2)
        train(ctx, loader, 1)
        ctx.dump_checkpoint(tmp_path / "checkpoint")
        ctx.load_checkpoint(tmp_path / "checkpoint")
        train(ctx, DataLoader(Batches(5)), 1)
    assert shared[:2] == [None, None]
    assert shared[2] is not None
