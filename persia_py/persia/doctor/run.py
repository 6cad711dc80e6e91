"""The checks of ``persia doctor`` by name, in the order in which they run."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from persia.config import Config
from persia.config.document import open_document
from persia.doctor import data, disk, environment, gpu, network, services, versions
from persia.doctor.check import Check
from persia.runtime import own_frames
from persia.runtime.errors import ConfigError, UsageError
from persia.runtime.exit_codes import ExitCode
from persia.runtime.places import Place


@dataclass(frozen=True)
class Subject:
    """The subject of the checks.

    Attributes:
        config: The configuration; None if there is none, or if it has errors.
        path: The file of the configuration.
        folders: The folders to check, instead of those of the configuration.
        measure: Whether to measure disks.
    """

    config: Config | None = None
    path: Path | None = None
    folders: list[Place] = field(default_factory=list)
    measure: bool = False


def _of_config(check: Callable[[Config], Iterator[Check]]) -> Callable[[Subject], Iterator[Check]]:
    """Return a check that runs only if there is a configuration."""

    def run(subject: Subject) -> Iterator[Check]:
        if subject.config is not None:
            yield from check(subject.config)

    return run


CHECKS: dict[str, Callable[[Subject], Iterator[Check]]] = {
    "versions": lambda _: versions.checks(),
    "gpu": lambda _: gpu.checks(),
    "network": lambda _: network.checks(),
    "services": lambda _: services.checks(),
    "disk": lambda subject: disk.checks(subject.config, subject.folders, measure=subject.measure),
    "env": _of_config(environment.checks),
    "data": _of_config(data.checks),
}
"""All checks, by the names that ``--only`` accepts."""
NEED_CONFIG = ("config", "env", "data")
"""The checks that need a configuration."""


def checks(
    path: Path | None, only: Sequence[str] = (), folders: Sequence[Place] = (), *, measure: bool = False
) -> Iterator[Check]:
    """Run checks, and yield each result as it arrives.

    Args:
        path: A ``persia.yml``; None if there is none.
        only: The names of the checks to run; an empty list means all.
        folders: The folders to check, instead of those of the configuration.
        measure: Whether to measure disks.

    Raises:
        UsageError: A name in ``only`` is not a check.
    """
    wrong = [name for name in only if name not in (*CHECKS, "config")]
    if wrong:
        raise UsageError(f"--only {','.join(wrong)}: no such check; the checks are config, {', '.join(CHECKS)}")
    config = None
    if path is not None:
        config, found = read(path)
        if not only or "config" in only or found.status == "fail":
            yield found
    elif needing := [name for name in only if name in NEED_CONFIG]:
        why = f"{', '.join(needing)}: a configuration is needed, and there is no persia.yml here"
        yield Check("config", "fail", "no persia.yml", why, "persia doctor FILE, or run it in the folder of the file")
    elif not only:
        yield Check("config", "skip", "no persia.yml", "config, data and env are not checked", "persia doctor FILE")
    subject = Subject(config, path, [*folders], measure)
    for name, check in CHECKS.items():
        if not only or name in only:
            yield from _guarded(name, check(subject))


def _guarded(name: str, found: Iterator[Check]) -> Iterator[Check]:
    """Yield checks. An exception in a check, for example from the user's model, becomes a finding."""
    try:
        yield from found
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":  # the check of packages reports it
            yield Check(name, "skip", "not checked", "this check needs PyTorch, which is not installed")
            return
        frames = own_frames.own_frames(error.__traceback__)
        place = f" at {own_frames.place(frames[0])}" if frames else ""
        why = "the check could not be completed; the other checks run"
        yield Check(
            name,
            "fail",
            f"{type(error).__name__}: {error}{place}",
            why,
            f"persia --verbose doctor --only {name}",
            ExitCode.FAILED,
        )


def read(path: Path) -> tuple[Config | None, Check]:
    """Read a configuration, and return it with the result of checking it.

    Args:
        path: The file.
    """
    command = f"persia config check {shlex.quote(str(path))}"
    try:
        document = open_document(path)
    except ConfigError as error:
        return None, Check("config", "fail", str(error), "", error.hint or command)
    findings = document.findings
    if document.config is None:
        return None, Check("config", "fail", "\n".join(findings.errors), "env and data are not checked", command)
    if findings.warnings:
        return document.config, Check("config", "warn", "\n".join(findings.warnings), "", command)
    config = document.config
    return config, Check("config", "ok", f"{path}: features: {len(config.features)}, labels: {len(config.labels)}")


def to_json(found: Sequence[Check]) -> str:
    """Return checks as JSON."""
    return json.dumps([{**asdict(check), "code": int(check.code)} for check in found], indent=1, ensure_ascii=False)


def lines(check: Check) -> list[str]:
    """Return the lines that show the result of a check."""
    first, *more = check.found.splitlines() or [""]
    shown = [f"{check.status:<5} {check.name:<14} {first}", *(f"{'':<20} {each}" for each in more)]
    shown += [f"{'':<20} why: {check.why}"] if check.why and check.status != "ok" else []
    shown += [f"{'':<20} {check.why}"] if check.why and check.status == "ok" else []
    return shown + ([f"{'':<20} next: {check.next}"] if check.next and check.status in ("warn", "fail") else [])
