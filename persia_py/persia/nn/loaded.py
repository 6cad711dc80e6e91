"""The data that an :class:`~persia.nn.EmbeddingCollection` reads from a checkpoint, apart from rows."""

from collections.abc import Mapping

from persia.checkpoint import snapshot
from persia.checkpoint.run_state import saved_inputs
from persia.embedding.listed import listed
from persia.embedding.optim import Optimizer
from persia.nn.defaults import STATE
from persia.nn.reference import RowsVersion
from persia.runtime.errors import CheckpointError, ConfigError, ForeignCheckpointError
from persia.runtime.logging import get_logger
from persia.runtime.settings import settings

_logger = get_logger("collection")


def saved_state(loaded: snapshot.Load, optimizer: Optimizer | None) -> tuple[float | None, list[str]]:
    """Return the learning rate in a checkpoint and the names of its rows; nothing if no collection wrote it.

    The rate is None if the collection was not trained.

    Raises:
        CheckpointError: The optimizer refuses the rate.
    """
    if STATE not in loaded.names:
        return None, []
    state = loaded.state(STATE)
    if optimizer is None:
        return None, state.get("rows", [])
    lr = state.get("lr")
    if not isinstance(lr, float):
        raise CheckpointError(f"{loaded.path}: {STATE}: lr={lr!r}: expected a number", hint="load another checkpoint")
    try:
        optimizer.check_lr(lr)
    except ConfigError as error:
        raise CheckpointError(f"{loaded.path}: {STATE}: {error}", hint="") from error  # the message has the next step
    return lr, state.get("rows", [])


def check_features(loaded: snapshot.Load, features: Mapping[str, str]) -> None:
    """Check that a collection has all features of a checkpoint's model. Warn about additional features.

    Tables that the checkpoint lacks are reported when its rows are restored.

    Args:
        loaded: The checkpoint.
        features: The features of the collection, each with the name of its table.

    Raises:
        ForeignCheckpointError: The collection lacks a feature of the model.
    """
    names = saved_inputs(loaded)
    if names is None:
        return
    if missing := [name for name in names.id_features if name not in features]:
        raise ForeignCheckpointError(
            f"{loaded.path}: this EmbeddingCollection lacks features that the model of the checkpoint needs: "
            f"{listed(missing)}; add them to the feature_names of its tables",
            hint="",
        )
    new = {
        feature: table
        for feature, table in features.items()
        if feature not in names.id_features and table in loaded.tables
    }
    if new:
        _logger.warning(
            "%s: the model of the checkpoint was trained without these features, which use its tables: %s",
            loaded.path,
            listed([f"{feature} (table {table})" for feature, table in new.items()]),
        )


def warn_unread_model(loaded: snapshot.Load | None, rows: RowsVersion) -> None:
    """Warn once if rows of a checkpoint are used without the model that was trained with them.

    Args:
        loaded: The checkpoint; None if there is none.
        rows: The names of the rows. A state dict may have been checked against them after the load.
    """
    if loaded is None or not loaded.models or loaded.models & loaded.read or rows.checked or settings.rank != 0:
        return
    model = min(loaded.models)
    loaded.read.add(model)  # one warning is enough
    _logger.warning(
        "%s: the rows of this checkpoint are used without its model, which was trained with them. Load both: "
        "loaded = collection.load(DIR), then model.load_state_dict(loaded.state(%r)). A new model may start from these "
        "rows, but its predictions are poor until it is trained",
        loaded.path,
        model,
    )
