"""``persia.yml``: one file for data, features, model and training.

* :func:`load_config`: read and check a file, with all errors in one error
* :func:`validate_config`: the errors of a file or of a dictionary, as a list
* :class:`Config`: the typed blocks, from which ``docs/configuration.md`` is generated
"""

from persia.config.blocks import Config
from persia.config.document import load_config, validate_config

__all__ = ["Config", "load_config", "validate_config"]
