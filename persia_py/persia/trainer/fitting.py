"""The transform of a run, which is fitted once over the training rows and stored in the run's folder."""

from dataclasses import dataclass
from pathlib import Path

from persia.config import Config
from persia.features import Fitter, Transform
from persia.runtime.errors import CheckpointError, DataError, ForeignCheckpointError
from persia.runtime.logging import get_logger
from persia.trainer.facts import check_files
from persia.trainer.parts import Part, Parts
from persia.trainer.run_folder import FACTS, RunFolder

_logger = get_logger("trainer")

FILE = "transform.json"
"""The file in a run's folder that holds the transform."""

_ROWS = 1 << 16
_RESTORE = "restore the file, or start a new run"


@dataclass(frozen=True)
class Fitted:
    """A transform, and the number of rows on which it was fitted.

    Attributes:
        transform: The features with their fitted values.
        rows: The number of training rows.
    """

    transform: Transform
    rows: int


def fit(config: Config, parts: Parts) -> Fitted:
    """Fit the features in one pass over the training rows, in bounded memory. The pass is skipped if it is not needed.

    Raises:
        DataError: A value cannot be used (the message names its file and row), or there are no rows.
    """
    features, train = config.compiled, parts.train
    if not features.needs_rows:
        return Fitted(features.fit(train.files.schema.empty_table()), parts.count_train())
    _logger.info("fitting the features over the training rows")
    fitter = Fitter(features)
    try:
        for batch in train.reader(_ROWS):
            fitter.update(batch)
    except DataError as error:
        raise _with_place(config, train, error) from error
    rows = fitter.rows
    return Fitted(fitter.finish(), rows)


def fit_first(config: Config, train: Part, rows: int) -> Transform:
    """Fit the features to the first ``rows`` training rows.

    Raises:
        DataError: A value cannot be used; the message names its file and row.
    """
    try:
        return config.compiled.fit(next(iter(train.reader(rows))))
    except DataError as error:
        raise _with_place(config, train, error) from error


def _with_place(config: Config, train: Part, error: DataError) -> DataError:
    """Return the error of a fit with file and row number. The files are read again."""
    fitter, path = Fitter(config.compiled), None
    for unit in train.files.units:
        if unit.path != path:
            fitter, path = Fitter(config.compiled), unit.path  # a separate fitter counts the rows of this file
        for batch in train.files.read(unit):
            try:
                fitter.update(batch)
            except DataError as found:
                return train.placed(found, unit)
    return train.placed(error)


def fitted_before(config: Config, folder: RunFolder, parts: Parts) -> Fitted:
    """Return the transform of a resumed run and the number of training rows, without fitting.

    Raises:
        CheckpointError: The run lacks the transform or its facts, or they belong to other features.
        DataError: The training files are not those of the run.
    """
    facts = folder.read_json(FACTS)
    if "rows" not in facts:
        raise CheckpointError(
            f"cannot continue {folder.shown}: {FACTS} is missing, or lacks the number of training rows",
            hint="start a new run",
        )
    check_files(folder, parts.train.files)
    return Fitted(load(config, folder.path), int(facts["rows"]))


def load(config: Config, folder: Path) -> Transform:
    """Read the transform of a run.

    Raises:
        ForeignCheckpointError: The transform was fitted for other features; the message names what differs.
        CheckpointError: The transform is missing or damaged.
    """
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read the transform of the run, {path}: {why}", hint=_RESTORE) from error
    try:
        return config.compiled.load(text)
    except CheckpointError as error:
        raise not_loaded(str(path), error, _RESTORE) from error


def not_loaded(place: str, error: CheckpointError, hint: str) -> CheckpointError:
    """Return the error of a transform that cannot be loaded, with the place of the transform.

    Args:
        place: The file of the transform, or where the transform comes from.
        error: The error.
        hint: The next step for a damaged transform. The message for a transform of other features has a separate hint.
    """
    message = f"{place}: {error}"
    if isinstance(error, ForeignCheckpointError):
        return ForeignCheckpointError(message, hint="")
    return CheckpointError(message, hint=hint)
