"""``persia export``: write a trained model as a bundle."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persia.runtime.errors import UsageError

if TYPE_CHECKING:
    from persia.trainer.exporting.export import Exported


def export(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The new folder.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CONFIG",
            help="A run's folder, runs/LATEST, or a checkpoint in a run; or a persia.yml: its run.name, else its "
            "newest run.",
        ),
    ] = Path("runs/LATEST"),
    rows: Annotated[
        str, typer.Option("--rows", metavar="FORM", help="The number format of embedding rows: f32, f16 or int8.")
    ] = "f32",
    torchscript: Annotated[
        bool, typer.Option("--torchscript", help="Write the dense model as TorchScript, not by torch.export.")
    ] = False,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            "--held-out",
            metavar="FILE",
            help="Compare scores on these rows. Default: the test set, else the validation set, else training rows.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="DIR", help="A checkpoint that is in no run; CONFIG describes it."),
    ] = None,
    transform: Annotated[
        Path | None,
        typer.Option(
            "--transform",
            metavar="FILE",
            help="With --checkpoint: the transform.json of the run that wrote it. Default: features are fitted again.",
        ),
    ] = None,
) -> None:
    """Write a trained model as a folder that can be served, and check that its scores equal those of evaluation."""
    from persia.runtime.interruptible import interruptible

    with interruptible():
        from persia.cli.quiet import only_warnings
        from persia.serving.parity import bound_of
        from persia.trainer.exporting.staging import check_free

    only_warnings()
    bound_of(rows)
    check_free(out)
    is_config = source.suffix in (".yml", ".yaml")
    if checkpoint is None and transform is not None:
        raise UsageError("--transform is only allowed with --checkpoint, because a run has its own transform")
    if checkpoint is None:
        done = _of_run(source, out, rows, torchscript, held_out, is_config=is_config)
    elif is_config:
        done = _of_checkpoint(source, checkpoint, transform, out, rows, torchscript, held_out)
    else:
        raise UsageError(
            f"--checkpoint {checkpoint}: expected the persia.yml that describes the checkpoint, found {source}",
            hint=f"persia export persia.yml --checkpoint {shlex.quote(str(checkpoint))} -o {shlex.quote(str(out))}",
        )
    manifest, parity = done.manifest, done.manifest.parity
    for table in manifest.tables:
        typer.echo(f"table {table.name}: {table.rows:,} rows, dim {table.dim}, {manifest.rows}")
    part = "the given files" if done.part == "given" else f"the {done.part} set"
    typer.echo(
        f"scores of {parity.compared - 1:,} rows of {part}, and of one row without values, agree with those of "
        f"evaluation: the largest |difference| / max(1, |output|) is {parity.largest:.1g}; at most {parity.bound:g} is "
        "allowed"
    )
    typer.echo(f"wrote {out}: {done.bytes:,} bytes, {manifest.identity}")


def _of_run(
    source: Path, out: Path, rows: str, torchscript: bool, held_out: list[str] | None, *, is_config: bool
) -> "Exported":
    from persia.config import load_config
    from persia.trainer import Trainer
    from persia.trainer.run_folder import find_checkpoint

    run = source
    if is_config:
        config = load_config(source)
        run = Path(config.run.dir).expanduser() / (config.run.name or "LATEST")
    found = find_checkpoint(run)
    typer.echo(str(found))
    with Trainer(found.folder.config()) as trainer:
        return trainer.resume(run).export(out, rows=rows, torchscript=torchscript, held_out=held_out)


def _of_checkpoint(
    source: Path,
    checkpoint: Path,
    transform: Path | None,
    out: Path,
    rows: str,
    torchscript: bool,
    held_out: list[str] | None,
) -> "Exported":
    from persia.config import load_config
    from persia.trainer.exporting import export as exporting
    from persia.trainer.exporting import held_out as rows_of
    from persia.trainer.exporting.source import of_checkpoint

    config = load_config(source)
    with of_checkpoint(config, checkpoint, transform=transform) as trained:
        typer.echo(str(checkpoint))
        compared = rows_of.read(config, held_out, {})
        return exporting.export(trained, compared, out, rows=rows, torchscript=torchscript)
