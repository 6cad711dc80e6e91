"""``persia logs``: the logs of all processes of a run or of the stack, in chronological order."""

import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from persia.doctor.log_lines import Line, Wanted


def logs(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="The folder of a run, such as runs/LATEST. If omitted: the containers of the stack in the current "
            "folder; without a stack, the newest run below runs/ that has logs.",
        ),
    ] = None,
    rank: Annotated[str | None, typer.Option(metavar="R|all", help="Only lines of rank R; all: any rank.")] = None,
    service: Annotated[
        str | None, typer.Option(help="Only processes whose names begin with this, such as server.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only lines that match this regular expression.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="G/R/S", help="Only lines about the batch of generation G, rank R, step S.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only lines of the last 30s, 10m, 2h, or since a time.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the last N of the selected lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each line.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="After the selected lines, print new lines until Ctrl-C.")
    ] = False,
) -> None:
    """Print the logs of all processes of a run or of the stack, in chronological order."""
    from persia.doctor.collectives import Failed

    wanted = _wanted(rank, service, grep, token, since)
    is_wanted, failed, limit = wanted.filter(), Failed(), tail

    def noted(lines: "Iterator[Line]") -> Iterator["Line"]:
        for line in lines:
            failed.note(line)
            yield line

    try:
        with suppress(KeyboardInterrupt) if follow else nullcontext():
            for lines in _rounds(run, wanted, follow=follow):
                found: Iterator[Line] = filter(is_wanted, noted(lines))
                for line in found if limit is None else deque(found, maxlen=limit):
                    sys.stdout.write(f"{line.as_json() if as_json else line.as_text()}\n")
                sys.stdout.flush()
                limit = None  # --tail limits only the lines that existed at the start
    except BrokenPipeError:  # the reader has ended: `persia logs | head`
        with Path(os.devnull).open("wb") as nowhere:  # Python flushes standard output again when it exits
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return
    for text in failed.lines():
        typer.echo(text, err=True)


def _rounds(run: Path | None, wanted: "Wanted", *, follow: bool) -> "Iterator[Iterator[Line]]":
    """Return the existing lines and, with ``follow``, repeatedly the new ones."""
    from persia.doctor import follow as followed
    from persia.doctor import logs as found
    from persia.doctor.log_lines import merged

    in_stack = run is None and found.has_stack(partial(typer.echo, err=True))
    folder = None if in_stack else _folder(run)
    if not follow or wanted.service is not None:
        sources = found.of_stack(wanted.since) if folder is None else found.of_run(folder)
        if wanted.service is not None:
            found.check_service(wanted.service, sources, in_stack=in_stack)
        if not follow:
            return iter([merged(sources)])
    return followed.stack(wanted.since) if folder is None else followed.run(folder)


def _folder(run: Path | None) -> Path:
    """Return the folder of a run."""
    from persia.doctor import logs as found
    from persia.runtime.errors import UsageError

    folder = found.run_folder(run)
    if folder is None:
        raise UsageError(
            "no logs: the current folder has no stack with containers, and no run below runs/ has logs",
            hint="specify the folder of a run: persia logs PATH; or run this in the folder of docker-compose.yaml",
        )
    if run is None:
        typer.echo(f"logs of {folder}", err=True)
    return folder


def _wanted(rank: str | None, service: str | None, grep: str | None, token: str | None, since: str | None) -> "Wanted":
    from persia.doctor import log_lines
    from persia.runtime.errors import UsageError

    if rank not in (None, "all") and not str(rank).isdecimal():
        raise UsageError(f"--rank {rank}: expected the number of a rank, or all")
    try:
        pattern = None if grep is None else re.compile(grep)
    except re.error as error:
        raise UsageError(f"--grep {grep}: not a valid regular expression: {error}") from error
    return log_lines.Wanted(
        rank="all" if rank == "all" else None if rank is None else int(rank),
        service=service,
        grep=pattern,
        token=token,
        since=None if since is None else log_lines.since(since),
    )
