"""``persia ckpt``: list, show, verify and copy checkpoints. No server is needed."""

from typing import Annotated

import typer

from persia.runtime.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="List, show, verify and copy checkpoints.")


@app.command("list")
def ckpt_list(
    parent: Annotated[str, typer.Argument(help="A folder of checkpoints, a checkpoint, or s3://bucket/prefix.")],
) -> None:
    """List the checkpoints in a folder or an object store. In a folder, broken ones are listed with the reason."""
    from persia.checkpoint.object_store import ObjectStore
    from persia.runtime.files import is_url
    from persia_core import checkpoint

    if is_url(parent):
        copies = ObjectStore(parent)
        whole = copies.whole()
        if not whole:
            typer.echo(f"{parent}: no checkpoints")
        for each in whole:
            size = f"{each.rows:,} rows  {each.size:,} bytes"
            typer.echo(f"{copies.url}/{each.name}  step {each.age[1]}  {size}  {each.created_at}")
        return
    found = checkpoint.listing(parent)
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


@app.command("show")
def ckpt_show(directory: Annotated[str, typer.Argument(help="A checkpoint.")]) -> None:
    """Print the manifest of a checkpoint, which is JSON."""
    from persia_core import checkpoint

    typer.echo(checkpoint.Checkpoint(_folder(directory)).manifest)


@app.command("verify")
def ckpt_verify(directory: Annotated[str, typer.Argument(help="A checkpoint.")]) -> None:
    """Check the size and the hash of every file of a checkpoint."""
    from persia_core import checkpoint

    opened = checkpoint.Checkpoint(_folder(directory))
    opened.verify()
    size = sum(file["bytes"] for file in opened.files)
    typer.echo(f"ok: {directory}: {len(opened.files)} files, {size:,} bytes, step {opened.step}")


def _folder(directory: str) -> str:
    """Return the folder; refuse a URL."""
    from persia.runtime.files import is_url

    if is_url(directory):
        raise UsageError(f"{directory}: download it first, which verifies it: persia ckpt copy {directory} FOLDER")
    return directory


@app.command("copy")
def ckpt_copy(
    source: Annotated[str, typer.Argument(help="A checkpoint: a folder, or s3://bucket/prefix/name.")],
    destination: Annotated[str, typer.Argument(help="The new checkpoint: a URL if SOURCE is a folder, else a folder.")],
) -> None:
    """Copy a checkpoint to an object store or from there, and verify it. A failed copy leaves no checkpoint."""
    from persia.checkpoint.object_store import copy
    from persia.runtime.files import is_url

    if is_url(source) == is_url(destination):
        raise UsageError(f"copy {source} {destination}: want one folder and one URL such as s3://bucket/run/step-100")
    copy(source, destination)
    typer.echo(f"ok: copied {source} to {destination}")
