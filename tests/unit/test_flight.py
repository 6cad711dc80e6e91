"""The flight recorder, and the rank that it names."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Batches, Configure
from meeting import LONG, Meet
from test_training import SLOTS, make, train
from waiting import wait_until

from persia.data import DataLoader
from persia.distributed import control_plane, lag
from persia.runtime import flight


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    before, flight._state = flight._state, flight._State()
    yield
    flight._state = before


def test_the_last_calls_are_kept_with_their_state(tmp_path: Path) -> None:
    flight.begin_loop(0)
    for step in range(1, 2001):
        with flight.Call(flight.PUSH, step):
            pass
    with pytest.raises(ValueError, match="bad"), flight.Call(flight.FORWARD, 2001):
        raise ValueError("bad")
    flight.use_folder(tmp_path)
    with flight.Call(flight.AGREEMENT, detail="next step"), flight.Call(flight.LOOK_UP, 2001):
        content = json.loads(flight.dump("why").read_text())
    calls = content["calls"]
    assert (content["reason"], len(calls)) == ("why", flight.CALLS)
    assert [(call["verb"], call["step"], call["state"]) for call in calls[-4:]] == [
        ("push", 2000, "done"),
        ("forward", 2001, "ValueError"),
        ("agreement", None, "open"),
        ("look-up", 2001, "open"),
    ]
    assert content["position"]["call"] == ["look-up", 2001, ""] and content["position"]["together"] == 1


def test_a_rank_has_a_place_before_its_first_loop() -> None:
    with flight.Call(flight.COLLECTIVE, detail="start of the process group"):
        place = flight.position()
        assert place["call"] == ["collective", None, "start of the process group"] and place["open"]
        said = lag.doing(place, 0.0)
    assert re.match(r"in collective 'start of the process group' after step 0 for \d+ s", said)
    assert not flight.totals()  # totals count only calls of training loops


def test_only_the_outer_calls_of_the_loop_count() -> None:
    flight.begin_loop(0)
    with flight.Call(flight.CHECKPOINT, 1), flight.Call(flight.AGREEMENT):
        pass
    other = threading.Thread(target=lambda: flight.Call(flight.READ, 1).__enter__().__exit__(None, None, None))
    other.start()
    other.join()
    assert flight.counts() == {"checkpoint": 1}
    assert [*flight.last_seconds()] == ["checkpoint"] and flight.totals()["checkpoint"] > 0


def test_a_training_loop_records_each_step(configure: Configure) -> None:
    configure(SLOTS)
    seen: list[str] = []

    class Seen:
        def begun(self, call: flight.Call) -> None:
            seen.append(f"{call.verb} {call.step}")

        def ended(self, call: flight.Call) -> None:
            assert call.ended is not None

        def stepped(self, step: int) -> None:
            seen.append(f"step {step}")

        def apart(self) -> None:
            raise AssertionError("nothing is evaluated")

    observer = Seen()
    flight.observe(observer)
    with make() as ctx:
        train(ctx, DataLoader(Batches(2), reproducible=True))
    flight.unobserve(observer)
    loop = [each for each in seen if not each.startswith("read")]
    one = ["data wait 1", "look-up 1", "forward 1", "backward 1", "push 1", "optimizer 1", "step 1"]
    assert loop[:7] == one and loop[7:14] == [each.replace("1", "2") for each in one]
    assert [each for each in seen if each.startswith("read")] == ["read 1", "read 2", "read 3"]


def place(together: int, verb: str = "agreement", *, is_open: bool = True, step: int | None = 5) -> dict[str, Any]:
    where = {"pid": 1, "host": "h", "step": 4, "together": together, "call": [verb, step, ""]}
    return {**where, "open": is_open, "seconds": 3.0}


def known(*places: dict[str, Any] | None, silent: int | None = None) -> dict[int, lag.Known]:
    return {rank: lag.Known(each, 1.0, answers=rank != silent) for rank, each in enumerate(places)}


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        (known(place(7), place(6, "data wait")), [1]),
        (known(place(6, "forward"), place(7, "all-reduce"), place(6, "look-up")), [0, 2]),
        (known(place(7), place(7, "look-up")), [1]),
        (known(place(7), place(7)), []),
        (known(place(7, "look-up"), place(7, "look-up")), []),
        (known(place(9), place(7), silent=0), [0]),
        (known(place(9), None, silent=1), [1]),
        (known(place(0, "data wait")), [0]),
    ],
)
def test_the_rank_that_lags(ranks: dict[int, lag.Known], late: list[int]) -> None:
    assert lag.lagging(ranks) == late


@pytest.mark.row("S3-12")
def test_a_collective_of_torch_that_waits_for_long_is_logged(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_plane, "_ALIVE_S", 0.02)
    monkeypatch.setattr(control_plane, "REMIND_S", 0.1)
    first, second = meet(2)
    late = known(place(7, "all-reduce"), place(6, "forward"))
    monkeypatch.setattr(lag.Positions, "_known", lambda self, answered: late)
    with second.in_collective(), first.in_collective():
        wait_until("the line", lambda: "for 4 s\nwaiting: rank 0" in caplog.text, LONG)
    text = (
        r"waiting in a forward pass, backward pass or collective for \d+ s\n"
        r"lagging: rank 1 \(pid 1 on h\): in forward of step 5"
    )
    assert re.search(text, caplog.text)
    assert first._positions.late() and not second._positions.late()  # a late rank does not report itself
    late = known(place(6, "forward"), place(6, "forward"))
    assert not first._positions.late()  # no rank is late, because both may be compiling
    late = known(place(7), place(7))
    assert "check the network" in first._positions.late()


@pytest.mark.row("S3-12")
def test_the_limit_of_a_collective_is_for_a_rank_that_waits(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = meet(2)
    ranks = known(place(6, "forward"), place(6, "forward"))
    monkeypatch.setattr(lag.Positions, "_known", lambda self, answered: ranks)
    waited = [each._positions.waited_s for each in (first, second)]
    assert [each(90.0) for each in waited] == [0.0, 0.0]  # both compute
    ranks = known(place(7, "all-reduce"), place(6, "backward"))
    assert [each(90.0) for each in waited] == [3.0, 0.0]  # rank 0 waits for 3 s, after its own backward
    ranks = known(place(6, "forward"), place(5, "push", is_open=False))
    assert [each(90.0) for each in waited] == [90.0, 0.0]  # the forward pass of rank 0 gathers weights or buffers

    ended: list[str] = []
    monkeypatch.setattr("persia.runtime.watchdog.end", lambda reason, *_: ended.append(reason))
    first.limit_s = 1.0
    for together, ends in ((6, False), (5, True)):
        ranks = known(place(6, "forward"), place(together, "forward"))
        first._collective_since = -90.0
        first._end_if_late()
        assert bool(ended) is ends
    first._collective_since = first.limit_s = None


def test_the_report_says_where_each_rank_is() -> None:
    assert lag.report(known(place(7), place(6, "data wait"))).splitlines() == [
        "lagging: rank 1 (pid 1 on h): in data wait of step 5 for 4 s",
        "waiting: rank 0 (pid 1 on h): in agreement of step 5 for 4 s",
    ]
    lines = lag.report(known(place(7), place(6, "push", is_open=False), silent=1)).splitlines()
    assert lines[0].startswith("lagging: rank 1 (pid 1 on h): does not respond: it is stopped, frozen, or without")
    assert lines[0].endswith("1 s ago: in the code of its script, after push of step 5, for 3 s")
    assert "all are in the same collective: check the network" in lag.report(known(place(7), place(7)))
