"""Persia: train recommender models whose embedding tables live in sharded parameter servers.

Layout, from the top; a layer imports only what is below it:

* :mod:`persia.cli`: the ``persia`` command
* :mod:`persia.doctor`: checks of a machine, a job and a configuration
* :mod:`persia.launch`: the processes of a job
* :mod:`persia.testing`: checks of a model against a reference, step by step
* :mod:`persia.trainer`: training from a configuration file
* :mod:`persia.config`: ``persia.yml``
* :mod:`persia.debug`: breakpoints, digests and stacks of several ranks
* :mod:`persia.data`, :mod:`persia.ctx`, :mod:`persia.nn`, :mod:`persia.models`: what a script imports
* :mod:`persia.loop`: a pass over the data
* :mod:`persia.checkpoint`: checkpoints of a run, and their replicas
* :mod:`persia.backend`: rows in this process, or on embedding servers
* :mod:`persia.distributed`: communication between ranks
* :mod:`persia.feed`: transport of batches from data-compose
* :mod:`persia.discovery`: the parts of a job find each other through NATS
* :mod:`persia.serving`: export of a trained model as a bundle, and the scoring server
* :mod:`persia.embedding`: features, batches, tables and optimizers of embeddings
* :mod:`persia.runtime`: settings, errors, exit codes, logging, signals
* :mod:`persia.proto`: code that is generated from the proto files

``persia.env``, ``errors``, ``logger``, ``utils``, ``service``, ``helper``, ``launcher`` and ``prelude`` are PersiaML's
paths. A module is imported when it is first used: after ``import persia``, ``persia.ctx.TrainCtx`` works.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    *("config", "ctx", "data", "debug", "distributed", "embedding", "env", "errors", "helper", "launcher", "logger"),
    *("models", "nn", "prelude", "service", "testing", "trainer", "utils"),
}
"""The modules that a script imports."""
_NAMES = {"Trainer": "trainer", "load_config": "config"}
"""Names that are available as ``persia.NAME``, without the name of their module."""


def __getattr__(name: str) -> Any:
    """Import a module of this package, or return one of the names in ``_NAMES``."""
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def _check_core(version: str) -> None:
    """Refuse a missing or outdated ``persia_core``.

    Raises:
        ImportError: The package is not installed, or of a different version than these sources (``StaleCoreError``).
    """
    try:
        core = importlib.import_module("persia_core")
    except ModuleNotFoundError as error:
        if error.name != "persia_core":
            raise
        raise ImportError(
            "persia_core, the compiled part of persia, is not installed; "
            "install the wheel persia-core, or in a clone run: make setup"
        ) from None
    built = getattr(core, "__version__", "unknown")
    if built != version:
        errors = importlib.import_module("persia_core.errors") if hasattr(core, "errors") else None
        stale = getattr(errors, "StaleCoreError", ImportError)
        raise stale(
            f"{core.__file__} was built as version {built}, but these Python sources are version {version}; "
            "build it again (in a clone: make setup), or, if the file is an override on PYTHONPATH, remove it"
        )


_check_core(__version__)
