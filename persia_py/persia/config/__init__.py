"""``persia.yml``: one file for data, features, model and training.

:func:`load_config` reads and checks it, with all mistakes in one error.
"""

from persia.config.blocks import Config
from persia.config.document import load_config

__all__ = ["Config", "load_config"]
