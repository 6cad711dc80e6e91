"""What ``persia doctor`` prints."""

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from persia.doctor import compose, diagnosis, run
from persia.doctor import ladder as steps
from persia.doctor.check import Check, worst
from persia.doctor.environment import block
from persia.runtime.exit_codes import ExitCode
from persia.runtime.settings import variable


def checks(path: Path | None, only: list[str], folders: list[Path], *, as_json: bool) -> int:
    """Run checks, print each one when it is done, and return the exit code."""
    return _show(run.checks(path, only, folders), as_json=as_json)


def image(*, as_json: bool) -> int:
    """Print the checks of the image, and return the exit code."""
    return _show(compose.checks(), as_json=as_json)


def matrix(size: int, *, as_json: bool) -> int:
    """Print the connections of ranks, and return the exit code: of this rank, or without RANK of ranks of this host."""
    from persia.doctor import matrix as ranks

    if variable("RANK") is None:
        return ranks.on_this_host(size, as_json=as_json)
    return _show(ranks.here(size), as_json=as_json)


def _show(found: Iterable[Check], *, as_json: bool) -> int:
    done: list[Check] = []
    for check in found:
        done.append(check)
        if not as_json:
            typer.echo("\n".join(run.lines(check)))
    if as_json:
        typer.echo(run.to_json(done))
    else:
        count = {status: sum(check.status == status for check in done) for status in ("ok", "warn", "fail", "skip")}
        typer.echo(", ".join(f"{number} {status}" for status, number in count.items() if number))
    return worst(done)


def environment() -> None:
    """Print versions, machine and variables."""
    typer.echo(block())


def differences() -> int:
    """Print a table of packages here and in the image, those with other versions first; return 0."""
    different, equal = compose.differences()
    table = Table("package", "here", "image", "")
    for row in different:
        table.add_row(*row, "only one side" if "-" in row[1:] else "differs")
    for row in equal:
        table.add_row(*row, "")
    Console().print(table)
    typer.echo(f"{len(different)} differ, {len(equal)} are equal")
    return 0


def ladder(path: Path, *, until: int, nproc: int | None) -> int:
    """Run the steps of the ladder, print each one and a summary, and return the exit code of the one that failed."""
    found = steps.steps(path, ranks=nproc)
    results: list[steps.Result] = []
    for result in steps.climb(found, until, lambda step: typer.echo(f"{step.number:>2} {step.title}: {step.command}")):
        results.append(result)
        step = result.step
        if result.code is None:
            typer.echo(f"   skipped: {step.skip}")
        elif not result.failed:
            typer.echo(f"   ✓ {result.seconds:.1f} s")
        else:
            typer.echo(f"   ✗ exit code {result.code}, {result.seconds:.1f} s")
            typer.echo("\n".join(f"   | {line}" for line in result.output.splitlines()))
            first, *more = diagnosis.of(step.number, result.code, result.output)
            typer.echo("\n".join([f"diagnosis: {first}", *(f"  {line}" for line in more)]))
            typer.echo(f"whole output: {result.log}\nnext: {step.command}")
    typer.echo("\n".join(steps.summary(found, results)))
    last = results[-1].code or 0
    return last if last >= 0 else ExitCode.FAILED
