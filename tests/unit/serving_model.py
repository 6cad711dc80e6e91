"""A small model for the tests of serving: its score of a row is known exactly."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from persia.features import Features, Samples

YAML = """
features:
  user: {type: id, values: integer, dim: 4}
  site: {type: id, values: string, dim: 4}
  tags: {type: bag, values: integer, dim: 4}
  price: {type: dense}
labels:
  click: {}
"""


@dataclass(frozen=True)
class Column:
    """A column of the model's rows."""

    name: str
    datatype: str
    is_list: bool = False


class SmallModel:
    """Scores ``scale * (user + 10 * hash of site % 7 + sum of tags) + price``, in float32."""

    labels = ("click",)
    inputs = (
        Column("user", "INT64"),
        Column("site", "BYTES"),
        Column("tags", "INT64", is_list=True),
        Column("price", "FP32"),
    )

    def __init__(self, scale: float = 1.0, *, delay_s: float = 0.0, exported_at: float = 0.0) -> None:
        """Create a model.

        Args:
            scale: A factor that distinguishes models.
            delay_s: The duration of each batch in seconds.
            exported_at: The time at which the bundle was written.
        """
        self.identity = f"small-{scale:g}"
        self.scale = scale
        self.delay_s = delay_s
        self.exported_at = exported_at
        self.closed = False
        self.batches: list[int] = []
        self.columns = {column.name: column for column in self.inputs}
        self.quoted = tuple(f'"{name}"'.encode() for name in self.columns)
        self._transform = Features.parse(YAML, "small.yml").transform()

    def transform(self, data: Any) -> Samples:
        """Return ids and floats."""
        assert not self.closed, "a closed model scores nothing"
        return self._transform(data, strict=False, labels=False)

    def scores(self, rows: Any) -> list[float]:
        """Return the scores of rows."""
        return [float(each) for each in self.score(self.transform(rows))[0][:, 0]]

    def score(self, samples: Samples) -> tuple[npt.NDArray[np.float32], int, int]:
        """Return the scores, ``[rows, 1]``, and numbers of ids."""
        assert not self.closed, "a closed model scores nothing"
        if self.delay_s:
            time.sleep(self.delay_s)
        self.batches.append(len(samples))
        total = np.zeros(len(samples))
        total += samples.ids("user")[0].astype(np.float64)
        total += 10 * (samples.ids("site")[0] % np.uint64(7)).astype(np.float64)
        ids, offsets, _ = samples.ids("tags")
        assert offsets is not None
        np.add.at(total, np.repeat(np.arange(len(samples)), np.diff(offsets)), ids.astype(np.float64))
        scores = self.scale * total + samples.dense[:, 0]
        if (scores == 666).any():
            raise RuntimeError("a row that makes the model fail")
        return scores.astype(np.float32)[:, None], 2 * len(samples), len(samples)

    def close(self) -> None:
        """Close the model."""
        self.closed = True
