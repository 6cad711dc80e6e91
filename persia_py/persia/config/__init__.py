"""``persia.yml``: one file for data, features, model and training.

* :func:`load_config`: read and check a file, with all mistakes in one error
* :func:`validate_config`: the mistakes of a file or of a dictionary, as a list
* :class:`Config`: the blocks, typed; ``docs/configuration.md`` is generated from them
"""

from persia.config.blocks import Config
from persia.config.document import load_config, validate_config

__all__ = ["Config", "load_config", "validate_config"]
