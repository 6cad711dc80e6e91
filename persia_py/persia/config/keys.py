"""Finds the keys of ``persia.yml`` that a user probably means by an unknown option."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import get_args, get_origin

from persia.config.block import Block
from persia.config.blocks import Config, TrainBlock
from persia.config.optimizers import OPTIMIZERS

_ALIASES = {"learning_rate": "lr", "checkpoint_dir": "checkpoint.dir", "output_dir": "run.dir", "out": "run.dir"}
"""The names of keys in other training programs."""
_SIMILAR = 0.8


def keys_like(option: str) -> list[str]:
    """Return the keys that an option such as ``--epochs`` or ``--batch-size`` probably means; often none."""
    word = option.lstrip("-").replace("-", "_").lower()
    word = _ALIASES.get(word, word)
    paths = [*_paths("", Config)]
    if word in paths:
        return [word]
    names: dict[str, list[str]] = {}
    for path in paths:
        names.setdefault(path.rpartition(".")[2], []).append(path)
    found = get_close_matches(word, names, n=1, cutoff=_SIMILAR)
    return names[found[0]] if found else []


def _paths(prefix: str, block: type[Block]) -> Iterator[str]:
    """Yield the keys of a block and its nested blocks; for optimizers, the arguments of the default one."""
    for name, field in block.model_fields.items():
        path = f"{prefix}{name}"
        kinds = [each for each in (field.annotation, *get_args(field.annotation)) if get_origin(each) is None]
        blocks = [each for each in kinds if isinstance(each, type) and issubclass(each, Block)]
        if block is TrainBlock and name in OPTIMIZERS:
            yield from (f"{path}.{key}" for key in OPTIMIZERS[name][field.default.name].model_fields)
        elif blocks:
            yield from _paths(f"{path}.", blocks[0])
        else:
            yield path
