"""The batches that a restarted script or a resumed run sends again or skips, and the warnings."""

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, ReplayWarnings
from feeding import JOB, MakeRanks, Ranks, batch, connect, many, new_ranks, number, sending
from relay import Relay
from waiting import wait_until

from persia import __version__
from persia.ctx import DataCtx
from persia.data import StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import DataError, FeatureTypeError, UsageError
from persia.feed import server as feed_server
from persia.feed.protocol import Stopped
from persia.feed.replay import MAX_POSITION_BYTES, Record, RoundRecords, batches_to_skip, records_after
from persia.feed.sender import Sender


@pytest.fixture
def ranks() -> Iterator[MakeRanks]:
    """Create ranks, and end them after the test."""
    with new_ranks() as make:
        yield make


def test_a_resumed_run_skips_what_it_has_trained_on(ranks: MakeRanks) -> None:
    run = ranks(2)
    run.begin(5)
    for server in run.servers:
        server.inbox.open(3, skip=2, replicas=1)
    with sending(run, 8):
        assert run.rest(0) == [4, 6]
        assert run.rest(1) == [5, 7]


@pytest.mark.parametrize(("of_second", "rest"), [(3, [5, 6]), (2, [6])])
def test_a_resumed_run_counts_in_the_order_of_training(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, of_second: int, rest: list[int]
) -> None:
    """Replica 1 ended early. It may have one batch fewer for this rank than for rank 0, which wrote the checkpoint."""
    run = ranks(1)
    run.servers[0].close()
    run.servers = [feed_server.serve(JOB, host="127.0.0.1")]
    run.servers[0].welcome(2, 0, 1)
    context = SimpleNamespace(common_context=SimpleNamespace(feed=run.servers[0]))
    monkeypatch.setattr("persia.runtime.contexts.current", lambda: context)
    data = StreamingDataset()
    data.load_state_dict({"taken": [5, 3], "world_size": 1})
    with sending(run, 7, 0, 2), sending(run, of_second, 1, 2, first=100):
        assert [number(each.data) for each in data] == rest
        assert sum(data.state_dict()["taken"]) == 8 + len(rest)


def test_a_restarted_script_with_the_same_batches_gives_no_warning(
    ranks: MakeRanks, replay_warnings: ReplayWarnings
) -> None:
    """The restarted script runs in another process, whose hashes have other seeds."""
    run = ranks(1, buffer=30)
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT / 'tests' / 'unit')!r}]\n"
        "import time\nfrom feeding import JOB, many\nfrom persia.feed.sender import Sender\n"
        f"sender = Sender(JOB, 0, 1, find=lambda: {run.find()!r}, start_timeout=20)\n"
        "for n in range(20): sender.send(many(n))\n"
        "time.sleep(60)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    wait_until("20 batches", lambda: run.servers[0].inbox.queued() == 20, 60)
    first.kill()
    first.wait()
    for changed in (None, 7):
        second = connect(run, start_timeout=20)
        for each in range(20):
            second.send(many(each if each != changed else 8))
        second.close()
        assert len(replay_warnings()) == (changed is not None)


@pytest.mark.parametrize(
    ("changed", "warned"),
    [(None, []), (0, [0]), (3, [1]), (4, [0]), (9, [])],
    ids=["none", "the first", "one of rank 1", "the last of those received", "one that was not received"],
)
def test_batches_that_differ_from_those_received_give_one_warning(
    ranks: MakeRanks,
    replay_warnings: ReplayWarnings,
    monkeypatch: pytest.MonkeyPatch,
    changed: int | None,
    warned: list[int],
) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://not-used:4222")
    run = ranks(2, buffer=10)
    first = connect(run)
    for each in range(6):
        first.send(batch(each))
    wait_until("6 batches", lambda: sum(server.inbox.queued() for server in run.servers) == 6, 20)
    assert [run.take(0), run.take(1)] == [0, 1]
    first.close()
    with sending(run, 12, changed=changed) as (thread, ended, _):
        assert run.rest(0) == [2, 4, 6, 8, 10]
        assert run.rest(1) == [3, 5, 7, 10_000 if changed == 9 else 9, 11]
        thread.join(20)
        assert not ended
    text = (
        "data-compose replica 0: the skipped batches (3) differ from those that rank {} has received: some "
        "samples may be trained on twice or not at all; to avoid this, use a fixed seed and a fixed order in "
        "the script, and start a new run"
    )
    assert replay_warnings() == [text.format(rank) for rank in warned]


def test_retries_do_not_draw_random_numbers_of_the_script(ranks: MakeRanks) -> None:
    run = ranks(1)
    asked: list[None] = []

    def find() -> list[dict[str, Any]]:
        asked.append(None)
        return run.find()

    sender = Sender(JOB, 0, 1, find=find, start_timeout=20)
    before, begun = random.getstate(), len(asked)
    run.kill()
    wait_until("two retries", lambda: len(asked) >= begun + 2, 20)
    sender.close()
    assert random.getstate() == before


def cut(relay: Relay, sender: Sender) -> None:
    """End the connection, and wait for the welcome of the next connection."""
    stream = sender._streams[0]
    before = [None, stream._call]
    relay.cut()
    wait_until("a welcome", lambda: stream._call not in before and stream._logged.startswith("connected to"), 20)


@pytest.mark.parametrize("changed", [None, 1])
def test_a_connection_that_is_lost_while_batches_are_skipped_changes_nothing(
    ranks: MakeRanks, replay_warnings: ReplayWarnings, changed: int | None
) -> None:
    run = ranks(1, buffer=10)
    inbox = run.servers[0].inbox
    first = connect(run)
    for each in range(4):
        first.send(batch(each))
    wait_until("4 batches", lambda: inbox.queued() == 4, 20)
    first.close()
    with Relay(run.servers[0].address) as relay:
        run.find = lambda: [{"index": "0", "replicas": "1", "address": relay.address, "started": ""}]  # type: ignore[method-assign]
        second = connect(run)
        for each in range(6):
            if each in {2, 5}:
                cut(relay, second)
            second.send(batch(each if each != changed else 10_000))
        ending = threading.Thread(target=second.end)
        ending.start()
        assert run.rest() == list(range(6))
        ending.join(20)
        second.close()
    assert len(replay_warnings()) == (changed is not None)


def streaming(run: Ranks, generation: int, monkeypatch: pytest.MonkeyPatch) -> StreamingDataset:
    """Return a data set of rank 0 in a new generation, without training."""
    run.kill()
    run.servers = [feed_server.serve(JOB, host="127.0.0.1")]
    run.servers[0].welcome(generation, 0, 1)
    context = SimpleNamespace(common_context=SimpleNamespace(feed=run.servers[0]))
    monkeypatch.setattr("persia.runtime.contexts.current", lambda: context)
    return StreamingDataset()


@pytest.mark.parametrize(
    ("changed", "known", "warned"),
    [
        (None, "whole", []),
        (2, "whole", [1]),
        (4, "whole", []),  # the last batch of a replica is received and dropped
        (2, "nothing", []),
        (2, "of another version", []),
        (2, "of another number", []),
    ],
)
def test_a_resumed_run_warns_of_batches_that_differ_from_those_trained_on(
    ranks: MakeRanks,
    monkeypatch: pytest.MonkeyPatch,
    replay_warnings: ReplayWarnings,
    changed: int,
    known: str,
    warned: list[int],
) -> None:
    """Two replicas send. The state goes through the JSON of a checkpoint and through the file of a rank."""
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://not-used:4222")
    run = ranks(1)
    data = streaming(run, 2, monkeypatch)
    with sending(run, 8, 0, 2), sending(run, 8, 1, 2, first=100):
        given = iter(data)
        states = [(next(given), data.state_dict())[1] for _ in range(14)]
        data.trained(states[9])  # the later batches are only looked up
        assert states[9] == {"taken": [5, 5], "world_size": 1}
        data.interrupt()
    passed = data.replay_digests()
    assert passed is not None and passed["batches"] == 4
    assert all(passed["digests"]) and len(set(passed["digests"])) == 2
    changes = {"nothing": None, "of another version": {**passed, "version": "0.0.9"}}
    passed = {**changes, "whole": passed, "of another number": {**passed, "batches": 3}}[known]
    data = streaming(run, 3, monkeypatch)
    data.load_state_dict(states[9])
    data.set_replay_digests(passed)
    assert data.replay_digests() == passed
    with sending(run, 8, 0, 2), sending(run, 8, 1, 2, first=100, changed=changed):
        assert [number(each.data) for each in data] == [5, 105, 6, 106, 7, 107]
    assert [int(message.split()[2][0]) for message in replay_warnings()] == warned
    data.trained(data.state_dict())
    again = data.replay_digests()
    assert again is not None and again["batches"] == 7
    assert (None not in again["digests"]) == (known == "whole")


def test_a_run_is_resumed_that_had_nothing_yet_of_some_replica(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ranks(1)
    data = streaming(run, 2, monkeypatch)
    with sending(run, 3, 0, 2), sending(run, 3, 1, 2, first=100):
        assert number(next(iter(data)).data) == 0
        state = data.state_dict()
        data.interrupt()
    assert state["taken"] == [1, 0]
    data = streaming(run, 3, monkeypatch)
    data.load_state_dict(state)
    with sending(run, 3, 0, 2), sending(run, 3, 1, 2, first=100):
        assert [number(each.data) for each in data] == [100, 1, 101, 2, 102]


def test_what_a_resumed_run_keeps_equals_that_of_one_that_was_not_interrupted() -> None:
    def record(replica: int, taken: int) -> Record:
        first = 100 * replica
        return Record(first + taken, f"after {first + taken}", 7 * taken, f"after {first + taken - 1}")

    def take(rounds: RoundRecords, taken: list[int], turns: int) -> None:
        for _ in range(turns):
            for replica in range(2):
                if replica == 0 or taken[1] < 5:  # the replica ends early
                    taken[replica] += 1
                    rounds.take(replica, record(replica, taken[replica]), taken)

    whole, taken = RoundRecords(), [0, 0]
    take(whole, taken, 4)
    state = whole.state()
    positions = [["after 3", 21, "after 2"], ["after 103", 21, "after 102"]]
    assert state == {"version": __version__, "batches": 3, "digests": [3, 103], "positions": positions}
    resumed, again = RoundRecords(3, records_after(3, 2, state)), [3, 3]
    take(resumed, again, 1)
    assert resumed.state() == state
    take(whole, taken, 20)
    take(resumed, again, 20)
    positions = [["after 4", 28, "after 3"], ["after 104", 28, "after 103"]]
    assert (
        resumed.state()
        == whole.state()
        == {"version": __version__, "batches": 4, "digests": [4, 104], "positions": positions}
    )
    assert batches_to_skip(taken) == 4


KNOWN = {"version": __version__, "batches": 3, "digests": [0, 2**32 - 1]}


@pytest.mark.parametrize(
    "state",
    [
        None,
        7,
        [KNOWN],
        {},
        {**KNOWN, "version": None},
        {**KNOWN, "version": np.array([__version__] * 2)},
        {**KNOWN, "batches": 4},
        {**KNOWN, "batches": torch.tensor([3, 3])},
        {**KNOWN, "digests": 7},
        {**KNOWN, "digests": {1: 1, 2: 2}},
        {**KNOWN, "digests": [1]},
        *({**KNOWN, "digests": [1, digest]} for digest in (-1, 2**32, 1.0, True, "1", [1])),
    ],
)
def test_a_checkpoint_with_digests_of_another_form_has_none(state: Any) -> None:
    assert records_after(3, 2, KNOWN) == [Record(0), Record(2**32 - 1)]
    assert records_after(3, 2, {**KNOWN, "digests": [None, 1]}) == [Record(None), Record(1)]
    assert records_after(3, 2, state) == [Record(None), Record(None)]


@pytest.mark.parametrize("wrong", [7, None, [], ["a", 1], [1, 1, "b"], ["a", -1, "b"], ["a", 1, 2], ["a", 1, "b", 3]])
def test_a_checkpoint_with_positions_of_another_form_has_none(wrong: Any) -> None:
    right = ["a", 1, "b"]
    assert records_after(3, 2, {**KNOWN, "positions": [right, wrong]}) == [Record(0, "a", 1, "b"), Record(2**32 - 1)]
    assert records_after(3, 2, {**KNOWN, "positions": [right]}) == [Record(0, "a", 1, "b"), Record(2**32 - 1)]
    assert records_after(3, 2, {**KNOWN, "positions": wrong}) == [Record(0), Record(2**32 - 1)]


def send_from(sender: Sender, begin: int, end: int) -> None:
    """Send batches of a script whose position after batch n is n + 1 as text."""
    for each in range(begin, end):
        sender.send(batch(each), str(each + 1))


def all_queued(run: Ranks, count: int) -> bool:
    return sum(server.inbox.queued() for server in run.servers) == count


@pytest.mark.parametrize("ranks_of_run", [1, 2, 3])
def test_a_restarted_script_begins_at_its_position(
    ranks: MakeRanks, replay_warnings: ReplayWarnings, ranks_of_run: int
) -> None:
    """The ranks have received the first batches. The script repeats at most ``2 * ranks_of_run - 1`` of them."""
    for received in range(5 * ranks_of_run):
        run = ranks(ranks_of_run, buffer=40)
        first = connect(run)
        send_from(first, 0, received)
        wait_until("all batches", partial(all_queued, run, received), 20)
        first.close()
        second = connect(run)
        position = second.resume()
        begin = int(position or 0)
        assert begin == (received - 2 * ranks_of_run + 1 if received >= 2 * ranks_of_run else 0)
        send_from(second, begin, 40)
        ending = threading.Thread(target=second.end)
        ending.start()
        for rank in range(ranks_of_run):
            assert run.rest(rank) == [*range(rank, 40, ranks_of_run)]
        ending.join(20)
        second.close()
    assert not replay_warnings()


def test_a_script_that_ignores_its_position_is_reported(ranks: MakeRanks, replay_warnings: ReplayWarnings) -> None:
    run = ranks(1, buffer=30)
    first = connect(run)
    send_from(first, 0, 5)
    wait_until("5 batches", lambda: run.servers[0].inbox.queued() == 5, 20)
    first.close()
    second = connect(run)
    assert second.resume() == "4"
    send_from(second, 0, 3)
    second.close()
    assert len(replay_warnings()) == 1


def test_a_rank_that_waits_after_a_resume_says_what_the_script_may_be_doing(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://not-used:4222")
    run = ranks(1)
    inbox = run.servers[0].inbox
    inbox.open(3, skip=5, replicas=1)
    sender = connect(run)
    said = inbox._missing(0)
    assert said.endswith(
        "unless its script uses DataCtx.resume, it first repeats the 5 batches that this rank has received"
    )
    for each in range(6):
        sender.send(batch(each))
    wait_until("a batch", lambda: inbox.queued() == 1, 20)
    assert inbox._missing(0) == "data-compose replica 0 is connected and has sent nothing new"
    sender.close()


def test_a_script_without_positions_begins_at_its_first_batch(
    ranks: MakeRanks, replay_warnings: ReplayWarnings
) -> None:
    run = ranks(1, buffer=30)
    first = connect(run)
    send_from(first, 0, 4)
    first.send(batch(4))
    first.send(batch(5))
    wait_until("6 batches", lambda: run.servers[0].inbox.queued() == 6, 20)
    first.close()
    second = connect(run)
    assert second.resume() == "", "the last position known is older than the one that is needed"
    send_from(second, 0, 8)
    wait_until("8 batches", lambda: run.servers[0].inbox.queued() == 8, 20)
    second.close()
    assert [run.take() for _ in range(8)] == [*range(8)]
    assert not replay_warnings()


def test_a_resumed_run_begins_at_the_position_of_its_checkpoint(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, replay_warnings: ReplayWarnings
) -> None:
    run = ranks(1)
    begun: list[int] = []

    def script() -> None:
        sender = connect(run)
        begun.append(int(sender.resume() or 0))
        with contextlib.suppress(Stopped):
            send_from(sender, begun[-1], 10)
            sender.end()
        sender.close()

    def started() -> threading.Thread:
        thread = threading.Thread(target=script)
        thread.start()
        return thread

    data = streaming(run, 2, monkeypatch)
    first = started()
    given = iter(data)
    states = [(next(given), data.state_dict())[1] for _ in range(7)]
    data.trained(states[5])  # the last batch is only looked up
    passed = data.replay_digests()
    assert passed is not None
    run.servers[0].stop("enough")
    first.join(20)
    for version in (__version__, "0.0.9"):
        data = streaming(run, 3, monkeypatch)
        data.load_state_dict(states[5])
        data.set_replay_digests({**passed, "version": version})
        second = started()
        assert [number(each.data) for each in data] == [6, 7, 8, 9]
        second.join(20)
    assert begun == [0, 4, 0]
    assert not replay_warnings()


def test_positions_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    sender = SimpleNamespace(send=lambda _, position: sent.append(position), resume=lambda: "here")
    ctx = DataCtx()
    with pytest.raises(UsageError, match="outside its `with` block"):
        ctx.resume()
    monkeypatch.setattr(ctx, "_sender", sender)
    one = PersiaBatch(
        [IDTypeFeatureWithSingleID("a", np.array([1], np.uint64))], labels=[Label(np.zeros(1, np.float32))]
    )
    assert ctx.resume() == "here"
    with pytest.raises(UsageError, match="before the first send_data"):
        ctx.resume()
    ctx.send_data(one, "x" * MAX_POSITION_BYTES)
    with pytest.raises(DataError, match="the position has 65538 bytes, allowed: at most 65536"):
        ctx.send_data(one, "\u00e9" * (MAX_POSITION_BYTES // 2 + 1))
    with pytest.raises(FeatureTypeError, match="position: expected a str, found int"):
        ctx.send_data(one, 7)  # type: ignore[arg-type]
    assert len(sent) == 1


def test_a_script_that_sends_another_number_of_batches_is_an_error(ranks: MakeRanks) -> None:
    run = ranks(1, buffer=10)
    first = connect(run)
    for each in range(5):
        first.send(batch(each))
    assert [run.take(), run.take()] == [0, 1]
    first.close()
    second = connect(run)
    second.send(batch(0))
    with pytest.raises(UsageError, match="batches for this rank: 1, received: [2-5]; a script"):
        second.end()
    second.close()
    with pytest.raises(DataError, match="same batches"):
        run.rest()
