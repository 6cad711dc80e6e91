"""Keys of a model's state dict, independent of the wrapper with which the model was saved."""

from typing import Any, TypeVar

import torch

WRAPPERS = ("module", "_orig_mod")
"""The names under which DistributedDataParallel and :func:`torch.compile` store the wrapped module."""

State = TypeVar("State", bound=dict[str, Any])


def fitted(module: torch.nn.Module, state: State) -> State:
    """Return a state dict with the keys of ``module``, if its keys differ only in the names of wrappers.

    Keys that match are not changed, and neither is a state dict in which two keys would become equal.
    :func:`persia.checkpoint.snapshot.check_module` checks whether the result can be loaded.

    Args:
        module: The module that the state will be loaded into.
        state: A state dict.
    """
    own = module.state_dict().keys()
    if own == state.keys():
        return state
    wanted, given = ({_unwrapped(key): key for key in keys} for keys in (own, state))
    if len(wanted) < len(own) or len(given) < len(state):
        return state
    renamed = type(state)({wanted.get(plain, key): state[key] for plain, key in given.items()})
    if (metadata := getattr(state, "_metadata", None)) is not None:  # the version of each module, by name
        places = {_unwrapped(name): name for name, _ in module.named_modules()}
        moved = {places.get(_unwrapped(name), name): value for name, value in metadata.items()}
        renamed._metadata = type(metadata)(moved)  # type: ignore[attr-defined]  # torch sets it on its OrderedDict
    return renamed


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)
