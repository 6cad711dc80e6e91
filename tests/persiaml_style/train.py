"""Trains on the batches that data_loader.py sends, as PersiaML's training scripts do."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from people import batches
from torchmetrics.functional.classification import binary_auroc

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding import get_default_embedding_config
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.env import get_local_rank, get_rank
from persia.logger import get_default_logger
from persia.utils import setup_seed

logger = get_default_logger("nn_worker")


class DNN(torch.nn.Module):
    """Two dense layers over the dense input and all embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(1, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8 + 3 * 8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return probabilities ``[batch, 1]``."""
        dense = torch.relu(self.dense(non_id_tensors[0]))
        hidden = torch.cat([dense] + embedding_tensors, dim=1)  # noqa: RUF005 - TorchScript does not support unpacking
        return torch.sigmoid(self.layers(hidden))


class TestPeople(IterableDataset):
    """Data for evaluation."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield batches."""
        yield from batches(20, 64, seed=99, requires_grad=False)


def test(model: torch.nn.Module, data_loader: DataLoader) -> float:
    """Return the AUC on the data."""
    scores, labels = [], []
    with eval_ctx(model=model) as ctx, torch.no_grad():
        for batch in data_loader:
            output, target = ctx.forward(batch)
            scores.append(output)
            labels.append(target[0])
    return float(binary_auroc(torch.cat(scores), torch.cat(labels).int()))


if __name__ == "__main__":
    setup_seed(3)
    torch.set_num_threads(1)
    use_cuda = os.environ.get("GPU_NUM", "0") not in ("", "0") and torch.cuda.is_available()
    device_id = get_local_rank() if use_cuda else None
    model = DNN()
    if device_id is not None:
        model.cuda(device_id)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    embedding_optimizer = Adagrad(lr=0.1)
    loss_fn = torch.nn.BCELoss(reduction="mean")
    with TrainCtx(
        model=model,
        embedding_optimizer=embedding_optimizer,
        dense_optimizer=dense_optimizer,
        mixed_precision=device_id is not None,
        device_id=device_id,
        embedding_config=get_default_embedding_config(),
    ) as ctx:
        data_loader = DataLoader(
            StreamingDataset(buffer_size=10),
            reproducible=bool(int(os.environ.get("REPRODUCIBLE", "0"))),
            embedding_staleness=int(os.environ.get("EMBEDDING_STALENESS", "10")),
        )
        test_loader = DataLoader(TestPeople())
        checkpoint = os.environ.get("CHECKPOINT", "")
        if checkpoint and Path(checkpoint).exists():
            ctx.load_checkpoint(checkpoint)
        stop_at = int(os.environ.get("STOP_AT", "0"))
        for batch_idx, data in enumerate(data_loader):
            output, labels = ctx.forward(data)
            loss = loss_fn(output, labels[0])
            ctx.backward(loss)
            if batch_idx % 50 == 0:
                logger.info("batch %d, loss %.4f", batch_idx, loss.item())
            if batch_idx + 1 == stop_at:
                break
        print(f"rank {get_rank()}: {ctx.step} steps")
        if get_rank() == 0:
            if checkpoint:
                ctx.dump_checkpoint(checkpoint, with_jit_model=True)
            print(f"test auc: {test(model, test_loader):.6f} rows: {sum(ctx.get_embedding_size())}")
