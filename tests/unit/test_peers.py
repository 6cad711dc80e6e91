"""Connected ranks: agreement, and the names of lost ranks."""

import json
import logging
import threading
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from meeting import LONG, Meet, all_gather
from waiting import wait_until

from persia.backend import rank_checks, remote
from persia.ctx import Checkpoints
from persia.distributed import control_plane, run
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import PersiaError, RunLostError, StorageError, UnreachableError, UsageError
from persia.loop.feeder import FedBatch
from persia.loop.quarantine import Quarantine
from persia.runtime import preemption
from persia.runtime.job import finished_summary


def test_every_rank_gets_what_all_have(meet: Meet, pool: Executor) -> None:
    ranks = meet(3)
    for number in range(50):
        assert [future.result(LONG) for future in all_gather(pool, ranks, f"step {number}")] == [[0, 10, 20]] * 3


def test_ranks_at_different_places_are_told_so(meet: Meet, pool: Executor) -> None:
    first, second = meet(2)
    futures = [pool.submit(first.all_gather, "the loop", 0), pool.submit(second.all_gather, "the end", 0)]
    for future in futures:
        with pytest.raises(UsageError, match="rank [01] at 'the (loop|end)'"):
            future.result(LONG)


def test_a_rank_that_is_gone_is_named_on_every_other(meet: Meet, pool: Executor) -> None:
    first, second, third = meet(3)
    waiting = [pool.submit(each.all_gather, "step 1", 0) for each in (first, second)]
    third._links[0].hang_up()  # as the kernel does for a killed process
    for future in waiting:
        with pytest.raises(RunLostError, match="rank 2 is gone: its connection ended without a message"):
            future.result(LONG)
    with pytest.raises(RunLostError, match="rank 0 is gone"):
        third.all_gather("step 1", 0)


def test_a_rank_that_fails_leaves_its_reason(meet: Meet, pool: Executor) -> None:
    first, second = meet(2)
    waiting = pool.submit(first.all_gather, "step 1", 0)
    second.leave("ValueError: bad")
    with pytest.raises(RunLostError, match="rank 1 is gone: ValueError: bad"):
        waiting.result(LONG)


def test_a_rank_that_ended_cleanly_is_missed_only_where_it_is_needed(meet: Meet, pool: Executor) -> None:
    first, second, third = meet(3)
    waiting = pool.submit(third.all_gather, "step 1", 0)
    second.leave(None)
    with pytest.raises(RunLostError, match="rank 1 is gone: its script has ended"):
        first.all_gather("step 1", 0)
    first.leave("RunLostError")
    with pytest.raises(RunLostError):
        waiting.result(LONG)


def test_ranks_meet_wherever_they_are_and_go_on_sharing(meet: Meet, pool: Executor) -> None:
    """Two ranks wait in an all-gather that the third does not call. One rank has completed more collectives."""
    ranks = meet(3)
    waiting = [pool.submit(each.all_gather, "the loop", 0) for each in ranks[:2]]
    third = pool.submit(ranks[2].all_gather_at_exit, 20, LONG)
    for future in waiting:
        with pytest.raises(SystemExit) as left:
            future.result(LONG)
        assert left.value.code == 75
    met = [third, *(pool.submit(each.all_gather_at_exit, each.rank * 10, LONG) for each in ranks[:2])]
    assert [future.result(LONG) for future in met] == [[0, 10, 20]] * 3
    assert [future.result(LONG) for future in all_gather(pool, ranks, "the save")] == [[0, 10, 20]] * 3


@pytest.mark.parametrize("how", ["at its end", "by an error", "killed", "not at all"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_that_fails_because_a_rank_is_gone_is_no_failure_of_a_batch(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, rank: int
) -> None:
    """Torch may detect the lost rank before its message arrives. Rank 0 forwards the messages of other ranks."""
    *ranks, last = meet(3)
    monkeypatch.setattr(run, "peers", lambda: ranks[rank])
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("a", np.arange(3, dtype=np.uint64))], labels=[Label(np.zeros((3, 1)))]
    )
    backend: Any = SimpleNamespace(
        engine=SimpleNamespace(step=4), all_gather=lambda _, mine: [mine], is_rank_0=True, checkpoint_dir=Path
    )
    quarantine = Quarantine(Checkpoints(tmp_path))
    quarantine.on_start(SimpleNamespace(backend=backend))
    fed_batch = FedBatch(5, json.dumps({"batches": 5, "source": None}), batch.data)
    monkeypatch.setattr(control_plane, "_NOTICED_S", 0.2 if how == "not at all" else LONG)
    if how != "not at all":
        reason = "its error" if how == "by an error" else None
        leave = last._links[0].hang_up if how == "killed" else lambda: last.leave(reason)
        threading.Timer(0.3, leave).start()
    quarantine.on_error(RuntimeError("Connection closed by peer"), fed_batch)
    assert ([*tmp_path.iterdir()] == []) == (how != "not at all")


def test_what_all_have_shared_is_told_though_one_of_them_left_behind_it(meet: Meet, pool: Executor) -> None:
    first, second = meet(2)
    with second._changed:  # delays the second rank
        waiting = pool.submit(second.all_gather, "the save", 10)
        assert first.all_gather("the save", 0) == [0, 10]
        first.leave("SystemExit: 75")
        second._answers[0], second._lost = ("the save", [0, 10]), (0, "SystemExit: 75")
    assert waiting.result(LONG) == [0, 10]


def test_a_rank_that_does_not_come_to_meet_is_named(meet: Meet, pool: Executor) -> None:
    first, _ = meet(2)
    with pytest.raises(UnreachableError, match=r"waited 0\.2 s for rank 1 to end the run"):
        first.all_gather_at_exit(0, 0.2)


def test_a_rank_that_waits_lets_all_know_that_it_was_asked_to_stop(meet: Meet, pool: Executor) -> None:
    """The loop of the rank waits, for example for a rank that evaluates."""
    ranks = meet(3)
    with preemption.saving_run():
        waiting = pool.submit(ranks[1].all_gather, "the loop", 0)
        preemption.note_remote_stop()
        wait_until("all to know", lambda: all(each._asked for each in ranks), LONG)
        for each in (ranks[0], ranks[2]):
            pool.submit(each.all_gather, "the loop", 0)
        assert waiting.result(LONG) == [0, 0, 0]


def test_waiting_for_a_rank_is_logged(
    meet: Meet, pool: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_plane, "REMIND_S", 0.1)
    first, second = meet(2)
    logging.getLogger("persia").addHandler(caplog.handler)
    try:
        waiting = pool.submit(first.all_gather, "a batch", 0)
        wait_until("the reminder", lambda: " s, for rank 1 to reach 'a batch'" in caplog.text, LONG)
        second.all_gather("a batch", 0)
        waiting.result(LONG)
    finally:
        logging.getLogger("persia").removeHandler(caplog.handler)


def test_a_rank_that_leaves_no_longer_waits(meet: Meet, pool: Executor) -> None:
    first, _ = meet(2)
    waiting = pool.submit(first.all_gather, "a batch", 0)
    wait_until("it to wait", lambda: 0 in first._shares, LONG)
    first.leave(None)
    with pytest.raises(RunLostError, match="this rank has left the run while it waited for rank 1 to reach 'a batch'"):
        waiting.result(LONG)


def test_rank_0_waits_for_notes_and_names_who_is_behind(meet: Meet) -> None:
    first, second, _ = meet(3)
    second.note(1)
    wait_until("the note to arrive", lambda: first._notes.get(1) == 1, LONG)
    with pytest.raises(UnreachableError, match="waited 0.2 s for rank 2 to leave its loop"):
        first.wait_for_notes(1, "to leave its loop", 0.2)


class FakeEngine:
    """An engine whose pushes are applied, or cannot be applied."""

    def __init__(self, error: PersiaError | None) -> None:
        self.error = error

    def drain(self) -> None:
        if self.error is not None:
            raise self.error


class FakePipeline:
    def close(self) -> None: ...


def test_a_loop_whose_last_pushes_fail_on_one_rank_fails_on_all(meet: Meet, pool: Executor) -> None:
    waiting = []
    for each in meet(3):
        context: Any = object.__new__(remote.RemoteBackend)
        context._peers = each
        context.engine = FakeEngine(UnreachableError("server 1 is gone") if each.rank == 1 else None)
        waiting.append(pool.submit(context.close_loop, FakePipeline(), together=True))
    for rank, future in enumerate(waiting):
        with pytest.raises(UnreachableError, match="^server 1 is gone" if rank == 1 else "^rank 1: server 1 is gone"):
            future.result(LONG)


class DiskFullError(StorageError):
    """A class of the failing code, which the other ranks do not know."""


def test_another_ranks_error_keeps_its_hint_and_the_class_that_all_ranks_know(meet: Meet, pool: Executor) -> None:
    def save(each: control_plane.Peers) -> None:
        with rank_checks.together(each, "save"):
            if each.rank == 1:
                failed = DiskFullError("disk full")
                failed.hint = "remove old checkpoints"
                raise failed

    futures = [pool.submit(save, each) for each in meet(2)]
    for rank, future in enumerate(futures):
        with pytest.raises(StorageError, match="^disk full$" if rank == 1 else "^rank 1: disk full$") as raised:
            future.result(LONG)
        assert raised.value.hint == "remove old checkpoints"


def test_ranks_begin_a_loop_with_the_same() -> None:
    told: list[dict[str, Any]] = [{"staleness": 1, "learning rate": rate} for rate in (0.1, 0.1, 0.2)]
    with pytest.raises(UsageError, match=r"learning rate is 0\.2 on rank 2 and 0\.1 on rank 0"):
        rank_checks.check_same(told)
    told[0]["learning rate"] = None  # rank 0 has loaded a checkpoint, and the other ranks get the rate from it
    rank_checks.check_same(told)
    told[2]["staleness"] = 2
    with pytest.raises(UsageError, match="staleness is 2 on rank 2 and 1 on rank 0"):
        rank_checks.check_same(told)


def test_the_summary_holds_what_was_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PERSIA_JOB", "j")
    monkeypatch.setattr(run, "_process", run._Process())
    run.trained(7, generation=3)
    run.report({"auc": 0.5})
    run.report({"rows": [1, 2]})
    assert finished_summary(tmp_path / "run") is None
    run.finish()
    summary = finished_summary(tmp_path / "run")
    assert summary is not None
    assert summary["result"] == {"auc": 0.5, "rows": [1, 2]}
    assert (summary["job"], summary["generation"], summary["steps"], summary["world_size"]) == ("j", 3, 7, 1)
    with pytest.raises(UsageError, match="report: 'auc': expected finite numbers"):
        run.report({"auc": float("nan")})
    with pytest.raises(UsageError, match="report: found float, expected a dict"):
        run.report(0.5)  # type: ignore[arg-type]


def test_alone_everything_is_agreed() -> None:
    assert run.agree(True)
    assert not run.agree(False)
    assert threading.active_count() >= 1
