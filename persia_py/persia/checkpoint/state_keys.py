"""Keys of a model's state dict, whatever wrapped the model when it was saved."""

from typing import Any, TypeVar

import torch

WRAPPERS = ("module", "_orig_mod")
"""The names under which DistributedDataParallel and :func:`torch.compile` hold the module that they wrap."""

State = TypeVar("State", bound=dict[str, Any])


def fitted(module: torch.nn.Module, state: State) -> State:
    """Return a state dict with the keys of ``module``, if theirs differ in the names of wrappers only.

    Keys that fit are left, and so is a state dict in which two keys would become one. Whether the result can be loaded
    is for :func:`persia.checkpoint.snapshot.check_module` to say.

    Args:
        module: What the state is to be loaded into.
        state: A state dict.
    """
    own = module.state_dict().keys()
    if own == state.keys():
        return state
    wanted, given = ({_unwrapped(key): key for key in keys} for keys in (own, state))
    if len(wanted) < len(own) or len(given) < len(state):
        return state
    renamed = type(state)({wanted.get(plain, key): state[key] for plain, key in given.items()})
    if (metadata := getattr(state, "_metadata", None)) is not None:  # versions of modules, by their names
        places = {_unwrapped(name): name for name, _ in module.named_modules()}
        moved = {places.get(_unwrapped(name), name): value for name, value in metadata.items()}
        renamed._metadata = type(metadata)(moved)  # type: ignore[attr-defined]  # torch sets it on its OrderedDict
    return renamed


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)
