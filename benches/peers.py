"""B3 for the peers, in a separate environment: FBGEMM on the CPU and torch's EmbeddingBag on the same workload.

FBGEMM's tables are fixed arrays: no hashing, no admission, no eviction. Its Adagrad and row-wise Adagrad are fused.
"""

import argparse
from collections.abc import Callable

import torch
import workload


def fbgemm(dim: int, per_sample: int, zipf: bool, rowwise: bool) -> Callable[[int], object]:
    """Return a training step of FBGEMM's CPU table-batched embedding."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.IDS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * workload.FEATURES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD if rowwise else EmbOptimType.EXACT_ADAGRAD,
        learning_rate=workload.LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    ids = [torch.from_numpy(batch.reshape(-1)) for batch in workload.make_ids(per_sample, zipf)]
    offsets = torch.arange(0, workload.rows_of(per_sample) + 1, per_sample)
    gradient = torch.randn(workload.BATCH, workload.FEATURES * dim) * 1e-3
    return lambda number: module(ids[number % len(ids)], offsets).backward(gradient)


def embedding_bag(dim: int, per_sample: int, zipf: bool) -> Callable[[int], object]:
    """Return a training step of 26 sparse ``nn.EmbeddingBag`` under ``torch.optim.Adagrad``."""
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(workload.IDS, dim, mode="sum", sparse=True) for _ in range(workload.FEATURES)
    )
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=workload.LEARNING_RATE)
    ids = [
        [torch.from_numpy(feature.reshape(-1).copy()) for feature in batch]
        for batch in workload.make_ids(per_sample, zipf)
    ]
    offsets = torch.arange(0, workload.BATCH * per_sample, per_sample)
    gradient = torch.randn(workload.BATCH, workload.FEATURES * dim) * 1e-3

    def step(number: int) -> None:
        batch = ids[number % len(ids)]
        optimizer.zero_grad(set_to_none=True)
        torch.cat([bag(values, offsets) for bag, values in zip(bags, batch, strict=True)], 1).backward(  # type: ignore[no-untyped-call]
            gradient
        )
        optimizer.step()

    return step


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--per-sample", type=int, nargs="+", default=[1, 10])
    parser.add_argument(
        "--systems", choices=["fbgemm", "embedding_bag"], nargs="+", default=["fbgemm", "embedding_bag"]
    )
    parser.add_argument("--zipf", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dim in arguments.dims:
        for per_sample in arguments.per_sample:
            case: dict[str, object] = {"dim": dim, "L": per_sample, "zipf": arguments.zipf}
            rows = workload.rows_of(per_sample)
            for rowwise in (False, True) if "fbgemm" in arguments.systems else ():
                named = {**case, "optimizer": "rowwise" if rowwise else "adagrad"}
                step = fbgemm(dim, per_sample, arguments.zipf, rowwise)
                workload.measure("fbgemm", named, rows, step, arguments.seconds)
            if "embedding_bag" in arguments.systems:
                step = embedding_bag(dim, per_sample, arguments.zipf)
                workload.measure("embedding_bag", {**case, "optimizer": "adagrad"}, rows, step, arguments.seconds)


if __name__ == "__main__":
    main()
