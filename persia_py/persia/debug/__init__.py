"""Debug a run of several ranks: breakpoints on one rank, digests of tensors, stacks, and post-mortems of errors.

* :mod:`persia.debug.breakpoint`: ``breakpoint_()`` and ``clear_()``
* :mod:`persia.debug.gate`: the state of breakpoints that ranks share
* :mod:`persia.debug.debugger`, :mod:`persia.debug.terminal`: pdb, and the terminal that it uses
* :mod:`persia.debug.watcher`: the behavior of a rank while another rank is stopped
* :mod:`persia.debug.examiner`: a post-mortem of a failing rank
* :mod:`persia.debug.process_groups`: the time limits of torch
* :mod:`persia.debug.ranks`, :mod:`persia.debug.attach`: the running ranks of this host, their stacks, and debugpy
* :mod:`persia.debug.step_digests`, :mod:`persia.debug.digest_files`: digests of tensors, and their comparison
* :mod:`persia.debug.tensors`: tensors in files, compared element by element
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.debug.breakpoint import breakpoint_, clear_
    from persia.debug.step_digests import digest, record
    from persia.debug.tensors import compare, load_tensor, save_tensor

__all__ = ["breakpoint_", "clear_", "compare", "digest", "load_tensor", "record", "save_tensor"]

_MODULES = {
    **dict.fromkeys(("breakpoint_", "clear_"), "breakpoint"),
    **dict.fromkeys(("digest", "record"), "step_digests"),
    **dict.fromkeys(("compare", "load_tensor", "save_tensor"), "tensors"),
}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used: the command line uses modules of this package without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
