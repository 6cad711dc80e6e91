"""``persia ckpt``: list, show, verify, copy, export and import checkpoints. No server is needed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persia.runtime.errors import UsageError

if TYPE_CHECKING:
    from persia.checkpoint.rows_export import SavedTable
    from persia_core.checkpoint import Checkpoint

_CHECKPOINT = "A checkpoint, or a run: its best checkpoint, else its newest."

app = typer.Typer(no_args_is_help=True, help="List, show, verify, copy, export and import checkpoints.")


@app.command("list")
def ckpt_list(
    parent: Annotated[str, typer.Argument(help="A run, a folder of checkpoints, a checkpoint, or s3://bucket/prefix.")],
) -> None:
    """List the checkpoints of a run, in a folder or an object store. Broken ones are listed with the reason."""
    from persia.checkpoint.object_store import ObjectStore
    from persia.runtime.files import is_url

    if is_url(parent):
        copies = ObjectStore(parent)
        whole = copies.whole()
        if not whole:
            typer.echo(f"{parent}: no checkpoints")
        for each in whole:
            size = f"{each.rows:,} rows  {each.size:,} bytes"
            typer.echo(f"{copies.url}/{each.name}  step {each.age[1]}  {size}  {each.created_at}")
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
    """Return the checkpoints in a folder; of a run the saves and the best one."""
    from persia.checkpoint.foreign import check_not_persiaml
    from persia_core import checkpoint

    if _is_run(parent):
        from persia.trainer.run_folder import find_run, saves_of

        run = find_run(parent)
        return [entry for place in (saves_of(run), run.best) if place.is_dir() for entry in checkpoint.listing(place)]
    found = checkpoint.listing(parent)
    if not found:
        check_not_persiaml(parent)
    return found


def _is_run(path: str) -> bool:
    """Whether a path is the folder of a run, or ``LATEST`` beside runs. For other paths nothing more is imported."""
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole manifest instead, which is JSON.")] = False,
) -> None:
    """Print the tables of a checkpoint, its step and its size."""
    from persia.checkpoint.foreign import open_checkpoint

    if tables + files + as_json > 1:
        raise UsageError("--tables, --files and --json: give one of them")
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
    from persia.doctor import vocabulary

    vocabulary.show(vocabulary.of_manifest(head))
    if not head.get("tables"):
        typer.echo(
            "note: the checkpoint has only the number of rows, because an older version or `persia ckpt import` wrote "
            "it; live numbers of a job: persia status"
        )


@app.command("verify")
def ckpt_verify(directory: Annotated[str, typer.Argument(help=_CHECKPOINT)]) -> None:
    """Check the size and the hash of every file of a checkpoint."""
    from persia.checkpoint.foreign import open_checkpoint

    folder = _checkpoint(directory)
    opened = open_checkpoint(folder)
    opened.verify()
    size = sum(file["bytes"] for file in opened.files)
    typer.echo(f"ok: {folder}: {len(opened.files)} files, {size:,} bytes, step {opened.step}")


def _checkpoint(given: str) -> str:
    """Return the folder of a checkpoint: the one given, or the best one of a run, else its newest."""
    folder = _folder(given)
    if not _is_run(folder):
        return folder
    from persia.trainer.run_folder import find_checkpoint

    found = find_checkpoint(folder)
    typer.echo(str(found), err=True)
    try:
        return str(found.checkpoint.relative_to(Path.cwd()))
    except ValueError:
        return str(found.checkpoint)


def _folder(directory: str) -> str:
    """Return the folder; refuse a URL."""
    from persia.runtime.files import is_url

    if is_url(directory):
        raise UsageError(f"{directory}: download it first, which verifies it: persia ckpt copy {directory} FOLDER")
    return directory


@app.command("copy")
def ckpt_copy(
    source: Annotated[str, typer.Argument(help="A checkpoint: a folder, a run, or s3://bucket/prefix/name.")],
    destination: Annotated[str, typer.Argument(help="The new checkpoint: a URL if SOURCE is a folder, else a folder.")],
) -> None:
    """Copy a checkpoint to an object store or from there, and verify it. A failed copy leaves no checkpoint."""
    from persia.checkpoint.object_store import copy
    from persia.runtime.files import is_url

    if is_url(source) == is_url(destination):
        raise UsageError(f"copy {source} {destination}: want one folder and one URL such as s3://bucket/run/step-100")
    source = source if is_url(source) else _checkpoint(source)
    copy(source, destination)
    typer.echo(f"ok: copied {source} to {destination}")


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
        raise UsageError(f"-o {out}: --table is missing; the tables are {', '.join(each.name for each in tables)}")
    if table is None:
        _list_tables(tables)
        return
    if out is None:
        raise UsageError(f"--table {table}: give the file to write, such as -o {table}.parquet")
    saved = export_rows(folder, table, out, state=state, force=force)
    typer.echo(f"ok: {out}: {saved.rows:,} rows of table {saved.name}, dim {saved.dim}")
    if state and not saved.optimizer:
        typer.echo("note: the rows have no optimizer state")
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
    """Make a checkpoint of vectors in Parquet files, from which training can start."""
    from persia.checkpoint.rows_import import Columns, import_rows

    if len(rows) != len(table):
        raise UsageError(f"{len(rows)} files and {len(table)} --table: give each file its table, in the same order")
    columns = Columns(id_column, weights_column, prefix, lower)
    made = import_rows(list(zip(rows, table, strict=True)), _folder(out), columns, force=force)
    for name, count in made.items():
        typer.echo(f"ok: {out}: {count:,} rows of table {name}, without optimizer state")
