"""Writes the dense model of a bundle to a file."""

import io
import warnings
from typing import Any

import torch

from persia.checkpoint.snapshot import save_scripted
from persia.runtime.errors import UsageError
from persia.serving.dense import EXPORTED, SCRIPTED

FILES = {EXPORTED: "model.pt2", SCRIPTED: "model.torchscript.pt"}
"""The file name for each kind of model file."""

_MOST_ROWS = 1 << 24


def written(
    model: torch.nn.Module, dense: list[torch.Tensor], vectors: list[torch.Tensor], *, torchscript: bool
) -> tuple[str, bytes]:
    """Return the kind and the content of a model file that accepts any number of rows.

    Args:
        model: The model, in evaluation mode.
        dense: Dense inputs of some rows, ``[rows, columns]`` each; at least two rows.
        vectors: The vectors of each feature of these rows.
        torchscript: Whether to write TorchScript instead of using ``torch.export``.

    Raises:
        UsageError: The model cannot be exported.
    """
    file = io.BytesIO()
    if torchscript:
        try:
            save_scripted(model, file)
        except UsageError as error:
            error.hint = "export by torch.export instead: leave out --torchscript"
            raise
        return SCRIPTED, file.getvalue()
    rows = torch.export.Dim("rows", min=1, max=_MOST_ROWS)
    shapes: Any = ([{0: rows} for _ in dense], [{0: rows} for _ in vectors])
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(model, (dense, vectors), dynamic_shapes=shapes), file)
    except Exception as error:  # torch does not document the exceptions
        name = type(model).__name__
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"{name} cannot be exported by torch.export: {first}",
            hint=(
                "write its forward without branches on the values of tensors and without fixed numbers of rows, or try "
                "--torchscript; persia --verbose export shows the full message of torch"
            ),
        ) from error
    return EXPORTED, file.getvalue()
