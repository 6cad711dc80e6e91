"""A small persia.yml, and the errors of a configuration."""

from pathlib import Path

import pytest

import persia
from persia.config import Config
from persia.errors import ConfigError

GOOD = """data:
  train: clicks.parquet
features:
  user: {type: id, dim: 16}
  price: {type: dense}
labels:
  clicked: {}
"""
"""Lines 1 to 7; the text that a test adds begins on line 8."""

KEYS = ", ".join(Config.model_fields)


def mistakes(path: Path, text: str, *overrides: str) -> list[str]:
    """Return the lines of the error message, without ``persia.yml:``."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        persia.load_config(path, overrides)
    head, *lines = str(caught.value).splitlines()
    assert head == f"persia.yml: {len(lines)} error{'s' * (len(lines) > 1)}"
    of_overrides = all(line.startswith("  --set ") for line in lines)
    hint = "correct each error, then run: persia config check persia.yml"
    if of_overrides:
        hint = "correct the values of --set"
    assert caught.value.hint == hint
    assert len(caught.value.findings) == len(lines)
    return [line.removeprefix("  ").removeprefix("persia.yml:") for line in lines]
