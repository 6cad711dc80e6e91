"""Send the training batches to the trainers of a job. The options are those of train.py."""

import sys

import census
import typer

from persia import env
from persia.ctx import DataCtx
from persia.errors import PersiaError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seed: census.Seed = 0,
    epochs: census.Epochs = census.EPOCHS,
    batch_size: census.BatchSize = census.BATCH_SIZE,
    data: census.Data = census.DATA,
) -> None:
    """Send the samples of every epoch in the order of the embedded mode. Each rank gets its share of every batch."""
    train, _ = census.training_data(data)
    with DataCtx() as ctx:
        batches = census.Batches(train, batch_size, epochs, seed)
        for piece in batches.pieces(ctx.world_size, replica=env.get_replica_index(), replicas=env.get_replica_size()):
            ctx.send_data(piece)


if __name__ == "__main__":
    try:
        app()
    except PersiaError as error:
        typer.echo(f"error: {error}" + (f"\nnext:  {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)
