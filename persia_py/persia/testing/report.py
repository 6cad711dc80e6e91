"""The steps of a check, and its report."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from persia.runtime import own_frames


@dataclass(frozen=True)
class Step:
    """One step of a check.

    Attributes:
        name: ``build``, ``forward``, ``loss``, ``backward``, ``eval`` or ``state_dict``.
        seconds: The duration of the step, in seconds.
        error: The exception that it raised; None if it passed.
    """

    name: str
    seconds: float
    error: Exception | None = None

    @property
    def place(self) -> str:
        """The innermost line of the user's files that was executing when the step failed; empty if there was none."""
        if self.error is None:
            return ""
        frames = own_frames.own_frames(own_frames.root_cause(self.error).__traceback__)
        frames = frames or own_frames.own_frames(self.error.__traceback__)
        return own_frames.place(frames[0]) if frames else ""


@dataclass(frozen=True)
class Report:
    """The result of :func:`check` or :func:`check_alone`. It is true if all steps passed.

    Attributes:
        steps: The steps that were run; the last one failed, unless all passed.
        warnings: Findings that are no errors, but probably not intended.
    """

    steps: list[Step]
    warnings: list[str] = field(default_factory=list)

    @property
    def failed(self) -> str | None:
        """The name of the step that failed; None if all passed."""
        return next((step.name for step in self.steps if step.error is not None), None)

    @property
    def error(self) -> Exception | None:
        """The error of the step that failed."""
        return next((step.error for step in self.steps if step.error is not None), None)

    def raise_if_failed(self) -> None:
        """Raise the error of the step that failed."""
        if self.error is not None:
            raise self.error

    def __bool__(self) -> bool:
        """Return whether all steps passed."""
        return self.failed is None

    def __str__(self) -> str:
        """Return a line for each step; for a failed step, also the error and the user's line."""
        lines = []
        for step in self.steps:
            if step.error is None:
                lines.append(f"✓ {step.name}  {step.seconds * 1000:.0f} ms")
                continue
            lines.append(f"✗ {step.name}: {type(step.error).__name__}: {step.error}")
            if step.place:
                lines.append(f"  at {step.place}")
        return "\n".join([*lines, *(f"warning: {each}" for each in self.warnings)])

    __repr__ = __str__


class _Failed(Exception):  # noqa: N818 - it only ends the steps
    """Raised to end the steps after a failure."""


class Steps:
    """Runs steps until one fails."""

    def __init__(self) -> None:
        self.done: list[Step] = []
        self.warnings: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Enclose a step. An error is recorded, and ends the steps."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.done.append(Step(name, time.perf_counter() - began, error))
            raise _Failed from error
        self.done.append(Step(name, time.perf_counter() - began))

    @contextmanager
    def until_failure(self) -> Iterator[None]:
        """Enclose all steps."""
        try:
            yield
        except _Failed:
            return

    def report(self) -> Report:
        """Return the report of the completed steps."""
        return Report(self.done, self.warnings)
