"""The environment variables of the block ``env``."""

import os
from collections.abc import Callable

from persia.config import Config
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger

_logger = get_logger("trainer")


def set_variables(config: Config) -> Callable[[], None]:
    """Set the variables of a configuration in this process, and return a function that restores them.

    If a variable has another value in the environment, the value of the configuration replaces it, with a warning.

    Args:
        config: The configuration.

    Raises:
        ConfigError: A variable must be set in the environment but is not; the message lists all such variables.
    """
    missing = [name for name, value in config.env.items() if value is None and not os.environ.get(name, "").strip()]
    if missing:
        raise ConfigError(
            "env: the configuration needs variables that are not set, or are empty: " + ", ".join(missing),
            hint="export " + " ".join(f"{name}=VALUE" for name in missing),
        )
    before: dict[str, str | None] = {}
    for name, value in config.env.items():
        if value is None:
            continue
        before[name] = os.environ.get(name)
        if before[name] not in (None, value):
            _logger.warning("env.%s: the value of persia.yml replaces the value in the environment", name)
        os.environ[name] = value

    def back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return back
