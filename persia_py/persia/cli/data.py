"""``persia data``: inspect tables, measure how fast they are read, and generate synthetic data."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from persia.cli.config import Overrides

app = typer.Typer(no_args_is_help=True, help="Inspect tables, measure how fast they are read, generate synthetic data.")


@app.callback()
def _group() -> None:
    """Inspect tables, measure how fast they are read, generate synthetic data."""


@app.command("inspect")
def data_inspect(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files, folders, globs or s3:// URLs.")],
    label: Annotated[str | None, typer.Option(help="The label: COL, COL=VALUE or 'COL>NUMBER'.")] = None,
    test: Annotated[list[str] | None, typer.Option(help="A file of test rows; may be repeated.")] = None,
    preset: Annotated[str | None, typer.Option(help="The format of text files: criteo.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the proposed persia.yml here.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Read at most this many rows.")] = 5_000_000,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of -o if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the columns of a table, and propose a persia.yml for it, with the reason for each choice."""
    from persia.data.inspect import inspect
    from persia.runtime.errors import StorageError, UsageError
    from persia.runtime.files import write_whole

    if output is not None and output.exists() and not force:
        raise UsageError(f"{output} already exists", hint="choose another name, or replace it with --force")
    folder = Path.cwd() if output is None else output.absolute().parent
    found = inspect(files, label=label, test=test or (), preset=preset, rows=rows, folder=folder)
    if as_json:
        import json

        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        found.show()
    if output is not None:
        try:
            write_whole(output, found.yaml.encode())
        except OSError as error:
            raise StorageError(f"cannot write the configuration to {output}: {error.strerror or error}") from error
        typer.echo(f"wrote {output}; next: persia train {shlex.quote(str(output))}", err=as_json)
    elif not as_json:
        typer.echo(f"\n{found.yaml}\nnext: write this configuration with -o persia.yml, then: persia train persia.yml")


@app.command("bench")
def data_bench(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A persia.yml.")],
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure several batch sizes.")] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for each batch size.")] = 2.0,
    set_: Overrides = None,
) -> None:
    """Measure how many rows per second are read and transformed, for one or several batch sizes."""
    from rich.console import Console
    from rich.table import Table

    from persia.config import load_config
    from persia.trainer import data_bench as bench

    config = load_config(file, set_ or ())
    size = config.data.batch_size
    table, found = Table("batch size", "rows/s", "ms per batch", "rows read"), []
    for each in bench.sweep(config, sorted({size, *(bench.SIZES if sweep else ())}), seconds):
        found.append(each)
        table.add_row(f"{each.batch_size:,}", f"{each.rows_per_s:,.0f}", f"{each.ms_a_batch:.2f}", f"{each.rows:,}")
    Console().print(table)
    if sweep:
        typer.echo(bench.advice(found, size))


@app.command("synth")
def data_synth(
    out: Annotated[Path, typer.Argument(help="The file to write: .parquet or .csv.")],
    rows: Annotated[int, typer.Option(min=1, help="The number of rows.")] = 1_000_000,
    ids: Annotated[
        str, typer.Option(help="The number of distinct ids of each id column, such as 1000,10000,1e6.")
    ] = "1000,10000,100000",
    dense: Annotated[int, typer.Option(help="The number of dense columns.")] = 4,
    exponent: Annotated[float, typer.Option(help="The exponent of the power law of ids; 0 is uniform.")] = 1.05,
    positive: Annotated[float, typer.Option(help="The share of labels that are 1.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="The seed. Equal seeds give equal rows.")] = 0,
    skip: Annotated[int, typer.Option(min=0, help="Skip this many rows, such as those of an earlier file.")] = 0,
) -> None:
    """Write synthetic clicks of a known model, and print the best AUC that a model can reach on them.

    The last line has the AUC of the known model (the teacher) on the labels of this file: compare other models with it.
    """
    from persia.data import synth
    from persia.runtime.errors import UsageError

    try:
        counts = tuple(int(float(count)) for count in ids.split(","))
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--ids {ids}: expected comma-separated numbers, such as 1000,10000,1e6") from error
    teacher = synth.Teacher(counts, dense, exponent, positive, seed)
    made = synth.write(out, rows, teacher, skip=skip)
    typer.echo(f"wrote {out}: {made.rows:,} rows, {made.positive:.2%} positive")
    typer.echo(f"best AUC {made.best_auc:.4f}, best log loss {made.best_log_loss:.4f} (those of the teacher)")
    typer.echo(f"on these labels the teacher has AUC {made.auc:.4f}, log loss {made.log_loss:.4f}")
