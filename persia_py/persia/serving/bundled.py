"""Adapts a bundle to the model interface of the serving process."""

from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persia.features import Samples
from persia.serving.bundle import Bundle
from persia.serving.manifest import Input


class BundledModel:
    """A bundle whose scores are served.

    Attributes:
        identity: The unique name of this bundle.
        exported_at: The time at which this bundle was exported, as Unix time.
        inputs: The columns of rows.
        columns: The columns of rows by name.
        labels: The labels of the scores.
        quoted: The names of the columns as they appear in JSON.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.identity = bundle.identity
        self.exported_at = datetime.fromisoformat(bundle.manifest.created_at).timestamp()
        self.inputs: tuple[Input, ...] = bundle.inputs
        self.columns = {column.name: column for column in bundle.inputs}
        self.labels = tuple(output.name for output in bundle.outputs)
        self.quoted = tuple(f'"{name}"'.encode() for name in self.columns)

    def transform(self, data: object) -> Samples:
        """Return the ids and floats of rows.

        Args:
            data: Records, in which a value of a wrong type counts as null, or a table made from tensors, in which it
                is refused.

        Raises:
            DataError: The rows are invalid.
        """
        return self._bundle.transform(data, strict=isinstance(data, pa.RecordBatch))

    def score(self, samples: Samples) -> tuple[npt.NDArray[np.float32], int, int]:
        """Return the scores, ``[rows, labels]``, the number of unique ids, and the number of ids without a row."""
        found = self._bundle.outputs_of(samples)
        return self._bundle.scores_from(found.values), found.ids, found.unseen

    def close(self) -> None:
        """Release the files."""
        self._bundle.close()


def load(path: Path) -> BundledModel:
    """Load a bundle, and check all of its hashes and some held-out rows.

    Raises:
        CheckpointError: The bundle is incomplete or damaged; the message names the file.
    """
    return BundledModel(Bundle.open(path))
