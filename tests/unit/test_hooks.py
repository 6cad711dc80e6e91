"""The hooks of a training loop: their order, their votes, and their ends."""

from typing import Any

import pytest

from persia.loop.hooks import Hooks


class Recorder:
    """Records its calls."""

    def __init__(self, name: str, called: list[str], fails: bool = False) -> None:
        self.name, self.called, self.fails = name, called, fails

    @property
    def identity(self) -> str:
        return self.name

    def on_start(self, loop: object) -> None:
        self.called.append(f"{self.name} starts")
        if self.fails:
            raise ZeroDivisionError

    def on_end(self, complete: bool) -> None:
        self.called.append(f"{self.name} ends {complete}")
        if self.name == "failing end":
            raise LookupError


class Voter:
    def __init__(self, mine: bool) -> None:
        self.mine = mine
        self.votes: list[Any] = []

    def vote(self, work: object) -> bool:
        return self.mine

    def decide(self, step: int, votes: list[bool]) -> bool:
        self.votes = [step, *votes]
        return any(votes)


def test_ends_run_in_reverse_order_and_once() -> None:
    called: list[str] = []
    hooks = Hooks([Recorder("a", called), object(), Recorder("b", called)])
    hooks.start(None)  # type: ignore[arg-type]
    hooks.end(complete=True)
    hooks.end(complete=False)
    assert called == ["a starts", "b starts", "b ends True", "a ends True"]
    assert hooks.identity == "a, object, b"


def test_what_has_started_ends_where_a_hook_cannot_start() -> None:
    called: list[str] = []
    hooks = Hooks([Recorder("a", called), Recorder("b", called, fails=True), Recorder("c", called)])
    with pytest.raises(ZeroDivisionError):
        hooks.start(None)  # type: ignore[arg-type]
    hooks.end(complete=False)
    assert called == ["a starts", "b starts", "b ends False", "a ends False"]


def test_all_hooks_end_though_one_fails_and_none_after_it_is_complete() -> None:
    called: list[str] = []
    hooks = Hooks([Recorder("a", called), Recorder("failing end", called)])
    hooks.start(None)  # type: ignore[arg-type]
    with pytest.raises(LookupError):
        hooks.end(complete=True)
    assert called[2:] == ["failing end ends True", "a ends False"]


def test_each_voter_gets_the_votes_of_all_ranks() -> None:
    voters = [Voter(True), Voter(False)]
    hooks = Hooks([voters[0], object(), voters[1]])
    assert hooks.votes and not Hooks([object()]).votes
    mine = hooks.vote(None)
    assert mine == [True, False]
    assert hooks.decide(7, [mine, [False, False]])
    assert [voter.votes for voter in voters] == [[7, True, False], [7, False, False]]
    assert not hooks.decide(8, [[False, False], [False, False]])
