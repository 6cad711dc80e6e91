"""Baselines: models that are trained on the same rows and evaluated with the same metrics."""

import importlib
from collections.abc import Callable

from persia.config import Config
from persia.runtime.errors import ConfigError, UsageError
from persia.trainer.run_folder import RunFolder

Baseline = Callable[[Config, RunFolder], None]


def find(name: str) -> Baseline:
    """Return the baseline with a name, after checking that its package can be imported.

    Raises:
        UsageError: The baseline does not exist.
        ConfigError: The package of the baseline cannot be imported.
    """
    if name != "lightgbm":
        raise UsageError(f"--baseline {name}: expected lightgbm")
    try:
        importlib.import_module("lightgbm")
    except (ImportError, OSError) as error:  # OSError: a system library is missing, such as libgomp
        raise ConfigError(
            f"--baseline lightgbm: the package cannot be imported: {error}",
            hint=(
                "pip install lightgbm"
                if isinstance(error, ImportError)
                else "install the system library that is named above; libgomp is in the package libgomp1"
            ),
        ) from error
    from persia.trainer.lightgbm_baseline import compare

    return compare
