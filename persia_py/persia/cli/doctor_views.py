"""The output of ``persia doctor``."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from persia.doctor import compose, diagnosis, run
from persia.doctor import ladder as steps
from persia.doctor import stack as containers
from persia.doctor.check import Check, worst
from persia.doctor.environment import block
from persia.runtime.exit_codes import ExitCode
from persia.runtime.places import place
from persia.runtime.settings import variable


def checks(path: Path | None, only: list[str], folders: list[str], *, as_json: bool, measure: bool) -> int:
    """Run checks, print each result as it arrives, and return the exit code."""
    return _show(run.checks(path, only, [place(each) for each in folders], measure=measure), as_json=as_json)


def stack(*, as_json: bool) -> int:
    """Run the checks inside the containers of the stack, print them, and return the exit code."""
    return _show(containers.checks(), as_json=as_json)


def image(*, as_json: bool) -> int:
    """Run the checks inside the image, print them, and return the exit code."""
    return _show(compose.checks(), as_json=as_json)


def matrix(size: int, *, as_json: bool, measure: bool) -> int:
    """Print the connections of this rank, or without RANK those of ranks on this host, and return the exit code."""
    from persia.doctor import matrix as ranks

    if variable("RANK") is None:
        return ranks.on_this_host(size, as_json=as_json, measure=measure)
    return _show(ranks.here(size, measure=measure), as_json=as_json)


def metrics(prometheus: str | None, gateway: str | None, *, as_json: bool) -> int:
    """Print the targets of a Prometheus and the groups of a push gateway, and return the exit code."""
    from persia.doctor import monitoring

    return _show(monitoring.checks(prometheus, gateway), as_json=as_json)


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
    """Print versions, machine properties and variables."""
    typer.echo(block())


def differences() -> int:
    """Print a table of packages here and in the image, different versions first; return 0."""
    different, equal = compose.differences()
    table = Table("package", "here", "image", "")
    for row in different:
        table.add_row(*row, "only on one side" if "-" in row[1:] else "differs")
    for row in equal:
        table.add_row(*row, "")
    Console().print(table)
    typer.echo(f"packages: {len(different)} different, {len(equal)} equal")
    return 0


def ladder(path: Path, *, until: int, nproc: int | None) -> int:
    """Run the steps of ``--ladder``, print each result and a summary, and return the exit code of the failed step."""
    found = steps.steps(path, ranks=nproc)
    results: list[steps.Result] = []

    def begun(step: steps.Step) -> None:
        typer.echo(f"{step.number:>2} {step.title}: {step.command}")

    with contextlib.closing(steps.climb(found, until, begun)) as climbing:
        for result in climbing:
            results.append(result)
            _show_result(result)
    typer.echo("\n".join(steps.summary(found, results)))
    last = results[-1].code or 0
    return last if last >= 0 else ExitCode.FAILED


def _show_result(result: steps.Result) -> None:
    """Print the result of a step of ``--ladder``, with the diagnosis if the step failed."""
    step = result.step
    if result.code is None:
        typer.echo(f"   skipped: {step.skip}")
        return
    if not result.failed:
        typer.echo(f"   ✓ {result.seconds:.1f} s")
        return
    typer.echo(f"   ✗ exit code {result.code}, {result.seconds:.1f} s")
    typer.echo("\n".join(f"   | {line}" for line in result.output.splitlines()))
    first, *more = diagnosis.of(step.number, result.code, result.output)
    typer.echo("\n".join([f"diagnosis: {first}", *(f"  {line}" for line in more)]))
    typer.echo(f"whole output: {result.log}\nnext: {step.command}")
