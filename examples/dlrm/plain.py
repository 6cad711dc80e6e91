"""Train the DLRM of train.py with torch alone: embeddings are torch.nn.Embedding, and Persia trains nothing.

This is the first step of the debugging ladder: if this script reaches another AUC than train.py, the fault is not in
the model or in the data. Options: python examples/dlrm/plain.py --help.
"""

import sys
from pathlib import Path
from typing import Annotated

import census
import numpy as np
import torch
import typer
from torchmetrics.functional.classification import binary_auroc

from persia.errors import PersiaError
from persia.models import DLRM

EMBEDDING_DIM = 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class PlainDLRM(torch.nn.Module):
    """A DLRM with its tables.

    Args:
        known: The sorted training ids of each slot.
    """

    def __init__(self, known: list[census.Ids]) -> None:
        super().__init__()
        self.known = known
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(len(ids) + 1, EMBEDDING_DIM, padding_idx=0) for ids in known
        )
        for table in self.tables:
            torch.nn.init.uniform_(table.weight, -0.05, 0.05)  # type: ignore[arg-type]
            with torch.no_grad():
                table.weight[0] = 0  # type: ignore[operator]  # the row of ids that did not occur in training
        self.model = DLRM(len(census.DENSE), len(known), EMBEDDING_DIM, [64, EMBEDDING_DIM], [256, 64, 1])

    def forward(self, samples: census.Samples) -> torch.Tensor:
        """Return the logits, ``[samples, 1]``."""
        vectors = [
            table(self._places(ids, known))
            for table, ids, known in zip(self.tables, samples.ids, self.known, strict=True)
        ]
        output: torch.Tensor = self.model([torch.from_numpy(samples.dense)], vectors)
        return output

    @staticmethod
    def _places(ids: census.Ids, known: census.Ids) -> torch.Tensor:
        """Return the row index of each id, 0 for an unknown id."""
        places = np.searchsorted(known, ids).clip(max=len(known) - 1)
        return torch.from_numpy(np.where(known[places] == ids, places + 1, 0))


@torch.no_grad()
def auc_of(model: PlainDLRM, samples: census.Samples, batch_size: int = 4096) -> float:
    """Return the AUC of a model on some samples."""
    model.eval()
    rows = np.arange(len(samples))
    parts = [model(samples.take(rows[start : start + batch_size])) for start in range(0, len(rows), batch_size)]
    model.train()
    logits = torch.cat(parts).double().flatten()
    return float(binary_auroc(torch.sigmoid(logits), torch.from_numpy(samples.labels).flatten().int()))


@app.command()
def main(
    seed: census.Seed = 0,
    epochs: census.Epochs = census.EPOCHS,
    batch_size: census.BatchSize = census.BATCH_SIZE,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate, which decreases linearly to 0.")] = 3e-3,
    data: census.Data = census.DATA,
) -> None:
    """Train a DLRM on Census-Income with torch alone, then evaluate it once on the test split."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train, validation = census.training_data(data)
    model = PlainDLRM([np.unique(ids) for ids in train.ids])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = epochs * -(-len(train) // batch_size)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    loss_fn = torch.nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(train))
        for start in range(0, len(order), batch_size):
            samples = train.take(order[start : start + batch_size])
            loss = loss_fn(model(samples), torch.from_numpy(samples.labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
        print(f"epoch {epoch + 1}/{epochs}  validation AUC {auc_of(model, validation):.4f}")
    test = census.read(Path(data) / "census_income_test.parquet")
    print(f"test AUC {auc_of(model, test):.4f}")


if __name__ == "__main__":
    try:
        app()
    except PersiaError as error:
        typer.echo(f"error: {error}" + (f"\nnext:  {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)
