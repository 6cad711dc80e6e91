"""The compiled engine of persia. Everything here is defined in Rust; see the ``.pyi`` files next to this one."""

from . import persia_core as _library
from .persia_core import *  # noqa: F403

__version__ = _library.__version__
__file__ = _library.__file__
