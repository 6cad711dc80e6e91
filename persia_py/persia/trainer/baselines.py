"""Baselines: models that are trained on the same rows and evaluated by the same metrics."""

import importlib
from collections.abc import Callable

from persia.config import Config
from persia.runtime.errors import ConfigError, UsageError
from persia.trainer.run_folder import RunFolder

Baseline = Callable[[Config, RunFolder], None]


def find(name: str) -> Baseline:
    """Return the baseline of a name, after checking that its package can be imported.

    Raises:
        UsageError: There is no such baseline.
        ConfigError: Its package cannot be imported.
    """
    if name != "lightgbm":
        raise UsageError(f"--baseline {name}: want lightgbm")
    try:
        importlib.import_module("lightgbm")
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing, such as libgomp
        missing = ConfigError(f"--baseline lightgbm: the package cannot be imported: {error}")
        missing.hint = "pip install lightgbm"
        raise missing from error
    from persia.trainer.lightgbm_baseline import compare

    return compare
