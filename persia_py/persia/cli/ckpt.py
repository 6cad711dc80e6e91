"""``persia ckpt``: list, show, verify, prune, copy, export and import checkpoints. No server is needed."""

import io
import json
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persia.runtime.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from persia.checkpoint.retention import Saved
    from persia.checkpoint.rows_export import SavedTable
    from persia.runtime.places import Place
    from persia_core.checkpoint import Checkpoint

_CHECKPOINT = "A checkpoint or a run. For a run: its best checkpoint, or its newest one if it has no best one."

app = typer.Typer(no_args_is_help=True, help="List, show, verify, prune, copy, export and import checkpoints.")


@app.command("list")
def ckpt_list(
    parent: Annotated[str, typer.Argument(help="A run, a folder of checkpoints, a checkpoint, or s3://bucket/prefix.")],
) -> None:
    """List the checkpoints of a run, in a folder or an object store; damaged ones are listed with the reason."""
    from persia.checkpoint.object_store import ObjectStore
    from persia.runtime.files import is_url

    if is_url(parent):
        copies = ObjectStore(parent)
        listing = copies.listing()
        if not listing:
            typer.echo(f"{parent}: no checkpoints")
        whole = [each for each in listing.values() if not isinstance(each, CheckpointError)]
        for each in sorted(whole, key=lambda one: one.age, reverse=True):
            size = f"{each.rows:,} rows  {each.size:,} bytes"
            typer.echo(f"{copies.url}/{each.name}  step {each.age[1]}  {size}  {each.created_at}")
        for name, broken in listing.items():
            if isinstance(broken, CheckpointError):
                typer.echo(f"{copies.url}/{name}  BROKEN: {broken}")
        return
    found = _listing(parent)
    if not found:
        typer.echo(f"{parent}: no checkpoints")
    for entry in found:
        if entry["problem"] is None:
            typer.echo(
                f"{entry['path']}  step {entry['step']}  {entry['rows']:,} rows  {entry['bytes']:,} bytes  "
                f"{entry['created_at']}"
            )
        else:
            typer.echo(f"{entry['path']}  BROKEN: {entry['problem']}")


def _listing(parent: str) -> list[dict[str, Any]]:
    """Return the checkpoints in a folder. For a run, these are its saves and its best checkpoint."""
    from persia.checkpoint.foreign import check_not_persiaml
    from persia.runtime.places import Url
    from persia_core import checkpoint

    if _is_run(parent):
        from persia.trainer.run_folder import find_run, saves_of

        run = find_run(parent)
        places = [each for each in (saves_of(run), run.best) if isinstance(each, Url) or each.is_dir()]
        return [entry for each in places for entry in checkpoint.listing(each)]
    found = checkpoint.listing(parent)
    if not found:
        check_not_persiaml(parent)
    return found


def _is_run(path: str) -> bool:
    """Whether a path is the folder of a run, or ``LATEST`` next to runs.

    The function imports further modules only if the path may be a run.
    """
    place = Path(path)
    if not (place.name == "LATEST" or (place / "metrics.jsonl").is_file()):
        return False
    from persia.trainer.run_folder import is_run

    return is_run(place)


@app.command("show")
def ckpt_show(
    directory: Annotated[str, typer.Argument(help=_CHECKPOINT)],
    tables: Annotated[bool, typer.Option("--tables", help="Print the vocabulary of each table instead.")] = False,
    files: Annotated[bool, typer.Option("--files", help="List each file with its size and hash too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest instead, as JSON.")] = False,
) -> None:
    """Print the tables of a checkpoint, its step and its size."""
    from persia.checkpoint.foreign import open_checkpoint

    if tables + files + as_json > 1:
        raise UsageError("--tables, --files and --json are mutually exclusive")
    folder = _checkpoint(directory)
    opened = open_checkpoint(folder)
    if as_json:
        typer.echo(opened.manifest)
    elif tables:
        _show_tables(json.loads(opened.manifest)["head"])
    else:
        _summarise(folder, opened, files)


def _summarise(folder: str, opened: "Checkpoint", with_files: bool) -> None:
    """Print the tables of a checkpoint, then its step and its files."""
    from persia.checkpoint.rows_export import saved_tables

    _list_tables(saved_tables(opened))
    size = sum(file["bytes"] for file in opened.files)
    typer.echo(f"{folder}: step {opened.step}, {len(opened.files)} files, {size:,} bytes")
    if with_files:
        for file in opened.files:
            typer.echo(f"{file['name']}  {file['bytes']:,} bytes  blake3 {file['blake3']}")


def _list_tables(tables: "list[SavedTable]") -> None:
    """Print a line for each table."""
    for each in tables:
        of = f"  features {', '.join(each.slots)}" if each.slots else ""
        typer.echo(f"{each.name}  {each.rows:,} rows  dim {each.dim}  optimizer {each.optimizer or 'none'}{of}")


def _show_tables(head: dict[str, Any]) -> None:
    """Print the vocabulary of each table of a checkpoint."""
    from persia.discovery.nats import status_command
    from persia.doctor import vocabulary

    vocabulary.show(vocabulary.of_manifest(head))
    if not head.get("tables"):
        typer.echo(
            "note: the checkpoint has only the number of rows, because an older version or `persia ckpt import` wrote "
            f"it; to see all columns for a running job: {status_command()}"
        )


@app.command("prune")
def ckpt_prune(
    parent: Annotated[str, typer.Argument(help="A run, a folder of checkpoints, or s3://bucket/prefix.")],
    older: Annotated[
        str | None, typer.Option(metavar="AGE", help="Delete checkpoints older than this age, such as 7d, 12h, 30m.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Always keep the newest N checkpoints.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
) -> None:
    """Delete old checkpoints of a run or a folder. The newest intact one and the best one of a run are kept."""
    from persia.checkpoint import retention

    if older is None and keep_last is None:
        raise UsageError(f"ckpt prune {parent}: pass --older AGE, such as 7d, or --keep-last N, or both")
    folder = _checkpoints_of(parent)
    age = None if older is None else _age(older)

    def keep(found: "Sequence[Saved]") -> int:
        return (keep_last or 1) if age is None else retention.kept(found, age, least=keep_last or 1)

    found = retention.checkpoints_in(folder)
    deleted = retention.to_delete(found, keep(found)) if dry_run else retention.prune(folder, keep)
    for each in deleted:
        typer.echo(f"{each.path}  step {each.step}  {each.size:,} bytes  {each.created_at:%Y-%m-%d %H:%M} UTC")
    size = sum(each.size for each in deleted)
    done = "would delete" if dry_run else "ok: deleted"
    typer.echo(f"{done} {len(deleted)} of {len(found)} checkpoints, {size:,} bytes")


def _checkpoints_of(parent: str) -> "Place":
    """Return the folder or the URL of the checkpoints of a run, or the folder or URL that was passed."""
    from persia.runtime.places import place

    folder = place(parent)
    if not isinstance(folder, Path):
        return folder
    if _is_run(parent):
        from persia.trainer.run_folder import find_run, saves_of

        return saves_of(find_run(folder))
    if not folder.is_dir() or (folder / "MANIFEST.json").exists():
        found = "one checkpoint" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        raise UsageError(
            f"{folder}: expected a run, or a folder of checkpoints, found {found}",
            hint=f"to delete this checkpoint: rm -r {shlex.quote(str(folder))}"
            if folder.is_dir()
            else "specify the folder of a run, such as runs/LATEST; to list checkpoints: persia ckpt list runs/LATEST",
        )
    return folder


def _age(text: str) -> timedelta:
    """Convert an age such as ``7d``."""
    from persia.checkpoint.retention import MAX_DAYS

    units = {"d": "days", "h": "hours", "m": "minutes"}
    number, unit = text[:-1], units.get(text[-1:])
    if unit is None or not number.isdecimal():
        raise UsageError(f"--older {text}: expected an integer and d, h or m, such as 7d, 12h, 30m")
    try:
        age = timedelta(**{unit: int(number)})
    except (OverflowError, ValueError):  # the age exceeds timedelta's limit, or has more digits than int() accepts
        age = timedelta.max
    if age > timedelta(days=MAX_DAYS):
        raise UsageError(f"--older {text[:20]}: expected at most {MAX_DAYS}d")
    return age


@app.command("verify")
def ckpt_verify(
    directory: Annotated[str, typer.Argument(help=_CHECKPOINT)],
    keys: Annotated[bool, typer.Option("--keys", help="List the keys and shapes of the dense model too.")] = False,
) -> None:
    """Check the size and the hash of every file of a checkpoint."""
    from persia.checkpoint.foreign import open_checkpoint

    folder = _checkpoint(directory)
    opened = open_checkpoint(folder)
    opened.verify()
    if keys:
        _show_keys(opened)
    size = sum(file["bytes"] for file in opened.files)
    typer.echo(f"ok: {folder}: {len(opened.files)} files, {size:,} bytes, step {opened.step}")


def _show_keys(opened: "Checkpoint") -> None:
    """Print the keys of the dense model, with shapes and dtypes."""
    import torch

    names = {file["name"] for file in opened.files}
    name = next((each for each in ("dense.pt", "model.pt") if each in names), None)
    if name is None:
        typer.echo("the checkpoint has neither dense.pt nor model.pt, the files of a dense model")
        return
    for key, value in torch.load(io.BytesIO(opened.read(name)), map_location="cpu", weights_only=True).items():
        shape = "x".join(map(str, value.shape)) or "scalar" if isinstance(value, torch.Tensor) else type(value).__name__
        dtype = f"  {str(value.dtype).partition('.')[2]}" if isinstance(value, torch.Tensor) else ""
        typer.echo(f"{name}  {key}  {shape}{dtype}")


def _checkpoint(given: str) -> str:
    """Return the folder or URL of a checkpoint.

    For a run, this is the best checkpoint, or the newest if none is best.
    """
    folder = given
    if not _is_run(folder):
        return folder
    from persia.trainer.run_folder import find_checkpoint

    found = find_checkpoint(folder)
    typer.echo(str(found), err=True)
    if isinstance(found.checkpoint, Path) and found.checkpoint.is_relative_to(Path.cwd()):
        return str(found.checkpoint.relative_to(Path.cwd()))
    return str(found.checkpoint)


def _folder(out: str) -> str:
    """Return the folder for imported rows; refuse a URL."""
    from persia.runtime.files import is_url

    if is_url(out):
        raise UsageError(
            f"-o {out}: expected a folder; rows cannot be imported into an object store",
            hint=f"import into a folder, then upload it: persia ckpt copy FOLDER {shlex.quote(out)}",
        )
    return out


@app.command("copy")
def ckpt_copy(
    source: Annotated[str, typer.Argument(help="A checkpoint: a folder, a run, or s3://bucket/prefix/name.")],
    destination: Annotated[str, typer.Argument(help="The new checkpoint: a URL if SOURCE is a folder, else a folder.")],
    force: Annotated[bool, typer.Option(help="Replace another checkpoint at the URL.")] = False,
) -> None:
    """Copy a checkpoint to or from an object store.

    All files are verified: before an upload in the source folder, after a download in the new folder. A failed copy
    leaves no checkpoint.
    """
    from persia.checkpoint.object_store import copy
    from persia.runtime.files import is_url

    if is_url(source) == is_url(destination):
        raise UsageError(
            f"copy {source} {destination}: expected one folder and one URL such as s3://bucket/run/step-100"
        )
    source = source if is_url(source) else _checkpoint(source)
    copy(source, destination, force=force)
    typer.echo(f"ok: copied {source} to {destination}")


@app.command("export")
def ckpt_export(
    source: Annotated[
        str, typer.Argument(help="A checkpoint, or a run; with --list-uploads or --abort-uploads: s3://bucket/prefix.")
    ],
    destination: Annotated[
        str | None, typer.Argument(help="The new checkpoint: s3://bucket/prefix/NAME.", show_default=False)
    ] = None,
    list_uploads: Annotated[
        bool, typer.Option("--list-uploads", help="List the unfinished uploads below the URL.")
    ] = False,
    abort_uploads: Annotated[
        bool,
        typer.Option(
            "--abort-uploads", help="Abort unfinished uploads older than --older: the store deletes their parts."
        ),
    ] = False,
    older: Annotated[
        str, typer.Option(metavar="AGE", help="With --abort-uploads: the minimum age, such as 7d, 12h, 30m.")
    ] = "1d",
    force: Annotated[bool, typer.Option(help="Replace another checkpoint at the URL.")] = False,
) -> None:
    """Upload a checkpoint to S3 in parts with checksums.

    If it is interrupted, run the same command again to continue.
    """
    from persia.cli import ckpt_uploads

    if list_uploads and abort_uploads:
        raise UsageError("--list-uploads and --abort-uploads are mutually exclusive")
    if (list_uploads or abort_uploads) == (destination is not None):
        told = f"ckpt export {source}: expected a checkpoint and the URL of the new one, s3://bucket/prefix/NAME"
        if destination is not None:
            option = "--list-uploads" if list_uploads else "--abort-uploads"
            told = f"ckpt export {option}: expected one URL, found {source} {destination}"
        raise UsageError(
            told,
            hint="persia ckpt export CHECKPOINT s3://bucket/run/step-100, or persia ckpt export --list-uploads "
            "s3://bucket",
        )
    if list_uploads:
        ckpt_uploads.show(source)
    elif abort_uploads:
        ckpt_uploads.abort(source, _age(older), older)
    elif destination is not None:
        ckpt_uploads.export(_checkpoint(source), destination, force=force)


@app.command("rows")
def ckpt_rows(
    directory: Annotated[str, typer.Argument(help=_CHECKPOINT)],
    table: Annotated[str | None, typer.Option(help="The table. Without it, the tables are listed.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The Parquet file to write.")] = None,
    state: Annotated[bool, typer.Option(help="Write the optimizer state and the step of the last push too.")] = False,
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write the rows of a table to a Parquet file: ids, and weights as lists of float32."""
    from persia.checkpoint.foreign import open_checkpoint
    from persia.checkpoint.rows_export import export_rows, saved_tables

    folder = _checkpoint(directory)
    tables = saved_tables(open_checkpoint(folder))
    if table is None and out is not None:
        names = ", ".join(each.name for each in tables) or "none"
        raise UsageError(f"-o {out}: --table is missing; tables of the checkpoint: {names}")
    if table is None:
        _list_tables(tables)
        return
    if out is None:
        raise UsageError(f"--table {table}: -o is missing; specify the file to write, such as -o {table}.parquet")
    saved = export_rows(folder, table, out, state=state, force=force)
    typer.echo(f"ok: {out}: {saved.rows:,} rows of table {saved.name}, dim {saved.dim}")
    if state and not saved.optimizer:
        typer.echo(f"note: the rows of table {saved.name} have no optimizer state in this checkpoint")
    if saved.hashed:
        typer.echo(f"note: ids are buckets of the hash stack of {', '.join(saved.hashed)}, not ids of the data")


@app.command("import")
def ckpt_import(
    rows: Annotated[list[Path], typer.Argument(help="Parquet files, one for each table.")],
    table: Annotated[list[str], typer.Option(help="The table of each file, in the order of the files.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder of the new checkpoint.")],
    id_column: Annotated[str, typer.Option(help="The column of ids: integers or strings.")] = "id",
    weights_column: Annotated[str, typer.Option(help="The column of vectors: lists of floats.")] = "weights",
    prefix: Annotated[str, typer.Option(help="The `prefix` of the feature in persia.yml.")] = "",
    lower: Annotated[bool, typer.Option(help="The feature has `lower: true` in persia.yml.")] = False,
    force: Annotated[bool, typer.Option(help="Replace a checkpoint in the folder.")] = False,
) -> None:
    """Create a checkpoint from vectors in Parquet files. Training can start from it."""
    from persia.checkpoint.rows_import import Columns, import_rows

    if len(rows) != len(table):
        raise UsageError(
            f"ckpt import: expected one --table for each file, in the same order; number of files: {len(rows)}, of "
            f"--table options: {len(table)}"
        )
    columns = Columns(id_column, weights_column, prefix, lower)
    made = import_rows(list(zip(rows, table, strict=True)), _folder(out), columns, force=force)
    for name, count in made.items():
        typer.echo(f"ok: {out}: {count:,} rows of table {name}, without optimizer state")
