"""Models to compare with: trained on the same rows, judged by the same metrics."""

from collections.abc import Callable

from persia.config import Config
from persia.runtime.errors import ConfigError, UsageError
from persia.trainer.run_folder import RunFolder

Baseline = Callable[[Config, RunFolder], None]


def find(name: str) -> Baseline:
    """Return the baseline of a name, after checking that its package is installed.

    Raises:
        UsageError: There is no such baseline.
        ConfigError: Its package is not installed.
    """
    if name != "lightgbm":
        raise UsageError(f"--baseline {name}: want lightgbm")
    from importlib.util import find_spec

    if find_spec("lightgbm") is None:
        error = ConfigError("--baseline lightgbm: the package lightgbm is not installed")
        error.hint = "pip install lightgbm"
        raise error
    from persia.trainer.lightgbm_baseline import compare

    return compare
