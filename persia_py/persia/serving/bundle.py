"""A loaded bundle: transforms rows, looks up ids, and computes scores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack
from typing_extensions import Self

from persia.embedding.data import with_mask
from persia.features import Samples, Transform
from persia.runtime.errors import CheckpointError, UsageError
from persia.serving import dense, parity, scores
from persia.serving.columns import as_rows
from persia.serving.manifest import MANIFEST, REPAIR, Input, Manifest, Output, damaged
from persia_core.serving import MappedFile, MappedRows

Floats = npt.NDArray[np.float32]

AT_A_TIME = 1 << 14
"""The maximum number of rows on which the model runs at a time."""
_CHECKED = 32
"""The number of parity rows that are scored when a bundle is opened."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for some rows.

    Attributes:
        values: The outputs, float32 ``[rows, labels]``: the logit of a probability, or the number itself.
        ids: The number of unique ids that were looked up.
        unseen: The number of these ids without a row, such as those that did not occur in training. Their vectors are
            zeros.
    """

    values: Floats
    ids: int
    unseen: int


class Bundle:
    """A bundle, whose rows are mapped into memory. Any number of threads may score at the same time.

    Use :meth:`open`. Close it, or use it as a context manager.

    Attributes:
        path: The folder of the bundle.
        manifest: The manifest, which lists the content.
        identity: The unique name of this bundle: run, step, and the beginning of the hash of its manifest.
        inputs: The columns of rows.
        outputs: The columns of scores.
    """

    def __init__(self, path: Path, manifest: Manifest, *, verify: bool = True, threads: int | None = None) -> None:
        """Load the files of a manifest; see :meth:`open`, which also reads the manifest and checks the parity rows."""
        self.path = path
        self.manifest = manifest
        self.identity = manifest.identity
        threads = threads or len(os.sched_getaffinity(0))
        files = {each.name: each.open(path, threads, verify=verify) for each in manifest.files}
        transform = self._file(files, manifest.transform).content().decode()
        try:
            self._transform = Transform.from_json(transform)
        except CheckpointError as error:
            raise damaged(path / manifest.transform, str(error)) from error
        if self._transform.digest != manifest.source.transform:
            raise damaged(path / manifest.transform, "its digest differs from that in the manifest")
        embedding = self._transform.features.embedding_config()
        if [(each.name, each.dim) for each in manifest.tables] != embedding.tables:
            raise damaged(path / manifest.transform, "its tables differ from those in the manifest")
        mapped = [(self._file(files, each.ids), self._file(files, each.weights)) for each in manifest.tables]
        self._rows: MappedRows | None
        try:
            self._rows = MappedRows(embedding, manifest.source.step, manifest.rows, mapped)
        except CheckpointError as error:  # the message names the file
            error.hint = REPAIR
            raise
        slots = self._transform.slots
        if sorted(slots) != sorted(manifest.model.slots):
            raise damaged(path / manifest.transform, "its features differ from those of the model in the manifest")
        self._order = [slots.index(slot) for slot in manifest.model.slots]
        self._model = dense.load(path, manifest.model, self._file(files, manifest.model.file).content())
        self._parity = files.get(manifest.parity.file)  # None while the bundle is being written

    def _file(self, files: dict[str, MappedFile], name: str) -> MappedFile:
        if name not in files:
            raise damaged(self.path / MANIFEST, f"does not list the file {name!r}")
        return files[name]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True, threads: int | None = None) -> Self:
        """Open the bundle in a folder.

        Args:
            path: The folder.
            verify: Whether to compare each file with its hashes. The size of each file, the order of ids and the scores
                of some parity rows are always checked.
            threads: The number of threads that verify; None means one for each processor.

        Raises:
            CheckpointError: The folder has no bundle, the bundle is incomplete, or a file is damaged; the message names
                the file.
        """
        folder = Path(path)
        bundle = cls(folder, Manifest.read(folder), verify=verify, threads=threads)
        try:
            bundle._check_parity()
        except BaseException:
            bundle.close()
            raise
        return bundle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The columns of rows."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The columns of scores."""
        return self.manifest.outputs

    def score(self, rows: Any, *, strict: bool = True) -> Floats:
        """Return the scores of rows: the probability of a binary label, or the predicted number.

        An id that did not occur in training gets a zero vector, and a missing value follows the rule of its feature, as
        in evaluation and in ``persia predict``.

        Args:
            rows: An Arrow table (pyarrow, polars, duckdb, pandas), a list of records, JSON text of them, a dictionary
                of columns, or the result of :meth:`transform`.
            strict: Whether to refuse values of a wrong type, and keys of records that are not inputs; otherwise such a
                value counts as null, and such a key is ignored. A missing key is always a missing value.

        Returns:
            float32 ``[rows]``; with several outputs ``[rows, outputs]``.

        Raises:
            DataError: A column is unknown or missing, or a value is invalid; the message names column and row.
            UsageError: The bundle is closed.
        """
        samples = rows if isinstance(rows, Samples) else self.transform(rows, strict=strict)
        found = self.scores_of(samples)
        return found[:, 0] if found.shape[1] == 1 else found

    def transform(self, rows: Any, *, strict: bool = True) -> Samples:
        """Return the ids and floats of rows. ``samples.report.counts`` has their unusual values.

        Args:
            rows: As in :meth:`score`.
            strict: As in :meth:`score`.

        Raises:
            DataError: As in :meth:`score`.
        """
        return self._transform(as_rows(rows, self.inputs, strict=strict), strict=strict, labels=False)

    def scores_of(self, samples: Samples) -> Floats:
        """Return the scores of transformed rows, float32 ``[rows, outputs]``.

        Raises:
            UsageError: The bundle is closed.
        """
        return self.scores_from(self.outputs_of(samples).values)

    def scores_from(self, outputs: Floats) -> Floats:
        """Return the scores for outputs of the model; both are ``[rows, outputs]``."""
        columns = [
            scores.score(outputs[:, place], probability=output.kind == "probability")
            for place, output in enumerate(self.outputs)
        ]
        return np.stack(columns, 1)

    def outputs_of(self, samples: Samples, *, at_a_time: int = AT_A_TIME) -> Outputs:
        """Return the outputs of the model for transformed rows.

        Args:
            samples: The rows.
            at_a_time: The maximum number of rows on which the model runs at a time.

        Raises:
            UsageError: The bundle is closed.
        """
        count = len(samples)
        if count <= at_a_time:
            parts = [samples] if count else []
        else:
            parts = [samples.slice(start, min(start + at_a_time, count)) for start in range(0, count, at_a_time)]
        done = [self._apply(part) for part in parts]
        values = [each.values for each in done] or [np.empty((0, len(self.outputs)), np.float32)]
        whole = values[0] if len(values) == 1 else np.concatenate(values)
        return Outputs(whole, sum(each.ids for each in done), sum(each.unseen for each in done))

    def vectors_of(self, samples: Samples) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[int, int]]:
        """Return the inputs of the model for transformed rows; at least one row is required.

        Returns:
            The dense inputs, ``[rows, columns]`` each. The vectors of each feature in the model's order, ``[rows,
            dim]`` or ``[rows, last, dim + 1]``. The numbers of ids and of ids without a row.

        Raises:
            UsageError: The bundle is closed.
        """
        table = self._rows
        if table is None:
            raise UsageError(f"{self.path}: the bundle is closed; open it again: Bundle.open({str(self.path)!r})")
        looked = table.lookup(samples.batch(requires_grad=False))
        floats = [from_dlpack(each) for each in looked.dense()]
        vectors = [
            from_dlpack(rows) if mask is None else with_mask(from_dlpack(rows), from_dlpack(mask))
            for rows, mask in zip(looked.embeddings(), looked.masks(), strict=True)
        ]
        return floats, [vectors[place] for place in self._order], looked.missing()

    def _apply(self, samples: Samples) -> Outputs:
        floats, vectors, (ids, unseen) = self.vectors_of(samples)
        with torch.no_grad():
            parts = scores.split(self._model(floats, vectors), [each.name for each in self.outputs])
        return Outputs(np.stack([scores.numbers(part) for part in parts], 1), ids, unseen)

    def unseen(self, samples: Samples) -> dict[str, tuple[int, int]]:
        """Return, for each feature, the number of unique ids in ``samples``, and the number of these without a row.

        Raises:
            UsageError: The bundle is closed.
        """
        if self._rows is None:
            raise UsageError(f"{self.path}: the bundle is closed; open it again: Bundle.open({str(self.path)!r})")
        return dict(zip(self._transform.slots, self._rows.missing(samples.batch(requires_grad=False)), strict=True))

    def _check_parity(self, count: int = _CHECKED) -> None:
        """Compare the model's outputs for some parity rows with those stored when the bundle was written.

        Raises:
            CheckpointError: The outputs differ: this machine or this version of torch computes different values.
        """
        labels: Sequence[str] = [each.name for each in self.outputs]
        content = b"" if self._parity is None else self._parity.content()
        known = parity.read(content, str(self.path / self.manifest.parity.file), labels)
        found = self.outputs_of(self.transform(known.rows.slice(0, count))).values
        far = parity.difference(found, known.outputs[:count])
        if far > parity.SAME:
            written = self.manifest.versions.get("torch")
            raise CheckpointError(
                f"{self.path}: the model's outputs for held-out rows differ from those computed when the bundle was "
                f"written, by {far:.2g} * max(1, |output|); the limit is {parity.SAME:g}. The bundle was written with "
                f"torch {written}, this is torch {torch.__version__}",
                hint="serve on a machine like the one that wrote the bundle, or export again on this machine"
                if written == torch.__version__
                else "serve with the version of torch that wrote the bundle, or export again with this version",
            )

    def close(self) -> None:
        """Release the files. Scores that are being computed are completed; later calls are refused."""
        self._rows = None
