"""The trainer, which trains a model from a ``persia.yml``.

* :mod:`persia.trainer.trainer`: :class:`Trainer`, the class that a script uses
* :mod:`persia.trainer.training`: a run, step by step; :mod:`persia.trainer.opening`: opening and closing a run
* :mod:`persia.trainer.parts`, :mod:`persia.trainer.batches`: training, validation and test rows
* :mod:`persia.trainer.fitting`: the transform, fitted once
* :mod:`persia.trainer.models`, :mod:`persia.trainer.optimizers`, :mod:`persia.trainer.objective`: the model, its
  optimizers and its loss
* :mod:`persia.trainer.evaluation`, :mod:`persia.trainer.metrics`: evaluation and metrics
* :mod:`persia.trainer.validation`: the best checkpoint, and early stopping
* :mod:`persia.trainer.state`: the state of a trainer in a checkpoint
* :mod:`persia.trainer.run_folder`, :mod:`persia.trainer.facts`, :mod:`persia.trainer.record`,
  :mod:`persia.trainer.pages`: the files of a run
* :mod:`persia.trainer.predictions`, :mod:`persia.trainer.prediction`: scores, and scores in a Parquet file
* :mod:`persia.trainer.progress`: the progress display
* :mod:`persia.trainer.baselines`: models to compare with
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.trainer.metrics import Metrics
    from persia.trainer.reports import EvaluationReport, StepReport
    from persia.trainer.trainer import Trainer

__all__ = ["EvaluationReport", "Metrics", "StepReport", "Trainer"]

_MODULES = {"EvaluationReport": "reports", "Metrics": "metrics", "StepReport": "reports", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    """Import modules that need PyTorch on first use: `persia config check` reads columns without it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
