"""PersiaML's path of :mod:`persia.runtime.errors`."""

from persia.runtime.errors import *  # noqa: F403  # its __all__
from persia.runtime.errors import __all__ as __all__
