"""A debugger that holds a rank stops the clock of all ranks."""

import time
from collections.abc import Iterator

import pytest

from persia.distributed.held import Held
from persia.runtime import clock


class Sent:
    """A connection that stores the messages that are sent."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: object) -> bool:
        self.messages.append(message)
        return True


@pytest.fixture
def links() -> Iterator[dict[int, Sent]]:
    yield {1: Sent(), 2: Sent()}
    for holder in ("prompt", "editor", "rank 1"):
        clock.go(holder)


def test_the_others_are_told_once_and_only_of_this_rank(links: dict[int, Sent]) -> None:
    held = Held(0, links)  # type: ignore[arg-type]
    clock.stop("rank 1", elsewhere=True)
    assert not links[1].messages
    clock.stop("prompt")
    clock.stop("editor")
    clock.go("prompt")
    assert [each.messages for each in links.values()] == [[{"held": [0, True]}]] * 2
    clock.go("editor")
    assert links[1].messages[1:] == [{"held": [0, False]}]
    held.close()
    clock.stop("prompt")
    assert len(links[1].messages) == 2


def test_the_clock_waits_for_a_rank_that_is_held_elsewhere(links: dict[int, Sent]) -> None:
    held = Held(0, links)  # type: ignore[arg-type]
    held.note(1, is_held=True)
    began = clock.now()
    time.sleep(0.02)
    assert clock.now() == began and not clock.is_held_here()
    held.note(1, is_held=False)
    assert (links[1].messages, len(links[2].messages)) == ([], 2)  # rank 0 connects the others
    before = clock.now()
    time.sleep(0.02)
    assert clock.now() >= before + 0.02
    held.close()
