"""Counts the steps of a backtracking matcher. Tests of linear time then need no clock.

:class:`Counted` returns the results of a pattern of ``re``. In addition to each search, it tries all starts itself, as
``re`` does without its shortcuts, and compares the ends of its matches with those of ``re``.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as ops
    from re import _parser as parser
else:
    import sre_constants as ops
    import sre_parse as parser

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
}
_CATEGORIES |= {
    ops.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    ops.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    ops.CATEGORY_NOT_WORD: lambda char: not _CATEGORIES[ops.CATEGORY_WORD](char),
}


class Steps:
    """The number of steps of all patterns."""

    count = 0


class Counted:
    """A pattern that counts its steps.

    Args:
        pattern: The pattern.
        steps: The count.
    """

    def __init__(self, pattern: "re.Pattern[str]", steps: Steps) -> None:
        self._pattern, self._steps = pattern, steps
        tree: Any = parser.parse(pattern.pattern, pattern.flags)
        self._tree = [*tree]
        self._folds, self._dot_all = bool(pattern.flags & re.IGNORECASE), bool(pattern.flags & re.DOTALL)
        self._groups: dict[int, str] = {}
        self._text = ""

    def search(self, text: str) -> "re.Match[str] | None":
        found = self._pattern.search(text)
        self._try_all(text, 0, found)
        return found

    def fullmatch(self, text: str) -> "re.Match[str] | None":
        found = self._pattern.fullmatch(text)
        self._try(text, 0, found, whole=True)
        return found

    def sub(self, replacement: Callable[["re.Match[str]"], str], text: str) -> str:
        at = 0
        for found in self._pattern.finditer(text):
            self._try_all(text, at, found)
            at = found.end()
        self._try_all(text, at, None)
        return self._pattern.sub(replacement, text)

    def split(self, text: str, maxsplit: int) -> list[str]:
        self._try_all(text, 0, self._pattern.search(text))
        return self._pattern.split(text, maxsplit)

    def _try_all(self, text: str, start: int, found: "re.Match[str] | None") -> None:
        for at in range(start, len(text) + 1 if found is None else found.start()):
            self._try(text, at, None)
        if found is not None:
            self._try(text, found.start(), found)

    def _try(self, text: str, at: int, found: "re.Match[str] | None", *, whole: bool = False) -> None:
        self._text, self._groups = text, {}
        ends = self._sequence(self._tree, 0, at)
        end = next((end for end in ends if not whole or end == len(text)), None)
        assert end == (None if found is None else found.end()), (self._pattern.pattern, text[at : at + 80], end, found)

    def _sequence(self, items: Any, index: int, at: int) -> Iterator[int]:
        """Yield the ends of items from an index on, in the order in which they are tried."""
        if index == len(items):
            yield at
            return
        op, value = items[index]
        for end in self._item(op, value, at):
            yield from self._sequence(items, index + 1, end)

    def _item(self, op: Any, value: Any, at: int) -> Iterator[int]:
        self._steps.count += 1
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            if at < len(self._text) and self._fits(op, value, self._text[at]):
                yield at + 1
        elif op is ops.BRANCH:
            for each in value[1]:
                yield from self._sequence([*each], 0, at)
        elif op is ops.SUBPATTERN:
            group, _, _, inner = value
            for end in self._sequence([*inner], 0, at):
                if group is not None:
                    self._groups[group] = self._text[at:end]
                yield end
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            yield from self._repeat(op, value, at)
        elif op is ops.GROUPREF:
            if value in self._groups and self._text.startswith(self._groups[value], at):
                self._steps.count += len(self._groups[value])
                yield at + len(self._groups[value])
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            direction, inner = value
            start = at if direction > 0 else at - inner.getwidth()[0]
            ends = self._sequence([*inner], 0, start) if start >= 0 else iter(())
            if (next(ends, None) is not None) == (op is ops.ASSERT):
                yield at
        elif op is ops.AT:
            if self._is_at(value, at):
                yield at
        else:
            raise NotImplementedError(op)

    def _repeat(self, op: Any, value: Any, at: int) -> Iterator[int]:
        """Yield the ends of a repetition. In the tested patterns, each repeated item has only one end."""
        least, most, inner = value
        items = [*inner]
        if op is ops.MAX_REPEAT:
            ends = [at]
            while len(ends) <= most:
                end = next(self._sequence(items, 0, ends[-1]), None)
                if end is None or end == ends[-1]:
                    break
                ends.append(end)
            while len(ends) > least:
                yield ends.pop()
            return
        last: int | None = at
        for number in range(least + len(self._text) + 1):
            if number >= least and last is not None:
                yield last
            if last is None or number == most:
                return
            last = next(self._sequence(items, 0, last), None)

    def _fits(self, op: Any, value: Any, char: str) -> bool:
        if op is ops.ANY:
            return self._dot_all or char != "\n"
        chars = {char, char.lower(), char.upper()} if self._folds else {char}
        if op is ops.LITERAL:
            return chr(value) in chars
        if op is ops.NOT_LITERAL:
            return chr(value) not in chars
        negated, found = False, False
        for kind, each in value:
            if kind is ops.NEGATE:
                negated = True
            elif kind is ops.LITERAL:
                found = found or chr(each) in chars
            elif kind is ops.RANGE:
                found = found or any(each[0] <= ord(one) <= each[1] for one in chars if len(one) == 1)
            else:
                found = found or _CATEGORIES[each](char)
        return found != negated

    def _is_at(self, place: Any, at: int) -> bool:
        text = self._text
        if place in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
            return at == 0
        if place is ops.AT_END:
            return at == len(text) or text[at:] == "\n"
        if place is ops.AT_END_STRING:
            return at == len(text)
        is_word = _CATEGORIES[ops.CATEGORY_WORD]
        around = [at > 0 and is_word(text[at - 1]), at < len(text) and is_word(text[at])]
        return (around[0] != around[1]) == (place is ops.AT_BOUNDARY)
