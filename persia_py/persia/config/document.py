"""Read ``persia.yml``: the file, overrides, and where each value came from."""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from persia.config.blocks import Config
from persia.runtime.config_files import read_config
from persia_core.features import Features


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a ``persia.yml``.

    Args:
        path: The file.
        overrides: Changes such as ``train.seed=7``; the value is YAML.

    Raises:
        ConfigError: The file cannot be read, or has mistakes; the message has all of them.
    """
    path = Path(path)
    text, name = read_config(path)
    content = yaml.safe_load(text)
    for override in overrides:
        key, _, value = override.partition("=")
        *parents, last = key.split(".")
        block = content
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = yaml.safe_load(value)
    described = yaml.safe_dump({key: content[key] for key in ("features", "labels")}, sort_keys=False)
    return Config.model_validate(content).located(path.absolute().parent, Features.parse(described, name), described)
