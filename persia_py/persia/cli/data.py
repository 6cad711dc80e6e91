"""``persia data``: generate synthetic data."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Generate synthetic data.")


@app.callback()
def _group() -> None:
    """Generate synthetic data."""


@app.command("synth")
def data_synth(
    out: Annotated[Path, typer.Argument(help="The file to write: .parquet or .csv.")],
    rows: Annotated[int, typer.Option(min=1, help="The number of rows.")] = 1_000_000,
    ids: Annotated[
        str, typer.Option(help="The number of different ids of each id column, such as 1000,10000,1e6.")
    ] = "1000,10000,100000",
    dense: Annotated[int, typer.Option(help="The number of dense columns.")] = 4,
    exponent: Annotated[float, typer.Option(help="The exponent of the power law of ids; 0 is uniform.")] = 1.05,
    positive: Annotated[float, typer.Option(help="The share of labels that are 1.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal rows.")] = 0,
) -> None:
    """Write synthetic clicks of a known model, and print the best AUC that a model can reach on them."""
    from persia.data import synth
    from persia.runtime.errors import UsageError

    try:
        counts = tuple(int(float(count)) for count in ids.split(","))
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--ids {ids!r}: want numbers with commas between them, such as 1000,10000,1e6") from error
    teacher = synth.Teacher(counts, dense, exponent, positive, seed)
    made = synth.write(out, rows, teacher)
    typer.echo(f"wrote {out}: {made.rows:,} rows, {made.positive:.2%} positive")
    typer.echo(f"best AUC {made.best_auc:.4f}, best log loss {made.best_log_loss:.4f} (those of the teacher)")
