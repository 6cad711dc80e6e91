"""``persia dump``: a redacted archive of a run or of the stack, for a report."""

import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def dump(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="The folder of a run, such as runs/LATEST. If omitted: the containers of the stack in the current "
            "folder; without a stack, PERSIA_RUN_DIR, else the newest run below runs/.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The archive; - is standard output. Default: persia-dump-….tar.gz"),
    ] = None,
    preview: Annotated[bool, typer.Option("--preview", help="List the files, and write nothing.")] = False,
    repro: Annotated[
        bool, typer.Option("--repro", help="Add a minimal reproduction: configuration, model, one batch of the data.")
    ] = False,
) -> None:
    """Collect logs, configuration, status and checks in one archive, without secrets.

    The job may be running or have failed.
    """
    from persia.cli.quiet import only_warnings
    from persia.doctor import logs
    from persia.doctor.dump import here, stack, summary
    from persia.doctor.dump.archive import SUMMARY, Archive, check, write
    from persia.doctor.dump.facts import Facts
    from persia.doctor.dump.redact import Redactor
    from persia.runtime.errors import UsageError

    only_warnings()
    to_stdout = out is not None and str(out) == "-"
    if out is not None and not to_stdout and not preview:
        check(out)
    archive, facts = Archive(Redactor()), Facts()
    of_stack = run is None and logs.has_stack(partial(typer.echo, err=True))
    folder = None if of_stack else logs.newest_run(run)
    if run is not None and (folder is None or not folder.is_dir()):
        raise UsageError(
            f"{run}: no such folder; expected the folder of a run, such as runs/LATEST",
            hint="correct the path, or omit RUN: the default is the stack in this folder, else PERSIA_RUN_DIR, else "
            "the newest run below runs/",
        )
    if folder is not None:
        facts.subject = f"run {folder}"
    here.learn_secrets(archive, folder)
    if of_stack:
        archive.attempt("stack", lambda: stack.collect(archive, facts), None)
    paths: AbstractContextManager[dict[str, str]] = nullcontext({})
    if of_stack:
        paths = here.without_container_paths(archive)
    with paths as ignored:
        here.collect(archive, facts, folder)
        if repro:
            from persia.doctor.dump import repro as reproduction

            rows = reproduction.collect(archive, folder, ignored)
            said = f"note: repro/ has up to {rows:,} rows of each part of the data; rows are not redacted"
            typer.echo(said, err=True)
    archive.add(SUMMARY, summary.text(archive, facts))
    started = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    name = "-".join(["persia-dump", *([folder.resolve().name] if folder is not None else []), started])
    if preview:
        for each, entry in sorted(archive.entries.items()):
            typer.echo(f"{len(entry.content):>10,}  {each}  ({entry.redactions} redacted)")
        for each, why in archive.skipped.items():
            typer.echo(f"{'-':>10}  {each}: {why}")
        return
    packed = archive.packed(name)
    if to_stdout:
        sys.stdout.buffer.write(packed)
        sys.stdout.buffer.flush()
        return
    path = out or Path(f"{name}.tar.gz")
    write(path, packed)
    typer.echo(f"{path}: {len(archive.entries)} files, {len(packed):,} bytes; its {SUMMARY} is the draft of a report")
