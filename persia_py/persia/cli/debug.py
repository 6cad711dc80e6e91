"""``persia debug``: breakpoints on one of several ranks, stacks, digests, editors, and the image of the trainer."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.cli import context_shell

if TYPE_CHECKING:
    from persia.debug.ranks import Rank

HELP = "Stop at breakpoints on one of several ranks; print stacks; compare tensors; work in the trainer's image."
app = typer.Typer(no_args_is_help=True, help=HELP)

_OWN = {"allow_interspersed_args": False}
"""Options after the script are those of the script."""
_Words = Annotated[
    list[str], typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The script, or a torchrun command.")
]
_Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", help="The number of ranks. Default: that of torchrun, else GPU_NUM, else the debugged rank + 1."
    ),
]


@app.callback()
def _group() -> None:
    """Stop at breakpoints on one of several ranks; print stacks; compare tensors; work in the trainer's image."""


def _rank(given: int | None) -> int:
    from persia.debug.gate import RANK
    from persia.runtime.errors import UsageError

    text = os.environ.get(RANK, "").strip() or "0"
    if given is None and not text.isdecimal():
        raise UsageError(f"environment variable {RANK}={text!r}: expected the number of a rank")
    return int(text) if given is None else given


@app.command("run", context_settings=_OWN)
def debug_run(
    words: _Words,
    rank: Annotated[int | None, typer.Option(help="The rank that stops. Default: RANK_TO_DEBUG, or 0.")] = None,
    nproc: _Nproc = None,
    post_mortem: Annotated[bool, typer.Option("--pm", help="If a rank fails, stop it at its error.")] = False,
    logs: Annotated[Path, typer.Option(help="The folder of the output of the other ranks.")] = Path("logs"),
) -> None:
    """Run the ranks of a script. The rank that is debugged gets the terminal, and stops at breakpoint_()."""
    _run(words, rank, nproc, logs, post_mortem=post_mortem)


def _run(words: list[str], rank: int | None, nproc: int | None, logs: Path, *, post_mortem: bool = False) -> None:
    from persia import debug
    from persia.launch.debug_command import script_of
    from persia.launch.debug_run import DebugRun, run

    chosen = _rank(rank)
    script = script_of(words, rank=chosen, ranks=nproc)
    paths = [str(Path(folder, "path")) for folder in debug.__path__]
    raise typer.Exit(run(DebugRun(script, chosen, logs, post_mortem, paths)))


@app.command("clear")
def debug_clear() -> None:
    """Let the ranks on this host that wait at a breakpoint_(False) continue."""
    from persia.debug.gate import PREFIX, remove_files

    removed = remove_files(f"{PREFIX}*_[0-9]*.txt")
    typer.echo("\n".join(f"removed {path}" for path in removed) or "no breakpoint is open on this host")


@app.command("stacks")
def debug_stacks(
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    job: Annotated[str | None, typer.Option(help="Only ranks of this job.")] = None,
    pid: Annotated[int | None, typer.Option(help="Only this process.")] = None,
) -> None:
    """Print the stacks of all threads of the ranks on this host. The ranks continue."""
    from persia.debug.ranks import stacks_of

    for entry in _running(rank, job, pid):
        typer.echo(f"=== {entry.title}\n{stacks_of(entry)}")


def _running(rank: int | None, job: str | None, pid: int | None) -> "list[Rank]":
    from persia.debug.ranks import running
    from persia.runtime.errors import UnreachableError

    found = running()
    chosen = [
        entry for entry in found if rank in (None, entry.rank) and job in (None, entry.job) and pid in (None, entry.pid)
    ]
    if not chosen:
        others = "; ".join(entry.title for entry in found) or "none"
        given = {"--rank": rank, "--job": job, "--pid": pid}
        options = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        wanted = f"rank with {options}" if options else "rank"
        raise UnreachableError(
            f"no {wanted} runs on this host; running ranks of this user: {others}",
            hint="run the command on the host of the rank, inside its container, as the user of the rank",
        )
    return chosen


@app.command("attach")
def debug_attach(
    rank: Annotated[int | None, typer.Option(help="The rank.")] = None,
    job: Annotated[str | None, typer.Option(help="The job of the rank, if several jobs run.")] = None,
    pid: Annotated[int | None, typer.Option(help="The process ID of the rank.")] = None,
    port: Annotated[int | None, typer.Option(help="The port on 127.0.0.1. Default: 5678 + RANK.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds in which the editor has to attach.")] = 300.0,
) -> None:
    """Print a launch.json with which VS Code attaches to a running rank, and wait until it is attached."""
    from persia.debug import attach
    from persia.runtime.errors import UsageError

    chosen = _running(rank, job, pid)
    found = [entry for entry in chosen if entry.accepts_editors]
    if len(found) != 1:
        titles = "; ".join(entry.title for entry in found or chosen)
        if not found:
            raise UsageError(
                f"cannot attach an editor, because no debugger runs in {titles}",
                hint="start the rank with `persia debug run`, or call `breakpoint_` in its script",
            )
        raise UsageError(
            f"an editor can be attached to one rank only, found {len(found)}: {titles}",
            hint="choose one: --rank R, --job NAME or --pid N",
        )
    listening = attach.ask(found[0], attach.FIRST_PORT + found[0].rank if port is None else port, timeout)
    typer.echo(attach.launch_json(found[0], listening))
    typer.echo(f"waiting up to {timeout:g} s for the editor", err=True)
    attach.wait_for_client(found[0], timeout)
    typer.echo("the editor is attached", err=True)


@app.command("digest", context_settings=_OWN)
def debug_digest(
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- SCRIPT [ARGUMENTS]]", help="The script.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Record the tensors of every N-th step.")] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the digests.")] = Path("digest"),
    nproc: _Nproc = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--diff", metavar="A B", help="Compare two folders or two files.")
    ] = None,
) -> None:
    """Run a script and write a digest of each tensor, or compare the digests of two runs or two ranks."""
    from persia.runtime.errors import UsageError

    if (compare is None) == (not words):
        found = "both" if words else "neither"
        raise UsageError(f"persia debug digest: expected either -- SCRIPT or --diff A B, found {found}")
    if compare is not None:
        _diff(*compare)
    else:
        os.environ |= {"PERSIA_DIGEST": str(every), "PERSIA_DIGEST_DIR": str(out.absolute())}
        _run(words or [], None, nproc, out / "logs")


def _diff(a: Path, b: Path) -> None:
    from persia.debug.digest_files import diff
    from persia.runtime.exit_codes import ExitCode

    result = diff(a, b)
    about = f"{result.tensors:,} digests of {', '.join(result.ranks)}"
    if result.shared_only:
        about += "; parameters and gradients only, because the batches of two ranks differ"
    if result.unmatched:
        about += f"; steps in only one of the two: {result.unmatched:,}"
    typer.echo(f"equal: {about}" if result.first is None else f"{result.first}\ncompared: {about}")
    if result.first is not None:
        raise typer.Exit(ExitCode.FAILED)


app.command("shell")(context_shell.shell)
app.command("notebook")(context_shell.notebook)
