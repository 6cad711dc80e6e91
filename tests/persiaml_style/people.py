"""A small invented data set. Whether a person buys depends on the job, the town, the places visited, and the age."""

from collections.abc import Iterator

import numpy as np

from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)


def batches(count: int, batch_size: int, seed: int, requires_grad: bool = True) -> Iterator[PersiaBatch]:
    """Yield batches; batch ``n`` of a seed is always the same."""
    taste = np.random.default_rng(0)
    of_job, of_town = taste.normal(size=20), taste.normal(size=50)
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        job, town = rng.integers(0, 20, batch_size), rng.integers(0, 50, batch_size)
        visits = [rng.integers(0, 50, rng.integers(0, 4)) for _ in range(batch_size)]
        age = rng.normal(size=batch_size)
        score = 2 * of_job[job] + of_town[town] + [of_town[places].sum() for places in visits] + age
        yield PersiaBatch(
            [
                IDTypeFeatureWithSingleID("job", job.astype(np.uint64)),
                IDTypeFeatureWithSingleID("town", town.astype(np.uint64)),
                IDTypeFeature("visits", [places.astype(np.uint64) for places in visits]),
            ],
            non_id_type_features=[NonIDTypeFeature(age[:, None].astype(np.float32), name="age")],
            labels=[Label((score > 0).astype(np.float32)[:, None])],
            requires_grad=requires_grad,
        )
