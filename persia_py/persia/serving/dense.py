"""The dense model of a bundle, which maps dense columns and vectors of features to outputs."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from persia.runtime.errors import CheckpointError
from persia.serving.manifest import MANIFEST, Model

EXPORTED, SCRIPTED = "torch.export", "torchscript"
"""The kinds of model files."""

Call = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
"""Maps dense inputs ``[rows, columns]`` and vectors of features to outputs: see :func:`persia.serving.scores.split`."""


def load(bundle: Path, model: Model, content: bytes) -> Call:
    """Return the function in a model file of the bundle in this folder.

    Raises:
        CheckpointError: The file is not a model, or this version of torch cannot read it.
    """
    if model.kind not in (EXPORTED, SCRIPTED):
        raise CheckpointError(
            f"{bundle / MANIFEST}: found a model of kind {model.kind!r}, expected {EXPORTED} or {SCRIPTED}",
            hint="serve with the version of persia that wrote the bundle, or write the bundle again: persia export",
        )
    try:
        with warnings.catch_warnings():  # torch warns that TorchScript is deprecated
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            file = io.BytesIO(content)
            if model.kind == SCRIPTED:
                loaded: Any = torch.jit.load(file)  # type: ignore[no-untyped-call]
            else:
                loaded = torch.export.load(file).module()
    except Exception as error:  # torch does not document the exceptions
        raise CheckpointError(
            f"{bundle / model.file}: torch {torch.__version__} cannot read the model: {error}",
            hint="serve with the version of torch that the manifest names, or write the bundle again: persia export",
        ) from error
    return loaded  # type: ignore[no-any-return]
