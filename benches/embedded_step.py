"""B3 for Persia, one JSON line per case. A step deduplicates, looks up, pools, sums gradients and updates rows."""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import workload

from persia.backend.base import Backend
from persia.backend.local import LocalBackend
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia_core.data import Batch, BatchBuilder


def make_batches(per_sample: int, zipf: bool, seed: int = 1) -> list[list[np.ndarray]]:
    """Return the flat ids of each batch and feature."""
    return [
        [np.ascontiguousarray(feature.reshape(-1).astype(np.uint64)) for feature in batch]
        for batch in workload.make_ids(per_sample, zipf, seed)
    ]


def build(ids: list[np.ndarray], per_sample: int) -> Batch:
    """Deduplicate the ids, as a data loader does for each batch."""
    builder = BatchBuilder(workload.BATCH, True, None)
    offsets = np.arange(0, workload.BATCH * per_sample + 1, per_sample, dtype=np.int64)
    for feature, values in enumerate(ids):
        if per_sample == 1:
            builder.add_single(f"f{feature}", values)
        else:
            builder.add_list(f"f{feature}", values, offsets)
    return builder.build()


@contextmanager
def stepper(
    context: Backend, dim: int, per_sample: int, *, zipf: bool, rowwise: bool, seed: int = 1
) -> Iterator[Callable[[int], None]]:
    """Begin a run, yield its step, and end its loop."""
    optimizer = Adagrad(workload.LEARNING_RATE, vectorwise_shared=rowwise)
    context.begin(optimizer=optimizer, config=EmbeddingConfig((-0.05, 0.05), weight_bound=0))
    pipeline = context.open_loop(1, False, 2)
    batches = make_batches(per_sample, zipf, seed)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(workload.BATCH, dim, generator=generator) * 1e-3 for _ in range(workload.FEATURES)]

    def step(number: int) -> None:
        pipeline.feed(build(batches[number % len(batches)], per_sample))
        looked = pipeline.next(60.0)
        assert looked is not None  # noqa: S101 - the source has not ended
        looked.embeddings()
        looked.push(gradients, 1.0)
        context.engine.drain()

    yield step
    context.close_loop(pipeline, together=False)


def run(dim: int, per_sample: int, zipf: bool, rowwise: bool, seconds: float) -> None:
    """Measure one case."""
    case: dict[str, object] = {
        "dim": dim,
        "L": per_sample,
        "zipf": zipf,
        "optimizer": "rowwise" if rowwise else "adagrad",
    }
    context = LocalBackend()
    with stepper(context, dim, per_sample, zipf=zipf, rowwise=rowwise) as step:
        workload.measure("persia", case, workload.rows_of(per_sample), step, seconds)
    context.close()


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--per-sample", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--zipf", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("LOG_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "embedding_config.yml"
        os.environ["PERSIA_EMBEDDING_CONFIG"] = str(path)
        for dim in arguments.dims:
            slots = "".join(f"  f{feature}: {{dim: {dim}}}\n" for feature in range(workload.FEATURES))
            path.write_text(f"feature_index_prefix_bit: 0\nslots_config:\n{slots}")
            for per_sample in arguments.per_sample:
                for rowwise in (False, True):
                    run(dim, per_sample, arguments.zipf, rowwise, arguments.seconds)


if __name__ == "__main__":
    main()
