"""``persia export``: write a trained model as a bundle."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The new folder.")],
    run: Annotated[
        Path, typer.Argument(metavar="[RUN]", help="A run's folder, runs/LATEST, or a checkpoint in a run.")
    ] = Path("runs/LATEST"),
    rows: Annotated[
        str, typer.Option("--rows", metavar="FORM", help="The form of embedding rows: f32, f16 or int8.")
    ] = "f32",
    torchscript: Annotated[
        bool, typer.Option("--torchscript", help="Write the dense model as TorchScript, not by torch.export.")
    ] = False,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            "--held-out",
            metavar="FILE",
            help="Compare scores on these rows, not on those of the test part. Repeatable.",
        ),
    ] = None,
) -> None:
    """Write a trained model as a folder to serve, whose scores are those of evaluation."""
    from persia.cli.importing import interruptible

    with interruptible():
        from persia.cli.quiet import only_warnings
        from persia.trainer import Trainer
        from persia.trainer.exporting.staging import check_free
        from persia.trainer.run_folder import find_checkpoint

    only_warnings()
    check_free(out)
    found = find_checkpoint(run)
    with Trainer(found.folder.config()) as trainer:
        done = trainer.resume(run).export(out, rows=rows, torchscript=torchscript, held_out=held_out)
    manifest = done.manifest
    typer.echo(str(found))
    for table in manifest.tables:
        typer.echo(f"table {table.name}: {table.rows:,} rows of {table.dim} {manifest.rows}")
    parity = manifest.parity
    typer.echo(
        f"scores of {parity.compared:,} rows of {done.part} are those of evaluation: the largest |difference| / "
        f"max(1, |output|) is {parity.largest:.1g}, allowed is {parity.bound:g}"
    )
    typer.echo(f"wrote {done.path}: {done.bytes:,} bytes, {manifest.identity}")
