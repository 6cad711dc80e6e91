"""The environment variables of the block ``env``."""

import os
from collections.abc import Callable

from persia.config import Config
from persia.runtime.errors import ConfigError
from persia.runtime.logging import get_logger

_logger = get_logger("trainer")


def set_variables(config: Config) -> Callable[[], None]:
    """Set the variables of a configuration in this process, and return what sets them back.

    A variable that has another value in the environment gets that of the configuration, with a warning.

    Args:
        config: The configuration.

    Raises:
        ConfigError: A variable has to be set outside, and is not; all of them are named.
    """
    missing = [name for name, value in config.env.items() if value is None and not os.environ.get(name, "").strip()]
    if missing:
        error = ConfigError("env: these variables are not set, and the configuration needs them: " + ", ".join(missing))
        error.hint = "export " + " ".join(f"{name}=VALUE" for name in missing)
        raise error
    before: dict[str, str | None] = {}
    for name, value in config.env.items():
        if value is None:
            continue
        before[name] = os.environ.get(name)
        if before[name] not in (None, value):
            _logger.warning("env.%s: the value of persia.yml replaces another one in the environment", name)
        os.environ[name] = value

    def back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return back
