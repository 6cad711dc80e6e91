"""Implements ``persia ckpt export``: multipart uploads of checkpoints, and unfinished uploads."""

import shlex
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from persia.checkpoint.multipart import Upload


def export(folder: str, url: str, *, force: bool) -> None:
    """Upload a checkpoint, and print what was sent."""
    from persia.checkpoint import multipart

    again = f"persia ckpt export {shlex.quote(folder)} {shlex.quote(url)}{' --force' if force else ''}"
    done = multipart.export(folder, url, again, force=force)
    if done.files_before == done.files:
        said = f"{done.files} files, {done.bytes:,} bytes; the store already had all of them, so none was sent"
        typer.echo(f"ok: {folder} is at {url}: {said}")
        return
    typer.echo(f"ok: {folder} is at {url}: {done.files} files, {done.bytes:,} bytes, {done.parts} parts sent")
    if done.files_before or done.parts_before:
        typer.echo(f"already in the store, not sent again: files {done.files_before}, parts {done.parts_before}")


def show(url: str) -> None:
    """List the unfinished uploads."""
    from persia.checkpoint import multipart

    found = multipart.uploads(url, f"persia ckpt export --list-uploads {shlex.quote(url)}")
    for each in found:
        typer.echo(_line(url, each))
    size = sum(sum(each.sizes) for each in found)
    typer.echo(f"unfinished uploads: {len(found)}, {size:,} bytes")
    if found:
        typer.echo(f"to abort uploads older than a day: persia ckpt export --abort-uploads {shlex.quote(url)}")


def abort(url: str, older: timedelta, text: str) -> None:
    """Abort old uploads, and list them."""
    from persia.checkpoint import multipart

    again = f"persia ckpt export --abort-uploads {shlex.quote(url)} --older {text}"
    aborted = multipart.abort(url, older, again, lambda each: typer.echo(_line(url, each)))
    size = sum(sum(each.sizes) for each in aborted)
    typer.echo(f"ok: aborted uploads that began at least {text} ago: {len(aborted)} ({size:,} bytes)")


def _line(url: str, upload: "Upload") -> str:
    bucket = url.partition("://")[2].partition("/")[0]
    size = f"{len(upload.sizes)} parts  {sum(upload.sizes):,} bytes"
    return f"s3://{bucket}/{upload.key}  {size}  begun {upload.started:%Y-%m-%d %H:%M} UTC"
