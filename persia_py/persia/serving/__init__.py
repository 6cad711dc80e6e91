"""Serves trained models. A bundle is a folder that scores rows like the evaluation of the model.

``persia export`` writes a bundle. It does not need a training job::

    with Bundle.open("bundle") as bundle:
        bundle.score([{"user": "u1", "price": 3.5}])  # [rows]

* :class:`Bundle`: transform, rows and dense model, checked and loaded
* :class:`Manifest`: the content and the source of a bundle; :class:`Input` and :class:`Output` are its columns

This package imports neither the trainer nor anything that talks to servers. The names of this package are imported on
first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.serving.bundle import Bundle
    from persia.serving.manifest import Input, Manifest, Output

__all__ = ["Bundle", "Input", "Manifest", "Output"]

_MODULES = {"Bundle": "bundle", "Input": "manifest", "Manifest": "manifest", "Output": "manifest"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a bundle needs PyTorch, and the ``persia`` command starts without it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
