"""Train DCN-v2 on Census-Income in your own loop, with the embedding rows in an EmbeddingCollection."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchmetrics.functional.classification import binary_auroc

from persia.features import Samples, read_features
from persia.models import DCNv2
from persia.nn import EmbeddingCollection, TableConfig

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "dlrm" / "data"
DIM, BATCH, EPOCHS = 16, 1024, 2


class Model(torch.nn.Module):
    """Tables, and the model that gets their vectors."""

    def __init__(self, slots: list[str], num_dense: int) -> None:
        super().__init__()
        self.slots = slots
        self.embeddings = EmbeddingCollection([TableConfig(slot, DIM, [slot]) for slot in slots])
        self.dense = DCNv2(num_dense, [DIM] * len(slots), cross_layers=2, deep_mlp=[128, 64])

    def forward(self, samples: Samples) -> torch.Tensor:
        """Return the logits, ``[batch]``."""
        vectors = self.embeddings({slot: samples.ids(slot)[0] for slot in self.slots})  # one id for each sample
        logits: torch.Tensor = self.dense([torch.from_numpy(samples.dense)], [*vectors.values()])
        return logits.squeeze(1)


def read(name: str) -> pa.Table:
    """Read a file. Its numbers are integers, so they can be ids."""
    table = pq.read_table(DATA / name).drop_columns("instance_weight")
    return table.cast(
        pa.schema([(f.name, pa.int64() if pa.types.is_floating(f.type) else f.type) for f in table.schema])
    )


def label(samples: Samples) -> torch.Tensor:
    """Return the labels, ``[batch]``."""
    return torch.from_numpy(samples.label("label"))


def auc(model: Model, samples: Samples) -> float:
    """Evaluate. No row changes, and ids without a row have zero vectors."""
    model.eval()
    with torch.no_grad():
        parts = [samples.slice(at, min(at + 4096, len(samples))) for at in range(0, len(samples), 4096)]
        logits = torch.cat([model(part) for part in parts])
    model.train()
    return binary_auroc(logits, label(samples).long()).item()


def main() -> None:
    """Train, keep the best epoch, and evaluate it once on the test split."""
    torch.set_num_threads(1)  # a model this small gains little from more threads
    torch.manual_seed(0)
    table = read("census_income_train.parquet")
    order = np.random.default_rng(0).permutation(len(table))
    table = table.take(order)
    held_out = len(table) // 20
    transform = read_features(HERE / "features.yml").fit(table.slice(held_out))
    train, valid = transform(table.slice(held_out)), transform(table.slice(0, held_out))
    test = transform(read("census_income_test.parquet"))

    model = Model(transform.slots, len(transform.dense))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    loss_fn = torch.nn.BCEWithLogitsLoss()
    best = 0.0
    for epoch in range(1, EPOCHS + 1):
        order = np.random.default_rng(epoch).permutation(len(train))
        for start in range(0, len(order), BATCH):
            batch = train.take(order[start : start + BATCH])
            optimizer.zero_grad()
            loss_fn(model(batch), label(batch)).backward()  # this also updates the rows
            optimizer.step()
        quality = auc(model, valid)
        print(f"epoch {epoch}: valid AUC {quality:.4f}", flush=True)
        if quality > best:
            best = quality
            model.embeddings.save("checkpoint", model=model.state_dict())

    checkpoint = model.embeddings.load("checkpoint")  # load the rows first
    model.load_state_dict(checkpoint.state("model.pt"))
    print(f"test AUC {auc(model, test):.4f}")
    print(f"{sum(model.embeddings.stats()['rows'].values())} rows in {len(model.slots)} tables")


if __name__ == "__main__":
    main()
