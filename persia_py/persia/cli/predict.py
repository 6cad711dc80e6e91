"""``persia predict``: write the scores of rows to a file."""

from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, runs/LATEST, or a checkpoint in a run.")],
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="The rows; they need no labels.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The Parquet file to write.")],
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN", help="Keep only this column of the rows. Repeatable."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict/--no-strict", help="Refuse values of a wrong type, or treat them as null.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write the score of each row to a Parquet file."""
    from persia.runtime.interruptible import interruptible

    with interruptible():
        from persia.cli.quiet import only_warnings
        from persia.trainer import Trainer, prediction
        from persia.trainer.progress import unusual_lines
        from persia.trainer.run_folder import find_checkpoint

    only_warnings()
    prediction.check_out(out, force=force)
    found = find_checkpoint(run)
    with Trainer(found.folder.config()) as trainer:
        trainer.resume(run)
        written = prediction.write(trainer, files, out, keep=keep or None, strict=strict, force=force)
    typer.echo(str(found))
    for line in unusual_lines(written.unusual, written.without_row):
        typer.echo(line)
    typer.echo(f"wrote {written.path}: {written.unusual.rows:,} rows, {', '.join(written.columns)}")
