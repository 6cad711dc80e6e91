"""Census-Income (KDD) as batches: 7 dense inputs, 45 slots with one id per sample, one label of 0 or 1.

Nothing is fitted to the data. An id is a hash of slot and value: there is no vocabulary to build or to distribute, and
every process that reads the data computes the same ids.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from persia.data import IterableDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import ConfigError, DataError, StorageError

EPOCHS = 3
BATCH_SIZE = 1024
DATA = Path(__file__).parent / "data"
VALIDATION_SHARE = 0.05
"""The share of the training file for validation; every choice of the recipe was made on such a part."""

# Options of train.py, data_compose.py and plain.py. The options of train.py and data_compose.py must agree. Environment
# variables set an option for all scripts.
Seed = Annotated[
    int, typer.Option(min=0, envvar="DLRM_SEED", help="Seed of dense weights, new rows and the order of samples.")
]
Epochs = Annotated[int, typer.Option(min=1, envvar="DLRM_EPOCHS", help="Passes over the training samples.")]
BatchSize = Annotated[int, typer.Option(min=1, envvar="DLRM_BATCH_SIZE", help="Samples in a step, over all ranks.")]
Data = Annotated[Path, typer.Option(envvar="DLRM_DATA", help="Folder with the two Parquet files.")]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]

LABEL = "label"
DENSE = (
    "age",
    "wage_per_hour",
    "capital_gains",
    "capital_losses",
    "stock_dividends",
    "num_employers",
    "weeks_worked",
)
CATEGORICAL = (
    "class_of_worker", "industry_code", "occupation_code", "education", "enrolled_in_edu", "marital_status",
    "major_industry", "major_occupation", "race", "hispanic_origin", "sex", "labor_union_member",
    "unemployment_reason", "employment_status", "tax_filer_status", "previous_region", "previous_state",
    "household_detail", "household_summary", "migration_msa", "migration_region", "migration_within_region",
    "lived_here_1_year_ago", "migration_sunbelt", "family_under_18", "father_birth_country",
    "mother_birth_country", "self_birth_country", "citizenship", "own_business", "veterans_questionnaire",
    "veterans_benefits", "year",
)  # fmt: skip


def _quarter_powers(amounts: Floats) -> Floats:
    """Bucket dollars on a log scale, four buckets for each factor of e. The value 0 has a separate bucket."""
    buckets: Floats = np.ceil(4 * np.log1p(amounts))
    return buckets


# A number is also an id of a slot for its exact value, and of a coarser slot if most values are rare.
BUCKETS: Mapping[str, Callable[[Floats], Floats]] = MappingProxyType(
    {
        "age": lambda years: years // 5,
        "wage_per_hour": _quarter_powers,
        "capital_gains": _quarter_powers,
        "capital_losses": _quarter_powers,
        "stock_dividends": _quarter_powers,
    }
)
SLOTS = (*CATEGORICAL, *DENSE, *(f"{name}_bucket" for name in BUCKETS))
"""Slots in the order of a batch's features, as in ``config/embedding_config.yml``."""


@dataclass(frozen=True)
class Samples:
    """Samples in memory.

    Attributes:
        dense: ``[samples, 7]``.
        ids: ``[slots, samples]``, slots in the order of :data:`SLOTS`.
        labels: ``[samples, 1]``.
    """

    dense: Floats
    ids: Ids
    labels: Floats

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64]) -> "Samples":
        """Return the samples of these rows, in their order."""
        return Samples(self.dense[rows], self.ids[:, rows], self.labels[rows])

    def split(self, share: float, seed: int = 0) -> tuple["Samples", "Samples"]:
        """Split off ``share`` of the samples, drawn by ``seed``. Return the remaining samples and the drawn ones."""
        order = np.random.default_rng(seed).permutation(len(self))
        apart = round(share * len(self))
        return self.take(np.sort(order[apart:])), self.take(np.sort(order[:apart]))

    def batch(self) -> PersiaBatch:
        """Return all samples as one batch."""
        return PersiaBatch(
            [IDTypeFeatureWithSingleID(name, ids) for name, ids in zip(SLOTS, self.ids, strict=True)],
            non_id_type_features=[NonIDTypeFeature(self.dense, name="dense")],
            labels=[Label(self.labels, name=LABEL, binary=True)],
        )


def read(path: Path) -> Samples:
    """Read one of the two parquet files.

    Raises:
        StorageError: The file is missing, or the operating system refuses to read it.
        DataError: It is truncated, damaged, or has other columns. The message names file and column.
    """
    try:
        with path.open("rb") as file:
            table = pq.read_table(file)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a complete parquet file ({_one_line(error)}); {_restore(path)}") from error
    except OSError as error:
        if error.errno is None:  # errors of pyarrow: the file could be read, but its content could not be decoded
            raise DataError(f"{path}: damaged ({_one_line(error)}); {_restore(path)}") from error
        raise StorageError(f"cannot read {path}: {error.strerror}; {_restore(path)}") from error
    _check_columns(path, table)
    numbers: dict[str, Floats] = {}
    for name in (*DENSE, LABEL):
        try:
            numbers[name] = table[name].cast(pa.float32()).to_numpy()
        except pa.ArrowException as error:
            raise DataError(f"{path}: column {name}: expected numbers ({error}); {_restore(path)}") from error
    _check_numbers(path, numbers)
    values = [table[name] for name in CATEGORICAL] + [pa.array(numbers[name]) for name in DENSE]
    values += [pa.array(bucket(numbers[name])) for name, bucket in BUCKETS.items()]
    return Samples(
        dense=np.log1p(np.stack([numbers[name] for name in DENSE], axis=1)),
        ids=np.stack([_ids(slot, column) for slot, column in zip(SLOTS, values, strict=True)]),
        labels=numbers[LABEL][:, np.newaxis],
    )


def training_data(folder: Path) -> tuple[Samples, Samples]:
    """Return the samples to train on, and those to validate with."""
    return read(folder / "census_income_train.parquet").split(VALIDATION_SHARE)


def _check_columns(path: Path, table: pa.Table) -> None:
    wanted = (*CATEGORICAL, *DENSE, LABEL)
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing)}; {_restore(path)}")
    empty = [name for name in wanted if table[name].null_count]
    if empty:
        raise DataError(f"{path}: empty cells in column {', '.join(empty)}; {_restore(path)}")
    if table.num_rows == 0:
        raise DataError(f"{path}: no rows; {_restore(path)}")


def _check_numbers(path: Path, numbers: Mapping[str, Floats]) -> None:
    for name, column in numbers.items():
        fits = np.isin(column, (0, 1)) if name == LABEL else np.isfinite(column) & (column >= 0)
        if not fits.all():
            row = int(np.argmin(fits))
            wanted = "0 or 1" if name == LABEL else "a number of at least 0"
            raise DataError(f"{path}: column {name}, row index {row}: {column[row]} is not {wanted}; {_restore(path)}")


def _restore(path: Path) -> str:
    return f"replace the file; if it came with the repository: git restore {path}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _ids(slot: str, values: pa.Array | pa.ChunkedArray) -> Ids:
    """Return a 64-bit id for each value. Each distinct value is hashed once."""
    encoded = pc.dictionary_encode(values)
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    distinct = encoded.dictionary.to_pylist()
    hashes = np.array([_hash(f"{slot}={value}") for value in distinct], dtype=np.uint64)
    ids: Ids = hashes[encoded.indices.to_numpy()]
    return ids


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Batches(IterableDataset):
    """Batches of some samples, for one pass of one or more epochs.

    The order of an epoch depends on seed and epoch alone, and the position is one number. A resumed run therefore
    continues exactly after its checkpoint.

    Args:
        samples: What to iterate.
        batch_size: Samples per batch; the last batch of an epoch has the remaining samples.
        epochs: The number of epochs of a pass.
        seed: Shuffles each epoch; None keeps the order of the samples.
    """

    def __init__(self, samples: Samples, batch_size: int, epochs: int = 1, seed: int | None = None) -> None:
        super().__init__()
        wrong = [f"{name}={n}" for name, n in (("batch_size", batch_size), ("epochs", epochs)) if n < 1]
        if wrong:
            raise ConfigError(f"Batches: {', '.join(wrong)}: must be at least 1")
        self.samples, self.batch_size, self.epochs, self.seed = samples, batch_size, epochs, seed
        self._start = self._next = 0

    def __len__(self) -> int:
        """The number of batches of the whole pass."""
        return self.epochs * self._per_epoch

    @property
    def _per_epoch(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one pass, or the remaining ones after :meth:`load_state_dict`."""
        start, self._start = self._start, 0
        order = self._order(start // self._per_epoch)
        for number in range(start, len(self)):
            epoch, index = divmod(number, self._per_epoch)
            if index == 0:
                order = self._order(epoch)
            self._next = number + 1
            yield self.samples.take(self._rows(order, index)).batch()
        self._next = 0

    def pieces(self, count: int, *, replica: int = 0, replicas: int = 1) -> Iterator[PersiaBatch]:
        """Yield one replica's part of the batches, each in pieces of nearly equal size, one for each rank.

        A batch with fewer samples than ranks, which can only be the last of an epoch, is skipped.

        Args:
            count: Number of ranks.
            replica: This replica's index; replica ``r`` has the batches ``r``, ``r + replicas``, ...
            replicas: Number of data-compose replicas.
        """
        for number in range(replica, len(self), replicas):
            epoch, index = divmod(number, self._per_epoch)
            if number == replica or index < replicas:
                order = self._order(epoch)
            rows = self._rows(order, index)
            if len(rows) >= count:
                for piece in np.array_split(rows, count):
                    yield self.samples.take(piece).batch()

    def _rows(self, order: npt.NDArray[np.int64], index: int) -> npt.NDArray[np.int64]:
        return order[index * self.batch_size : (index + 1) * self.batch_size]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self.seed is None:
            return np.arange(len(self.samples))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, and the arguments that it depends on."""
        return {"next": self._next, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next pass at a position of :meth:`state_dict`.

        Raises:
            DataError: The position belongs to other samples, another batch size or another seed.
        """
        other = {key: state_dict.get(key) for key in self._identity()}
        if other != self._identity():
            raise DataError(
                f"cannot resume: the position is that of a run with {other}, but this run has {self._identity()}; "
                "use the options of the run that is resumed"
            )
        self._start = self._next = int(state_dict["next"])

    def _identity(self) -> dict[str, Any]:
        return {"samples": len(self.samples), "batch_size": self.batch_size, "seed": self.seed}
