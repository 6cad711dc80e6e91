"""Opens a checkpoint, and refuses PersiaML checkpoints."""

import json
import os
from pathlib import Path

from persia.runtime.errors import CheckpointError
from persia.runtime.files import is_url
from persia_core import checkpoint as _core

_DONE = "embedding_dump_done"
"""The file with which PersiaML marks a folder of rows as complete."""


def open_checkpoint(directory: str | os.PathLike[str]) -> _core.Checkpoint:
    """Return the checkpoint in ``directory``. Its manifest is read; its other files are not.

    Raises:
        CheckpointError: The folder has no checkpoint, its manifest is damaged, or it is a PersiaML checkpoint.
        StorageError: The manifest cannot be read.
    """
    try:
        return _core.Checkpoint(os.fspath(directory))
    except CheckpointError:
        check_not_persiaml(directory)
        raise


def is_imported(opened: _core.Checkpoint) -> bool:
    """Whether a checkpoint contains only rows that ``persia ckpt import`` has written."""
    return bool(json.loads(opened.manifest)["head"]["build"].get("origin") == "import")


def check_not_persiaml(directory: str | os.PathLike[str]) -> None:
    """Refuse rows that PersiaML has written.

    PersiaML writes ``embedding_dump_done`` into the folder, and into a subfolder ``sN`` for each server N. The
    subfolders contain the rows, as ``replica_N_shard_M.emb``. Each ``.emb`` file is a list of entries: an id, a
    dimension, and weights followed by optimizer state.

    Raises:
        CheckpointError: The folder has rows of PersiaML.
    """
    if is_url(directory):
        return
    folder = Path(directory)
    found = next((path for pattern in (_DONE, "*.emb", f"*/{_DONE}", "*/*.emb") for path in folder.glob(pattern)), None)
    if found is None:
        return
    raise CheckpointError(
        f"{folder} is a PersiaML checkpoint ({found.relative_to(folder)}), which cannot be loaded or converted. "
        "Its .emb files do not name the table or the optimizer of a row. Their ids are those of the data modulo "
        "2^(64 - feature_index_prefix_bit), with the number of the feature group in the other bits",
        hint=(
            "in PersiaML, look up the ids of the data, and write the ids and their vectors to one Parquet file for "
            "each table; then run: persia ckpt import FILE.parquet --table T -o DIR; load the model from the dense.pt "
            "of the PersiaML checkpoint with ctx.load_torch_state_dict"
        ),
    )
